"""Ranks that meet in collectives of equal size for different objects get an error; right programs get none."""

from __future__ import annotations

import pytest
import torch

from ddp_notebook.errors import RankError
from ddp_notebook.rank.group.collective_owners import Identities, Meaning
from ddp_notebook.rank.group.guard.ledger import Ledger, count_bytes
from ddp_notebook.rank.group.modules import Modules
from tests.meanings.programs import (
    QUICK,
    RIGHT,
    RIGHT_OF_FOUR,
    RIGHT_OF_THREE,
    SETUP,
    SETUP_OF_THREE,
    WRONG,
    WRONG_OF_THREE,
)


@pytest.fixture(scope="module")
def ranks(session):
    assert session.run(SETUP).ok
    return session


@pytest.mark.parametrize(
    "name", [name if one.is_quick else pytest.param(name, marks=pytest.mark.long) for name, one in WRONG.items()]
)
def test_another_meaning_is_an_error_on_all_ranks(ranks, name):
    with pytest.raises(RankError) as caught:
        ranks.run(WRONG[name].code, timeout_s=60)
    message = str(caught.value)
    assert message.startswith("CollectiveMismatchError: "), message
    for words in WRONG[name].words:
        assert words in message
    assert "The operations were ended on all ranks; the next cell can use the group (ranks 0-1)" in message
    assert set(caught.value.summaries) == {0, 1}
    again = ranks.run("y = torch.ones(1); dist.all_reduce(y); int(y)", timeout_s=60)
    assert [one.result for one in again.by_rank.values()] == ["2", "2"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in RIGHT]
)
def test_nothing_is_said_of_a_right_program(ranks, name, capsys):
    assert ranks.run(RIGHT[name], timeout_s=60).ok
    assert "ddp_notebook: " not in capsys.readouterr().err


@pytest.mark.long
def test_nothing_is_said_of_right_programs_on_four_ranks(make_session_alone, capsys):
    ranks = make_session_alone(4)
    assert ranks.run(SETUP, timeout_s=60).ok
    for code in RIGHT_OF_FOUR.values():
        assert ranks.run(code, timeout_s=60).ok
    assert "ddp_notebook: " not in capsys.readouterr().err


def test_deleted_objects_are_forgotten(monkeypatch):
    monkeypatch.setattr("ddp_notebook.rank.group.collective_owners._MOST", 10)
    identities = Identities(Modules())
    assert all(identities.add(torch.nn.Identity(), 1, []) for _ in range(30))
    kept = [torch.nn.Identity() for _ in range(20)]
    assert sum(identities.add(one, 2, []) > 0 for one in kept) == 10


@pytest.mark.long
def test_groups_that_overlap_are_compared_separately(make_session_alone, capsys):
    ranks = make_session_alone(3)
    assert ranks.run(SETUP_OF_THREE, timeout_s=60).ok
    for code in RIGHT_OF_THREE.values():
        assert ranks.run(code, timeout_s=60).ok
    assert "ddp_notebook: " not in capsys.readouterr().err
    for code, words, _ in WRONG_OF_THREE.values():
        with pytest.raises(RankError) as caught:
            ranks.run(code, timeout_s=60)
        assert str(caught.value).startswith("CollectiveMismatchError: ")
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_descriptions_of_many_modules_stay():
    memory = memoryview(bytearray(count_bytes(2)))
    first, second = Ledger(memory, 0, 2), Ledger(memory, 1, 2)
    kinds = {"is_guarded": False, "of_thread": False, "has_threads": False}
    assert first.claim(2, ["a", "b"], "a, b") is None
    entries = [first.entry(f"call {number}", f"operation {number}", Meaning(0, 0), **kinds) for number in range(2000)]
    other = second.entry("another", "another", Meaning(0, 0), **kinds)
    first.post(1, entries[0])
    found = second.post(1, other)
    assert found is not None and (found.theirs, found.mine) == ("call 0", "another")
    assert second.claim(2, ["b", "a"], "b, a") == (0, "a, b")
