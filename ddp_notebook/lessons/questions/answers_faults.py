"""What notebook 19 asks, by name: the number of the notebook and a word."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS = {
    "19/next-step": Question(
        answer=50,
        why="the checkpoint was saved after 50 steps, 0 to 49, and all that came later was in the memory of the dead.",
        hint="Ask what the new processes know: what is in the file, which is written after every 50 steps.",
        traps={65: "So it would be if somebody had kept steps 50 to 64.", 0: "The script begins with what is saved."},
    ),
    "19/who-restarts": Question(
        answer=2,
        why="a group with a dead member is of no use, so the agent ends the other worker too and starts both.",
        hint="Ask whether the worker that is well can go on with its group.",
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
        why="the rank that died got a process, and its state from the others, who stayed where they were.",
        hint="Who has died, and who still has all that was done?",
    ),
    "19/images": Question(
        answer=lambda size: {rank: {"seen": 640} for rank in range(size)},
        why="80 steps of 8 images on each rank, whoever has died.",
        hint="Add 8 inside of `with step:`, and name the dictionary to survive(): what is named is put back with the "
        "step that is done again, and handed to the new process.",
    ),
}
