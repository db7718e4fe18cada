"""Open a debugger in the frames of the last failed cell, `%ddp_debug`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddp_notebook.messages.debug_messages import FailureQuestion
from ddp_notebook.records.words import list_ranks

if TYPE_CHECKING:
    from ddp_notebook.run.session_parts import SessionParts

_CODE = "get_ipython().run_line_magic('debug', '')"  # a rank keeps the failure while it runs this


def debug_failure(parts: SessionParts, run: Callable[..., object], asked: str | None) -> None:
    """Open a debugger on the ranks whose last cell has failed, in the innermost frame of the user's code.

    Args:
        parts: the core of the session.
        run: `Session.run`.
        asked: ranks, see `rank_sets`; None: all of them.

    Raises:
        UsageError: a rank does not exist.
        SessionBrokenError: a rank is still running a cell.
    """
    ranks = parts.liveness.parse(asked)
    parts.cells.check_idle(ranks)
    alive = [rank for rank in ranks if rank in parts.cluster.alive]
    answers: dict[int, Any] = parts.questions.ask_all(alive, lambda number: FailureQuestion(request=number))
    failed = [rank for rank, answer in answers.items() if answer.facts.get("error")]
    if not failed:
        where = "any rank" if asked is None else list_ranks(ranks)
        print(
            f"no failure is kept on {where}: %ddp_debug opens the last cell of a rank if a line of your code failed; "
            "not a syntax error or SystemExit"
        )
        return
    run(_CODE, ranks=failed)
