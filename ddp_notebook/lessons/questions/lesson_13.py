"""Questions of lesson 13: memory and sharding."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

_MILLIONS = 2.102272  # parameters of the network

QUESTIONS: dict[str, Question] = {
    "13/ddp": Question(
        answer=16 * _MILLIONS,
        why="4 bytes for the parameter, 4 for its gradient, 8 for Adam, and every rank has all of them.",
        hint="Four numbers of 4 bytes each, for every parameter.",
        traps={
            4 * _MILLIONS: "Those are the parameters alone.",
            8 * _MILLIONS: "Adam keeps two numbers for each parameter as well.",
            12 * _MILLIONS: "Adam keeps two numbers for each parameter, not one.",
        },
        tolerance=0.03,
    ),
    "13/sharded": Question(
        answer=lambda size: {"ZeRO-1": (8 + 8 / size) * _MILLIONS, "FSDP": 16 / size * _MILLIONS},
        why="ZeRO-1 divides the 8 bytes of Adam, FSDP all 16.",
        hint="Which of the 16 bytes are divided by the number of ranks?",
        tolerance=0.03,
    ),
    "13/gathers": Question(
        answer={"reshard": 8, "no reshard": 4},
        why="each block is gathered for the forward, and once more for the backward unless it has stayed.",
        hint="Count the blocks, and whether the backward finds their parameters still there.",
    ),
    "13/first": Question(
        answer=False,
        why="the optimizer steps parameters that are in no model any more.",
        hint="Whose parameters did the optimizer get, and who computes the loss now?",
    ),
    "13/bytes": Question(
        answer={"DDP": 16e9, "ZeRO-1": 9e9, "FSDP": 2e9},
        why="16 bytes for each parameter, of which ZeRO-1 divides 8 and FSDP all.",
        hint="In DDP it does not depend on the number of ranks.",
    ),
}
