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
        choices=(0, 50, 64, 65),
    ),
    "19/who-restarts": Question(
        answer=2,
        why="a group with a dead member is of no use, so the agent ends the other worker too and starts both.",
        hint="Ask whether the healthy worker can continue with its group.",
        traps={1: "The other worker's group has a dead member, and it cannot get another one."},
        choices=(1, 2, 3),
    ),
    "19/joined": Question(
        answer=3,
        why="the new group is made of new processes only: the one that trained was ended and started again.",
        hint="A process group cannot grow, and an agent gives a running worker no new one.",
        traps={2: "The worker that trained had a group of one, and a group cannot grow."},
        choices=(2, 3),
    ),
    "19/survive": Question(
        answer={"new processes": 1, "steps again": 0},
        why="the dead rank got a new process and its state from the other ranks, which stayed at their step.",
        hint="Which rank has died, and which ranks still have the state?",
        placeholder="5",
    ),
    "19/young": Question(
        answer=1138.4,
        why="sqrt(2 * 30 * 21600) = 1138 seconds: every 19 minutes.",
        hint="sqrt(2 * c * m) with c and m in seconds: 6 hours are 21,600 seconds.",
        traps={18.97: "That is the number of minutes."},
        tolerance=0.01,
    ),
    "19/hours": Question(
        answer={"16,384 GPUs": 3.093, "1,024 GPUs": 49.49},
        why="54 * 24 / 419 hours; with a sixteenth of the GPUs it takes 16 times as long.",
        hint="Divide the hours of 54 days by the number of interruptions. Fewer GPUs fail less often together.",
        tolerance=0.02,
    ),
    "19/cost": Question(
        answer=110,
        why="60 seconds for the restart, and on average half of 200 steps again: 100 steps of 0.5 seconds.",
        hint="A fault comes on average in the middle between two checkpoints.",
        traps={160: "That is the worst case: the fault comes just before a checkpoint."},
        tolerance=0.01,
    ),
    "19/images": Question(
        answer={"images": {0: 640, 1: 640}, "new processes": 1, "few repeated steps": True},
        why="80 steps of 8 images on each rank, one new process, and at most the interrupted step is repeated.",
        hint="Add 8 inside `with step:`, and pass the dictionary to survive(): it is restored before the step is "
        "repeated, and copied to the new process.",
    ),
}
