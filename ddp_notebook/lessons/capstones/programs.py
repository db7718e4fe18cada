"""Broken programs of the kinds that people report, and their repairs. Each fails for a different reason.

A program uses the variables of a cell on the ranks: `torch`, `dist`, `rank`, `world_size`, `device`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A broken program.

    Args:
        report: Words of the user who reports the problem.
        tools: Commands that show the cause.
        code: The program.
        repairs: Replacements (old text, new text) that make it right.
        judge: Code that runs on all ranks after a repaired program. It sets `repaired` to True or False on each rank.
        source: Address of a report of this mistake, or of the page of torch that warns of it.
        limit_s: Seconds after which the program is stopped.
    """

    report: str
    tools: str
    code: str
    repairs: tuple[tuple[str, str], ...]
    judge: str
    source: str
    limit_s: float = 20.0


_SETUP = """\
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(256, 20), torch.randint(0, 4, (256,))  # the same data on every rank
network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
"""

_EQUAL = """
flat = torch.cat([p.detach().flatten() for p in network.parameters()])
low, high = flat.clone(), flat.clone()
dist.all_reduce(low, op=dist.ReduceOp.MIN)
dist.all_reduce(high, op=dist.ReduceOp.MAX)
repaired = bool((low == high).all())
"""

PROGRAMS: dict[int, Program] = {
    1: Program(
        report="All epochs are done, and then the job hangs. The GPU of rank 0 shows 100 %.",
        tools="the hang card",
        code=_SETUP
        + """
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    first = (step * world_size + rank) * 8
    mine = slice(first, first + 8)
    optimizer.zero_grad()
    cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()


def accuracy(mine):
    right = (network(x[mine]).argmax(1) == y[mine]).sum()
    dist.all_reduce(right)
    return right.item() / len(x)


if rank == 0:
    score = accuracy(slice(rank, None, world_size))
    print("accuracy", score)
""",
        repairs=(
            (
                "if rank == 0:\n    score = accuracy(slice(rank, None, world_size))\n",
                "score = accuracy(slice(rank, None, world_size))\nif rank == 0:\n",
            ),
        ),
        judge="""
exact = ((network(x).argmax(1) == y).sum() / len(x)).item()
repaired = abs(globals().get("score", -1.0) - exact) < 1e-6
""",
        source="https://github.com/LibreYOLO/libreyolo/pull/594",
        limit_s=1.5,
    ),
    2: Program(
        report="We skip batches that are too large for the memory. Since then the job hangs at its end.",
        tools="the hang card",
        code=_SETUP
        + """
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for step in range(6):
    first = (step * world_size + rank) * 8
    mine = slice(first, first + 8)
    optimizer.zero_grad()
    try:
        if step == 2 and rank == world_size - 1:
            torch.empty(2**60)  # a batch that needs more memory than there is
        loss = cross_entropy(model(x[mine]), y[mine])
    except RuntimeError as error:
        print("skipped:", str(error)[-60:])
        continue
    loss.backward()
    optimizer.step()
    steps += 1
finished = True
""",
        repairs=(
            (
                "    try:\n",
                "    fits = torch.ones(1)\n    try:\n",
            ),
            (
                "        continue\n    loss.backward()\n",
                "        fits.zero_()\n    dist.all_reduce(fits, op=dist.ReduceOp.MIN)\n"
                "    if not fits:\n        continue\n"
                "    loss.backward()\n",
            ),
        ),
        judge=_EQUAL + "repaired = repaired and steps == 5 and finished\n",
        source="https://docs.pytorch.org/docs/stable/notes/faq.html",
        limit_s=1.5,
    ),
    3: Program(
        report="The first epoch never ends. With one image less it works.",
        tools="the hang card",
        code=_SETUP
        + """
share = torch.arange(rank, 32 * world_size + 1, world_size)  # every rank takes each world_size-th image
images, labels = torch.randn(32 * world_size + 1, 20), torch.randint(0, 4, (32 * world_size + 1,))
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for batch in share.split(8):
    optimizer.zero_grad()
    cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    steps += 1
finished = True
""",
        repairs=(("share.split(8):", "share[:32].split(8):"),),
        judge=_EQUAL + "repaired = repaired and steps >= 4 and finished\n",
        source="https://github.com/pytorch/pytorch/issues/33148",
        limit_s=1.5,
    ),
    4: Program(
        report="The logged loss is much too small, and the accuracy much too high.",
        tools="the line under the cell",
        code=_SETUP
        + """
with torch.no_grad():
    mine = slice(rank * 16, rank * 16 + 16)
    metrics = {"loss": cross_entropy(network(x[mine]), y[mine])}
    if rank == 0:
        metrics = {"accuracy": (network(x[mine]).argmax(1) == y[mine]).float().mean(), **metrics}
    else:
        metrics["accuracy"] = (network(x[mine]).argmax(1) == y[mine]).float().mean()
    local = {name: value.item() for name, value in metrics.items()}
    for name, value in metrics.items():
        dist.all_reduce(value)
        metrics[name] = value / world_size
print({name: round(value.item(), 3) for name, value in metrics.items()})
""",
        repairs=(
            (
                "for name, value in metrics.items():\n        dist",
                "for name, value in sorted(metrics.items()):\n        dist",
            ),
        ),
        judge="""
box = [None] * world_size
dist.all_gather_object(box, local)
exact = {name: sum(one[name] for one in box) / world_size for name in local}
repaired = all(abs(metrics[name].item() - exact[name]) < 1e-5 for name in exact)
""",
        source="https://github.com/NVIDIA/nvalchemi-toolkit/pull/143",
    ),
    5: Program(
        report="The loss falls on every rank. The saved model of rank 0 is bad on the data of the other ranks.",
        tools="the line under the cell, %ddp_check model, %ddp_verify",
        code=_SETUP
        + """
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    first = (step * world_size + rank) * 8
    mine = slice(first, first + 8)
    images, labels = x[mine], y[mine]
    optimizer.zero_grad()
    loss = cross_entropy(model.module(images), labels)
    loss.backward()
    optimizer.step()
""",
        repairs=(("model.module(images)", "model(images)"),),
        judge=_EQUAL,
        source="https://github.com/OpenTSLM/OpenTSLM/pull/49",
    ),
    6: Program(
        report="Four GPUs need as many epochs as one, and each epoch takes as long as on one.",
        tools="the line under the cell, %ddp_verify",
        code=_SETUP
        + """
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
for images, labels in loader:
    seen.append(images.sum().item())
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
""",
        repairs=(("batch_size=16, shuffle=True)", "batch_size=16, sampler=DistributedSampler(x))"),),
        judge="""
box = [None] * world_size
dist.all_gather_object(box, seen)
repaired = len({value for one in box for value in one}) == sum(map(len, box))
""",
        source="https://github.com/huggingface/transformers/issues/37932",
    ),
    7: Program(
        report="We moved from DDP to FSDP2. The loss does not change any more.",
        tools="the line under the cell, %ddp_report",
        code=_SETUP
        + """
from torch.distributed.fsdp import fully_shard

optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
fully_shard(network)
losses = []
for step in range(6):
    mine = slice(rank * 8, rank * 8 + 8)
    optimizer.zero_grad()
    loss = cross_entropy(network(x[mine]), y[mine])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", round(losses[0], 3), "->", round(losses[-1], 3))
""",
        repairs=(
            (
                "optimizer = torch.optim.SGD(network.parameters(), lr=0.1)\nfully_shard(network)\n",
                "fully_shard(network)\noptimizer = torch.optim.SGD(network.parameters(), lr=0.1)\n",
            ),
        ),
        judge="repaired = losses[-1] < losses[0] - 0.01\n",
        source="https://github.com/huggingface/accelerate/pull/3394",
    ),
    8: Program(
        report="With the learning rate of the paper the loss explodes. With a smaller batch per GPU it does not.",
        tools="%ddp_verify",
        code=_SETUP
        + """
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    first = (step * world_size + rank) * 16
    images, labels = x[first : first + 16], y[first : first + 16]
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels, reduction="sum")
    loss.backward()
    optimizer.step()
""",
        repairs=((', reduction="sum"', ""),),
        judge="""
last = slice(32 * world_size, 48 * world_size)  # the whole batch of the last step
gradients = [p.grad.clone() for p in network.parameters()]
with torch.no_grad():
    for p, gradient in zip(network.parameters(), gradients):
        p += 0.1 * gradient  # the weights before the last step
exact = torch.autograd.grad(cross_entropy(network(x[last]), y[last]), list(network.parameters()))
repaired = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(gradients, exact))
""",
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    ),
    9: Program(
        report="The model learns the order of the samples: its loss falls at the same batch in each epoch.",
        tools="the line under the cell, %ddp_report",
        code=_SETUP
        + """
sampler = DistributedSampler(x, shuffle=True)
loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
orders = []
for epoch in range(2):
    orders.append([])
    for images, labels in loader:
        orders[epoch].append(images.sum().item())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
""",
        repairs=(("    orders.append([])\n", "    orders.append([])\n    sampler.set_epoch(epoch)\n"),),
        judge="repaired = orders[0] != orders[1]\n",
        source="https://github.com/pytorch/pytorch/issues/31771",
    ),
    10: Program(
        report="We fine-tune a checkpoint of yesterday. It starts as badly as a new network, without an error.",
        tools="the line under the cell, %ddp_report",
        code=_SETUP
        + """
trained = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)))
checkpoint = trained.state_dict()  # saved yesterday

network.load_state_dict(checkpoint, strict=False)
model = DDP(network)
begin = network[0].weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    cross_entropy(model(x[:16]), y[:16]).backward()
    optimizer.step()
""",
        repairs=(
            (
                "network.load_state_dict(checkpoint, strict=False)",
                'network.load_state_dict({name.removeprefix("module."): value for name, value in checkpoint.items()})',
            ),
        ),
        judge="repaired = bool((begin == trained.module[0].weight).all())\n",
        source="https://github.com/pytorch/pytorch/issues/9176",
    ),
    11: Program(
        report="Two GPUs train slower than one. The network is not busy.",
        tools="%ddp_report",
        code=_SETUP
        + """
import time

model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pictures = 0
for step in range(16):
    mine = slice(rank * 8, rank * 8 + 8)
    optimizer.zero_grad()
    cross_entropy(model(x[mine]), y[mine]).backward()
    optimizer.step()
    if rank == 0:
        time.sleep(0.02)  # draws a picture of the loss
        pictures += 1
""",
        repairs=(("    if rank == 0:\n", "    if rank == 0 and step % 10 == 9:\n"),),
        judge="repaired = pictures <= 4 and (pictures >= 1 or rank > 0)\n",
        source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    ),
    12: Program(
        report="Rank 0 hangs before the first step. It has not called any collective yet.",
        tools="the hang card",
        code=_SETUP
        + """
readers = None
if rank == 0:
    readers = dist.new_group([0, 1])  # ranks 0 and 1 read the file
total = torch.ones(1)
dist.all_reduce(total)
""",
        repairs=(("if rank == 0:\n    readers = ", "readers = "),),
        judge="repaired = total.item() == world_size and (readers is not None)\n",
        source="https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group",
        limit_s=1.5,
    ),
}
