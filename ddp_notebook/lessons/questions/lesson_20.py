"""Questions of lesson 20: is my training right?"""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

_PAIRS = ("together, parts", "parts, whole", "none")  # gradients that differ

QUESTIONS: dict[str, Question] = {
    "20/bypassed": Question(
        answer="together, parts",
        why="DDP did not average the gradients, so each rank kept the gradient of its part. The loss is right.",
        hint="Which module does the loss call, and does DDP take part in that forward?",
        traps={
            "parts, whole": "The average of the parts is right here. Do the ranks compute that average?",
            "none": "Then both ranks would have the same weights, and the same accuracy.",
        },
        choices=_PAIRS,
    ),
    "20/unequal": Question(
        answer="parts, whole",
        why="each part counts one half, so an image counts 1/96 on rank 0 and 1/32 on rank 1, where one process counts "
        "1/64.",
        hint="DDP averages correctly. How much does a part of 48 images count in that average, and one of 16?",
        traps={
            "together, parts": "DDP averages the gradients of the two parts as it should.",
            "none": "The loss looks right. Does each image count 1/64?",
        },
        choices=_PAIRS,
    ),
    "20/times": Question(
        answer=3,
        why="an image counts 1/2 * 1/16 on rank 1 and 1/2 * 1/48 on rank 0.",
        hint="Each rank counts one half. Divide the half by the images of the rank.",
        traps={1: "That would be right with one process.", 1 / 3: "That is an image of rank 0 compared with rank 1."},
        placeholder="10",
    ),
    "20/same-batch": Question(
        answer="none",
        why="the batch has each image twice, and its mean has the same gradient. Only the images themselves show the "
        "mistake.",
        hint="Compare the losses of the two ranks. What is the mean over a batch that contains each image twice?",
        traps={"together, parts": "DDP averages as it should: model(x) is called."},
        choices=_PAIRS,
    ),
    "20/two-mistakes": Question(
        answer={"scale": "together, parts", "sum": "parts, whole"},
        why="DDP does not average a parameter outside of it. And each part divides by the images of all parts, before "
        "DDP divides by the number of ranks.",
        hint="Which parameters does DDP average? And by how many images does one process divide, and by how many does "
        "the average of the ranks?",
        choices=_PAIRS,
    ),
    "20/which": Question(
        answer={
            "a layer whose parameters are not in the DDP model": "together, parts",
            "a mean over the tokens of each rank, with texts of different length": "parts, whole",
            "every rank reads the same file from the beginning": "none",
            "no_sync around every forward and backward": "together, parts",
        },
        why="without an average each rank has its own gradient; unequal means count samples differently; equal batches "
        "have equal gradients.",
        hint="Does DDP average these gradients? If it does: does each sample count the same as in one process?",
    ),
    "20/factor": Question(
        answer={"rank 0": 1.25, "rank 1": 0.75},
        why="len(x) * world_size / 64: 40 * 2 / 64 and 24 * 2 / 64.",
        hint="DDP divides the sum by 2. The goal is the sum over all samples divided by 64.",
    ),
    "20/repaired": Question(
        answer={"findings": [], "is within 0.01 %": True},
        why="no finding is left, and the gradients are those of one process.",
        hint="Which parameters does DDP know? And over how many images is the loss of one rank a mean?",
    ),
}

_UNEQUAL = """
from torch import nn
from torch.nn.functional import cross_entropy


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def part(rank):
    chance, count = torch.Generator().manual_seed(rank), 48 if rank == 0 else 16
    return torch.rand(count, 64, generator=chance), torch.randint(10, (count,), generator=chance)


x, y = part(rank)
whole_x, whole_y = (torch.cat(both) for both in zip(*map(part, range(world_size)), strict=True))
alone = network()
cross_entropy(alone(whole_x), whole_y).backward()
wanted = [parameter.grad for parameter in alone.parameters()]
"""
_GRADIENT_BYTES = 4 * (64 * 64 + 64 + 64 * 10 + 10)

PUZZLES: dict[str, Puzzle] = {
    "20/one-message": Puzzle(
        setup=_UNEQUAL,
        call="solution(network(), x, y)",
        wanted="wanted",
        targets=(
            Target(measure=COLLECTIVES, most=1),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * (_GRADIENT_BYTES + 4)),
        ),
        why="the sums of the gradients and the number of samples travel in one tensor.",
        hint="Which numbers must one flat tensor carry? And when do you know by what to divide?",
        wrong_hint="Each sample of the whole batch counts the same: sum over the samples, and divide by their number.",
    ),
}
