"""Sets of ranks by name: dimensions of meshes, and hosts."""

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.run.groups.named_ranks import select

HOSTS = {rank: f"gpu{rank // 2}" for rank in range(4)}
MESH = {rank: [["mesh", ["dp", "tp"], [rank // 2, rank % 2]]] for rank in range(4)}


def chosen(asked, coordinates=MESH, hosts=HOSTS):
    return select(asked, hosts, lambda: coordinates)


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ("tp=1", [1, 3]),
        ("tp=-1", [1, 3]),
        ("dp=0", [0, 1]),
        ("dp=0-1", [0, 1, 2, 3]),
        ("dp=0,tp=1", [1]),
        (" dp = 0 , tp = 1 ", [1]),
        ("host=gpu1", [2, 3]),
        ("host=gpu1,tp=0", [2]),
    ],
)
def test_ranks_by_name(asked, ranks):
    assert chosen(asked) == ranks


def test_hosts_need_no_answer_of_the_ranks():
    def ask():
        raise AssertionError("not needed")

    assert select("host=gpu0", HOSTS, ask) == [0, 1]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("pp=1", "no mesh in a variable of the ranks has a dimension 'pp'; the names are dp, host, tp"),
        ("tp=2", "tp=2 does not exist: tp has the coordinates 0 to 1"),
        ("tp=x", "tp=x must have a number, such as tp=1 or tp=0-1"),
        ("host=gpu7", "no rank is on the host 'gpu7'; the hosts are gpu0, gpu1"),
        ("0,tp=1", "'0' in the rank set '0,tp=1' must have a form such as tp=1, dp=0-1 or host=NAME; names and"),
        ("tp=0,tp=1", "'tp=0,tp=1' selects no rank: no rank fulfils all of these conditions"),
    ],
)
def test_wrong_names(asked, error):
    with pytest.raises(UsageError) as raised:
        chosen(asked)
    assert str(raised.value).startswith(error)


def test_two_meshes_with_one_name():
    same = {rank: [*MESH[rank], ["tp_mesh", ["tp"], [rank % 2]]] for rank in range(4)}
    assert chosen("tp=1", same) == [1, 3], "both select the same ranks"
    other = {rank: [*MESH[rank], ["flat", ["tp"], [rank]]] for rank in range(4)}
    with pytest.raises(UsageError) as raised:
        chosen("tp=1", other)
    assert str(raised.value) == (
        "tp=1 has several meanings: ranks 1,3 by mesh; rank 1 by flat; give the ranks as numbers"
    )


def test_a_mesh_of_some_ranks():
    some = {0: [], 1: [["mesh", ["tp"], [0]]], 2: [["mesh", ["tp"], [1]]], 3: []}
    assert chosen("tp=1", some) == [2]


def test_names_of_a_mesh_in_a_session(session):
    session.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))",
        quiet=True,
    )
    assert sorted(session.run("rank", ranks="dp=0,tp=1", quiet=True).by_rank) == [1]
    assert dict(session.pull("rank", ranks="tp=0")) == {0: 0}
    job = session.submit("import time; time.sleep(1.5)", quiet=True)
    assert sorted(session.submit("rank", ranks="tp=-1", quiet=True).result().by_rank) == [1], "while a cell runs"
    job.result()
    with pytest.raises(UsageError, match="no mesh in a variable of the ranks has a dimension 'pp'"):
        session.run("rank", ranks="pp=0")
    session.run(
        "from torch.distributed.tensor import distribute_module\n"
        "net = distribute_module(torch.nn.Linear(2, 2), init_device_mesh('cpu', (2,), mesh_dim_names=('shard',)))",
        quiet=True,
    )
    assert dict(session.pull("rank", ranks="shard=1")) == {1: 1}, "a mesh that only a model holds"
