"""Questions of lesson 06: collectives."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target


def _product(size: int) -> int:
    product = 1
    for number in range(1, size + 1):
        product *= number
    return product


QUESTIONS: dict[str, Question] = {
    "06/all-reduce": Question(
        answer="sums",
        why="every rank gets the sums of the first and of the second numbers.",
        hint="*Reduce* makes one value of many. *All* means that every rank gets it.",
        traps={
            "own": "That would be a reduce to rank 0. After an all-reduce no rank keeps its own numbers.",
            "all": "That would be an all-gather: it collects, and does not add.",
        },
        choices=lambda size: {
            "its own numbers, [2, 20]": "own",
            f"the sums, [{size * (size + 1) // 2}, {10 * size * (size + 1) // 2}]": "sums",
            "the numbers of all ranks, [1, 10, 2, 20, ...]": "all",
        },
    ),
    "06/reduce": Question(
        answer="nothing",
        why="only the destination has a result. Elsewhere the values are unspecified, and differ between libraries.",
        hint="Which rank gets the sum? Does the library need a place for partial sums on its way?",
        traps={
            "own": "It may be so, and it may not: the tensor is used for partial sums.",
            "sum": "That would be an all-reduce.",
        },
        choices={"their own number": "own", "the sum": "sum", "nothing that you can rely on": "nothing"},
    ),
    "06/all-to-all": Question(
        answer=lambda size: {
            "all_gather": [10.0 * rank for rank in range(size)],
            "reduce_scatter": [float(sum(10 * rank + 1 for rank in range(size)))],
            "all_to_all": [10.0 * rank + 1 for rank in range(size)],
        },
        why="all-gather collects, reduce-scatter adds up what all have for rank 1, all-to-all brings it unadded.",
        hint="Write the numbers as a table with a row for each rank. The numbers for rank 1 are in column 1.",
        placeholder="[0, 1]",
    ),
    "06/reduce-op": Question(
        answer=lambda size: {"MAX": size, "MIN": 1, "PRODUCT": _product(size)},
        why="one number from all, by three rules.",
        hint="The numbers are 1, 2, 3, ... up to the number of ranks.",
        placeholder="5",
    ),
    "06/plain": Question(
        answer="wrong",
        why="the bytes of the integers are added as if they were floating-point numbers, and the other way round. (As "
        "a float, the bytes of the integer 1 are 1e-45.) Other sizes give wrong numbers, or end a process.",
        hint="Does a rank know the dtype of the others? A message contains bytes only.",
        traps={
            "error": "Only a check of all ranks could find it, and plain torch does not check by default.",
            "converted": "Bytes are sent, without their dtype.",
        },
        choices={"an error on both ranks": "error", "the right sum, converted": "converted", "wrong numbers": "wrong"},
    ),
    "06/agree": Question(
        answer=lambda size: dict.fromkeys(range(size), True),
        why="MAX is true if any rank has a 1. MIN would tell whether all have one.",
        hint="Each rank brings 0 or 1 in a tensor of integers. Which operation returns 1 as soon as one rank brings 1?",
    ),
    "06/which": Question(
        answer={
            "average the gradients": "all_reduce",
            "all ranks need the vectors of all ranks": "all_gather",
            "start from the weights of rank 0": "broadcast",
            "each rank keeps its share of the sum": "reduce_scatter",
            "each rank has tokens for each other rank": "all_to_all",
        },
        why="distributed training mostly uses these five collectives.",
        hint="Which ranks have the data before, and which ranks need which data afterwards?",
    ),
    "06/mean": Question(
        answer=lambda size: {rank: (size * size - 1) / 2 for rank in range(size)},
        why="the sum of all numbers, divided by their count.",
        hint="The ranks have different amounts of numbers, so a mean of their means counts some more than others. Add "
        "up sums and counts, and divide at the end.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "06/statistics": Puzzle(
        setup="numbers = torch.arange(rank + 2, dtype=torch.float64, device=device) ** 2\n"
        "everything = torch.cat([torch.arange(one + 2, dtype=torch.float64) ** 2 for one in range(world_size)])",
        call="solution(numbers)",
        got="[float(one) for one in result or []]",
        wanted="[everything.mean().item(), everything.std(correction=0).item()]",
        targets=(Target(measure=COLLECTIVES, most=1), Target(measure=SENT, most=48)),
        why="count, sum and sum of squares add up over the ranks, and both results follow from them.",
        hint="Which three numbers of a rank are enough? They fit into one tensor, so into one all-reduce.",
        wrong_hint="The variance is the mean of the squares minus the square of the mean.",
    ),
}
