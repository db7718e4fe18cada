"""Random numbers of the first step: ranks that draw the same ones, samplers that differ, and the effective batch."""

from __future__ import annotations

import pytest

_PROGRAM = """
import random, numpy
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Data(Dataset):
    def __init__(self, draw):
        self.draw, self.x = draw, torch.arange(96.).reshape(24, 4)
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return self.x[index] + self.draw()

def train(draw=float, seed=0, own=0, dropout=0.0, wrap=DDP, epoch=0, seeds=0, **loading):
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(seeds)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for set_seed in (torch.manual_seed, random.seed, numpy.random.seed):
        set_seed(seeds + own)
    data = Data(draw)
    sampler = DistributedSampler(data, seed=seed)
    sampler.set_epoch(epoch)
    for x in DataLoader(data, batch_size=4, sampler=sampler, **loading):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def told(session):
    """Run a training cell and return the sentences of its report about random numbers, and its notes."""
    session.run(_PROGRAM)

    def told(call: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        session.run(call)
        report = session.report()
        return report.same_draws, report.notes

    return told


_LOADED = (
    "Ranks 0,1 drew the same random numbers while they loaded their first batches, which differ: {} had the same state"
)
_DROPPED = (
    "Ranks 0,1 drew the same random numbers in the first forward of Sequential, which has dropout, for different "
    "inputs: the generator of torch had the same state"
)


@pytest.mark.parametrize(
    ("call", "start", "end"),
    [
        ("train(dropout=0.5)", _DROPPED, "call torch.manual_seed(seed + rank) after the model is made"),
        ("train(dropout=0.5, wrap=fully_shard)", _DROPPED, "after the model is made"),
        (
            "train(lambda: torch.rand(()))",
            _LOADED.format("the generator of torch"),
            "call torch.manual_seed(seed + rank) before the loop",
        ),
        (
            "train(lambda: numpy.random.rand())",
            _LOADED.format("NumPy"),
            "call numpy.random.seed(seed + rank) before the loop",
        ),
        (
            "train(random.random, num_workers=1)",
            _LOADED.format("the random module") + " in the first worker of the data loader",
            "call torch.manual_seed(seed + rank) before the loop",
        ),
        (
            "train(lambda: torch.rand(()), num_workers=1, generator=torch.Generator().manual_seed(3))",
            _LOADED.format("the generator of torch") + " in the first worker of the data loader",
            "use the rank in the generator or the worker_init_fn of the loader",
        ),
    ],
)
def test_ranks_that_draw_the_same_numbers(told, call, start, end):
    ((sentence,), notes) = told(call)
    assert sentence.startswith(start) and sentence.endswith(end), sentence
    assert notes == (), "it is not called a mistake"


@pytest.mark.parametrize(
    "call",
    [
        "train()",
        "train(dropout=0.5, own=rank)",
        "train(lambda: torch.rand(()), own=rank)",
        "train(random.random, own=rank, num_workers=1)",
        "train(lambda: torch.rand(()), num_workers=1, worker_init_fn=lambda number: torch.manual_seed(rank))",
        "train(random.Random(rank).random, dropout=0.0)",  # another generator
    ],
)
def test_ranks_with_other_numbers_have_no_sentence(told, call):
    assert told(call) == ((), ())


def test_ranks_with_the_same_batches_have_no_sentence(told, session):
    code = """
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout()))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(4):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
    assert told(code + "# ddp: ok same-batches") == ((), ())
    assert session.report().batch == "8 x 2 micro-steps = 16, because ranks 0,1 had the same batches"
    same, (note,) = told(code)
    assert same == () and "same inputs" in note
    assert session.report().batch == "8 x 2 micro-steps = 16, because ranks 0,1 had the same batches"


@pytest.mark.parametrize(
    ("call", "what", "fix"),
    [
        ("train(seed=5 + rank)", "seed of DistributedSampler is 5 on rank 0 and 6 on rank 1", "pass the same seed"),
        ("train(epoch=rank, num_workers=1)", "epoch of DistributedSampler is 0 on rank 0 and 1 on rank 1", "set_epoch"),
    ],
)
def test_samplers_that_differ(told, call, what, fix):
    (_, (note,)) = told(call)
    assert note.startswith(f"Step 0: the {what}. So each rank takes its part from another order") and fix in note
    assert told(f"{call}  # ddp: ok mixed-samplers")[1] == ()


def test_the_sentences_are_saved(told, session, tmp_path):
    import ddp_notebook

    told("train(dropout=0.5)")
    assert len(ddp_notebook.load(session.recording.save(tmp_path / "run.npz")).report().same_draws) == 1


def test_a_loader_that_gave_no_batch_is_as_torch_made_it(session):
    session.run("from torch.utils.data import DataLoader\nbatches = iter(DataLoader(torch.ones(4, 1)))")
    found = session.run("'fetch' in vars(batches._dataset_fetcher), next(batches).item()")
    assert found[0].result == "(False, 1.0)"


def test_nothing_is_looked_at_after_the_first_step(session):
    """A later step calls no function that reads a state."""
    code = """
from ddp_notebook.rank.findings import random_draws
read, own = [0], random_draws._now
def counted():
    read[0] += 1
    return own()
random_draws._now = counted
train(lambda: torch.rand(()), dropout=0.5)
random_draws._now = own
read[0]
"""
    session.run(_PROGRAM)
    found = session.run(code)
    assert [found[rank].result for rank in (0, 1)] == ["4", "4"]
