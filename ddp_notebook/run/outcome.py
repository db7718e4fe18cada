"""How a cell ended, in words: the error that the notebook raises."""

from __future__ import annotations

import re
import sys

from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError, name_ranks
from ddp_notebook.run.interrupt import keyboard_interrupt
from ddp_notebook.run.result import CellResult

_UNDEFINED = re.compile(r"^NameError: name '(\w+)' is not defined")


def raise_if_bad(
    result: CellResult, pending: list[int], interrupted: bool, timeout_s: float | None, where: dict[int, str]
) -> None:
    """Raise what the cell's end calls for; nothing if it ended well on every rank.

    Args:
        result: what it left behind.
        pending: ranks on which it has not ended.
        interrupted: whether somebody pressed stop.
        timeout_s: the limit that it has exceeded; None: it has not.
        where: what the ranks were doing when the limit was reached.

    Raises:
        RankDiedError, CellTimeoutError, KeyboardInterrupt, RankError
    """
    by_rank = result.by_rank
    died = {rank: one.error for rank, one in by_rank.items() if one.status == "died"}
    failed = {rank: one.error for rank, one in by_rank.items() if one.status in ("error", "interrupted")}
    if died:
        raise RankDiedError({rank: by_rank[rank].traceback for rank in died}, died, result)
    if timeout_s is not None and (where or failed):
        places: dict[str, list[int]] = {}
        for rank, place in where.items():
            places.setdefault(place, []).append(rank)
        lines = [f"  {name_ranks(ranks)}: {place}" for place, ranks in places.items()]
        left = f"\n{name_ranks(pending)} not stopped yet; the cell goes on there until %ddp_restart" if pending else ""
        raise CellTimeoutError(
            f"the cell took longer than {timeout_s:g} s and was stopped; it was then at\n" + "\n".join(lines) + left,
            result,
        )
    if interrupted:
        answered = [rank for rank, one in by_rank.items() if one.status == "interrupted"]
        ended = [rank for rank, one in by_rank.items() if one.status in ("ok", "error")]
        parts = [
            f"interrupted: {name_ranks(answered)}" if answered else "",
            f"had ended: {name_ranks(ended)}" if ended else "",
            f"not answered yet: {name_ranks(pending)}; the cell goes on there until %ddp_restart" if pending else "",
        ]
        raise keyboard_interrupt("; ".join(part for part in parts if part))
    if failed:
        raise RankError({rank: by_rank[rank].traceback for rank in failed}, failed, result, hint=_hint(failed))


def _hint(failed: dict[int, str]) -> str:
    """What to do about a name that the notebook has and the ranks do not."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return ""
    names = {found[1] for error in failed.values() if (found := _UNDEFINED.match(error))}
    here = sorted(name for name in names if name in shell.user_ns)
    if not here:
        return ""
    return f"The notebook has {' and '.join(map(repr, here))}: %ddp_push {' '.join(here)} sends it to the ranks."
