"""The steps of a training as they are recorded: in threads, of optimizers of all kinds, of ranks that train apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddp_notebook.records import SPANS

_TRAIN = """
import threading
from torch.nn.parallel import DistributedDataParallel
def make(Optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    return model, Optimizer(model.parameters(), lr=0.1, **options)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_TRAIN, quiet=True)
    return session


def steps_of(session: Any, code: str) -> list[int]:
    """Run a cell. How many steps each rank has taken in it, as the report counts them."""
    session.run(code, quiet=True)
    cell = int(session.recording.rows("span")["cell"].max())
    return [len(session.recording.steps(cell=cell, rank=rank)) for rank in range(session.world_size)]


# ---- threads


def test_steps_each_in_a_thread_of_its_own(ranks):
    code = """
model, optimizer = make()
for _ in range(20):
    thread = threading.Thread(target=step, args=(model, optimizer))
    thread.start()
    thread.join()
"""
    assert steps_of(ranks, code) == [20, 20]
    assert [one.compute_ns > 0 for one in ranks.recording.steps()[-40:]] == [True] * 40


def test_steps_in_several_threads_at_once(ranks):
    """None is lost, and each has a number of its own."""
    code = """
def work():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        step(model, optimizer)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    assert steps_of(ranks, code) == [200, 200]
    spans = ranks.recording.rows("span")
    spans = spans[(spans["cell"] == spans["cell"].max()) & (spans["kind"] == SPANS.index("optimizer"))]
    for rank in (0, 1):
        assert np.sort(spans["step"][spans["rank"] == rank]).tolist() == list(range(200))
