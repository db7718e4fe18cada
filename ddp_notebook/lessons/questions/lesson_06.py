"""Questions of lesson 06: collectives."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question


def _product(size: int) -> int:
    product = 1
    for number in range(1, size + 1):
        product *= number
    return product


def _bits(size: int, rule: str) -> int:
    total = 1
    for number in range(2, size + 1):
        total = {"and": total & number, "or": total | number, "xor": total ^ number}[rule]
    return total


QUESTIONS: dict[str, Question] = {
    "06/all-reduce": Question(
        answer=lambda size: {r: [sum(range(1, size + 1)), 10.0 * sum(range(1, size + 1))] for r in range(size)},
        why="the sums, the same on every rank.",
        hint="Add up the first numbers of all ranks, and then the second ones; every rank gets both sums.",
    ),
    "06/reduce-op": Question(
        answer=lambda size: {
            "SUM": size * (size + 1) // 2,
            "PRODUCT": _product(size),
            "MIN": 1,
            "MAX": size,
            "BAND": _bits(size, "and"),
            "BOR": _bits(size, "or"),
            "BXOR": _bits(size, "xor"),
        },
        why="one number from all, by seven rules.",
        hint="For the last three write 1, 2, 3, ... as binary numbers and go through them column by column.",
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
