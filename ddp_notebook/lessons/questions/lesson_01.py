"""Questions of lesson 01: the first process group."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "01/sum": Question(
        answer=lambda size: size * (size - 1) // 2,
        why="all_reduce adds up the numbers of all ranks, and every rank gets the sum.",
        hint="Rank r brings the number r. Add up the numbers of all ranks.",
        traps=lambda size: {size: "Each rank brings its own number, not 1."} if size != 3 else {},
        placeholder="-1",
    ),
    "01/losses": Question(
        answer="different",
        why="each rank computes the loss of its part of the images. DDP averages the gradients and not the losses.",
        hint="Which images does a rank use for its loss, and what does DDP average?",
        traps={
            "equal": "The parameters are equal, but each rank has other images.",
            "one": "Every rank computes a loss, because every rank runs the whole loop.",
        },
        choices={
            "the same loss on every rank": "equal",
            "another loss on each rank": "different",
            "only rank 0 has a loss": "one",
        },
    ),
    "01/seen": Question(
        answer=lambda size: -(-1437 // size),
        why="each rank gets an equal share, and the sampler uses some images twice if the division has a remainder.",
        hint="Divide the 1437 images by the number of ranks. All ranks get the same number, so round up.",
        traps={1437: "That is right without a DistributedSampler."},
        placeholder="1000",
    ),
    "01/mean-loss": Question(
        answer=True,
        why="the sum over all ranks, divided by the number of ranks.",
        hint="all_reduce adds up tensors. What must losses[-1] become first? And what makes a mean of a sum "
        "over all ranks?",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "01/one-call": Puzzle(
        setup="right, seen, loss = 90.0 + rank, 100.0, 12.5 * (rank + 1)\n"
        "wanted = [sum(90.0 + r for r in range(world_size)), 100.0 * world_size,\n"
        "          sum(12.5 * (r + 1) for r in range(world_size))]",
        call="solution(right, seen, loss)",
        got="[float(one) for one in result]",
        wanted="wanted",
        targets=(
            Target(measure=COLLECTIVES, most=1),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * 12),
        ),
        why="Each call has a fixed cost, which is far larger than that of 12 bytes. So small numbers travel together.",
        hint="One tensor can hold all three numbers.",
        wrong_hint="Return the three sums over all ranks, in the same order.",
    ),
}
