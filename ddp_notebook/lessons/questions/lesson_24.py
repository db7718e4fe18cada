"""Questions of lesson 24: data at scale."""

from __future__ import annotations

from ddp_notebook.lessons.capstones.measures import FULLEST
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "24/times": Question(
        answer=lambda size: 2 * size,
        why="each rank has two workers, and each worker reads the whole stream.",
        hint="How many processes run the iterator?",
        traps=lambda size: {
            1: "The DataLoader divides indices. A stream has none.",
            size: "Each rank reads it. But each rank has two workers.",
        },
        choices=lambda size: (1, size, 2 * size),
    ),
    "24/uneven": Question(
        answer="rank 0 hangs in step 5",
        why="the other ranks have no more batches after four steps, and rank 0 waits for them in its fifth all-reduce.",
        hint="How many all-reduces does each rank call?",
        traps={
            "rank 0 trains alone for two steps": "An all-reduce needs all ranks.",
            "DDP ends all ranks": "DDP does not know how many batches a rank has.",
        },
        choices=("rank 0 trains alone for two steps", "DDP ends all ranks", "rank 0 hangs in step 5"),
    ),
    "24/ahead": Question(
        answer=24,
        why="2 batches are used, and 2 workers times prefetch_factor 2 = 4 batches are requested: 6 batches of 4.",
        hint="Each worker has two batches in advance.",
        traps={
            8: "Those are used. But the workers read in advance.",
            40: "The loader does not read everything in advance.",
        },
        choices=(8, 24, 40),
    ),
    "24/workers": Question(
        answer=2,
        why="a batch takes 32 ms to read. Two workers give a batch each 16 ms, as long as a step takes.",
        hint="Divide the time to read a batch by the time of a step.",
        traps={
            0: "Then the times add up: 32 + 16 ms.",
            1: "One worker needs 32 ms for each batch.",
            8: "More than needed.",
        },
        choices=(0, 1, 2, 8),
    ),
    "24/crops": Question(
        answer="yes",
        why="the seed of a worker is drawn from the generator of its rank, which is the same on all ranks. Seed by "
        "rank after the "
        "model is made.",
        hint="Where does a worker get its seed from?",
        traps={"no": "Each worker of a rank has its own seed. But the ranks have the same ones."},
        choices=("yes", "no"),
    ),
    "24/readers": Question(
        answer=768,
        why="there are 24 * 8 * 4 = 768 readers: 232 of them get two shards, and 536 get one. The ranks have uneven "
        "data.",
        hint="Count the readers: nodes, GPUs, workers.",
        traps={192: "Those are the ranks. Each has four workers.", 1000: "There are more shards than readers."},
        choices={
            "more readers than shards": 1000,
            "192 readers, and 1,000 is no multiple of it": 192,
            "768 readers, and 1,000 is no multiple of it": 768,
        },
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "24/assign": Puzzle(
        setup="""
sizes = [90, 10, 35, 65, 50, 50, 70, 30]


def fill(parts):
    loads = [sum(sizes[number] for number in part) for part in parts]
    log(fullest=max(loads) * len(parts) / sum(sizes))
    return parts
""",
        call="fill(solution(sizes, world_size))",
        got="[len(result), sorted(number for part in result for number in part)]",
        wanted="[world_size, list(range(len(sizes)))]",
        targets=(
            Target(measure=FULLEST, most=1.1),
            Target(measure=COLLECTIVES, most=0),
        ),
        why="every rank computes the same lists from the same sizes, so nothing has to be sent.",
        hint="Which shard is the hardest to place? Place that one first. Which reader should get the next one?",
        wrong_hint="Return a list for each reader; each shard must be in exactly one of them.",
    ),
}
