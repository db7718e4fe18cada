"""Programs of libraries and of torch, in a cell and under torchrun, twice in one session and on every rank.

The losses and all other numbers that a program prints are bit-identical.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

_PROGRAMS = Path(__file__).parent / "programs"
_WORLD_SIZE = 4
_FIGURE = re.compile(r"-?0x[\d.a-f]+p[+-]\d+")  # output of the programs: floats by `float.hex`
_OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def session():
    """Start four CPU ranks with the same number of threads as those of torchrun."""
    from ddp_notebook import api

    with api.start(_WORLD_SIZE, env=_OFFLINE) as running:
        yield running


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("accelerate", "MULTI_CPU {rank} of 4"),
        ("lightning", "DDPStrategy {rank} of 4"),
        ("transformers", "distributed {rank} of 4"),
        ("torchmetrics", ""),
    ],
)
def test_a_program_with_a_library(session, tmp_path, library, says):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make test-long` installs it: pip install -e '.[libraries]'")
    _expect_the_same(session, _PROGRAMS / f"with_{library}.py", tmp_path, says)


@pytest.mark.parametrize("name", ["pipeline", "checkpoint", "uneven_inputs", "tensor_parallel"])
def test_a_program_with_what_torch_has(session, tmp_path, name):
    _expect_the_same(session, _PROGRAMS / f"torch_{name}.py", tmp_path)


def _expect_the_same(session, program: Path, directory: Path, says: str = "") -> None:
    expected = _under_torchrun(program, directory)
    assert all(len(figures) >= 3 for figures in expected), expected
    for _ in range(2):
        result = session.run(program.read_text(), quiet=True, timeout_s=300)
        for rank in range(_WORLD_SIZE):
            assert says.format(rank=rank) in result[rank].stdout
            assert _FIGURE.findall(result[rank].stdout) == expected[rank], (program.name, rank)


def _under_torchrun(program: Path, directory: Path) -> list[list[str]]:
    """Return the numbers that each rank prints."""
    launcher = "torch.distributed.run"
    options = ["--standalone", f"--nproc-per-node={_WORLD_SIZE}", f"--log-dir={directory}", "--redirects=3"]
    environment = {**os.environ, **_OFFLINE, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-m", launcher, *options, str(program)],
        env=environment, timeout=300, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = {int(file.parent.name): file.read_text() for file in directory.glob("*/attempt_0/*/stdout.log")}
    return [_FIGURE.findall(texts[rank]) for rank in range(_WORLD_SIZE)]
