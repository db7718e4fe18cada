"""`session.whos()` on two ranks, idle and while a cell runs."""

import time

import pytest

from ddp_notebook.errors import UsageError
from tests.conftest import is_within, wait_until

CODE = """
shared = torch.arange(10.0)
part = shared[2:5]
own = torch.arange(3.0) + rank
longer = torch.zeros(3 + rank)
if rank == 1: only_here = 1
def step(): pass
"""


@pytest.fixture(scope="module")
def filled(session):
    session.run(CODE, quiet=True)
    return session


def test_variables_of_two_ranks(filled):
    found = filled.whos()
    states = {row.name: row.ranks for row in found}
    assert states == {
        "shared": "same",
        "part": "same",
        "own": "ranks 0 / 1: values",
        "longer": "ranks 0 / 1: shape",
        "only_here": "missing on rank 0",
    }, "variables of this package are left out"
    assert "step" in found.code
    assert [row.name for row in filled.whos("o*", exact=True)] == ["only_here", "own"]
    with pytest.raises(UsageError, match="pattern must be text"):
        filled.whos(3)


def test_sharded_models(filled):
    filled.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "net = torch.nn.Linear(64, 64)\nfully_shard(net)\nnet(torch.ones(1, 64)).sum().backward()\n"
        "from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor\n"
        "copied = distribute_tensor(torch.arange(6.0), DeviceMesh('cpu', [0, 1]), [Replicate()])",
        quiet=True,
    )
    found = filled.whos("[nc]*")
    assert (found["net"].ranks, found["net"].nbytes) == ("sharded", (64 * 64 + 64) * 4 // 2)
    assert found.memory[0]["gradients"] == (64 * 64 + 64) * 4 // 2
    assert (found["copied"].shape, found["copied"].ranks) == ("(6,)", "same")
    assert filled.run("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()", quiet=True)[0].result == "2.0"
    filled.run("del net, copied", quiet=True)


def test_while_a_cell_runs(filled):
    job = filled.submit("import time\nend = time.time() + 2\nwhile time.time() < end: pass", quiet=True)
    wait_until(lambda: job.state == "running", 20)
    time.sleep(0.3)
    began_s = time.monotonic()
    found = filled.whos()
    assert is_within(time.monotonic() - began_s, 0.5)
    assert job.state == "running"
    assert (found["shared"].shape, found["shared"].nbytes, found["own"].ranks) == ("(10,)", 40, "")
    assert repr(found).splitlines()[-1] == "a cell runs: shapes and bytes only, contents were not compared"
    job.result()
    assert filled.whos()["own"].ranks == "ranks 0 / 1: values"


@pytest.mark.alone
def test_200_names_and_a_gigabyte_take_50_ms(filled):
    filled.run("for i in range(200): globals()[f'v{i}'] = torch.ones(1_250_000)", quiet=True)
    took = []
    for _ in range(6):
        began_s = time.monotonic()
        found = filled.whos()
        took.append(time.monotonic() - began_s)
    filled.run("for i in range(200): del globals()[f'v{i}']", quiet=True)
    assert sum(row.nbytes for row in found) > 1e9
    assert is_within(took[0], 0.3)
    assert is_within(min(took[1:]), 0.05)
