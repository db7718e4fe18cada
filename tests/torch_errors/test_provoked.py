"""Each entry of the catalogue, provoked by a program on two ranks: the sentence, and torch's own text above it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from ddp_notebook import api
from ddp_notebook.errors import COLORS, RankError
from ddp_notebook.rank.torch_errors import catalogue
from tests.torch_errors.programs import PROGRAMS, QUICK, SETUP

_ENTRIES = {entry.name: entry for entry in catalogue.entries()}
# Errors that a session prevents, or that another version of torch raises. The last test has those of two processes.
_ELSEWHERE = {
    "connection closed by a known rank",
    "connection closed",
    "group with an unknown rank, before torch 2.13",
    "worker killed by a signal",
    *(entry.name for entry in catalogue.AREAS["NCCL"]),
}


@pytest.fixture(scope="module")
def ranks(waiting_host_server):
    """Two ranks without the guard, which refuses some of these programs before torch does."""
    waiting_host_server()
    with api.start(2, guard=False) as session:
        session.run(SETUP, quiet=True)
        yield session


def shown_by(ranks, code: str, folder) -> dict[int, str]:
    """Run a program that fails. Return the tracebacks by rank."""
    ranks.run(f"folder = {str(folder)!r}\ntorch.set_grad_enabled(True)", quiet=True)
    with pytest.raises(RankError) as failed:
        ranks.run(code, quiet=True, timeout_s=60)
    return {rank: COLORS.sub("", "\n".join(lines)) for rank, lines in failed.value.tracebacks.items() if lines}


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in PROGRAMS]
)
def test_sentence(ranks, name, tmp_path):
    program, entry = PROGRAMS[name], _ENTRIES[name]
    shown = shown_by(ranks, program.code, tmp_path / "saved")
    wanted = {0: program.said, 1: program.said if program.on_1 is None else program.on_1}
    for rank, sentence in wanted.items():
        if not sentence:
            continue
        lines = shown[rank].splitlines()
        values = {"FOLDER": str(tmp_path / "saved"), "CWD": os.getcwd(), "VERSION": torch.__version__}
        pattern = re.escape(sentence).replace("PORT", r"\d+")
        for word, value in values.items():
            pattern = pattern.replace(word, re.escape(value))
        assert any(re.fullmatch(pattern, line) for line in lines), (rank, lines[-4:])
        texts = [max(re.split(r"\{[^}]*\}|\n", text), key=len) for text in (entry.text, *entry.other_texts)]
        assert any(text in shown[rank] for text in texts), (texts, lines)


def test_every_entry_has_a_program():
    assert set(_ENTRIES) == set(PROGRAMS) | _ELSEWHERE
    assert len(_ENTRIES) == sum(1 for _ in catalogue.entries()), "names are unique"


def test_ranks_with_different_names_are_both_shown(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run(PROGRAMS["unused parameters"].code, quiet=True)
    last = str(failed.value).splitlines()[-1]
    assert "(right.* got no gradient on rank 0" in last and "(left.* got no gradient on rank 1" in last
    assert last.index("(rank 0)") < last.index("(rank 1)")


def test_a_cell_that_catches_the_error_sees_that_of_torch(ranks):
    caught = "try: dist.all_gather([torch.empty(4)], x)\nexcept RuntimeError as error: text = str(error)\ntext"
    result = ranks.run(caught, quiet=True)[0].result
    assert result.endswith("(expected length 2, got 1)'")


_TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
from ddp_notebook.rank.torch_errors import catalogue
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
dist.barrier()
if dist.get_rank() == 0:
    x = torch.ones(4)
    try:
        dist.recv(x, 1) if sys.argv[3] == "recv" else dist.irecv(x, 1).wait()
    except RuntimeError as error:
        print(catalogue.explain(error))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "name", "values"),
    [("recv", "connection closed by a known rank", {"peer": 1}), ("wait", "connection closed", {})],
)
def test_a_process_that_ends(tmp_path, how, name, values):
    """Plain processes: in a session a rank that has ended its cell keeps its connections."""
    command = [sys.executable, "-c", _TWO_PROCESSES]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = both[0].communicate(timeout=60)[0].strip()
    both[1].communicate(timeout=60)
    entry = _ENTRIES[name]
    assert said == f"{entry.cause}: {entry.fix}".format(**values)
