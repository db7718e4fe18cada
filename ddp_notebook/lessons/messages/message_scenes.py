"""Scenes of point-to-point communication: explanations, and the code that ranks run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStory:
    """One scene before it is played.

    Args:
        title: Short title.
        lesson: Explanation in a sentence or two.
        code: Code that runs on every rank, as shown to the reader. `work_for(ms)` simulates other work of a rank.
    """

    title: str
    lesson: str
    code: str


STORIES = {
    "blocking": MessageStory(
        title="send and recv block",
        lesson="send returns when the receiver takes the message; recv returns when the message has arrived. The "
        "earlier rank waits for the other.",
        code="""\
x = torch.full((4,), float(rank))
if rank == 0:
    dist.send(x, dst=1)
elif rank == 1:
    work_for(300)
    dist.recv(x, src=0)
told = x.tolist()""",
    ),
    "nonblocking": MessageStory(
        title="isend and irecv do not",
        lesson="isend and irecv return a work immediately; wait() blocks until it is done. Computation between them "
        "overlaps with the transfer.",
        code="""\
x = torch.full((4,), float(rank))
if rank == 0:
    work = dist.isend(x, dst=1)
    work_for(200)
    work.wait()
elif rank == 1:
    work = dist.irecv(x, src=0)
    work_for(300)
    work.wait()
told = x.tolist()""",
    ),
    "race": MessageStory(
        title="a race: the buffer is changed before wait()",
        lesson="Until wait() has returned, the tensor belongs to the message: earlier writes to it may be sent. Here "
        "the receiver is late and gets all of them; a receiver that already waits gets all, some or none.",
        code="""\
x = torch.ones(4_000_000)
if rank == 0:
    work = dist.isend(x, dst=1)
    x[2_000_000:] = 2  # too early
    work.wait()
elif rank == 1:
    work_for(50)
    dist.recv(x, src=0)
told = x[::15625].tolist()""",
    ),
    "no race": MessageStory(
        title="no race: the buffer is changed after wait()",
        lesson="After wait() the tensor can be changed: the message has its earlier contents.",
        code="""\
x = torch.ones(4_000_000)
if rank == 0:
    work = dist.isend(x, dst=1)
    work.wait()
    x[2_000_000:] = 2  # now it may
elif rank == 1:
    work_for(50)
    dist.recv(x, src=0)
told = x[::15625].tolist()""",
    ),
    "any source": MessageStory(
        title="recv from any source",
        lesson="recv without src takes the first message, and returns the rank of its sender.",
        code="""\
x = torch.full((4,), float(rank))
if rank == 0:
    told = [dist.recv(x) for _ in range(world_size - 1)]
else:
    work_for(60 * (world_size - rank))
    dist.send(x, dst=0)
    told = []""",
    ),
    "tags": MessageStory(
        title="tags",
        lesson="Messages between two ranks arrive in the order in which they were sent. With tags, recv takes the "
        "next message with its tag.",
        code="""\
a, b = torch.tensor([1.0]), torch.tensor([2.0])
told = []
if rank == 0:
    for work in [dist.isend(a, dst=1, tag=1), dist.isend(b, dst=1, tag=2)]:
        work.wait()
elif rank == 1:
    work_for(50)
    for tag in (2, 1):
        x = torch.zeros(1)
        dist.recv(x, src=0, tag=tag)
        told.append((tag, x.item()))""",
    ),
    "deadlock": MessageStory(
        title="a deadlock of two sends",
        lesson="Both ranks send first, and a send waits for its recv: each waits for the other forever. One of them "
        "has to receive first, or use isend.",
        code="""\
x = torch.full((1_000_000,), float(rank))
y = torch.empty_like(x)
if rank < 2:
    dist.send(x, dst=1 - rank)
    dist.recv(y, src=1 - rank)
told = y[:4].tolist()""",
    ),
}
