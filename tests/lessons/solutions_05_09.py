"""Solutions of the puzzles of lessons 05 to 09. The ranks run them, with their own `torch`, `dist` and `rank`."""

# ruff: noqa: F821
from __future__ import annotations


def to_each(number):
    numbers = torch.zeros(world_size)
    numbers[rank] = number
    sending = [dist.isend(torch.tensor([number]), dst=to, group=post) for to in range(world_size) if to != rank]
    for source in range(world_size):
        if source != rank:
            dist.recv(numbers[source : source + 1], src=source, group=post)
    for one in sending:
        one.wait()
    return numbers.tolist()


def along_a_chain(number):
    numbers = torch.zeros(world_size)
    if rank > 0:
        dist.recv(numbers, src=rank - 1, group=post)
    numbers[rank] = number
    if rank < world_size - 1:
        dist.send(numbers, dst=rank + 1, group=post)
        dist.recv(numbers, src=rank + 1, group=post)
    if rank > 0:
        dist.send(numbers, dst=rank - 1, group=post)
    return numbers.tolist()


LONG_PAIRS = {"05/everyone": (to_each, along_a_chain, 4)}
