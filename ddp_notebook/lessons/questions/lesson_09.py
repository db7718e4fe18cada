"""Questions of lesson 09: DDP from the inside, and DataParallel."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import EXPOSED_SHARE
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "09/first-bucket": Question(
        answer="last",
        why="backward begins at the last layer, so its gradients are ready first, and their bucket is sent first.",
        hint="Which layer's gradients does autograd compute first?",
        traps={"first": "The backward reaches the first layer last."},
        choices=("first", "last"),
    ),
    "09/overlap": Question(
        answer="nothing",
        why="the only bucket is full when the last gradient is ready, and then nothing is left to compute.",
        hint="When is a bucket sent? Which gradient is the last one of this bucket?",
        traps={
            "same": "The bytes are the same. But when can the first of them be sent?",
            "half": "A bucket is sent as a whole, when all of its gradients are ready.",
        },
        choices={"as much as with small buckets": "same", "about half": "half", "nothing": "nothing"},
    ),
    "09/slow-link": Question(
        answer="fp16",
        why="on a slow link the time depends on the bytes: half the bytes take half the time, with any bucket size.",
        hint="Small buckets hide communication behind the backward, but only as long as the backward lasts.",
        traps={
            "small buckets": "They hide only as much as the backward takes, which is short compared to the transfer."
        },
        choices=("small buckets", "fp16"),
    ),
    "09/default-device": Question(
        answer={
            "parameters": False,
            "gradients": False,
            "optimizer state": True,
            "activations": False,
            "whole batch": True,
            "gathered outputs": True,
        },
        why="the update is made there, the loss too, and the batch begins there.",
        hint="Follow one step: where does the batch begin, where do the outputs come together, who makes the update?",
        choices={"only there": True, "on all devices": False},
    ),
    "09/gil": Question(
        answer="threads",
        why="the lock of the interpreter lets one thread run Python at a time. Each process has its own interpreter.",
        hint="Most of this work is Python code. How many threads of a process can run Python at once?",
        traps={
            "processes": "Each process has its own interpreter, so with a core for each they are independent.",
            "same": "That would be right if threads could run Python at the same time.",
        },
        choices={"N threads": "threads", "N processes": "processes", "both take as long as one": "same"},
    ),
    "09/accumulate": Question(
        answer=1,
        why="three passes only added to the gradients of their rank, and the fourth sent the sum.",
        hint="Which of the four passes has to send? DDP has a context in which a pass does not send, and it "
        "decides that in the forward pass.",
        traps={
            4: "Every pass synchronises still.",
            "another gradient": "It sends once, but the gradient is not the mean over all four.",
            0: "The last pass has to synchronise, or every rank steps with its own gradient.",
        },
    ),
}

# Ten layers of 1 MB. A ring of N ranks moves 2 (N - 1) / N of a layer, in 15 ms.
_HIDE = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from ddp_notebook.lessons.ddp.ranks import SlowLink, simulate_compute

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(10)]).to(device)
simulate_compute(model, 0.18)
link = SlowLink(2 * (world_size - 1) / world_size * 1.002 / 0.015, device)

def train(wrapped):
    wrapped.register_comm_hook(None, link.around(allreduce_hook))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    try:
        for step in range(6):
            optimizer.zero_grad()
            wrapped(torch.full((4, 500), 1.0 + rank + step, device=device)).square().mean().backward()
            optimizer.step()
    finally:
        link.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    highest = weights.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return bool((weights == highest).all())
"""

PUZZLES: dict[str, Puzzle] = {
    "09/hide": Puzzle(
        setup=_HIDE,
        call="train(solution(model))",
        wanted="True",
        targets=(Target(measure=EXPOSED_SHARE, most=0.25),),
        why="nine of ten buckets are sent while the backward pass of earlier layers runs.",
        hint="By default DDP closes the first bucket at 1 MB, and the others at 25 MB. How large are all gradients of "
        "this model, and into how many buckets do they go?",
        wrong_hint="After the steps all ranks must have equal weights.",
    ),
}
