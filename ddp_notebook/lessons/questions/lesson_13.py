"""Questions of lesson 13: memory and sharding."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import PEAK
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

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
        placeholder="2.102272 * 1",
    ),
    "13/sharded": Question(
        answer=lambda size: {"ZeRO-1": (8 + 8 / size) * _MILLIONS, "FSDP": 16 / size * _MILLIONS},
        why="ZeRO-1 divides the 8 bytes of Adam, FSDP all 16.",
        hint="Which of the 16 bytes are divided by the number of ranks?",
        tolerance=0.03,
        placeholder="2.102272 * 1",
    ),
    "13/all-gathers": Question(
        answer={"reshard": 8, "no reshard": 4},
        why="each block has an all-gather for the forward, and one more for the backward unless it has stayed whole.",
        hint="Count the blocks, and whether the backward finds their parameters still there.",
        placeholder="3",
    ),
    "13/precision": Question(
        answer={
            "an all-gather of parameters": True,
            "a reduce-scatter of gradients": False,
            "the parameters that a rank keeps between the steps": False,
            "the state of Adam": False,
        },
        why="only the cast copy has 16 bits. It is sent and computed with. reduce_dtype keeps the sums at 32 bits.",
        hint="The cast happens before the all-gather. What does the optimizer update, and what does reduce_dtype say?",
        choices={"becomes smaller": True, "stays": False},
    ),
    "13/first": Question(
        answer=False,
        why="the optimizer steps parameters that are in no model any more.",
        hint="Whose parameters did the optimizer get, and which parameters compute the loss now?",
        choices={"the loss falls": True, "the loss does not fall": False},
    ),
    "13/bytes": Question(
        answer={"DDP": 16e9, "ZeRO-1": 9e9, "FSDP": 2e9},
        why="16 bytes for each parameter, of which ZeRO-1 divides 8 and FSDP all.",
        hint="In DDP it does not depend on the number of ranks.",
    ),
    "13/gpus": Question(
        answer={"FSDP": 3, "DDP": 0},
        why="7 billion parameters need 112 GB. FSDP divides them by 3. With DDP each GPU would need all 112 GB.",
        hint="16 bytes per parameter are 112 GB. Each GPU has room for 40 GB of them.",
    ),
    "13/moved": Question(
        answer={"DDP": 7.0, "FSDP": 10.5, "FSDP, no reshard": 7.0},
        why="4 GB of parameters: 2 * 7/8 * 4 GB for an all-reduce, and 7/8 * 4 GB for each all-gather or "
        "reduce-scatter.",
        hint="The parameters have 4 GB. An all-gather or reduce-scatter brings (n - 1) / n of them to each rank, "
        "and an all-reduce twice as much. How many of them does a step have?",
        tolerance=0.02,
    ),
}

_SMALL_STEP = """
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)]).to(device)


x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(rank)).to(device)
with torch.no_grad():
    wanted = network()(x).square().mean().item()
"""

PUZZLES: dict[str, Puzzle] = {
    "13/small-step": Puzzle(
        setup=_SMALL_STEP,
        call="solution(network, x)",
        wanted="wanted",
        targets=(Target(measure=PEAK, most=36e6),),
        why="fully_shard divides the 16 bytes per parameter, and checkpointed blocks keep only their inputs.",
        hint="Which part of the peak is divided by fully_shard, and which part is the activations of the batch?",
        wrong_hint="Return the loss of this rank for x, before the optimizer step.",
    ),
}
