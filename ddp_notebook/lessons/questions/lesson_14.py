"""Questions of lesson 14: DTensor and tensor parallelism."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "14/shape": Question(
        answer=lambda size: (6, math.ceil(12 / size)),
        why="dimension 1 are the columns: they are dealt out, and every rank has all rows.",
        hint="Which of the two numbers is that of dimension 1? Divide it by the number of ranks.",
        traps=lambda size: {(math.ceil(6 / size), 12): "That is Shard(0): dimension 0 are the rows."},
    ),
    "14/collectives": Question(
        answer={
            "A whole, B by columns": "all_gather",
            "A by rows, B whole": "all_gather",
            "A by columns, B by rows": "all_reduce",
        },
        why="finished elements are gathered, summands are added up.",
        hint="Has a rank the whole row and the whole column of an element? Then the element is finished, and others "
        "only lack it.",
    ),
    "14/sums": Question(
        answer=1,
        why="between the two matrices every rank continues with its own numbers; only the final outputs are summands.",
        hint="After `up` every rank has complete numbers, and `down` takes just these. What does it have after that?",
        traps={
            2: "The output of `up` need not be gathered: `down` takes the sharded output directly.",
            0: "Its rows are cut.",
        },
    ),
    "14/factor": Question(
        answer="none",
        why="each rank has another summand of every element, and no number makes the sum of one of them.",
        hint="Are the summands of the ranks equal?",
    ),
    "14/words": Question(
        answer=lambda size: 24 * size,
        why="all words of all ranks go there, and the other experts have nothing to do.",
        hint="Every rank sends all of its words to rank 0.",
        traps=lambda size: {24: "Those are its own; the other ranks send theirs too."} if size > 1 else {},
    ),
    "14/passes": Question(
        answer=lambda size: size - 1,
        why="it begins at one rank, and each pass takes it to one more.",
        hint="At how many ranks is it at the beginning, and how many more are there?",
        traps=lambda size: {size: "The last pass would bring it back to its first rank."},
    ),
    "14/row-parallel": Question(
        answer=True,
        why="the pieces' products are summands, and an all-reduce adds them up.",
        hint="Multiply the pieces, and ask what is still missing to every element.",
    ),
}
