"""Measures of puzzles that a solution's run returns itself, such as the number of microbatches that it kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.questions.measures import Attempt, Measure
from ddp_notebook.records.units import at_most_three_figures


def returned(name: str, in_words: Callable[[float], str] = at_most_three_figures) -> Measure:
    """Return a measure whose value is an entry of the dictionary that the call of the puzzle returns.

    Args:
        name: Key of the entry, and name of the measure in a sentence.
        in_words: Formats a value.
    """

    def of(_: Attempt) -> Mapping[int, float]:
        found = LessonRunner(running()).ask(f"_lesson_told = float(_puzzle.names['result'][{name!r}])", level="off")
        return {rank: value for rank, value in found.items() if value is not None}

    return Measure(name=name, of=of, in_words=in_words)
