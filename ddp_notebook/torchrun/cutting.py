"""Ending what the ranks of a job wait in, and what came of it, in sentences."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.groups.diagnosis import RankView
from ddp_notebook.torchrun.rounds import Round
from ddp_notebook.torchrun.shown import JobLooks
from ddp_notebook.wire.events import Interrupt, Message

_FREE_S = 6.0  # what ranks get to leave what was cut


def cut(run: Round, looks: JobLooks, send: Callable[[int, Message], None]) -> list[str]:
    """Have each rank cut what it waits in, and wait until it has left that.

    Args:
        run: the attempt under way.
        looks: at its ranks.
        send: sends a message to a rank.
    """
    before = looks.look(run)
    waiting = {rank: view for rank, view in before.items() if view.operation is not None}
    for rank in run.there:
        send(rank, Interrupt(cell=run.number))
    left, until = set(waiting), time.monotonic() + _FREE_S
    while left and time.monotonic() < until:
        now = looks.look(run)
        left = {rank for rank in left if _operation(now[rank]) == _operation(waiting[rank])}
    said = []
    for rank, view in waiting.items():
        where = view.place.partition(", in ")[0]
        how = "has not left it yet" if rank in left else "it raised there as if a peer were gone"
        said.append(f"rank {rank}: {view.operation}{f' ({where})' if where else ''} was cut; {how}")
    if free := [rank for rank in run.there if rank not in waiting]:
        said.append(f"{list_ranks(free)}: in no operation, so nothing was cut there")
    return said or ["no rank of it is there"]


def _operation(view: RankView) -> tuple[str, str, int] | None:
    one = view.operation
    return None if one is None else (one.name, one.group, one.number)
