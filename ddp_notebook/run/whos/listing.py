"""Ask the ranks for their variables."""

from __future__ import annotations

from ddp_notebook.errors import DDPNotebookError, SessionBrokenError, UsageError
from ddp_notebook.messages.ranks import Checked
from ddp_notebook.messages.whos_messages import ListVariables, ReadVariables
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.session_parts import SessionParts
from ddp_notebook.run.whos.variables import Variables, variables_of

_ANSWER_S = 5.0  # for ranks in a cell, which may hold the GIL


def list_variables(parts: SessionParts, pattern: str, exact: bool) -> Variables:
    """Return the variables of all living ranks, see `Session.whos`."""
    if not isinstance(pattern, str):
        raise UsageError(f"pattern must be text, as in whos('loss*'), got {pattern!r:.60}")
    cluster = parts.liveness.check_host()
    alive = list(cluster.alive)
    if not alive:
        parts.liveness.check()
    with parts.cells.run_queue.if_free() as is_ours:
        busy = parts.cells.busy
        if is_ours and not busy and parts.cells.elsewhere is None:
            answers = parts.questions.ask_all(alive, lambda n: ReadVariables(request=n, pattern=pattern, exact=exact))
            return _variables(answers, pattern, [])
    answers = parts.questions.ask_for(alive, lambda n: ListVariables(request=n, pattern=pattern), _ANSWER_S)
    silent = [rank for rank in alive if rank not in answers]
    if not answers:
        raise SessionBrokenError(f"{list_ranks(silent)} did not answer within {_ANSWER_S:g} s; try again later")
    notes = ["a cell runs: shapes and bytes only, contents were not compared"]
    if silent:
        notes.append(f"{list_ranks(silent)} did not answer within {_ANSWER_S:g} s")
    return _variables(answers, pattern, notes)


def _variables(answers: dict[int, Checked], pattern: str, notes: list[str]) -> Variables:
    for rank, answer in answers.items():
        if answer.error:
            raise DDPNotebookError(f"rank {rank} could not list its variables: {answer.error}")
    return variables_of({rank: answer.facts for rank, answer in answers.items()}, pattern, notes)
