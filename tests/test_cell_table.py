"""The table of cells on two kinds of sessions. `tests/long` runs it on all kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import closing
from itertools import pairwise

import pytest

from ddp_notebook.run.rank_sets import parse_ranks
from tests.cell_table import TABLE, Case, Expected
from tests.conftest import ipykernel6
from tests.kernels import NotebookKernel, Reply

_LABEL = re.compile(r"\[(?P<ranks>[\d,-]+)\]( |$)")


def by_rank(shown: str) -> dict[int, list[str]]:
    """Return the lines that each rank has shown: on a busy machine equal lines may arrive too late to be merged."""
    lines: dict[int, list[str]] = {}
    ranks: list[int] = []
    for line in shown.splitlines():
        if label := _LABEL.match(line):
            ranks, width = parse_ranks(label["ranks"], 64), label.end()
            line = line[width:]
        elif ranks and line.startswith(" " * width):  # another line of a value
            line = line[width:]
        else:
            ranks = [-1]  # the notebook itself
        for rank in ranks:
            lines.setdefault(rank, []).append(line)
    return lines


def check(case: Case, reply: Reply, world_size: int) -> None:
    """Compare the output of a cell with the expected one."""
    everyone = f"[0-{world_size - 1}]"

    def compare(shown: str, expected: Expected, what: str) -> None:
        told = f"{case.name}: {what} is {shown[:2000]!r}"
        if isinstance(expected, re.Pattern):
            for lines in by_rank(shown).values() or [[]]:
                assert expected.search("".join(f"{{all}} {line}\n" for line in lines)), told
        else:
            wanted = (expected or "").replace("{all}", everyone).replace("{n}", str(world_size))
            wanted = wanted.replace("{pad}", " " * (len(everyone) + 1))
            assert by_rank(shown) == by_rank(wanted), told

    if case.error:
        assert reply.status == "error", f"{case.name}: it ended well, with {reply.stdout[:2000]!r}"
        assert re.search(case.error, reply.traceback, re.DOTALL), f"{case.name}: {reply.traceback}"
        return
    assert reply.status == "ok", f"{case.name}: {reply.traceback}"
    compare(reply.stdout, case.stdout, "stdout")
    compare(reply.stderr, case.stderr, "stderr")
    kinds = [tuple(kind for kind in data if kind != "text/plain") for data in reply.displays]
    assert sorted(set(kinds)) == [(mime,) for mime in case.mimes], case.name


def run_table(world_size: int, start_method: str, pythonpath: str, rounds: Iterable[int] = range(1)) -> None:
    """Run all cells in one kernel, in order, in every round."""
    kernel = NotebookKernel(env={"DDP_NOTEBOOK_START_METHOD": start_method}, pythonpath=pythonpath)
    with closing(kernel):
        kernel.run("%load_ext ddp_notebook")
        started = kernel.run(f"%ddp_start {world_size}", timeout_s=120)
        assert started.status == "ok", started.traceback
        for _ in rounds:
            for case in TABLE:
                check(case, kernel.run(case.prefix + case.code), world_size)
        assert kernel.run("%ddp_stop").status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "start_method", "version"),
    [(2, "fork", "newest"), pytest.param(2, "fork", "6.31", marks=pytest.mark.long)],
    ids=str,
)
def test_every_cell_shows_what_it_should(world_size, start_method, version):
    if version == "6.31" and not ipykernel6():
        pytest.skip("DDP_NOTEBOOK_TEST_IPYKERNEL6 names no folder with ipykernel 6.31; `make test` sets it")
    run_table(world_size, start_method, ipykernel6() if version == "6.31" else "")


def test_the_table_is_large_and_its_names_differ():
    names = sorted(case.name for case in TABLE)
    assert len(names) >= 60
    assert not [a for a, b in pairwise(names) if a == b]
