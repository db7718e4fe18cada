"""What notebooks 14 and 15 ask, by name: the number of the notebook and a word."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question


def _shape(size: int) -> tuple[int, int]:
    """Rows and columns of the mesh that the notebook makes of so many ranks."""
    rows = 2 if size >= 4 and size % 2 == 0 else 1
    return rows, size // rows


QUESTIONS = {
    # ---- 14: DTensor and tensor parallelism
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
        why="between the two matrices every rank goes on with its own numbers; only what comes out are summands.",
        hint="After `up` every rank has complete numbers, and `down` takes just these. What does it have after that?",
        traps={
            2: "What comes out of `up` need not be put together: `down` takes it as it lies.",
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
        traps=lambda size: {size: "The last pass would bring it home, where it has been already."},
    ),
    "14/row-parallel": Question(
        answer=True,
        why="the pieces' products are summands, and an all-reduce adds them up.",
        hint="Multiply the pieces, and ask what is still missing to every element.",
    ),
    # ---- 15: meshes
    "15/row": Question(
        answer=lambda size: list(range(_shape(size)[1])),
        why="the first row is filled before the second one begins.",
        hint="Deal the ranks out row by row, and see where rank 1 comes to lie.",
        traps={(1, 3): "That is its column: the ranks below it, not beside it."},
    ),
    "15/ways": Question(
        answer={"gather": "row", "scatter": "row", "average": "column"},
        why="a row holds the whole model once, so a layer is put together there; the copies are the other rows.",
        hint="Where are the parts of one copy of the model? Along that they are gathered and scattered. The other way "
        "lie the copies.",
    ),
    "15/share": Question(
        answer=lambda size: 1 / size,
        why="the row divides the matrix, and the column divides each piece: all ranks together hold it once.",
        hint="Divide by the number of ranks in a row, and that once more by the number of ranks in a column.",
        traps=lambda size: {1 / _shape(size)[1]: "That is a piece; FSDP has sharded it once more."},
        tolerance=0.05,  # where the sizes do not come out even
    ),
    "15/complaint": Question(
        answer=False,
        why="all shapes fit, and nothing in torch compares the inputs of the ranks that share a matrix.",
        hint="What could notice it? Every message has the right size.",
    ),
    "15/shape": Question(
        answer=(2, 4),
        why="two rows, a machine each, and the four GPUs of a machine in a row.",
        hint="The ranks of one machine have numbers that follow each other, and a row is what follows each other.",
        traps={(4, 2): "Then a row has two GPUs, and half of the columns lead to the other machine."},
    ),
    "15/coordinates": Question(
        answer=lambda size: {rank: divmod(rank, _shape(size)[1]) for rank in range(size)},
        why="the row is how many whole rows come before the rank, the column is what is left.",
        hint="Divide the rank by the number of columns: one of the two is the quotient, the other is the remainder.",
    ),
}
