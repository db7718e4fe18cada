"""Questions of lesson 12: pipelines."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.lessons.questions.returned import returned


def _order(size: int) -> list[str]:
    """Return the actions of rank 0 in 1F1B with `size` stages and twice as many microbatches."""
    turns = [one for k in range(size) for one in (f"B{k}", f"F{size + k}")]
    return [*(f"F{k}" for k in range(size)), *turns, *(f"B{k}" for k in range(size, 2 * size))]


QUESTIONS: dict[str, Question] = {
    "12/one-batch": Question(
        answer=lambda size: (size - 1) / size,
        why="one rank computes at a time, and all the others wait.",
        hint="At each moment one of the ranks computes. What share of them does not?",
        traps=lambda size: {1 / size: "That is the share of the time in which a rank computes."} if size > 2 else {},
        tolerance=0.02,
        placeholder="1 / 10",
    ),
    "12/bubble": Question(
        answer=lambda size: (size - 1) / (3 * size - 1),
        why="with p stages and m microbatches it is (p - 1) / (m + p - 1).",
        hint="A rank is busy for 2 n units. The last stage has to wait for n - 1 of them until its first microbatch "
        "has come, and the first stage for as many at the end.",
        traps=lambda size: {
            (size - 1) / (2 * size): "That is lost time over compute time; the bubble is a share of the total time.",
            (size - 1) / size: "That was the bubble of a single microbatch.",
        },
        tolerance=0.12,
        placeholder="1 / 10",
    ),
    "12/schedule": Question(
        answer="neither",
        why="both fill and drain the pipeline in the same time; 1F1B keeps fewer activations.",
        hint="Compare the two lines of the table: which numbers differ by more than noise?",
        traps={"1F1B": "Many tutorials say so.", "GPipe": "Look at the numbers without messages."},
        choices=("GPipe", "1F1B", "neither"),
    ),
    "12/slow-stage": Question(
        answer="nearly 2 times as long",
        why="every microbatch passes the slow stage, so all stages work at its speed.",
        hint="How often can the slow stage start a microbatch? And can another stage be faster than that?",
        traps={
            "(1 + 1 / n) times as long": "That is how much more work there is. The other ranks wait during this time.",
            "not longer": "The other stages have no work that could hide the slow one.",
        },
        choices=("not longer", "(1 + 1 / n) times as long", "nearly 2 times as long"),
    ),
    "12/counts": Question(
        answer="both wait forever",
        why="rank 0 sends the fifth microbatch, and rank 1 the first gradient. Neither receives what the other sends.",
        hint="Which message does rank 0 want to send after the fourth microbatch? What does rank 1 do then?",
        traps={
            "an error at once": "Each rank knows only its own number.",
            "the four extra microbatches are dropped": "Each send needs a receive.",
        },
        choices=("an error at once", "the four extra microbatches are dropped", "both wait forever"),
    ),
    "12/microbatches": Question(
        answer=63,
        why="7 / (63 + 7) is 10 %.",
        hint="Solve (p - 1) / (m + p - 1) = 0.1 for m, with p = 8.",
        traps={70: "The bubble is a share of the total time, m + p - 1 units."},
    ),
    "12/balance": Question(
        answer=[4, 6, 6, 6, 6, 2],
        why="the whole model takes 36 units, so each stage gets 6: the embedding counts as 2, the loss as 4.",
        hint="Add up the blocks, the embedding and the loss, and divide by the number of stages.",
        traps={(5, 5, 5, 5, 5, 5): "Then the last stage takes 9 units, and all others wait for it."},
    ),
    "12/order": Question(
        answer=_order,
        why="fill with n forwards, then a backward and a forward in turns, and drain with n backwards.",
        hint="Rank 0 begins n forwards before the first gradient is back. Then it does one backward and one forward in "
        "turns until all forwards are done.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "12/one-f-one-b": Puzzle(
        setup="from ddp_notebook.lessons.pipelines.by_hand import play",
        call="play(solution(rank, world_size, 2 * world_size), 2 * world_size)",
        got="result['is right']",
        wanted="1.0",
        targets=(
            Target(measure=returned("kept at once"), most=lambda size: size),
            Target(measure=returned("units of time"), most=lambda size: 3 * (3 * size - 1)),
        ),
        why="rank r begins with n - r forwards, then it does one backward and one forward in turns.",
        hint="A rank may do its first backward as soon as its gradient can be there. How many forwards does it make "
        "until "
        "then? After that, each backward makes room for one forward.",
        wrong_hint="Each rank needs one forward and one backward of every microbatch.",
    ),
}
