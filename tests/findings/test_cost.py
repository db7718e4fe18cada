"""Processor time of the findings in a training step."""

from __future__ import annotations

import pytest

LOOP = """
import gc, time
from ddp_notebook.rank.record.training import loaders, spans
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(100)]))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
data = DataLoader(TensorDataset(torch.randn(64 * 60, 256)), batch_size=64)
spent, own = [0], spans.tell
def timed(*args, **named):
    began = time.thread_time_ns()
    own(*args, **named)
    spent[0] += time.thread_time_ns() - began
spans.tell = loaders.tell = timed
began = time.process_time_ns()
for x, in data:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
step_ms, findings_ms = (time.process_time_ns() - began) / 60e6, spent[0] / 60e6
spans.tell = loaders.tell = own
(round(step_ms, 3), round(findings_ms, 4))
"""


@pytest.mark.long
def test_findings_take_little_of_a_step(session):
    """A step of 200 parameters and a batch of 64 KiB: at most 1 % of its processor time, and at most 1 ms."""
    found = session.run(LOOP)
    for rank in (0, 1):
        step_ms, findings_ms = eval(found[rank].result)
        print(f"rank {rank}: {findings_ms} ms of a step of {step_ms} ms")
        assert findings_ms < 1 and findings_ms < 0.02 * step_ms
