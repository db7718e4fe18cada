"""Arguments of the functions that form and end groups: a rank accepts and rejects the same as torch in a plain process.

Each call of a table runs in a process without this package and on a rank, with one rank each. Both must end with the
same type of exception or with none.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ddp_notebook.errors import RankError

_HEAD = """
import json, os, torch, torch.distributed as dist, warnings
from datetime import timedelta
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
def _ends(call):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(call, globals())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""
def _fresh(is_formed):
    if dist.is_initialized() and not is_formed: dist.destroy_process_group()
    if is_formed and not dist.is_initialized(): dist.init_process_group("gloo")
"""

# The argument lists of init_process_group.
_INIT = """
'gloo'
'gloo', device_id=torch.device("cpu")
'gloo', device_id=torch.device("cpu", 0)
'gloo', device_id=0
'gloo', device_id="cpu"
'gloo', device_id=torch.device("cuda", 0)
'gloo', device_id=torch.device("cuda")
'gloo', device_id=torch.device("meta")
'gloo', device_id=1.5
'gloo', timeout=30
'gloo', timeout=30.0
'gloo', timeout="30"
'gloo', None, 30
'gloo', timeout=timedelta(seconds=30)
'gloo', timeout=timedelta(seconds=0)
'gloo', timeout=timedelta(seconds=-1)
'gloo', timeout=timedelta(milliseconds=1500)
'gloo', timeout=None
'gloo', timeout=timedelta(days=36500)
'gloo', init_method="bogus://x"
'gloo', init_method="bogus"
'gloo', init_method=""
'gloo', init_method=5
'gloo', init_method=b"env://"
'gloo', init_method="env://"
'gloo', "env://"
'gloo', init_method="env://?rank=0&world_size=1"
'gloo', init_method="env://?rank=0", rank=0, world_size=1
'gloo', init_method="env://?rank=x&world_size=1"
'gloo', init_method="ENV://"
'gloo', init_method="tcp://127.0.0.1"
'gloo', init_method="tcp://127.0.0.1:0"
'gloo', init_method="tcp://127.0.0.1:0", rank=0
'gloo', init_method="tcp://127.0.0.1:0", world_size=1
'gloo', init_method="tcp://127.0.0.1:0", rank=0, world_size=1
'gloo', init_method="tcp://127.0.0.1:99999", rank=0, world_size=1
'gloo', init_method="tcp://127.0.0.1:port", rank=0, world_size=1
'gloo', init_method="tcp://:0", rank=0, world_size=1
'gloo', init_method="tcp://127.0.0.1:0?rank=0&world_size=1"
'gloo', init_method="tcp://127.0.0.1:0?rank=0&world_size=1", rank=0
'gloo', init_method="file://"
'gloo', init_method="file:///FOLDER/a", rank=0
'gloo', init_method="file:///FOLDER/b", rank=0, world_size=1
'gloo', init_method="env://", store=dist.HashStore(), rank=0, world_size=1
'gloo', store=dist.HashStore(), rank=0, world_size=1
'gloo', store=dist.HashStore(), rank=0
'gloo', store=dist.HashStore(), world_size=1
'gloo', store=dist.HashStore()
'gloo', store="store", rank=0, world_size=1
'gloo', store=dist.HashStore(), rank="0", world_size=1
'gloo', rank=0, world_size=1
'gloo', rank="0"
'gloo', rank=None
'gloo', rank=0.0
'gloo', rank=True - 1
'gloo', world_size="1"
'gloo', world_size=None
'gloo', world_size=1.0
'gloo', world_size=True
'gloo', rank=torch.tensor(0)
'gloo', rank=__import__("numpy").int64(0), world_size=__import__("numpy").int32(1)
b"gloo"
5
None
''
'GLOO'
'Gloo'
dist.Backend.GLOO
'bogus'
'undefined'
'nccl'
'mpi'
'ucc'
'xccl'
'cpu:gloo'
'cpu:gloo,cuda:gloo'
'cpu:gloo,cuda:nccl'
'cpu:bogus'
'cpu:gloo,cpu:gloo'
'cpu'
'cpu:'
':'
'gloo,nccl'
'cpu:gloo:x'
'bogus:gloo'
['gloo']
'gloo', group_name="name"
'gloo', group_name=5
'gloo', pg_options=5
'gloo', pg_options=dist.ProcessGroupGloo._Options()
'gloo', nonsense=1
'gloo', 'env://', None, 1, 0, None, '', None, None, None, None
'gloo', backend='gloo'

