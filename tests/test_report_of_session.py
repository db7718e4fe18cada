"""Parts of a report that need living ranks."""

from __future__ import annotations

TRAINS = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
_own = DataLoader(dataset, batch_size=8, shuffle=True)
test_loader = DataLoader(dataset, batch_size=8)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
SAYS = "Each rank reads all of loader: with a DistributedSampler it reads its share, and an epoch has 1/2 of the steps."


def test_a_forgotten_sampler_is_told(session):
    session.run(TRAINS)
    assert SAYS in str(session.report()).splitlines()
    assert SAYS not in str(session.recording.report())  # a recording from a file does not have it
    session.run("loader = DataLoader(dataset, batch_size=8, shuffle=rank == 0)")
    assert "Each rank reads all" not in str(session.report()), "on one rank only"
    session.run(
        "loader = DataLoader(dataset, sampler=DistributedSampler(dataset))\nlate = DataLoader(dataset, shuffle=True)"
    )
    assert "Each rank reads all" not in str(session.report()), "somebody knows what a share is"
    session.run("del loader")
    assert "Each rank reads all of late: " in str(session.report())
    session.run("del late")


def test_a_busy_rank_is_not_asked(session):
    session.run(TRAINS)
    job = session.submit("import time; time.sleep(20)", ranks=0)
    assert SAYS not in str(session.report())
    job.cancel()
    assert SAYS in str(session.report())


def test_where_no_gradients_are_averaged_it_may_be_meant_so(session):
    session.run(TRAINS.replace("DistributedDataParallel(torch.nn.Linear(4, 1))", "torch.nn.Linear(4, 1)"))
    assert "Each rank reads all" not in str(session.report())
