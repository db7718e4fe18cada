"""Questions of lesson 23: it hangs."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "23/missing": Question(
        answer="all others",
        why="rank 0 does what the program says: it waits for the other ranks, which never call all_reduce.",
        hint="Which ranks does rank 0 wait for? An all-reduce needs every rank of its group.",
        traps={
            "rank 0": "Rank 0 is in the all-reduce, as it should be. It only shows the symptom.",
            "none": "Then the operation would be complete.",
        },
        choices=("rank 0", "all others", "none"),
    ),
    "23/timeout": Question(
        answer="30 minutes",
        why="30 minutes is the default of init_process_group for gloo. For NCCL it is 10 minutes.",
        hint="The next cell reads it from torch.",
        traps={
            "30 seconds": "That would end many runs whose ranks wait for a checkpoint.",
            "for ever": "Every group of torch has a timeout.",
            "10 minutes": "That is the default of NCCL.",
        },
        choices=("30 seconds", "10 minutes", "30 minutes", "for ever"),
    ),
    "23/order": Question(
        answer="yes",
        why="a call meets the call with the same number on the other ranks, whatever its name is.",
        hint="How would rank 1 find the all-reduce that belongs to its barrier? Calls of a group are matched by "
        "their order.",
        traps={"no": "torch matches calls by their order only. These two have the same number."},
        choices=("yes", "no"),
    ),
    "23/caught": Question(
        answer=3,
        why="rank 1 makes one call less. Its calls meet earlier steps of rank 0, and the last call of rank 0 has no "
        "partner.",
        hint="Count the calls of rank 0 and of rank 1. Calls are matched by their order, not by their step.",
        traps={
            1: "Rank 0 waits in step 1, but the next call of rank 1 ends this wait: that of step 2.",
            2: "Step 2 of rank 0 meets step 3 of rank 1.",
            -1: "Rank 0 makes four calls, and rank 1 makes three.",
        },
        choices={"step 1": 1, "step 2": 2, "step 3": 3, "in no step": -1},
    ),
    "23/mismatch": Question(
        answer="a process is ended",
        why="gloo ends the process that receives a message of an unexpected size; the other rank sees a closed "
        "connection.",
        hint="Read the lines of the program mismatch without DETAIL.",
        traps={
            "an error on both ranks": "TORCH_DISTRIBUTED_DEBUG=DETAIL does this. The default compares no sizes.",
            "both ranks hang": "The messages do arrive, with another size than expected.",
            "a wrong sum, no error": "Not with these sizes. It can happen if the sizes are equal and the dtypes differ "
            "(lesson 06).",
        },
        choices=("an error on both ranks", "both ranks hang", "a process is ended", "a wrong sum, no error"),
    ),
    "23/circle": Question(
        answer="start with isend, then recv",
        why="isend returns at once, so every rank reaches its recv while its own message is under way.",
        hint="In each circle at least one rank must be able to go on without waiting.",
        traps={
            "send first, then recv": "A send may wait until the receiver has taken the data. Then all ranks stand in "
            "send.",
            "a longer timeout": "Nothing changes while they wait.",
            "a barrier before it": "All ranks pass the barrier, and then wait as before.",
        },
        choices=("send first, then recv", "start with isend, then recv", "a barrier before it", "a longer timeout"),
    ),
    "23/symptoms": Question(
        answer={
            "hangs at the first collective of the job": "network",
            "hangs at the end of the first epoch": "uneven data",
            "hangs when rank 0 saves a checkpoint": "rank 0 only",
            "hangs after a line about memory": "caught error",
        },
        why="the moment of the hang is the best hint for its cause.",
        hint="Ask what the ranks do differently at this moment.",
        choices=("network", "uneven data", "rank 0 only", "caught error"),
    ),
    "23/loops": Question(
        answer={"a": "safe", "b": "can hang", "c": "can hang"},
        why="only a has a number of calls that is the same on every rank.",
        hint="Is the number of calls the same on every rank, whatever its data are?",
        choices=("safe", "can hang"),
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "23/agree": Puzzle(
        setup="fine = rank != world_size - 1",
        call="solution(fine)",
        got="[int(one) for one in result]",
        wanted="[world_size - 1]",
        targets=(Target(measure=COLLECTIVES, most=1), Target(measure=SENT, most=lambda size: max(8, 2 * size))),
        why="one small call in each step is cheap: it costs the latency of a call, and nearly no bytes.",
        hint="A tensor with one byte for each rank is enough. An object must be pickled, and its size is sent first.",
        wrong_hint="Return the list of the ranks that are not fine, on every rank.",
    ),
}
