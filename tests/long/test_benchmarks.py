"""Each benchmark runs in a short form. Its figures are not compared with limits: the machine may be busy."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

_SHORT: dict[str, dict[str, Any]] = {
    "cell": {"blocks": 1, "per_block": 5},
    "cold": {"blocks": 2},
    "collective": {"blocks": 2},
    "hosts": {"rounds": 1},
    "intake": {"seconds": 2},
    "jobs": {"rounds": 1},
    "kept": {"blocks": 2, "per_block": 5, "rounds": 1},
    "many": {"sizes": (64,), "seconds": 2, "questions": 3},
    "monitor": {"seconds": 3},
    "output": {"seconds": 3, "delays": 3},
    "pipelines": {"blocks": 1},
    "recording": {"blocks": 2, "seconds": 2},
    "rpc": {},
    "scale": {"rounds": 1, "per_block": 3},
    "start": {"rounds": 1},
    "survive": {"blocks": 2},
    "values": {},
}
_NEEDS_OTHER_HOSTS = ("hosts", "jobs")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", _SHORT)
def test_a_benchmark_runs(name):
    figures = importlib.import_module(f"tests.benchmarks.{name}").measure(**_SHORT[name])
    if not figures and name in _NEEDS_OTHER_HOSTS:
        pytest.skip("needs sshd, network namespaces or Slurm")
    assert figures
    for figure in figures:
        assert figure.what  # a count has no unit
        assert math.isfinite(figure.value), figure
