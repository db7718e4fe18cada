"""`torch.distributed.rpc` behaves the same on ranks as in plain processes: outcomes, names, profiles."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rpc.cases import LONG, QUICK

_FOLDER = Path(__file__).parent
_PLAIN = """
import json, os, sys, torch.multiprocessing as mp
sys.path.insert(0, {folder!r})
import cases, observed
from torch.distributed import rpc
sys.modules["__main__"].__dict__.update((name, value) for name, value in vars(observed).items() if name[:2] != "__")
ends = mp.get_context("fork").Barrier(2)
def run(rank):
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2)
    found = observed.observe(rank, cases.{cases})
    ends.wait()
    if rank == 0:
        print("shown: " + json.dumps(found), flush=True)
    os._exit(0)  # torch's shutdown waits a minute for calls that never return
mp.start_processes(run, nprocs=2, start_method="fork")
"""
_CELL = """
import json
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
found = observe(rank, __cases__)
dist.barrier()
if rank == 0: print("shown: " + json.dumps(found))
"""


Outcomes = tuple[dict[str, str], dict[str, str]]  # the outcomes in plain processes and on ranks


@pytest.fixture(scope="module")
def quick(waiting_host_server) -> Outcomes:
    return _plain("QUICK"), _on_ranks("QUICK", waiting_host_server)


@pytest.fixture(scope="module")
def every(waiting_host_server) -> Outcomes:
    return _plain("LONG"), _on_ranks("LONG", waiting_host_server)


def _plain(cases: str) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN.format(folder=str(_FOLDER), cases=cases)],
        env={**os.environ, **place}, timeout=150, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return _read(done.stdout)


def _on_ranks(cases: str, waiting_host_server: Any) -> dict[str, str]:
    from ddp_notebook import api

    waiting_host_server()
    with api.start(2) as session:
        session.run((_FOLDER / "cases.py").read_text() + (_FOLDER / "observed.py").read_text(), quiet=True)
        return _read(session.run(_CELL.replace("__cases__", cases), timeout_s=150, quiet=True)[0].stdout)


def _read(stdout: str) -> dict[str, Any]:
    (line,) = [line for line in stdout.splitlines() if line.startswith("shown: ")]
    return dict(json.loads(line.removeprefix("shown: ")))


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_a_program_sees_the_same(quick, name):
    plain, on_ranks = quick
    assert on_ranks[name] == plain[name]


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_a_program_sees_the_same_in_every_case(every, name):
    plain, on_ranks = every
    assert on_ranks[name] == plain[name]
