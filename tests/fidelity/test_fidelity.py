"""One program on bare ranks and in a cell, with all defaults: torch and Python report the same about it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # a run on bare ranks and one in a cell

_PROGRAM = Path(__file__).with_name("program.py")
_ASKED = [
    "profile: collectives",
    "profile: training",
    "profile of all threads: collectives",
    "profile of all threads: training",
    "autograd's profile",
    "execution trace",
    "mode: Functions",
    "mode: Operators",
    "statistics: DDP",
    "statistics: DDP with a static graph",
    "statistics: a comm hook",
    "hooks",
    "groups",
    "flight recorder: _dump_fr_trace",
    "flight recorder: _dump_fr_trace_json",
    "warnings",
    "lines of warnings",
    "filters of warnings",
    "logging before",
    "logging",
]


@pytest.fixture(scope="module")
def told(session: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the reports of each rank: on bare ranks, and in a cell."""
    cell = session.run(_PROGRAM.read_text(), quiet=True, timeout_s=120)
    return [(_read(alone), _read(cell[rank].stdout)) for rank, alone in enumerate(_on_bare_ranks())]


def _on_bare_ranks() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            env={**os.environ, **place, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error[-3000:] for _, error in said)
    return [text for text, _ in said]


def _read(stdout: str) -> dict[str, Any]:
    (line,) = [line for line in stdout.splitlines() if line.startswith("shown: ")]
    return dict(json.loads(line.removeprefix("shown: ")))


@pytest.mark.parametrize("asked", _ASKED)
def test_a_cell_is_told_what_a_bare_rank_is_told(told, asked):
    for alone, cell in told:
        assert _without_gloo(cell[asked]) == _without_gloo(alone[asked])


@pytest.mark.parametrize("asked", [asked for asked in _ASKED if "profile" in asked or "execution" in asked])
def test_a_cell_is_told_of_as_many_operations_of_gloo(told, asked):
    """Except for the last one, which its thread may end after the profile, on bare ranks too."""
    for alone, cell in told:
        assert set(cell[asked]) == set(alone[asked])
        for name in set(cell[asked]) - set(_without_gloo(cell[asked])):
            assert abs(cell[asked][name][0] - alone[asked][name][0]) <= 1, name


def _without_gloo(told: Any) -> Any:
    """Remove the counted operations that gloo's threads end."""
    if not isinstance(told, dict):
        return told
    return {name: count for name, count in told.items() if not name.startswith("gloo:")}


def test_everything_that_the_program_asks_is_compared(told):
    assert set(_ASKED) == set(told[0][0]) == set(told[0][1])


def test_the_program_is_told_something(told):
    """Two empty reports would be equal."""
    for alone, _ in told:
        assert alone["profile: collectives"]["gloo:all_reduce"][0] >= 5
        assert alone["execution trace"]["gloo:all_reduce"][0] >= 5
        assert alone["lines of warnings"] == [True]
        assert alone["mode: Operators"]["c10d.allreduce_.default"] >= 5
        assert alone["statistics: DDP"][-1]["backward_comm_time"] is True
        assert alone["logging"][0] == "mine DEBUG hello"
        assert ["gloo:all_reduce", ["0", "default_pg"], 5] in alone["flight recorder: _dump_fr_trace"]
