"""Programs with the calls of PyTorch's RPC tutorials, run twice in one session.

The losses, gradients and parameters of each rank are bit-identical to those of bare processes.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddp_notebook.errors import RankError

_PROGRAMS = Path(__file__).parent / "programs"
_ADDRESSES = "29500", "29501"  # ports that the programs use
_FIGURE = re.compile(r"-?0x[\d.a-f]+p[+-]\d+")  # output of the programs: floats by `float.hex`
# The processes are forks, so that torch is imported once. They end together: torch's `shutdown` fails on a rank that is
# still in it when rank 0, which has the store, ends.
_BARE = """
import os, {name} as program, torch.multiprocessing as mp
ends = mp.get_context("fork").Barrier({workers})
def run_worker(rank, world_size):
    os.dup2(os.open(f"{{rank}}.txt", os.O_CREAT | os.O_WRONLY), 1)
    program.run_worker(rank, world_size)
    ends.wait()
mp.start_processes(run_worker, args=({workers},), nprocs={workers}, start_method="fork")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("agent_and_observers", 3),
        ("ddp_with_rpc", 4),
        ("batched_updates", 3),
        ("parameter_server", 3),
        ("pipeline", 3),
        ("rnn_in_two", 2),
    ],
)
def test_a_program_has_the_outcome_of_bare_processes(make_session, tmp_path, name, workers):
    text = (_PROGRAMS / f"{name}.py").read_text()
    expected = _of_bare_processes(text, name, workers, tmp_path)
    assert sum(map(len, expected)) >= 8, expected
    session = make_session(workers)
    pasted = text.partition("\nif __name__")[0] + "\nrun_worker(rank, world_size)"
    for _ in range(2):
        result = session.run(pasted, timeout_s=120)
        assert [_FIGURE.findall(result[rank].stdout) for rank in range(workers)] == expected


@pytest.mark.long
def test_a_program_pasted_with_its_spawn_is_told_what_to_call(make_session):
    session = make_session(2)
    with pytest.raises(RankError, match=r"The ranks exist already: call run_worker\(dist.get_rank\(\), ...\) in"):
        session.run((_PROGRAMS / "rnn_in_two.py").read_text())


def _of_bare_processes(text: str, name: str, workers: int, directory: Path) -> list[list[str]]:
    """Return the numbers that each process prints."""
    with ExitStack() as stack:
        for address in _ADDRESSES:
            free = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            text = text.replace(address, str(free.getsockname()[1]))
    (directory / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", _BARE.format(name=name, workers=workers)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=directory, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [_FIGURE.findall((directory / f"{rank}.txt").read_text()) for rank in range(workers)]
