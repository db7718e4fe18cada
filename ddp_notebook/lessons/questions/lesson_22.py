"""Questions of lesson 22: is it fast?"""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

_ALONE_MS = 48.0  # one process, for the whole batch


def _all_reduce_ms(size: int) -> float:
    """Return the milliseconds of an all-reduce of 1 MB by this number of ranks, as the notebook simulates it."""
    return 1 + 2 * (size - 1) / size * 5


def _speedup(size: int) -> float:
    return round(_ALONE_MS / (_ALONE_MS / size + _all_reduce_ms(size)), 1)


def _strong(size: int) -> float:
    """Return the efficiency for the same batch on more ranks."""
    return round(_ALONE_MS / (_ALONE_MS / size + _all_reduce_ms(size)) / size, 2)


def _weak(size: int) -> float:
    """Return the efficiency for a batch that grows with the number of ranks."""
    return round(_ALONE_MS / (_ALONE_MS + _all_reduce_ms(size)), 2)


QUESTIONS: dict[str, Question] = {
    "22/speedup": Question(
        answer=_speedup,
        why="with N ranks it is 48 / (48 / N + 1 + 10 (N - 1) / N). Two ranks compute for 24 ms and communicate for 6 "
        "ms: 48 / 30 is 1.6.",
        hint="Add the computation of a rank and the time of the all-reduce. Divide 48 ms by it.",
        traps=lambda size: {
            float(size): "That would be so without communication.",
            1.0: "The computation shrinks; the communication costs less than that.",
        },
        choices=lambda size: {"about 1": 1.0, f"about {_speedup(size)}": _speedup(size), f"about {size}": float(size)},
    ),
    "22/weak": Question(
        answer=_weak,
        why="each rank computes 48 ms and communicates as before. With two ranks these are 48 ms and 6 ms: 48 / 54 is "
        "89 %. The same 6 ms now weigh less.",
        hint="Each process computes 48 ms, as one process did. What is added?",
        traps=lambda size: {
            _strong(size): "That is the efficiency of the strong scaling above.",
            1.0: "The communication is still there.",
        },
        choices=lambda size: {f"{share:.0%}".replace("%", " %"): share for share in (_strong(size), _weak(size), 1.0)},
    ),
    "22/calls": Question(
        answer="one call",
        why="both move the same bytes, but 1,000 calls pay for 1,000 times the messages.",
        hint="Which of the two terms of the model is the same in both cases?",
        traps={
            "1,000 calls": "Small tensors are faster one by one, but there are a thousand of them.",
            "the same": "The bytes are the same, the messages are not.",
        },
        choices=("1,000 calls", "one call", "the same"),
    ),
    "22/parameters": Question(
        answer="as many as before",
        why="both sides of the inequality contain P: computation and bytes grow together.",
        hint="Divide both sides of the inequality by 4 P.",
        traps={
            "twice as many": "The bytes double, but the operations double too.",
            "half as many": "The operations double, but the bytes double too.",
        },
        choices=("half as many", "as many as before", "twice as many"),
    ),
    "22/utilisation": Question(
        answer="nearly nothing",
        why="nvidia-smi counts the time in which at least one kernel runs. A kernel that waits for other ranks "
        "counts too.",
        hint="Is a GPU busy while it waits in an all-reduce of NCCL?",
        traps={
            "it is 100 %": "Then every kernel would use all parts of the GPU all the time.",
            "it is above 50 %": "A GPU that only waits for other ranks shows 100 % as well.",
        },
        choices=("it is 100 %", "it is above 50 %", "nearly nothing"),
    ),
    "22/large-batch": Question(
        answer="higher",
        why="there are 24 steps instead of 384, and each is as long as before.",
        hint="How many optimizer steps do two epochs have in both cases?",
        traps={
            "the same": "Both have seen the same samples, but the large batch has made 16 times fewer steps.",
            "lower": "Its gradients are more precise. But how many steps did it make?",
        },
        choices=("lower", "the same", "higher"),
    ),
    "22/efficiency": Question(
        answer=0.83,
        why="the speedup is 10 / 6 = 1.67, of a possible 2.",
        hint="Speedup over the factor of the GPUs.",
        traps={0.6: "That is the share of the time. Divide the old time by the new one.", 1.67: "That is the speedup."},
        choices={"60 %": 0.6, "83 %": 0.83, "167 %": 1.67},
    ),
    "22/mfu": Question(
        answer=0.4,
        why="6 * 7e9 * 3,000 = 126 TFLOP/s, which is 40 % of 312.",
        hint="Multiply: 6 operations, parameters, tokens per second. Divide by the peak.",
        traps={0.13: "That counts the forward only: 2 operations for each parameter and token."},
        choices={"13 %": 0.13, "40 %": 0.4, "81 %": 0.81},
    ),
    "22/order": Question(
        answer={"one rank is slower than the others": 1, "the link is full": 2, "the GPUs compute inefficiently": 3},
        why="a slow rank costs all ranks and is cheap to repair. A full link needs fewer bytes or more tokens. "
        "Kernels come last: "
        "they are as slow with one GPU.",
        hint="Which of them exists only with several GPUs, and is cheap to repair?",
        choices=(1, 2, 3),
    ),
}

_BYTES = 4 * (256 * 256 + 256 + 256 * 8 + 8)  # of the gradients

PUZZLES: dict[str, Puzzle] = {
    "22/lighter": Puzzle(
        setup="""
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

x = torch.randn(16, 256, generator=torch.Generator().manual_seed(rank))


def made():
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8)))


def gradients(model):
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


exact = gradients(made())
largest = [g.abs().max() for g in exact]
model = made()
""",
        call="[solution(model), gradients(model)][1]",
        got="[g / most for g, most in zip(result, largest)]",
        wanted="[g / most for g, most in zip(exact, largest)]",
        targets=(Target(measure=SENT, most=lambda size: 0.55 * 2 * (size - 1) / size * _BYTES),),
        why="the hook sends each gradient with 16 bits, and DDP gets it back with 32.",
        hint="torch.distributed.algorithms.ddp_comm_hooks.default_hooks has hooks that compress.",
        wrong_hint="The gradients must stay within 1 % of their largest value.",
        tolerance=0.01,
    ),
}
