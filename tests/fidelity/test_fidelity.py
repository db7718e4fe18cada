"""One program on bare ranks and in a cell, with everything at its default: torch and Python tell the same of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    "filters of warnings",
    "logging before",
    "logging",
]


@pytest.fixture(scope="module")
def told(session: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each rank was told: by itself, and in a cell."""
    cell = session.run(_PROGRAM.read_text(), quiet=True, timeout=120)
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
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [text for text, _ in said]


def _read(stdout: str) -> dict[str, Any]:
    (line,) = [line for line in stdout.splitlines() if line.startswith("shown: ")]
    return dict(json.loads(line.removeprefix("shown: ")))


@pytest.mark.parametrize("asked", _ASKED)
def test_a_cell_is_told_what_a_bare_rank_is_told(told, asked):
    for alone, cell in told:
        assert cell[asked] == alone[asked]


def test_an_execution_trace_has_no_operation_that_a_profile_has_not(told):
    """The observer is stopped while gloo's thread may still end the last one: bare ranks miss it in some runs too."""
    for alone, cell in told:
        for name, count in cell["gloo's nodes"].items():
            profiles = [alone[f"profile: {what}"].get(name, [0])[0] for what in ("collectives", "training")]
            assert count <= sum(profiles), name


def test_everything_that_the_program_asks_is_compared(told):
    assert {*_ASKED, "gloo's nodes"} == set(told[0][0]) == set(told[0][1])


def test_the_program_is_told_something(told):
    """Or two empty answers would be equal."""
    for alone, _ in told:
        assert alone["profile: collectives"]["gloo:all_reduce"][0] >= 5
        assert alone["gloo's nodes"]["gloo:all_reduce"] >= 5
        assert alone["mode: Operators"]["c10d.allreduce_.default"] >= 5
        assert alone["statistics: DDP"][-1]["backward_comm_time"] is True
        assert alone["logging"][0] == "mine DEBUG hello"
        assert ["gloo:all_reduce", ["0", "default_pg"], 5] in alone["flight recorder: _dump_fr_trace"]
