"""Programs that do something unusual on purpose. The session may report it, and does not call it wrong."""

from __future__ import annotations

from tests.training_programs.program import MAKE, STEP, Program, loop

_DOCS = "https://docs.pytorch.org/docs/stable/"

DELIBERATE: list[Program] = []


def _add(name: str, source: str, code: str) -> None:
    DELIBERATE.append(Program(name=name, source=source, code=code))


_SAME = "torch.manual_seed(0); x, y = torch.randn(8, 4), torch.randn(8, 2)\n"
_add(
    "equal data on all ranks, to compare them",
    _DOCS + "notes/randomness.html",
    loop(MAKE, _SAME + STEP.strip(), steps=3),
)
_add(
    "one batch that is learned by heart",
    "https://karpathy.github.io/2019/04/25/recipe/",
    loop(MAKE, "x, y = batch(0)\n" + STEP.strip()),
)
_add(
    "a frozen model that is only measured",
    _DOCS + "notes/autograd.html",
    "model = net().requires_grad_(False)\nscore = sum(F.mse_loss(model(batch(step)[0]), batch(step)[1]) for step in range(3)); dist.all_reduce(score)",
)
_add(
    "one rank that evaluates",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    loop(MAKE, STEP)
    + "if rank == 0:\n    with torch.no_grad(): score = F.mse_loss(model.module(x), y).item()\ndist.barrier()",
)
_add(
    "one rank that prints and saves",
    "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    loop(MAKE, STEP)
    + "if rank == 0: torch.save(model.module.state_dict(), tempfile.mkdtemp() + '/model.pt')\ndist.barrier()",
)
_add(
    "another seed of dropout on each rank",
    _DOCS + "notes/randomness.html",
    loop(
        "torch.manual_seed(0); model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))); optimizer = sgd(model); torch.manual_seed(rank)",
        STEP,
    ),
)
_add(
    "a warm-up without a step",
    _DOCS + "optim.html",
    loop(MAKE, "F.mse_loss(model(x), y).backward(); optimizer.zero_grad()", steps=2)
    + "for step in range(2):\n    x, y = batch(step); optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "local steps, then an average",
    "https://arxiv.org/abs/1805.09767",
    loop("model = net(); optimizer = sgd(model)", STEP)
    + "for p in model.parameters(): dist.all_reduce(p.data); p.data /= world_size",
)
_add(
    "a learning rate that begins at zero",
    _DOCS + "optim.html",
    loop(
        f"{MAKE}; scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)",
        STEP + "scheduler.step()",
    ),
)
_add(
    "a layer that is frozen halfway",
    _DOCS + "notes/autograd.html",
    loop(
        "model = DDP(net(), find_unused_parameters=True); optimizer = sgd(model)",
        "if step == 2:\n    for p in model.module[0].parameters(): p.grad = None; p.requires_grad_(False)\n    model = DDP(model.module)\n"
        + STEP.strip(),
    ),
)
_add(
    "only the head is trained",
    "https://docs.pytorch.org/tutorials/beginner/transfer_learning_tutorial.html",
    loop("inner = net(); model = DDP(inner); optimizer = sgd(inner[2])", STEP),
)
_add(
    "a teacher that is a moving average",
    "https://arxiv.org/abs/1703.01780",
    loop(
        "model = DDP(net()); optimizer = sgd(model); teacher = net().requires_grad_(False)",
        STEP + "with torch.no_grad():\n    for a, b in zip(teacher.parameters(), model.parameters()): a.lerp_(b, 0.1)",
    ),
)
_add(
    "a model of each rank, as an ensemble",
    "https://arxiv.org/abs/1612.01474",
    loop("torch.manual_seed(rank); model = net(); optimizer = sgd(model)", STEP, steps=1)
    + "out = model(batch(9)[0]).detach(); dist.all_reduce(out)",
)
_add(
    "a hyperparameter for each rank",
    _DOCS + "optim.html",
    loop("model = net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))", STEP, steps=1)
    + "found = [None] * world_size; dist.all_gather_object(found, loss.item())",
)
_add(
    "a rank that only serves data",
    _DOCS + "distributed.html",
    "for step in range(3):\n    x = batch(step)[0] if rank == 0 else torch.empty(8, 4)\n    if rank == 0: dist.send(x, 1)\n    else: dist.recv(x, 0)",
)
_add(
    "an asynchronous operation that the next cell waits for",
    _DOCS + "distributed.html",
    "kept = torch.ones(4); work = dist.all_reduce(kept, async_op=True)",
)
_add(
    "the last batch repeated by the shorter rank",
    "https://github.com/pytorch/pytorch/issues/33148",
    loop(MAKE, "x, y = batch(min(step, 2 + rank))\n" + STEP.strip()),
)
_add(
    "a timing of collectives in a loop",
    _DOCS + "distributed.html",
    "x = torch.ones(1000)\nfor _ in range(50): dist.all_reduce(x); x.fill_(1.0)",
)
