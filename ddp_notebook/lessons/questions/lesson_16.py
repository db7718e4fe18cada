"""Questions of lesson 16: the training loop."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "16/who-skips": Question(
        answer="all",
        why="a mean with one infinite number or nan in it is not finite, so every rank finds it in its own copy.",
        hint="Which gradients does every rank have after the backward of DDP?",
        traps={
            "rank 1": "That would be right if each rank checked the gradients of only its batch.",
            "none": "The numbers of rank 1 do not fit into float16. Its loss and its gradients are not finite.",
        },
        choices=("rank 1", "all", "none"),
    ),
    "16/messages": Question(
        answer={"nothing": 4, "backward": 4, "forward and backward": 1},
        why="DDP decides in the forward whether the next backward sends, so the forward has to be inside too.",
        hint="When does DDP decide whether a backward is one that sends?",
        placeholder="2",
    ),
    "16/equal-bytes": Question(
        answer=20,
        why="S / 10 * (N - 1) = 2 S (N - 1) / N holds for N = 20. With more ranks the hook receives more than DDP.",
        hint="A rank receives S / 10 from each of the N - 1 other ranks. Set this equal to 2 S (N - 1) / N.",
        traps={10: "The hook sends values and indices: S / 10, and DDP receives nearly 2 S."},
        placeholder="7",
    ),
    "16/times": Question(
        answer=8,
        why="there are as many weights as gradients, and they are sent once in 8 steps.",
        hint="Compare the size of all weights with the size of all gradients. How often are they sent?",
        traps={4: "That is how often they meet.", 32: "DDP sends 32 times; how often does local SGD?"},
        placeholder="3",
    ),
    "16/careful": Question(
        answer=lambda size: {
            rank: {"skipped": [3], "is finite": True, "is clipped": True, "has moved": True} for rank in range(size)
        },
        why="average first, so that all ranks find the nan; unscale, so that the norm is right; then clip.",
        hint="Which ranks see an infinite gradient if you average before unscale_, and if you average after "
        "it? Which norm does clip_grad_norm_ measure before unscale_?",
    ),
    "16/accumulated": Question(
        answer={"samples": 256, "all-reduces": 1},
        why="4 micro-batches of 8 samples on 8 ranks are 256 samples. Only the last of the four backwards sends.",
        hint="Multiply all three numbers. And which of the four backward passes are inside no_sync?",
    ),
    "16/which-hook": Question(
        answer=["fp16", "none", "top-k"],
        why="with fp16 a rank receives half of the bytes of plain DDP, on any number of ranks. With top-k it receives "
        "64 / 20 times as many.",
        hint="fp16 keeps the all-reduce and halves the size. For top-k use the ratio N / 20.",
        traps={("top-k", "fp16", "none"): "A rank gives few bytes, but it receives those of 63 other ranks."},
    ),
}

_FEW_BYTES = """
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def batches_of(rank):
    chance = torch.Generator().manual_seed(rank)
    return [
        (torch.rand(32, 64, generator=chance), torch.randint(10, (32,), generator=chance)) for _ in range(4)
    ]


alone = network()
for r in range(world_size):
    for x, y in batches_of(r):
        (cross_entropy(alone(x), y) / 4 / world_size).backward()
wanted = alone[0].weight.grad
model, batches = DistributedDataParallel(network()), batches_of(rank)
"""
_GRADIENT_BYTES = 4 * (64 * 64 + 64 + 64 * 10 + 10)

PUZZLES: dict[str, Puzzle] = {
    "16/few-bytes": Puzzle(
        setup=_FEW_BYTES,
        call="solution(model, batches)",
        got="result / wanted.norm()",
        wanted="wanted / wanted.norm()",
        tolerance=1e-3,
        targets=(Target(measure=SENT, most=lambda size: (size - 1) / size * _GRADIENT_BYTES),),
        why="three of the four backwards send nothing, and the last one sends 16 bits per number.",
        hint="How many of the four backwards have to send? And how many bits does a number need on the way?",
        wrong_hint="Return the gradient of the first layer: the mean over all ranks and all four micro-batches.",
    ),
}
