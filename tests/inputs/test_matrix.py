"""The recorded results of every operation with every kind of tensor are those of torch and of ranks."""

from __future__ import annotations

import pytest

from tests.inputs import on_ranks
from tests.inputs.cases import MEMORY, RIGHT, WRONG
from tests.inputs.matrix import Case, cases, recorded, run_plain
from tests.inputs.on_ranks import run_on_ranks
from tools.docs import inputs

_SAMPLE = [
    Case("all_reduce", "tensor", "column", False),
    Case("all_reduce", "tensor", "transposed", False),
    Case("all_reduce", "tensor", "transposed_1", False),
    Case("broadcast", "tensor", "expanded", False),
    Case("scatter", "input", "channels_last", False),
    Case("reduce_scatter", "output", "overlapping", False),
    Case("all_gather", "output", "twice", False),
    Case("all_gather_into_tensor", "output", "in_place", False),
    Case("all_to_all_single", "output", "shifted", False),
    Case("all_to_all", "output", "neg", False),
    Case("all_gather_object", "tensor", "column", False),
    Case("functional all_reduce", "tensor", "column", False),
]
_GRADIENT = "all_to_all | input | requires_grad"


def test_the_page_shows_the_recorded_results():
    assert inputs.PAGE.read_text() == inputs.page(), "run python -m tools.docs.inputs"


def test_every_case_is_recorded_and_nothing_wrong_passes():
    plain, ranks = recorded(), recorded(on_ranks.RESULTS)
    assert {case.name for case in cases()} == plain.keys() == ranks.keys()
    assert len(plain) > 1600
    assert sum(one.verdict in (WRONG, MEMORY) for one in plain.values()) > 200
    assert {name: one for name, one in ranks.items() if one.verdict in (WRONG, MEMORY, "crash")} == {}


def test_no_right_case_is_refused():
    plain, ranks = recorded(), recorded(on_ranks.RESULTS)
    refused = {name for name, one in ranks.items() if one.verdict != RIGHT and plain[name].verdict == RIGHT}
    assert {name for name in refused if not _depends_on_time(name) and plain[name].words != "no data"} == set()


@pytest.mark.processes
def test_a_sample_gives_the_recorded_results_with_torch_alone():
    plain = recorded()
    assert {case.name: found.verdict for case, found in run_plain(_SAMPLE)} == {
        case.name: plain[case.name].verdict for case in _SAMPLE
    }


def test_a_sample_gives_the_recorded_results_on_ranks(session):
    ranks = recorded(on_ranks.RESULTS)
    assert {case.name: found.verdict for case, found in run_on_ranks(session, _SAMPLE)} == {
        case.name: ranks[case.name].verdict for case in _SAMPLE
    }


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.processes
def test_all_cases_give_the_recorded_results_with_torch_alone():
    plain = recorded()
    others = [case for case, found in run_plain(cases()) if found.verdict != plain[case.name].verdict]
    again = run_plain(
        [case for case in others if not _depends_on_time(case.name)]
    )  # a process may die on a busy machine
    assert {case.name: found for case, found in again if found.verdict != plain[case.name].verdict} == {}


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_all_cases_give_the_recorded_results_on_ranks(make_session_alone):
    ranks, session = recorded(on_ranks.RESULTS), make_session_alone(2, grace_s=0.5)
    found = {case.name: outcome.verdict for case, outcome in run_on_ranks(session, cases())}
    assert {name: one for name, one in found.items() if one != ranks[name].verdict} == {}


def _depends_on_time(name: str) -> bool:
    """Return whether the result of torch alone differs between runs."""
    is_shared = " in_place " in name or " shifted " in name
    return (name.startswith(("all_to_all_single", "batch_isend_irecv")) and is_shared) or name.startswith(_GRADIENT)
