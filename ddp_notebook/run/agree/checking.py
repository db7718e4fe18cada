"""Asking the ranks what is to agree between them, and comparing what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.messages.ranks import Check, Checked
from ddp_notebook.run.agree.agreement import Agreement, compare
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.groups.living import Living
from ddp_notebook.run.questions import Questions
from ddp_notebook.run.values.exchange import check_name

_ANSWER_S = 1.0  # what ranks get to answer a question that a report can do without


class Checking:
    """Checks whether ranks agree.

    Args:
        cells: whose turn it may be.
        questions: to ask the ranks.
        living: tells which of them can answer.
    """

    def __init__(self, cells: Cells, questions: Questions, living: Living) -> None:
        self._cells = cells
        self._questions = questions
        self._living = living

    def check(self, names: Sequence[str]) -> Agreement:
        """See `Session.check`."""
        for name in names:
            check_name(name)
        with self._cells.turn:
            cluster = self._living.check_host()
            busy, gone = self._cells.busy, cluster.gone
            ranks = [rank for rank in cluster.ranks if rank not in {*busy, *gone}]
            if len(ranks) < 2:  # nobody to compare with
                self._living.check()
                self._cells.check_idle()
            found = compare(self._ask(ranks, names, ()), is_whole=not busy and not gone)
            if found.differing_entries:
                found = found.with_samples(self._ask(ranks, names, found.differing_entries))
            return found.without(busy, gone)

    def whole_loaders(self) -> list[str]:
        """Loaders of which each rank reads everything, in random order; none where a rank is busy or does not answer in
        time."""
        with self._cells.turn.if_free() as is_ours:
            cluster = self._living.cluster
            if not is_ours or not cluster.is_running or self._cells.busy or cluster.gone or cluster.unheard:
                return []
            answers = self._questions.ask_for(cluster.ranks, lambda n: Check(request=n, whole=True), _ANSWER_S)
            names = [answer.facts for answer in answers.values()]
            if len(names) < max(2, len(cluster.ranks)):
                return []
            return [name for name in names[0] if all(name in others for others in names)]

    def _ask(self, ranks: list[int], names: Sequence[str], entries: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Fingerprints of these variables, or samples of these entries, by rank."""

        def make(request: int) -> Check:
            return Check(request=request, names=list(names), entries=list(entries))

        answers: dict[int, Checked] = self._questions.ask_all(ranks, make)
        for rank, answer in answers.items():
            if answer.error:
                raise DDPNotebookError(f"rank {rank} could not inspect its variables: {answer.error}")
        return {rank: answer.facts for rank, answer in answers.items()}
