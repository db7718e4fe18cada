"""Questions of lesson 26: build FSDP."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import PEAK, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target


def _joined(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _gathered(size: int) -> str:
    """Return the tensors of all ranks, one after the other."""
    return _joined([number * 10**rank for rank in range(size) for number in range(1, size + 1)])


def _sums(size: int) -> list[int]:
    """Return the sum of the tensors of all ranks."""
    return [number * int("1" * size) for number in range(1, size + 1)]


def _times(size: int) -> dict[str, float]:
    """Return choices in times of the model: gradients of the shards, with one layer, and with all whole weights."""
    shards = 1 / size
    return {f"{value:.2f}": value for value in (shards, shards + 0.25, 1 + shards + 0.25)}


QUESTIONS: dict[str, Question] = {
    "26/collectives": Question(
        answer=lambda size: {"all-gather": _gathered(size), "reduce-scatter": str(_sums(size)[1])},
        why="the all-gather puts the tensors one after the other. The sum begins with 11, 22 on two ranks, and with "
        "111, 222 on three. Rank 1 gets its second part.",
        hint="Rank 1 gets everything from the first one, and one element of the sum from the second.",
        choices=lambda size: (_gathered(size), _joined(_sums(size)), str(_sums(size)[0]), str(_sums(size)[1])),
    ),
    "26/clone": Question(
        answer="a view keeps the whole weight in memory",
        why="chunk returns a view of the whole storage, which lives as long as one view of it does.",
        hint="How much memory does a view of a tensor keep?",
        traps={
            "chunk returns a list": "It returns tensors; [rank] takes one of them.",
            "a gradient needs a copy": "A view can be a parameter too. But which memory stays?",
        },
        choices=("chunk returns a list", "a gradient needs a copy", "a view keeps the whole weight in memory"),
    ),
    "26/peak": Question(
        answer=lambda size: 1 + 1 / size + 0.25,
        why="all whole weights, which autograd has saved (1), the gradients of the shards (1/N), the gradient of a "
        "layer (1/8), and the inputs of the layers (1/8).",
        hint="Which tensors does autograd keep for the backward?",
        traps=lambda size: {
            1 / size: "Those are the gradients of the shards. Are there no whole weights?",
            1 / size + 0.25: "Those are the gradients of the shards, and one layer. Does autograd forget a whole "
            "weight after its layer?",
        },
        choices=_times,
    ),
    "26/count": Question(
        answer={"all-gather": 2, "reduce-scatter": 1, "all-reduce": 0},
        why="gather for the forward, gather again for the backward, and reduce-scatter the gradient.",
        hint="When does the layer need its whole weight? Who needs the whole gradient?",
        choices=(0, 1, 2),
    ),
    "26/bytes": Question(
        answer=1.5,
        why="DDP: an all-gather and a reduce-scatter. FSDP: two all-gathers and a reduce-scatter. 3 / 2.",
        hint="Count each all-reduce as an all-gather and a reduce-scatter.",
        traps={3: "That is in times of the model. DDP moves 2 times the model.", 1: "FSDP gathers twice."},
        choices=(1, 1.5, 2, 3),
    ),
}

_BYTES = 8 * 120 * 120 * 4  # of the weights

PUZZLES: dict[str, Puzzle] = {
    "26/sharded": Puzzle(
        setup="from ddp_notebook.lessons.capstones.ranks import GradedFSDP\n_graded = GradedFSDP(solution)",
        call="_graded.step()",
        got="[_graded.is_sharded(), _graded.is_right()]",
        wanted="[True, True]",
        targets=(
            Target(measure=SENT, most=lambda size: 3 * (size - 1) / size * _BYTES),
            Target(measure=PEAK, most=lambda size: (0.7 + 1 / size) * _BYTES),
        ),
        why="only one or two layers are whole at the same time.",
        hint="Save the shard for the backward, and gather it again there.",
        wrong_hint="The first value: each shard is a copy with 1/N of the elements. The second: its gradient "
        "is the part of the mean gradient.",
    ),
}
