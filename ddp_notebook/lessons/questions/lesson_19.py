"""Questions of lesson 19: elastic training."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "19/next-step": Question(
        answer=50,
        why="the checkpoint was saved after 50 steps, 0 to 49; later steps were only in the memory of the dead rank.",
        hint="New processes have only the state in the file, which is written after every 50 steps.",
        traps={
            65: "That would be right if a process had kept steps 50 to 64.",
            0: "The script starts from the saved state.",
        },
    ),
    "19/who-restarts": Question(
        answer=2,
        why="a group with a dead member is of no use, so the agent ends the other worker too and starts both.",
        hint="Ask whether the healthy worker can continue with its group.",
        traps={1: "The other worker's group has a dead member, and it cannot get another one."},
    ),
    "19/joined": Question(
        answer=3,
        why="the new group is made of new processes only: the one that trained was ended and started again.",
        hint="A process group cannot grow, and an agent gives a running worker no new one.",
        traps={2: "The worker that trained had a group of one, and a group cannot grow."},
    ),
    "19/survive": Question(
        answer={"new processes": 1, "steps again": 0},
        why="the dead rank got a new process and its state from the other ranks, which stayed at their step.",
        hint="Which rank has died, and which ranks still have the state?",
    ),
    "19/images": Question(
        answer=lambda size: {rank: {"seen": 640} for rank in range(size)},
        why="80 steps of 8 images on each rank, no matter which rank died.",
        hint="Add 8 inside `with step:`, and pass the dictionary to survive(): it is restored before the step is "
        "repeated, and copied to the new process.",
    ),
}
