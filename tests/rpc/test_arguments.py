"""Arguments of `init_rpc`: a rank accepts and refuses what torch does in a plain process.

Each call of the table runs in a process without this package and on a rank, with one worker each. Both must end with
the same type of exception or with none.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from typing import Any

import pytest

_HEAD = """
import json, os, torch, torch.distributed as dist, warnings
from datetime import timedelta
from torch.distributed import rpc
from torch.distributed.rpc import BackendType, TensorPipeRpcBackendOptions as Options
def _ends(call):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(call, globals())
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    try:
        rpc.shutdown(graceful=False)
    except RuntimeError:  # the call has failed
        pass
    return said
"""
# A failed call leaves state in torch that changes the outcome of the next call, so each call runs in a new process.
_PLAIN = """
import signal, sys
for _call in json.loads(sys.stdin.read()):
    _reads, _writes = os.pipe()
    if not (_pid := os.fork()):
        signal.alarm(6)  # torch waits for workers that do not exist
        os.write(_writes, json.dumps(_ends(_call)).encode())
        os._exit(0)
    os.close(_writes)
    _said = open(_reads).read()
    os.waitpid(_pid, 0)
    print("ended", _said or '"it waits"', flush=True)
"""

_ARGUMENTS = """
"w", rank=0, world_size=1
"w", None, 0, 1
"w", BackendType.TENSORPIPE, 0, 1
"w", BackendType.TENSORPIPE, 0, 1, Options()
name="w", rank=0, world_size=1
"w", rank=0
"w", world_size=1
"w"
"w", rank=-1, world_size=1
"w", rank=-2, world_size=1
"w", rank=1, world_size=1
"w", rank=2, world_size=1
"w", rank="0", world_size=1
"w", rank=0.0, world_size=1
"w", rank=None, world_size=1
"w", rank=False, world_size=1
"w", rank=True, world_size=1
"w", rank=b"0", world_size=1
"w", rank=[0], world_size=1
"w", rank=torch.tensor(0), world_size=1
"w", rank=__import__("numpy").int64(0), world_size=1
"w", rank=0, world_size="1"
"w", rank=0, world_size=1.0
"w", rank=0, world_size=True
"w", rank=0, world_size=0
"w", rank=0, world_size=-1
"w", rank=0, world_size=None
"w", rank=0, world_size=[1]
"w", rank=0, world_size=torch.tensor(1)
"w", rank=0, world_size=__import__("numpy").int64(1)
5, rank=0, world_size=1
0, rank=0, world_size=1
None, rank=0, world_size=1
b"w", rank=0, world_size=1
"", rank=0, world_size=1
"a b", rank=0, world_size=1
"a/b", rank=0, world_size=1
"a:b", rank=0, world_size=1
"a-b_c", rank=0, world_size=1
"\\u00e9", rank=0, world_size=1
"w" * 128, rank=0, world_size=1
"w" * 127, rank=0, world_size=1
["w"], rank=0, world_size=1
rank=0, world_size=1
"w", backend="tensorpipe", rank=0, world_size=1
"w", backend="TENSORPIPE", rank=0, world_size=1
"w", backend=0, rank=0, world_size=1
"w", backend="gloo", rank=0, world_size=1
"w", backend=b"TENSORPIPE", rank=0, world_size=1
"w", backend=BackendType, rank=0, world_size=1
"w", rank=0, world_size=1, rpc_backend_options=5
"w", rank=0, world_size=1, rpc_backend_options={}
"w", rank=0, world_size=1, rpc_backend_options="env://"
"w", rank=0, world_size=1, rpc_backend_options=Options
"w", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions()
"w", BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions()
"w", rank=0, world_size=1, rpc_backend_options=Options(rpc_timeout=5)
"w", rank=0, world_size=1, rpc_backend_options=Options(rpc_timeout=0)
"w", rank=0, world_size=1, rpc_backend_options=Options(rpc_timeout=-1)
"w", rank=0, world_size=1, rpc_backend_options=Options(rpc_timeout="5")
"w", rank=0, world_size=1, rpc_backend_options=Options(rpc_timeout=timedelta(seconds=5))
"w", rank=0, world_size=1, rpc_backend_options=Options(num_worker_threads=1)
"w", rank=0, world_size=1, rpc_backend_options=Options(num_worker_threads=0)
"w", rank=0, world_size=1, rpc_backend_options=Options(num_worker_threads=-1)
"w", rank=0, world_size=1, rpc_backend_options=Options(num_worker_threads="4")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="env://")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="bogus://x")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="bogus")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method=5)
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="tcp://127.0.0.1:0")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="tcp://127.0.0.1")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="tcp://127.0.0.1:99999")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="tcp://127.0.0.1:port")
"w", rank=0, rpc_backend_options=Options(init_method="tcp://127.0.0.1:0")
"w", world_size=1, rpc_backend_options=Options(init_method="tcp://127.0.0.1:0")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="file://")
"w", rank=0, world_size=1, rpc_backend_options=Options(init_method="file:///FOLDER/a")
"w", rank=0, rpc_backend_options=Options(init_method="file:///FOLDER/b")
"w", rank=0, world_size=1, rpc_backend_options=Options(devices=[0])
"w", rank=0, world_size=1, rpc_backend_options=Options(devices=["cpu"])
"w", rank=0, world_size=1, rpc_backend_options=Options(devices=["cuda:0"])
"w", rank=0, world_size=1, rpc_backend_options=Options(devices=5)
"w", rank=0, world_size=1, rpc_backend_options=Options(device_maps={"w": {"cpu": "cpu"}})
"w", rank=0, world_size=1, rpc_backend_options=Options(device_maps={"nobody": {0: 0}})
"w", rank=0, world_size=1, rpc_backend_options=Options(device_maps={"w": {0: 0}})
"w", rank=0, world_size=1, rpc_backend_options=Options(device_maps=5)
"w", rank=0, world_size=1, rpc_backend_options=Options(_transports=["bogus"])
"w", rank=0, world_size=1, rpc_backend_options=Options(_channels=["bogus"])
"w", rank=0, world_size=1, rpc_backend_options=Options(_transports=["uv"])
"w", rank=0, world_size=1, nonsense=1
"w", None, 0, 1, None, None
""".strip("\n").split("\n")
_CALLS = [f"rpc.init_rpc({one})" for one in _ARGUMENTS] + [
    "rpc.init_rpc('w', rank=0, world_size=1); rpc.init_rpc('w', rank=0, world_size=1)",
    "rpc.shutdown()",
    "rpc.init_rpc('w', rank=0, world_size=1); rpc.shutdown(graceful='no')",
    "rpc.init_rpc('w', rank=0, world_size=1); rpc.shutdown(timeout='x')",
    "rpc.init_rpc('w', rank=0, world_size=1); rpc.get_worker_info('nobody')",
    "rpc.init_rpc('w', rank=0, world_size=1); rpc.get_worker_info(5)",
    "rpc.get_worker_info()",
]


@pytest.fixture(scope="module")
def ends(waiting_host_server, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Return the outcome of each call in a plain process and on a rank."""
    from ddp_notebook import api

    folder = str(tmp_path_factory.mktemp("files"))
    calls = [one.replace("/FOLDER", folder) for one in _CALLS]
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    plain = subprocess.run(
        [sys.executable, "-c", _HEAD + _PLAIN],
        env={**os.environ, **of_torchrun, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=100,
    )
    said: list[Any] = [
        json.loads(line.removeprefix("ended ")) for line in plain.stdout.splitlines() if line.startswith("ended ")
    ]
    assert len(said) == len(calls), plain.stderr[-1000:]
    waiting_host_server()
    with api.start(1) as session:
        loop = f"_ended = []\nfor _call in json.loads({json.dumps(calls)!r}): _ended.append(_ends(_call))"
        result = session.run(f"{_HEAD}{loop}\njson.dumps(_ended)", timeout_s=120)
        on_rank = json.loads(ast.literal_eval(result[0].result or ""))
    return dict(zip(_CALLS, zip(said, on_rank, strict=True), strict=True))


# torch waits for workers that do not exist; a rank gives the reason at once. In a session a timeout of 0 means an
# unlimited wait, as torch documents it.
_DIFFER = {
    "it waits": "RuntimeError",
    "DistStoreError": "",
}


@pytest.mark.long
def test_a_rank_refuses_what_torch_refuses(ends):
    wrong = {}
    for call, (plain, on_rank) in ends.items():
        plain_type, rank_type = plain.partition(":")[0], on_rank.partition(":")[0]
        if rank_type not in (plain_type, _DIFFER.get(plain_type)):
            wrong[call] = plain[:300], on_rank[:300]
    assert not wrong


@pytest.mark.long
def test_the_table_has_accepted_and_refused_calls(ends):
    accepted = [call for call, (plain, _) in ends.items() if not plain]
    assert 20 < len(accepted) < len(ends) - 50
