"""Ending what the ranks of a job wait in, and what came of it, in sentences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from ddp_notebook.messages.cutting import WasCut
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.groups.diagnosis import RankView
from ddp_notebook.torchrun.rounds import Round
from ddp_notebook.torchrun.shown import JobLooks

_FREE_S = 6.0  # what ranks get to leave what was cut
_FORM = (", in init_process_group", ", in new_group")  # ends of where a rank is that forms a group


def cut(run: Round, looks: JobLooks) -> list[str]:
    """Have each rank cut what it waits in, and wait until it has left that. A rank that meanwhile has gone on by itself
    cuts nothing: what it is in then may be well.

    Args:
        run: the attempt under way.
        looks: at its ranks.
    """
    views = looks.look(run)
    waiting = {rank: view for rank, view in views.items() if rank in run.there and _waits(view)}
    asked = {rank: looks.cut(rank, view.operation) for rank, view in waiting.items()}
    until = time.monotonic() + _FREE_S
    said, free = [], []
    for rank, future in asked.items():
        what = _answer(future, until)
        if what:
            said.append(f"rank {rank}: {what} was cut; it raised there as if a peer were gone")
        elif what is None:
            said.append(f"rank {rank}: {waiting[rank].operation or 'the forming of a group'} is not left yet")
        else:
            free.append(rank)
    if free:
        said.append(f"{list_ranks(free)}: had left it by then, by {_self(free)} or since a peer was cut")
    if others := [rank for rank in run.living if rank not in waiting]:
        said.append(f"{list_ranks(others)}: in no operation, so nothing was cut there")
    return said or ["no rank of it is there"]


def _waits(view: RankView) -> bool:
    return view.operation is not None or view.place.endswith(_FORM)


def _self(ranks: Sequence[int]) -> str:
    return "itself" if len(ranks) == 1 else "themselves"


def _answer(future: Future[WasCut], until_s: float) -> str | None:
    try:
        return future.result(max(0.0, until_s - time.monotonic())).what
    except FutureTimeoutError:
        return None
