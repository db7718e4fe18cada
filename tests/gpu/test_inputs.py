"""Every operation with every kind of tensor on GPUs, with NCCL alone and on ranks.

These tests have not been run yet: no machine with GPUs was available. The recorded results of gloo are no expectation
here. Each test prints the pairs that torch alone computes wrongly and that ranks do not refuse, which is the list that
NCCL needs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.errors import RankError
from tests.gpu.test_nccl import start
from tests.inputs.cases import OPERATIONS, is_defined

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.timeout(3000)]

_ROOT = Path(__file__).parents[2]
# Operations that NCCL has. Objects and lazy bits are moved by torch itself.
_NAMES = [name for name, one in OPERATIONS.items() if not one.is_object and name != "all_reduce_coalesced"]
_KINDS = ("column", "transposed_1", "channels_last_1", "expanded", "overlapping", "twice", "in_place", "shifted")
_CELL = """
torch.set_default_device(device)
from tests.inputs.cases import attempt
verdict, words = attempt({name!r}, {role!r}, {kind!r}, False, rank)
torch.cuda.synchronize()
assert verdict != "error", words
verdict, words
"""


def test_every_pair_with_nccl_alone(gpus, record_property):
    """Processes that die, so that they cannot be forked from this one, which must not use CUDA."""
    if len(gpus) < 2:
        pytest.skip("NCCL needs a GPU for each of two processes")
    command = [sys.executable, "-m", "tests.inputs.matrix", "--backend", "nccl"]
    ran = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=2800)
    assert ran.returncode == 0, ran.stderr[-2000:]
    wrong = [line for line in ran.stdout.splitlines() if " wrong " in line or " memory " in line]
    record_property("wrong with NCCL alone", len(wrong))
    print("\n".join(wrong))


@pytest.mark.parametrize("kind", _KINDS)
def test_nothing_wrong_passes_on_ranks(gpus, waiting_host_server, kind):
    """Computed wrongly means: without an error of torch or of the guard."""
    waiting_host_server()
    wrong = []
    with start(gpus, guard=True, grace_s=0.5) as session:
        for name in _NAMES:
            for role in ("input", "output") if OPERATIONS[name].outputs else ("tensor",):
                if not is_defined(name, role, kind):
                    continue
                try:
                    code = _CELL.format(name=name, role=role, kind=kind)
                    results = session.run(code, timeout_s=60, quiet=True)
                    wrong += [(name, role, one.result) for one in results.values() if "right" not in str(one.result)]
                except RankError as error:
                    print(name, role, kind, str(error).splitlines()[0])
    assert wrong == []
