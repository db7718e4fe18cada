"""Programs whose ranks diverge, with the sentence that a hang card or an error must contain.

The programs were written before the code that describes them. `""` means that nothing may be said.
"""

from __future__ import annotations

from typing import NamedTuple


class Program(NamedTuple):
    """A cell for some ranks, and the sentence that describes where they diverge."""

    code: str
    sentence: str
    world_size: int = 2
    earlier: str = ""  # an earlier cell
    file: str = ""  # text of the module `paths_helper`


PROGRAMS = {
    "if and else": Program(
        """
        t = torch.ones(1)
        dist.all_reduce(t)
        if rank == 0:
            dist.all_reduce(t)
        else:
            dist.broadcast(torch.ones(2), 0)
        """,
        "line 3: rank 0 took `if rank == 0:`, rank 1 its `else`",
    ),
    "if without else": Program(
        """
        t = torch.ones(1)
        dist.all_reduce(t)
        if rank == 0:
            dist.broadcast(t, 0)
        dist.barrier()
        """,
        "line 3: rank 0 took `if rank == 0:`, rank 1 did not",
    ),
    "if at the end of the cell": Program(
        """
        score = torch.tensor([0.5 + rank])
        dist.all_reduce(score)
        best = 0.9 + rank
        if best > 1:
            dist.all_reduce(score)
        """,
        "line 4: rank 1 took `if best > 1:`, rank 0 did not",
    ),
    "elif on three ranks": Program(
        """
        t = torch.ones(1)
        if rank == 0:
            dist.all_reduce(t)
        elif rank == 1:
            dist.broadcast(t, 0)
        else:
            dist.barrier()
        """,
        "line 2: rank 0 took `if rank == 0:`, rank 1 `elif rank == 1:` (line 4), rank 2 its `else`",
        world_size=3,
    ),
    "one of three ranks": Program(
        """
        t = torch.ones(1)
        for i in range(3):
            dist.all_reduce(t)
            if i == rank + 1:
                dist.broadcast(t, 0)
        dist.barrier()
        """,
        "line 4: rank 0 took `if i == rank + 1:`, ranks 1,2 did not",
        world_size=3,
    ),
    "nested if, undecided": Program(
        """
        t = torch.ones(1)
        ready = t.sum() > 0
        if ready:
            if rank == 0:
                dist.all_reduce(t)
        dist.barrier()
        """,
        "rank 0 reached line 5 through `if ready:` (line 3) and `if rank == 0:` (line 4), rank 1 did not",
    ),
    "nested if, decided by a collective": Program(
        """
        t = torch.ones(1)
        ready = t.sum() > 0
        if ready:
            dist.all_reduce(t)
            if rank == 0:
                dist.all_reduce(t)
        dist.barrier()
        """,
        "line 5: rank 0 took `if rank == 0:`, rank 1 did not",
    ),
    "uneven loop": Program(
        """
        t = torch.ones(1)
        for i in range(5 + rank):
            dist.all_reduce(t)
        dist.barrier()
        """,
        "line 2: rank 0 left the loop after 5 passes, rank 1 is in the 6th",
    ),
    "uneven loop at the end of the cell": Program(
        """
        t = torch.ones(1)
        for i in range(12 - 2 * rank):
            dist.all_reduce(t)
        """,
        "line 2: rank 1 left the loop after 10 passes, rank 0 is in the 11th",
    ),
    "no pass of the loop": Program(
        """
        t = torch.ones(1)
        names = ["a", "b"] * rank
        for name in names:
            dist.all_reduce(t)
        dist.barrier()
        """,
        "line 3: rank 0 made no pass of the loop, rank 1 is in the 1st",
    ),
    "break": Program(
        """
        t = torch.ones(1)
        for i in range(20):
            dist.all_reduce(t)
            if i == 7 and rank == 1:
                break
        dist.broadcast(t, 0)
        """,
        "line 2: rank 1 left the loop after 8 passes, rank 0 is in the 9th",
    ),
    "while on a local loss": Program(
        """
        loss = torch.tensor(1.0)
        while loss > 0.1 * (rank + 1):
            loss = loss * 0.8
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        """,
        "line 2: rank 1 left the loop after 8 passes, rank 0 is in the 9th",
    ),
    "while True with break": Program(
        """
        patience = 3 + rank
        while True:
            dist.all_reduce(torch.ones(1))
            patience -= 1
            if patience == 0:
                break
        dist.barrier()
        """,
        "line 2: rank 0 left the loop after 3 passes, rank 1 is in the 4th",
    ),
    "inner loop, with a collective for each epoch": Program(
        """
        t = torch.ones(1)
        for epoch in range(2):
            for batch in range(4 + epoch * rank):
                dist.all_reduce(t)
            dist.broadcast(t, 0)
        """,
        "line 3: rank 0 left the loop after 4 passes, rank 1 is in the 5th",
    ),
    "inner loop without one": Program(
        """
        t = torch.ones(1)
        for epoch in range(2):
            for batch in range(3 + rank):
                dist.all_reduce(t)
        """,
        "line 2: rank 0 left the loop after line 4 had run 6 times, rank 1 is there for the 7th time",
    ),
    "continue": Program(
        """
        t = torch.ones(1)
        for i in range(5):
            if i == 2 and rank == 1:
                continue
            dist.all_reduce(t)
        dist.barrier()
        """,
        "line 2: rank 1 left the loop after line 5 had run 4 times, rank 0 is there for the 5th time",
    ),
    "early return": Program(
        """
        def step(t, i):
            dist.all_reduce(t)
            if i == rank:
                return
            dist.broadcast(t, 0)

        t = torch.ones(1)
        for i in range(1, 4):
            step(t, i)
        dist.barrier()
        """,
        "line 4: rank 1 returned early from `step` (line 9)",
    ),
    "early return, called once": Program(
        """
        def evaluate(t):
            if t.item() > 1:
                return t
            dist.all_reduce(t)
            return t

        t = torch.ones(1) * (rank + 1)
        evaluate(t)
        dist.barrier()
        """,
        "line 3: rank 1 returned early from `evaluate` (line 8)",
    ),
    "branch in a function": Program(
        """
        def save(t, k):
            if k > 2:
                dist.broadcast(t, 0)
            return t

        t = torch.ones(1)
        dist.all_reduce(t)
        save(t, 2 + rank)
        dist.barrier()
        """,
        "line 2: rank 1 took `if k > 2:`, rank 0 did not",
    ),
    "caught exception": Program(
        """
        t = torch.ones(1)
        try:
            dist.all_reduce(t)
            if rank == 1:
                raise ValueError("bad sample")
            dist.broadcast(t, 0)
        except ValueError:
            dist.barrier()
        """,
        "line 4: rank 1 took `if rank == 1:`, rank 0 did not",
    ),
    "exception of a called function": Program(
        """
        def load(i):
            if i == 2 + rank:
                raise OSError("truncated file")
            return torch.ones(1)

        for i in range(5):
            try:
                t = load(i)
                dist.all_reduce(t)
            except OSError:
                dist.broadcast(torch.ones(1), 0)
        """,
        "line 7: rank 0 ran `except OSError:` (line 10), rank 1 did not",
    ),
    "comprehension": Program(
        """
        t = torch.ones(1)
        works = [dist.all_reduce(t) for _ in range(3 + rank)]
        dist.barrier()
        """,
        "line 2: rank 0 left the comprehension after 3 passes, rank 1 is in the 4th",
    ),
    "conditional expression": Program(
        """
        t = torch.ones(1)
        dist.all_reduce(t)
        done = dist.broadcast(t, 0) if rank else dist.barrier()
        """,
        "line 3: rank 1 ran `dist.broadcast(t, 0)`, rank 0 ran `dist.barrier()`",
    ),
    "and": Program(
        """
        t = torch.ones(1)
        rank == 0 and dist.broadcast(t, 0)
        dist.barrier()
        """,
        "line 2: rank 0 ran `dist.broadcast(t, 0)`, rank 1 did not",
    ),
    "two functions in a dict": Program(
        """
        def train(t):
            dist.all_reduce(t)

        def evaluate(t):
            dist.broadcast(t, 0)

        roles = {0: train, 1: evaluate}
        roles[rank](torch.ones(1))
        """,
        "rank 0 called `train` (line 2), rank 1 called `evaluate` (line 5)",
    ),
    "two functions in branches": Program(
        """
        def train(t):
            dist.all_reduce(t)

        def evaluate(t):
            dist.broadcast(t, 0)

        t = torch.ones(1)
        if rank == 0:
            train(t)
        else:
            evaluate(t)
        """,
        "line 8: rank 0 took `if rank == 0:`, rank 1 its `else`",
    ),
    "method of a class": Program(
        """
        class Trainer:
            def __init__(self, limit):
                self.limit = limit

            def step(self, value):
                t = torch.tensor([float(value)])
                dist.all_reduce(t)
                if value > self.limit:
                    dist.broadcast(t, 0)
                return t

        trainer = Trainer(limit=1.5)
        for value in range(3):
            trainer.step(value + rank)
        """,
        "line 8: rank 1 took `if value > self.limit:`, rank 0 did not",
    ),
    "match": Program(
        """
        t = torch.ones(1)
        match rank:
            case 0:
                dist.all_reduce(t)
            case _:
                dist.broadcast(t, 0)
        """,
        "line 2: rank 0 took `case 0:` (line 3), rank 1 `case _:` (line 5)",
    ),
    "inside with": Program(
        """
        t = torch.ones(1)
        with torch.no_grad():
            dist.all_reduce(t)
            if rank % 2:
                dist.all_reduce(t)
            dist.broadcast(t, 0)
        """,
        "line 4: rank 1 took `if rank % 2:`, rank 0 did not",
    ),
    "uneven batches of DDP": Program(
        """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.ones(2, 4)] * (3 + rank)
        for x in batches:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        """,
        "line 4: rank 0 left the loop after 3 passes, rank 1 is in the 4th",
    ),
    "DDP stops on a local loss": Program(
        """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            loss = model(torch.ones(2, 4)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i == 4 and rank == 0:
                break
        dist.barrier()
        """,
        "line 3: rank 0 left the loop after 5 passes, rank 1 is in the 6th",
    ),
    "evaluation on rank 0 while DDP trains": Program(
        """
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        for i in range(6):
            model(torch.ones(2, 4)).sum().backward()
            if rank == 0 and i % 3 == 2:
                total = torch.zeros(5)
                dist.all_reduce(total)
        """,
        "line 4: rank 0 took `if rank == 0 and i % 3 == 2:`, rank 1 did not",
    ),
    "swapped order": Program(
        """
        a, b = torch.ones(1), torch.ones(2)
        if rank == 0:
            dist.all_reduce(a)
            dist.broadcast(b, 0)
        else:
            dist.broadcast(b, 0)
            dist.all_reduce(a)
        """,
        "line 2: rank 0 took `if rank == 0:`, rank 1 its `else`",
    ),
    "function of an earlier cell": Program(
        """
        t = torch.ones(1)
        dist.all_reduce(t)
        checkpoint(t, rank == 0)
        dist.barrier()
        """,
        "In[1] line 2: rank 0 took `if is_first:`, rank 1 did not",
        earlier="""
        def checkpoint(t, is_first):
            if is_first:
                dist.broadcast(t, 0)
        """,
    ),
    "function of a file": Program(
        """
        import paths_helper
        t = torch.ones(1)
        dist.all_reduce(t)
        paths_helper.sync(t, rank == 0)
        dist.barrier()
        """,
        "paths_helper.py:5: rank 0 took `if is_first:`, rank 1 did not",
        file="""
        import torch.distributed as dist

        def sync(t, is_first):
            t += 1
            if is_first:
                dist.broadcast(t, 0)
        """,
    ),
    "harmless branch with subgroups before": Program(
        """
        pairs = [dist.new_group([0, 1]), dist.new_group([2])]
        t = torch.ones(1)
        if rank < 2:
            dist.all_reduce(t, group=pairs[0])
        else:
            t += 1
        if rank == 2:
            dist.broadcast(t, 2)
        dist.barrier()
        """,
        "line 7: rank 2 took `if rank == 2:`, ranks 0,1 did not",
        world_size=3,
    ),
    "recursion": Program(
        """
        def halve(t, n):
            if n == 0:
                return
            dist.all_reduce(t)
            halve(t, n - 1)

        halve(torch.ones(1), 3 + rank)
        dist.barrier()
        """,
        "",
    ),
    "caught exception in one of the passes": Program(
        """
        t, passes = torch.ones(1), 0
        for i in range(3):
            passes += 1
            try:
                if i == 0 and rank == 0:
                    raise OSError("first file")
                dist.all_reduce(t)
            except OSError:
                pass
        dist.barrier()
        """,
        "line 2: rank 0 left the loop after line 7 had run 2 times, rank 1 is there for the 3rd time",
    ),
    "top-level await": Program(
        """
        import asyncio
        t = torch.ones(1)
        await asyncio.sleep(0.01)
        if rank == 1:
            dist.all_reduce(t)
        await asyncio.sleep(0.01)
        dist.barrier()
        """,
        "line 4: rank 1 took `if rank == 1:`, rank 0 did not",
    ),
    # ---- programs without a sentence: the cause is not a branch, or it is uncertain
    "operation in a variable": Program(
        """
        t = torch.ones(1)
        operation = dist.all_reduce if rank == 0 else dist.barrier
        arguments = [t] if rank == 0 else []
        operation(*arguments)
        """,
        "",
    ),
    "other size on the same line": Program(
        """
        dist.all_reduce(torch.ones(3 + rank))
        """,
        "",
    ),
    "two threads": Program(
        """
        import threading
        t = torch.ones(1)
        dist.all_reduce(t)
        def work():
            if rank == 0:
                dist.all_reduce(t)
            else:
                dist.broadcast(t, 0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """,
        "",
    ),
    "a message on one rank, a collective on the other": Program(
        """
        t = torch.ones(1)
        if rank == 0:
            dist.recv(t, src=1)
        else:
            dist.all_reduce(t)
        """,
        "line 2: rank 0 took `if rank == 0:`, rank 1 its `else`",
    ),
    "receive without a send": Program(
        """
        t = torch.ones(1)
        dist.all_reduce(t)
        dist.recv(t, 1 - rank)
        """,
        "",
    ),
}
