"""Sentences about the cells that keep ranks from answering."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.rank_requests import Questions

_ANSWER_S = 0.3  # a rank's agent answers within milliseconds
_LONG_S = 1.0  # a shorter cell may end before a message about it is read


class _Job(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def run(self) -> CellRun | None: ...


class BusyCells:
    """Finds the cells that ranks are running.

    Args:
        questions: sends requests to the ranks.
        jobs: returns the jobs that have not ended.
    """

    def __init__(self, questions: Questions, jobs: Callable[[], Collection[_Job]]) -> None:
        self._questions = questions
        self._jobs = jobs

    def cells(self, ranks: Collection[int]) -> str:
        """Return sentences about the cells that these ranks have run for more than a second, and how to end each.

        Return "" if there are none. Ranks that do not answer in time are left out.
        """
        answers: dict[int, Vitals] = self._questions.ask_for(ranks, lambda n: Probe(request=n), _ANSWER_S)
        return ". ".join(self._describe({rank: one for rank, one in answers.items() if one.running_s > _LONG_S}))

    def _describe(self, answers: dict[int, Vitals]) -> Iterator[str]:
        jobs = {job.run.number: job.number for job in self._jobs() if job.run is not None}
        for cell in sorted({vitals.running_cell for vitals in answers.values()} - {0}):
            its = [rank for rank, vitals in answers.items() if vitals.running_cell == cell]
            runs = f"{list_ranks(its)} {'runs' if len(its) == 1 else 'run'}"
            since = f"since {max(answers[rank].running_s for rank in its):.0f} s"
            if number := jobs.get(cell):
                yield f"{runs} job {number} {since}: %ddp_wait {number} waits for it, %ddp_cancel {number} ends it"
            else:
                yield f"{runs} a cell {since}: %ddp_interrupt ends it, and all variables are kept"
