"""How a cell ended, in words: the error that the notebook raises."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError
from ddp_notebook.records.words import group_by_value, list_ranks, name_ranks
from ddp_notebook.run.cells.advice import advice
from ddp_notebook.run.cells.interrupt import keyboard_interrupt
from ddp_notebook.run.cells.result import Act, CellResult
from ddp_notebook.run.groups.diagnosis import Views, by_what_they_do
from ddp_notebook.run.kernel import ipython


def raise_if_bad(
    result: CellResult,
    pending: list[int],
    interrupted: bool,
    killed: list[int],
    timeout_s: float | None,
    views: Views,
    why: str = "",
    going_on: Sequence[str] = (),
) -> None:
    """Raise what the cell's end calls for; nothing if it ended well on every rank.

    Args:
        result: what it left behind.
        pending: ranks on which it has not ended.
        interrupted: whether somebody pressed stop.
        killed: ranks that did not answer that, and were ended.
        timeout_s: the limit that it has exceeded; None: it has not.
        views: what the ranks were doing when the limit was reached.
        why: they did not get on, in a sentence, as far as is known.
        going_on: what ranks still do for it, in sentences.

    Raises:
        RankDiedError, CellTimeoutError, KeyboardInterrupt, RankError
    """
    by_rank = result.by_rank
    bad = {rank for rank, one in by_rank.items() if one.status in ("error", "interrupted", "died")}
    culprits = {rank for rank in bad if by_rank[rank].failed_by_itself} - set(killed)
    stopped = f"was stopped: {why}" if why else "was stopped"
    if interrupted and not culprits:
        acts = _acts(result, set(by_rank), killed)
        raise keyboard_interrupt("\n  ".join([f"the cell {stopped}", *acts, *going_on]))
    if timeout_s is not None and (views or bad) and not culprits:
        then = "" if why else "; then"
        lines = [f"  {list_ranks(ranks)}: {doing}" for ranks, doing in by_what_they_do(views, lambda view: view.doing)]
        left = [f"{name_ranks(pending)} not stopped yet; {_NOT_YET}"] if pending else []
        first = f"the cell took longer than {timeout_s:g} s and {stopped}{then}"
        raise CellTimeoutError("\n".join([first, *lines, *left, *going_on]), result)
    if shown := culprits or bad:
        raise _error_of(result, shown, pending, going_on)


def _error_of(result: CellResult, shown: Collection[int], pending: list[int], going_on: Sequence[str]) -> RankError:
    """The error with the tracebacks of the ranks `shown`. `pending` and `going_on` as in `raise_if_bad`."""
    by_rank = result.by_rank
    errors = {rank: by_rank[rank].error for rank in shown}
    kind = RankDiedError if any(by_rank[rank].status == "died" for rank in shown) else RankError
    tracebacks = {rank: by_rank[rank].traceback for rank in shown}
    others = {rank for rank in by_rank if rank not in shown and by_rank[rank].status != "ok"}
    known = advice(errors.values(), () if (shell := ipython()) is None else shell.user_ns)
    hint = "\n".join(filter(None, [f"{name_ranks(pending)}: {_NOT_YET}" if pending else "", *going_on, known]))
    return kind(tracebacks, errors, result, hint=hint, others=_acts(result, others))


_NOT_YET = "the cell goes on there until it ends by itself, or until %ddp_interrupt ends it"


_KILLED = Act("killed by the second press of stop", "be")


def _acts(result: CellResult, ranks: set[int], killed: Sequence[int] = ()) -> list[str]:
    """A line for each set of these ranks that did the same: `"ranks 0,1,3 waited in all_reduce #12 ..."`."""
    acts = group_by_value({rank: _KILLED if rank in killed else result[rank].last_act for rank in sorted(ranks)})
    return [act.of(those) for act, those in acts.items()]
