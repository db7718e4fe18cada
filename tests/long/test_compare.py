"""Counted tests of `%ddp_diff`: pairs of equal training runs have no finding, in time and in numbers."""

from __future__ import annotations

import itertools

import pytest

pytestmark = [pytest.mark.long, pytest.mark.alone]

_SETUP = """
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def train(body, kind, dtype, micro, steps=40):
    torch.manual_seed(0)
    model = DDP(body())
    optimizer = kind(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(2048, 32), torch.randint(0, 4, (2048,)))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    torch.manual_seed(rank)
    batches = itertools.cycle(loader)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            x, y = next(batches)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = F.cross_entropy(model(x), y) / micro
            loss.backward()
        optimizer.step()
        log(loss=loss.item())

import itertools
"""
_BODIES = (
    "lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))",
    "lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))",
    "lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 4))",
    "lambda: nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 4))",
    "lambda: nn.Sequential(nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(120, 4))",
)
_STYLES = (
    "torch.optim.SGD, 'float32', 1",
    "torch.optim.AdamW, 'float32', 1",
    "torch.optim.SGD, 'bfloat16', 1",
    "torch.optim.Adam, 'float32', 2",
)


def test_20_pairs_of_equal_runs_are_silent(session):
    session.run(_SETUP)
    found = {}
    for body, style in itertools.product(_BODIES, _STYLES):
        for _ in range(2):
            assert session.run(f"train({body}, {style})").ok
        compared = session.recording.compare()
        assert compared.labels[0] != compared.labels[1] and compared.runs[0].steps == compared.runs[1].steps == 40
        assert compared.numbers.tensors and compared.numbers.metrics == 80
        if compared.is_found:
            found[body, style] = str(compared)
    assert not found, "\n\n".join(found.values())
