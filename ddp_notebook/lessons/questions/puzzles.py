"""Puzzles with a target: a solution runs on the ranks, and the recording decides whether it has reached the target."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.errors import DDPNotebookError, RankError, UsageError
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.questions.measures import Attempt, Measure, without_hooks
from ddp_notebook.lessons.questions.starters import DOTS
from ddp_notebook.records.words import name_ranks

_ON_RANKS = "from ddp_notebook.lessons.questions.puzzle_ranks import PuzzleRun as _PuzzleRun\n"
_DOTS_ON_RANKS = "from ddp_notebook.lessons.questions.puzzle_ranks import has_dots as _has_dots\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Limit for one measure.

    Args:
        measure: What is measured.
        most: Largest allowed value on any rank; a function of the number of ranks if it depends on it.
        least: Smallest allowed value, instead of `most`.
    """

    measure: Measure
    most: float | Callable[[int], float] | None = None
    least: float | Callable[[int], float] | None = None

    def judge(self, attempt: Attempt) -> tuple[bool, str]:
        """Return whether the target is reached, and a text with the measured value and the target."""
        values = self.measure.of(attempt)
        words = self.measure.in_words
        least = self.most is None
        limit: Any = self.least if least else self.most
        limit = limit(len(attempt.ranks)) if callable(limit) else limit
        target = f"target {'at least' if least else 'at most'} {words(limit)}"
        if not values:
            return False, f"{self.measure.name}: not measured, {target}"
        worst = (min if least else max)(values.values())
        ranks = [rank for rank, value in values.items() if value == worst]
        where = "" if len(ranks) == len(attempt.ranks) else f" on {name_ranks(ranks)}"
        reached = worst >= limit - 1e-9 if least else worst <= limit + 1e-9
        return reached, f"{self.measure.name}: {words(worst)}{where}, {target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A task for a function of the reader, with targets.

    All texts are Python code for the ranks. They see the variables of the cells, and `solution`.

    Args:
        setup: Statements before the run. They create the arguments and the right result.
        call: Expression that calls the solution.
        got: Expression with the result to compare, in which `result` is the value of `call`.
        wanted: Expression with the right result. Numbers, tensors, and lists and dictionaries of them.
        targets: Limits that a good solution keeps.
        why: Explanation when the targets are reached.
        hint: Explanation when they are not.
        wrong_hint: Explanation when the result is wrong.
        tolerance: Largest relative and absolute difference of numbers.
    """

    setup: str
    call: str
    wanted: str
    targets: tuple[Target, ...]
    why: str
    hint: str
    wrong_hint: str = ""
    got: str = "result"
    tolerance: float = 1e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """A solution of the reader: its name, and its source if the notebook has defined it."""

    name: str
    source: str = ""


def solve(puzzle: Puzzle, given: object) -> tuple[bool, str]:
    """Run a solution on all ranks, and judge it.

    Args:
        puzzle: The puzzle.
        given: Function or class of the notebook, or the name of one on the ranks.

    Returns:
        Whether all targets are reached, and a text with the measured values.

    Raises:
        UsageError: The solution is neither a function nor a name.
        NoSessionError: No ranks are running.
    """
    solution = _solution(given)
    runner = LessonRunner(running())
    try:
        if (found := _run(runner, puzzle, solution)) is None:
            return False, DOTS
        wrong, attempt = found
    except RankError as error:
        return False, f"it failed: {str(error).splitlines()[0]}"
    except DDPNotebookError as error:
        return False, f"it did not end: {str(error).splitlines()[0]}"
    judged = [target.judge(attempt) for target in puzzle.targets]
    measured = "; ".join(text for _, text in judged)
    if wrong:
        ranks = ", ".join(f"rank {rank} has {text}" for rank, text in list(wrong.items())[:2])
        return False, " ".join(filter(None, [f"the result is wrong: {ranks}.", puzzle.wrong_hint, f"({measured})"]))
    if not all(is_reached for is_reached, _ in judged):
        return False, f"the result is right. {measured}. {puzzle.hint}"
    return True, f"{measured}. {puzzle.why[0].upper()}{puzzle.why[1:]}"


def has_dots(given: object) -> bool:
    """Return whether a solution still has a line with the dots of the notebook. False if the ranks cannot answer.

    Args:
        given: Function or class of the notebook, or the name of one on the ranks.
    """
    solution = _solution(given)
    ask = f"_lesson_told = _has_dots(globals(), {solution.source!r}, {solution.name!r})"
    try:
        return any(LessonRunner(running()).ask(f"{_DOTS_ON_RANKS}{ask}").values())
    except DDPNotebookError:  # the solution has ended the ranks
        return False


def _run(runner: LessonRunner, puzzle: Puzzle, solution: Solution) -> tuple[Mapping[int, str], Attempt] | None:
    """Return how the results of ranks differ from the right ones, and the recorded run. None if the solution has only
    the dots of the notebook."""
    session = runner.session
    make = f"_puzzle = _PuzzleRun(globals(), {solution.source!r}, {solution.name!r}, {puzzle.setup!r})"
    if any(runner.ask(f"{_ON_RANKS}{make}\n_lesson_told = _puzzle.is_empty").values()):
        return None
    runner.mark()
    seen = {(step.rank, step.cell, step.step) for step in session.recording.steps()}
    runner.run(f"_puzzle.run({puzzle.call!r})")
    calls = without_hooks(runner.calls())
    steps = tuple(one for one in session.recording.steps() if (one.rank, one.cell, one.step) not in seen)
    told = runner.ask(f"_lesson_told = _puzzle.difference({puzzle.got!r}, {puzzle.wanted!r}, {puzzle.tolerance})")
    peak: Mapping[int, int] = {}
    if any(target.measure.needs_memory for target in puzzle.targets):
        memory = f"{make}\n_puzzle.run({puzzle.call!r}, with_memory=True)\n_lesson_told = _puzzle.peak_bytes"
        peak = runner.ask(memory, level="off")  # without the memory of the recording
    cells = [*(one.cell for one in calls), *(one.cell for one in steps)]
    attempt = Attempt(
        ranks=tuple(range(session.world_size)),
        calls=calls,
        steps=steps,
        peak_bytes=peak,
        recording=session.recording,
        cell=cells[0] if cells else None,
    )
    return {rank: text for rank, text in told.items() if text}, attempt


def _solution(given: object) -> Solution:
    if isinstance(given, str) and given.isidentifier():
        return Solution(given)
    name = getattr(given, "__name__", "")
    if not callable(given) or not name.isidentifier():
        raise UsageError(f"give a function (def ...) or the name of one on the ranks, got {given!r}")
    return Solution(name, _source(given))


def _source(given: Any) -> str:
    """Return the source of a function or class of a cell; "" if its text is unknown."""
    try:
        return textwrap.dedent(inspect.getsource(given))
    except (OSError, TypeError):  # `inspect` does not find the file of a class of a cell
        members = vars(given).values() if inspect.isclass(given) else ()
    for code in [one.__code__ for one in members if inspect.isfunction(one)]:
        text = "".join(linecache.getlines(code.co_filename))
        for node in ast.parse(text).body if text else ():
            if isinstance(node, ast.ClassDef) and node.name == given.__name__:
                return ast.get_source_segment(text, node) or ""
    return ""
