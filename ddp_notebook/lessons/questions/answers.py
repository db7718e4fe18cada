"""What notebooks 04 to 07 ask, by name: the number of the notebook and a word. A new question is a new entry."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS = {
    # ---- 04: processes, ranks, nodes, groups
    "04/boxes": Question(
        answer=lambda size: {rank: 1 for rank in range(size)},
        why="each process has a list of its own, and has put one number into it.",
        hint="Ask yourself whether two processes can put something into the same Python list.",
        traps=lambda size: {size: f"{size} would be the length of one list that all ranks share."},
    ),
    "04/world-size": Question(
        answer=24,
        why="3 nodes with 8 processes each are 24 processes.",
        hint="Every process counts, on all nodes.",
        traps={3: "3 is the number of nodes.", 8: "8 is the number of processes of one node."},
    ),
    "04/where-is-13": Question(
        answer=(1, 5),
        why="13 = 1 * 8 + 5: node 1, local rank 5, and so GPU 5 of that machine.",
        hint="Nodes and local ranks are counted from 0, and each node has 8 processes: 13 divided by 8, with rest.",
        traps={
            (2, 5): "Nodes are counted from 0 too.",
            (1, 13): "A local rank starts again at 0 on every node; this machine has no GPU 13.",
        },
    ),
    "04/backend": Question(
        answer={
            "GPU tensors, a process per GPU": "nccl",
            "tensors in main memory": "gloo",
            "two ranks on one GPU": "gloo",
        },
        why="NCCL for tensors on GPUs with a GPU for each rank, gloo for the rest.",
        hint="NCCL moves only tensors on GPUs, and wants a GPU for each rank.",
    ),
    "04/evens-and-odds": Question(
        answer=lambda size: {rank: float(sum(r + 1 for r in range(rank % 2, size, 2))) for rank in range(size)},
        why="each rank gets the sum over its own group only.",
        hint="Rank r brings r + 1, and only ranks of the same group are added up: the even ones, or the odd ones.",
    ),
    "04/neighbours": Question(
        answer=lambda size: {r: sum(m for m in (r // 2 * 2, r // 2 * 2 + 1) if m < size) for r in range(size)},
        why="0 and 1 make a group, 2 and 3 the next one, and each adds up its own ranks.",
        hint="Rank r belongs to the group that begins at r // 2 * 2. Every rank has to call new_group for every group.",
    ),
    # ---- 05: point to point
    "05/who-waits": Question(
        answer="sender",
        why="gloo's send comes back when the receiver has taken the data, so rank 0 waited for rank 1.",
        hint="Look at the seconds: one of the two had nothing to do until the other came.",
        traps={"receiver": "The receiver came last, so everything was there already."},
    ),
    "05/changed": Question(
        answer=[100.0, 100.0],
        why="rank 1 asked for the data after rank 0 had changed them, and what it got is what was in the buffer then.",
        hint="isend only notes where the data are. They are read when rank 1 is ready, and rank 0 had gone on by then.",
        traps={(0.0, 0.0): "That is what rank 0 wanted to send."},
    ),
    "05/first-comer": Question(
        answer=lambda size: size - 1,
        why="the last rank sleeps for the shortest time, so its message comes first.",
        hint="Rank 0 takes whatever comes first. Who sleeps for the shortest time?",
    ),
    "05/tags": Question(
        answer=["second", "first"],
        why="the tag chooses the message, and not the order in which they were sent.",
        hint="recv takes the message whose tag it names, and the others wait.",
    ),
    "05/shift": Question(
        answer=lambda size: {rank: float((rank - 1) % size) for rank in range(size)},
        why="each rank has the number of its left neighbour, and rank 0 that of the last.",
        hint="Rank r sends to (r + 1) % world_size and receives from (r - 1) % world_size. Start both before you wait.",
    ),
    # ---- 06: collectives
    "06/all-reduce": Question(
        answer=lambda size: {r: [sum(range(1, size + 1)), 10.0 * sum(range(1, size + 1))] for r in range(size)},
        why="the sums, the same on every rank.",
        hint="Add up the first numbers of all ranks, and then the second ones; everybody gets both sums.",
    ),
    "06/reduce-op": Question(
        answer=lambda size: {
            "SUM": size * (size + 1) // 2,
            "PRODUCT": _product(size),
            "MIN": 1,
            "MAX": size,
            "BAND": _bits(size, "and"),
            "BOR": _bits(size, "or"),
            "BXOR": _bits(size, "xor"),
        },
        why="one number from all, by seven rules.",
        hint="For the last three write 1, 2, 3, ... as binary numbers and go through them column by column.",
    ),
    "06/which": Question(
        answer={
            "average the gradients": "all_reduce",
            "all ranks need the vectors of all ranks": "all_gather",
            "start from the weights of rank 0": "broadcast",
            "each rank keeps its share of the sum": "reduce_scatter",
            "each rank has tokens for each other rank": "all_to_all",
        },
        why="these five are most of what distributed training says.",
        hint="Who has the data before, and who needs what afterwards?",
    ),
    "06/mean": Question(
        answer=lambda size: {rank: (size * size - 1) / 2 for rank in range(size)},
        why="the sum of all numbers over how many there are.",
        hint="The ranks have different amounts of numbers, so a mean of their means counts some more than others. Add "
        "up sums and counts, and divide at the end.",
    ),
    # ---- 07: ring, tree, parameter server
    "07/server-bytes": Question(
        answer=lambda size: 2 * (size - 1) * 48,
        why="48 bytes come in from every other rank, and 48 bytes go out to every other rank.",
        hint="Count both directions: what comes in at the server from each other rank, and what goes out to it.",
    ),
    "07/ring-bytes": Question(
        answer=700,
        why="2 * 7 / 8 * 400 MB. A hundred ranks would send hardly more: 792 MB each.",
        hint="A rank sends 2 (N - 1) chunks, and a chunk is the N-th part of the data.",
        traps={
            2800: "That is what it costs to send the whole tensor around, N - 1 times.",
            350: "That is half of it: the sums are there, but each rank has one chunk of them.",
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
        why="2 (N - 1) against 2 log2 N: small tensors prefer the tree, large ones do not care.",
        hint="The ring goes round twice, less one step each time. The tree halves, then doubles: log2(8) steps each.",
    ),
    "07/which": Question(
        answer={"a tensor of 4 bytes": "latency", "a tensor of 400 MB": "bandwidth"},
        why="alpha counts for small tensors, beta for large ones.",
        hint="T = messages * alpha + bytes * beta: which of the two terms is the larger one?",
    ),
}


def _product(size: int) -> int:
    product = 1
    for number in range(1, size + 1):
        product *= number
    return product


def _bits(size: int, rule: str) -> int:
    total = 1
    for number in range(2, size + 1):
        total = {"and": total & number, "or": total | number, "xor": total ^ number}[rule]
    return total
