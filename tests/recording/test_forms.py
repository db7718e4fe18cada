"""Recording of every way to call `torch.distributed`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddp_notebook import api
from tests.recording import forms
from tests.recording.witness import cell_of_last, expect_agreement, operations, operations_off
from tests.test_groups import stop_in


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Start two ranks without the guard, whose comparisons the profiler would record too."""
    waiting_host_server()
    with api.start(2, guard=False) as running:
        running.run(forms.SET_UP, quiet=True)
        yield running


@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "another thread"])
def test_every_form_of_a_call(session, in_thread):
    session.run(forms.cell(in_thread), quiet=True)
    recording, cell = session.recording, cell_of_last(session)
    for rank in range(2):
        found = operations(recording, cell, rank)
        for line, form in enumerate(forms.FORMS, forms.FIRST_LINE):
            mine = [one for one in found if one.site == f"cell line {line} in work"]
            assert [forms.row_of(one) for one in mine] == form.of(rank), f"rank {rank}: {form.line}"
            for one in mine:
                assert one.state == "done" and one.end_ns is not None and one.end_ns > one.issue_ns, one
                assert one.blocked_ns > 0 or one.origin == "functional", one  # it may be finished when it is used
                assert one.ranks == ((rank,) if one.group.startswith("only") else (0, 1)), one
        assert len(found) == sum(len(form.of(rank)) for form in forms.FORMS), "all of them have their line"
        rows = recording.collectives(cell=cell, rank=rank).rows
        assert {thread > 0 for thread in rows["thread"].tolist()} == {in_thread}
        for group in {one.group_name for one in found}:
            for kinds in (("send",), ("recv",), {one.op for one in found} - {"send", "recv"}):
                numbers = [one.number for one in found if one.group_name == group and one.op in kinds]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, group


def test_the_profiler_has_seen_the_same(session):
    session.run("from tests.recording.on_rank import Witness; witness = Witness()", quiet=True)
    code = forms.cell(False).removesuffix("work()")

    def look() -> list[str]:
        session.run(
            code + "with witness.watching():\n    for _ in range(8): work()\nranges = witness.ranges", quiet=True
        )
        return operations_off(session)

    expect_agreement(look)


# Calls that wait, and the number of their operations.
WAITS = {
    "dist.all_reduce(x)": "all_reduce",
    "dist.all_reduce(x, async_op=True).wait()": "all_reduce",
    "dist.reduce_scatter_single(x, torch.ones(8))": "reduce_scatter_single",
    "dist.barrier()": "barrier",
    "dist.monitored_barrier()": "monitored_barrier",
    "dist.send(x, 0) if rank else dist.recv(x, 1)": "recv",
    "(dist.isend(x, 0) if rank else dist.irecv(x, 1)).wait()": "recv",
    "dist.all_gather_object([None, None], rank)": forms.GATHERS_OBJECTS,
    "with dist._coalescing_manager(): dist.all_reduce(x)": "all_reduce_coalesced",
    "funcol.all_reduce(x, 'sum', world) + 1": "all_reduce",
    "funcol.reduce_scatter_single(torch.ones(8), 'sum', 0, world) + 1": "reduce_scatter_single_coalesced",
    "[y + 1 for y in funcol.all_reduce_coalesced([x, torch.ones(2)], 'sum', world)]": "all_reduce_coalesced",
}
WAITS = {line: op for line, op in WAITS.items() if forms.is_there(line)}


def test_a_wait_in_cpp_that_is_stopped_has_its_row(session):
    """The interrupt arrives in our own code around the wait."""
    stop_in(session, "if rank == 0: dist.monitored_barrier()")
    (last,) = operations(session.recording, cell_of_last(session), 0)
    assert (last.op, last.state) == ("monitored_barrier", "failed")


def test_how_long_a_caller_was_blocked(session):
    """Rank 1 calls each of them 100 ms late."""
    lines = [f"dist.barrier(pair); time.sleep(0.1 * rank)\n{line}" for line in WAITS]
    session.run("import time\nx = torch.ones(4)\n" + "\n".join(lines), quiet=True)
    recording, cell = session.recording, cell_of_last(session)
    for at, (line, op) in enumerate(WAITS.items()):
        place = f"cell line {4 + 2 * at}"
        mine = [[one for one in operations(recording, cell, rank) if one.site.startswith(place)] for rank in range(2)]
        assert op in {one.op for one in mine[0]}, line
        blocked, late = [sum(one.blocked_ns for one in some) / 1e6 for some in mine]
        lasted = sum((one.end_ns or 0) - one.issue_ns for one in mine[0]) / 1e6
        assert blocked > 50 and blocked > lasted - 10, f"{line}: {blocked} ms of {lasted}"
        assert late < blocked - 20, f"{line}: {late} ms on the rank that is late"
