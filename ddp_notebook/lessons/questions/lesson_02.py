"""Questions of lesson 02: cells on every rank."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "02/pushed": Question(
        answer="NameError",
        why="the ranks do not share variables with the notebook. `session[...] = value` or %ddp_push copies one.",
        hint="Is a variable of one process defined in another process?",
        traps={
            "value": "It would be so in a plain cell. This cell runs in other processes.",
            "waits": "Reading a variable sends nothing, so it cannot wait.",
        },
        choices={
            "each rank prints 0.01": "value",
            "NameError on every rank": "NameError",
            "the ranks wait for the notebook": "waits",
        },
    ),
    "02/largest": Question(
        answer=1,
        why="rank 1 has the score 0, and all others are below.",
        hint='session["score"] is a mapping from rank to score.',
    ),
    "02/flags": Question(
        answer=lambda size: {rank: rank > 0 for rank in range(size)},
        why="an expression with `rank` has another value on each rank. Two cells, with %%on_ranks, do it too.",
        hint="%%on_ranks 0 runs a cell on rank 0, and %%on_ranks 1: on all others. Or use an expression with `rank`.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "02/spread": Puzzle(
        setup="x = float((7 * rank + 3) % 5)\nxs = [float((7 * r + 3) % 5) for r in range(world_size)]",
        call="solution(x)",
        got="float(result)",
        wanted="max(xs) - min(xs)",
        targets=(
            Target(measure=COLLECTIVES, most=1),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * 8),
        ),
        why="the smallest number is minus the largest of the negative numbers, so one MAX is enough.",
        hint="How can you find the smallest number with MAX? And how many numbers can one tensor carry?",
        wrong_hint="Return the difference between the largest and the smallest x of all ranks, on every rank.",
    ),
}
