"""Questions of lesson 07: ring, tree, parameter server."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "07/server-bytes": Question(
        answer=lambda size: 2 * (size - 1) * 48,
        why="48 bytes come in from every other rank, and 48 bytes go out to every other rank.",
        hint="Count both directions: the server receives from each other rank, and sends to it.",
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
        answer={"ring": 14, "tree": 6},
        why="2 (N - 1) against 2 log2 N: the tree is faster for small tensors; for large ones the bytes count.",
        hint="The ring goes round twice, less one step each time. The tree halves, then doubles: log2(8) steps each.",
    ),
    "07/which": Question(
        answer={"a tensor of 4 bytes": "latency", "a tensor of 400 MB": "bandwidth"},
        why="alpha counts for small tensors, beta for large ones.",
        hint="T = messages * alpha + bytes * beta: which of the two terms is the larger one?",
    ),
}
