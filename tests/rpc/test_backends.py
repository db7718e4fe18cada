"""`rpc.backend_registry.register_backend`, and `init_rpc` after it."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import RankError
from tests.test_rpc import DEFINITIONS, said

REGISTER = """
from torch.distributed.rpc import backend_registry
asked = []
def construct(rpc_timeout, init_method, **options):
    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)
def make(store, name, rank, world_size, rpc_backend_options):
    store.set(f"here {rank}", name); store.wait([f"here {one}" for one in range(world_size)])
    asked.append((name, rank, world_size, store.get(f"here {1 - rank}").decode()))
    tensorpipe = backend_registry.BackendType.TENSORPIPE
    return backend_registry.init_backend(tensorpipe, store=store, name=name, rank=rank, world_size=world_size,
                                         rpc_backend_options=rpc_backend_options)
if not backend_registry.backend_registered("MINE"): mine = backend_registry.register_backend("MINE", construct, make)
"""
CALL = "print(rpc.rpc_sync(f'w{1 - rank}', add, args=(rank, 1)), rpc.remote(f'w{1 - rank}', Counter).to_here().count)\n"


@pytest.fixture
def session(make_session):
    session = make_session(2)
    session.run(DEFINITIONS + REGISTER)
    return session


@pytest.mark.long
@pytest.mark.parametrize(
    "backend",
    ["None", "rpc.BackendType.TENSORPIPE", "backend_registry.BackendType.TENSORPIPE", "mine"],
)
def test_rpc_begins_with_every_backend_after_one_was_registered(session, backend):
    code = f"rpc.init_rpc(f'w{{rank}}', rank=rank, world_size=2, backend={backend})\n{CALL}rpc.shutdown()\nasked.pop()"
    code = code.removesuffix("\nasked.pop()") if backend != "mine" else code
    for _ in range(2):  # twice in one session, including references
        told = [text.splitlines()[1:] for text in said(session, code)]
        its = [[f"('w{rank}', {rank}, 2, 'w{1 - rank}')"] if backend == "mine" else [] for rank in range(2)]
        assert told == [["1 0", *its[0]], ["2 0", *its[1]]]


def test_what_is_no_backend_is_named(session):
    for asked, words in (
        ("backend='MINE'", "Argument backend must be a member of BackendType, not 'MINE'"),
        ("rpc_backend_options=3", "Argument rpc_backend_options must be an instance of RpcBackendOptions, not int"),
    ):
        with pytest.raises(RankError, match=words):
            session.run(f"rpc.init_rpc(f'w{{rank}}', rank=rank, world_size=2, {asked})")
    with pytest.raises(RankError, match="RPC backend MINE: already registered"):
        session.run("backend_registry.register_backend('MINE', construct, make)")


def test_an_agent_of_another_kind_is_used_and_ends(session):
    """Use the agent that the tests of torch have for failures: an extension that inherits `TensorPipeAgent`."""
    code = (
        "import torch.distributed.rpc._testing.faulty_agent_backend_registry as faulty\n"
        "kind = backend_registry.BackendType.FAULTY_TENSORPIPE\n"
        "given = {'num_worker_threads': 4, 'messages_to_fail': [], 'messages_to_delay': {}, 'num_fail_sends': 0}\n"
        "options = backend_registry.construct_rpc_backend_options(kind, **given)\n"
        "rpc.init_rpc(f'w{rank}', rank=rank, world_size=2, backend=kind, rpc_backend_options=options)\n"
        "answer = rpc.rpc_sync(f'w{1 - rank}', torch.add, args=(torch.tensor(rank), 1))\n"
        "print(type(rpc._get_current_rpc_agent()).__name__, answer)\n"
        "rpc.shutdown()"
    )
    assert [text.splitlines()[-1] for text in said(session, code)] == [
        "FaultyTensorPipeAgent tensor(1)",
        "FaultyTensorPipeAgent tensor(2)",
    ]
