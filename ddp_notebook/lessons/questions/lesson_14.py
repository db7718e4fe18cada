"""Questions of lesson 14: DTensor and tensor parallelism."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "14/shape": Question(
        answer=lambda size: (6, math.ceil(12 / size)),
        why="dimension 1 are the columns: they are distributed, and every rank has all rows.",
        hint="Which of the two numbers is that of dimension 1? Divide it by the number of ranks.",
        traps=lambda size: {(math.ceil(6 / size), 12): "That is Shard(0): dimension 0 are the rows."},
        placeholder="(2, 2)",
    ),
    "14/collectives": Question(
        answer={
            "A whole, B by columns": "all_gather",
            "A by rows, B whole": "all_gather",
            "A by columns, B by rows": "all_reduce",
        },
        why="finished elements need an all-gather, summands must be added up.",
        choices=("all_gather", "all_reduce"),
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
        placeholder="5",
    ),
    "14/factor": Question(
        answer="none",
        why="each rank has another summand of every element, and no number makes the sum of one of them.",
        hint="Are the summands of the ranks equal?",
        choices={"by the number of ranks": "n", "by 1 / the number of ranks": "1 / n", "no number works": "none"},
    ),
    "14/tokens": Question(
        answer=lambda size: 24 * size,
        why="all tokens of all ranks go there, and the other experts have nothing to do.",
        hint="Every rank sends all of its tokens to rank 0.",
        traps=lambda size: {24: "Those are its own; the other ranks send theirs too."} if size > 1 else {},
        placeholder="10",
    ),
    "14/passes": Question(
        answer=lambda size: size - 1,
        why="it begins at one rank, and each pass takes it to one more.",
        hint="At how many ranks is it at the beginning, and how many more are there?",
        traps=lambda size: {size: "The last pass would bring it back to its first rank."},
        placeholder="20",
    ),
    "14/causal": Question(
        answer=lambda size: {"rank 0": 1, "the last rank": size},
        why="the first piece sees only itself, and the last piece sees all pieces.",
        hint="Which pieces of the text come before the piece of the rank, and is its own piece one of them?",
        placeholder="12",
    ),
    "14/colwise": Question(
        answer=(2048, 4096),
        why="a column of the matrix is an output, so each rank has 16384 / 8 outputs and all inputs.",
        hint="ColwiseParallel divides the outputs. Where do they stand in (out_features, in_features)?",
        traps={(16384, 512): "That is RowwiseParallel, which divides the inputs."},
    ),
    "14/block": Question(
        answer={"forward": 2, "backward": 2},
        why="each of the two parts sums its outputs in the forward, and the gradients of its input in the backward.",
        hint="Two parts. In the forward each has summands at its end; in the backward each has summands at its "
        "beginning.",
    ),
    "14/row-parallel": Question(
        answer=True,
        why="the pieces' products are summands, and an all-reduce adds them up.",
        hint="Multiply the pieces, and ask what is still missing to every element.",
    ),
}

_OWN_TOKENS = """
chance = torch.Generator().manual_seed(3)
x, w = (torch.randn(shape, dtype=torch.float64, generator=chance).to(device) for shape in ((48, 96), (96, 32)))
x_piece = x.chunk(world_size, dim=1)[rank].contiguous()
w_piece = w.chunk(world_size, dim=0)[rank].contiguous()
"""

PUZZLES: dict[str, Puzzle] = {
    "14/own-tokens": Puzzle(
        setup=_OWN_TOKENS,
        call="solution(x_piece, w_piece)",
        wanted="(x @ w).chunk(world_size)[rank]",
        targets=(Target(measure=SENT, most=lambda size: (size - 1) / size * 48 * 32 * 8),),
        why="a reduce-scatter is the half of an all-reduce after which each rank has its own rows.",
        hint="An all-reduce is a reduce-scatter and an all-gather. Which half brings rows that you then throw away?",
        wrong_hint="Return the rows of x @ w that belong to this rank: the products of the pieces are summands.",
    ),
}
