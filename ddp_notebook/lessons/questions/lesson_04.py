"""Questions of lesson 04: processes, ranks, nodes, groups."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "04/boxes": Question(
        answer=1,
        why="each process has its own list, and has put one number into it.",
        hint="Ask yourself whether two processes can put something into the same Python list.",
        traps=lambda size: {
            size: f"{size} would be the length of one list that all ranks share.",
            "different": "Lengths would differ if the ranks shared one list and did not wait for each other.",
        },
        choices=lambda size: {"1": 1, str(size): size, "another length on each rank": "different"},
    ),
    "04/world-size": Question(
        answer=24,
        why="3 nodes with 8 processes each are 24 processes.",
        hint="Every process counts, on all nodes.",
        traps={3: "3 is the number of nodes.", 8: "8 is the number of processes of one node."},
        placeholder="12",
    ),
    "04/where-is-13": Question(
        answer=(1, 5),
        why="13 = 1 * 8 + 5: node 1, local rank 5, and so GPU 5 of that machine.",
        hint="Nodes and local ranks are counted from 0, and each node has 8 processes: 13 divided by 8, with rest.",
        traps={
            (2, 5): "Nodes are counted from 0 too.",
            (1, 13): "A local rank starts again at 0 on every node; this machine has no GPU 13.",
        },
        placeholder="(0, 0)",
    ),
    "04/backend": Question(
        answer={
            "GPU tensors, a process per GPU": "nccl",
            "tensors in main memory": "gloo",
            "two ranks on one GPU": "gloo",
        },
        why="NCCL for tensors on GPUs with a GPU for each rank, gloo for the rest.",
        hint="NCCL moves only tensors on GPUs, and wants a GPU for each rank.",
        choices=("nccl", "gloo", "mpi"),
    ),
    "04/evens-and-odds": Question(
        answer=lambda size: {rank: float(sum(r + 1 for r in range(rank % 2, size, 2))) for rank in range(size)},
        why="each rank gets the sum over its own group only.",
        hint="Rank r brings r + 1, and only ranks of the same group are added up: the even ones, or the odd ones.",
        placeholder="0",
    ),
    "04/places": Question(
        answer=[(rank // 8, rank % 8) for rank in range(24)],
        why="the node is the quotient, and the local rank is the remainder.",
        hint="Divide the rank by 8. `//` returns the quotient and `%` the remainder.",
    ),
    "04/neighbours": Question(
        answer=lambda size: {r: sum(m for m in (r // 2 * 2, r // 2 * 2 + 1) if m < size) for r in range(size)},
        why="0 and 1 make a group, 2 and 3 the next one, and each adds up its own ranks.",
        hint="Rank r belongs to the group that begins at r // 2 * 2. Every rank has to call new_group for every group.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "04/pids": Puzzle(
        setup="import os\nwanted = [None] * world_size\ndist.all_gather_object(wanted, os.getpid())",
        call="solution()",
        got="[int(one) for one in result]",
        wanted="wanted",
        targets=(Target(measure=COLLECTIVES, most=1), Target(measure=SENT, most=lambda size: 8 * (size - 1))),
        why="the ranks know the size of a tensor, so one call is enough. An object has to be pickled, and its size is "
        "sent first.",
        hint="A process id fits into a tensor of one int64, so all_gather can send it.",
        wrong_hint="Return the process ids of all ranks as a list, in the order of the ranks.",
    ),
}