'fake'
'fake', store=dist.HashStore(), rank=0, world_size=1
""".strip("\n").split("\n")

_OTHERS = """
dist.new_group([0])
dist.new_group()
dist.new_group(None)
dist.new_group(ranks=[0], timeout=30)
dist.new_group([0], 30)
dist.new_group([0], timedelta(seconds=30))
dist.new_group([0], timedelta(seconds=30), "gloo")
dist.new_group([0], timeout="30")
dist.new_group([0], timeout=timedelta(days=36500))
dist.new_group([0], backend="bogus")
dist.new_group([0], backend=b"gloo")
dist.new_group([0], backend=5)
dist.new_group([0], backend="nccl")
dist.new_group([0], backend="GLOO")
dist.new_group([0], backend="cpu:gloo")
dist.new_group([0], backend="mpi")
dist.new_group([0, 0])
dist.new_group([1])
dist.new_group([-1])
dist.new_group([0, 1])
dist.new_group(["0"])
dist.new_group([0.0])
dist.new_group(0)
dist.new_group("0")
dist.new_group(())
dist.new_group([])
dist.new_group(range(1))
dist.new_group({0})
dist.new_group((0,))
dist.new_group([None])
dist.new_group([0], pg_options=5)
dist.new_group([0], backend="fake")
dist.new_group([0], use_local_synchronization=True)
dist.new_group([0], use_local_synchronization="yes")
dist.new_group([0], use_local_synchronization=True, backend="mpi")
dist.new_group([0], group_desc="text")
dist.new_group([0], group_desc=5)
dist.new_group([0], device_id=torch.device("cpu"))
dist.new_group([0], device_id=0)
dist.new_group([0], device_id="cpu")
dist.new_group([0], device_id=torch.device("cuda", 0))
dist.new_group([0], nonsense=1)
dist.new_group([0], ranks=[0])
dist.new_subgroups()
dist.new_subgroups(1)
dist.new_subgroups(group_size=1)
dist.new_subgroups(group_size=2)
dist.new_subgroups(group_size=0)
dist.new_subgroups(group_size=-1)
dist.new_subgroups(group_size="1")
dist.new_subgroups(group_size=1.0)
dist.new_subgroups(1, timeout=3)
dist.new_subgroups(1, backend=b"gloo")
dist.new_subgroups(1, group=5)
dist.new_subgroups(1, dist.group.WORLD)
dist.new_subgroups_by_enumeration([[0]])
dist.new_subgroups_by_enumeration([[0], [0]])
dist.new_subgroups_by_enumeration([])
dist.new_subgroups_by_enumeration(None)
dist.new_subgroups_by_enumeration([0])
dist.new_subgroups_by_enumeration([[1]])
dist.new_subgroups_by_enumeration([[0]], timeout=1)
dist.split_group()
dist.split_group(split_ranks=[[0]])
dist.split_group(None, [[0]], timeout=3)
dist.split_group(dist.group.WORLD, [])
init_device_mesh("cpu", (1,))
init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "a"))
init_device_mesh("cpu", (1, 1), mesh_dim_names=("a",))
init_device_mesh("cpu", (2,))
init_device_mesh("cpu", (0,))
init_device_mesh("cpu", (-1,))
init_device_mesh("cpu", 1)
init_device_mesh("cpu", [1])
init_device_mesh("cpu", "1")
init_device_mesh("cpu", (1.0,))
init_device_mesh("cpu", ("1",))
init_device_mesh("cpu", ())
init_device_mesh("cpu:0", (1,))
init_device_mesh("cuda", (1,))
init_device_mesh("bogus", (1,))
init_device_mesh(torch.device("cpu"), (1,))
init_device_mesh(None, (1,))
init_device_mesh("", (1,))
init_device_mesh("cpu", (1,), ("a",))
init_device_mesh("cpu", (1,), mesh_dim_names="a")
init_device_mesh("cpu", (1,), mesh_dim_names=(5,))
init_device_mesh("cpu", (1,), backend_override={0: "bogus"})
init_device_mesh("cpu", (1,), backend_override={0: "gloo"})
init_device_mesh("cpu", (1,), backend_override={1: "gloo"})
init_device_mesh("cpu", (1,), backend_override={"a": "gloo"})
init_device_mesh("cpu", (1,), backend_override=5)
init_device_mesh(device_type="cpu", mesh_shape=(1,))
DeviceMesh("cpu", [0])
DeviceMesh("cpu", torch.tensor([0]))
DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))
DeviceMesh("cpu", [1])
DeviceMesh("cpu", [0, 0])
DeviceMesh("cpu", [0, 1])
DeviceMesh("cpu", ["0"])
DeviceMesh("cpu", None)
DeviceMesh("cpu", 0)
DeviceMesh("cuda", [0])
DeviceMesh("cpu:0", [0])
DeviceMesh.from_group(dist.group.WORLD, "cpu")
DeviceMesh.from_group([dist.group.WORLD], "cpu")
DeviceMesh.from_group(5, "cpu")
init_device_mesh("cpu", (1,), mesh_dim_names=("a",)).get_group("b")
init_device_mesh("cpu", (1,), mesh_dim_names=("a",))["b"]
dist.destroy_process_group()
dist.destroy_process_group(None)
dist.destroy_process_group(dist.group.WORLD)
dist.destroy_process_group(group=dist.group.WORLD)
dist.destroy_process_group("x")
dist.destroy_process_group(5)
dist.destroy_process_group([])
dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)
dist.destroy_process_group(dist.new_group([0]))
g = dist.new_group([0]); dist.destroy_process_group(g); dist.destroy_process_group(g)
dist.destroy_process_group(); dist.destroy_process_group()
dist.destroy_process_group(group_name="x")
dist.destroy_process_group(None, None)
dist.barrier(device_ids=5)
dist.barrier(device_ids=[0])
dist.monitored_barrier(timeout=3)
dist.monitored_barrier(wait_all_ranks="x")
dist.get_rank(5)
dist.get_rank("x")
dist.get_world_size(5)
dist.get_backend(5)
dist.get_process_group_ranks(5)
dist.get_global_rank(dist.group.WORLD, 5)
dist.get_group_rank(dist.group.WORLD, 5)
""".strip("\n").split("\n")


_CALLS = [f"dist.init_process_group({one})" for one in _INIT] + _OTHERS
_REFUSED_OTHERWISE = {  # while the session's group exists; after destroy_process_group as in a plain process
    "dist.init_process_group('fake')",
    "dist.init_process_group('fake', store=dist.HashStore(), rank=0, world_size=1)",
}


def _run_all(calls: list[str], is_formed: bool | None) -> str:
    """Return code that makes each call in a fresh state, and evaluates to their outcomes.

    Args:
        is_formed: Whether the default group exists before; None for the state that each function needs.
    """
    table = json.dumps([(not one.startswith("dist.init_") if is_formed is None else is_formed, one) for one in calls])
    loop = f"for _formed, _call in json.loads({table!r}):\n    _fresh(_formed); _ended.append(_ends(_call))"
    return f"{_HEAD}_ended = []\n{loop}\njson.dumps(_ended)"


@pytest.fixture(scope="module")
def session_of_one(waiting_host_server) -> Iterator[Any]:
    from ddp_notebook import api

    waiting_host_server()
    with api.start(1) as running:
        yield running


@pytest.fixture(scope="module")
def ends(session_of_one, tmp_path_factory) -> dict[str, Any]:
    """Return the outcome of each call in a plain process, on a rank, and on a rank without a group."""
    folder = str(tmp_path_factory.mktemp("files"))
    calls = [one.replace("/FOLDER", folder) for one in _CALLS]
    code = _run_all(calls, None)
    script, _, last = code.rpartition("\n")
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    plain = subprocess.run(
        [sys.executable, "-c", f"{script}\nprint({last})"],
        env={**os.environ, **of_torchrun},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = [json.loads(plain.stdout.splitlines()[-1])]
    inits = [one for one in calls if one.startswith("dist.init_")]
    for code in (_run_all(calls, None), _run_all(inits, True)):
        result = session_of_one.run(code, timeout_s=120)
        found.append(json.loads(ast.literal_eval(result[0].result)))
    return dict(zip(_CALLS, itertools.zip_longest(*found, fillvalue=None), strict=True))


def _function(call: str) -> str:
    return re.split(r"[.(]", call.removeprefix("dist."))[0]


@pytest.mark.processes
@pytest.mark.parametrize("function", dict.fromkeys(map(_function, _CALLS)))
def test_a_rank_refuses_what_torch_refuses(ends, function):
    wrong = {}
    for call, outcomes in ends.items():
        plain, on_rank, with_group = (None if one is None else one.partition(":")[0] for one in outcomes)
        is_same = on_rank == plain and (with_group in (plain, None) or call in _REFUSED_OTHERWISE)
        if _function(call) == function and not is_same:
            wrong[call] = outcomes
    assert not wrong


@pytest.mark.processes
def test_the_table_has_accepted_and_refused_calls(ends):
    accepted = [call for call, (plain, *_) in ends.items() if not plain]
    assert 60 < len(accepted) < len(ends) - 100


@pytest.mark.processes
def test_a_file_that_cannot_be_written_is_refused_at_once(session_of_one, tmp_path):
    """torch itself retries for five minutes."""
    call = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/missing/c', rank=0, world_size=1)"
    with pytest.raises(RankError, match=r"DistStoreError: init_method must name a writable file, got .*/missing/c"):
        session_of_one.run(call)


@pytest.mark.processes
@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group('gloo', timeout=timedelta(days=10**6))",
        "dist.new_group([0], timeout=timedelta(days=10**6))",
        "dist.distributed_c10d._set_pg_timeout(timedelta(days=10**6))",
    ],
)
def test_a_timeout_above_a_century_is_refused_with_the_limit(session_of_one, call):
    """gloo adds it to the clock in 64 bits: operations would fail at once, or wait forever."""
    began = "from datetime import timedelta\nif not dist.is_initialized(): dist.init_process_group()\n"
    with pytest.raises(RankError, match=r"timeout must be at most 36,500 days, got 1000000 days, 0:00:00"):
        session_of_one.run(began + call)
    session_of_one.run("dist.all_reduce(torch.ones(1))")


@pytest.mark.processes
def test_groups_form_with_a_timeout_of_months(session_of_one):
    """A socket counts at most 25 days in milliseconds."""
    session_of_one.run(
        "from datetime import timedelta\nif dist.is_initialized(): dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', timeout=timedelta(days=50))\n"
        "dist.all_reduce(torch.ones(1), group=dist.new_group([0], timeout=timedelta(days=36_500)))"
    )
