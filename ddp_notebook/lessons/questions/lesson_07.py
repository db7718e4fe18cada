"""Questions of lesson 07: ring, tree, parameter server."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

_ELEMENTS = 1200  # length of the puzzle's tensor, divisible by 2, 3, 4, 5, 6 and 8

QUESTIONS: dict[str, Question] = {
    "07/server-bytes": Question(
        answer=lambda size: 2 * (size - 1) * 48,
        why="48 bytes come in from every other rank, and 48 bytes go out to every other rank.",
        hint="Count both directions: the server receives from each other rank, and sends to it.",
        traps=lambda size: {(size - 1) * 48: "That is one direction.", 2 * size * 48: "Rank 0 sends itself nothing."},
        placeholder="48",
    ),
    "07/half": Question(
        answer=lambda size: size - 1,
        why="a chunk visits every rank once, and needs N - 1 steps for that.",
        hint="Follow one chunk: it grows by one rank's data in each step.",
        traps=lambda size: {
            size: "The rank where the chunk begins has its own data already.",
            2 * (size - 1): "That is when every rank has all chunks.",
        },
        placeholder="7",
    ),
    "07/tree": Question(
        answer=6,
        why="log2(8) = 3 levels up, and 3 levels down.",
        hint="At each level half of the ranks are left. How many levels are there, and how often are they passed?",
        traps={
            3: "That is the way up. The other ranks have no sum yet.",
            14: "That is the number of all messages. Those of one level are sent at the same time.",
        },
        placeholder="1",
    ),
    "07/ring-bytes": Question(
        answer=700,
        why="2 * 7 / 8 * 400 MB. A hundred ranks would send hardly more: 792 MB each.",
        hint="A rank sends 2 (N - 1) chunks, and a chunk is the N-th part of the data.",
        traps={
            2800: "Those are the bytes of sending the whole tensor around, N - 1 times.",
            350: "That is the first half: the sums are complete, but each rank has only one chunk of them.",
        },
    ),
    "07/server-load": Question(
        answer=5600,
        why="7 * 400 MB in and 7 * 400 MB out, all through one link; it grows with every rank.",
        hint="The server gets 400 MB from each of the 7 others, and sends 400 MB to each of them.",
        traps={2800: "That is one direction."},
    ),
    "07/steps": Question(
        answer={"ring": 14, "tree": 6, "halving and doubling": 6},
        why="2 (N - 1) against 2 log2 N. Tree and halving differ in the bytes, not in the messages.",
        hint="The ring goes round twice, less one step each time. The others have log2(8) steps, twice.",
    ),
    "07/which": Question(
        answer={"a tensor of 4 bytes": "latency", "a tensor of 400 MB": "bandwidth"},
        why="alpha counts for small tensors, beta for large ones.",
        hint="T = messages * alpha + bytes * beta: which of the two terms is the larger one?",
        choices={"alpha, the latency": "latency", "beta, the bandwidth": "bandwidth"},
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "07/ring": Puzzle(
        setup=f"post = dist.new_group(backend='gloo')\nx = torch.arange({_ELEMENTS}, dtype=torch.float64) % 7 + rank",
        call="solution(x)",
        got="x",
        wanted=f"(torch.arange({_ELEMENTS}, dtype=torch.float64) % 7) * world_size + sum(range(world_size))",
        targets=(
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * 8 * _ELEMENTS),
            Target(measure=COLLECTIVES, most=0),
        ),
        why="no all-reduce can send less: each rank has to get rid of its data, and to receive the sum.",
        hint="Cut x into as many chunks as there are ranks. Each chunk goes round once to be added up, and once "
        "more to be distributed.",
        wrong_hint="After the call, x itself must have the sum: use +=, copy_ or x[...] = ..., not x = ....",
    ),
}
