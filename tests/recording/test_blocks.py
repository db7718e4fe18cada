"""Blocks that the user has named by `torch.profiler.record_function`: in the recording, and unchanged in torch's
profiles."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ddp_notebook.records.schema import SPANS


def blocks_of(session: Any, code: str) -> list[list[str]]:
    """Run a cell. Return the names of the recorded blocks of each rank, by their end."""
    session.run(code, quiet=True)
    spans = session.recording.rows("span")
    spans = spans[(spans["cell"] == spans["cell"].max()) & (spans["kind"] == SPANS.index("block"))]
    of_ranks = [spans[spans["rank"] == rank] for rank in range(session.world_size)]
    return [[session.recording.text(name) for name in own["name"][np.argsort(own["end_ns"])]] for own in of_ranks]


def test_blocks_of_the_users_are_recorded_and_torchs_own_are_not(session):
    code = """
from torch.profiler import record_function
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # its step is a block of torch's, and DDP's forward
@record_function("decorated")
def work():
    with record_function("inner"): return model(torch.ones(2, 4)).sum()
for _ in range(2):
    with record_function("outer"):
        work().backward()
    optimizer.step()
"""
    assert blocks_of(session, code) == [["inner", "decorated", "outer"] * 2] * 2


def test_an_error_and_an_interrupted_block_leave_nothing_open(session):
    code = """
try:
    with record_function("fails"): raise ValueError
except ValueError: pass
record_function("never left").__enter__()
with record_function("later"): pass
"""
    assert blocks_of(session, code) == [["fails", "later"]] * 2
    assert blocks_of(session, "with record_function('next'): pass") == [["next"]] * 2


def test_they_are_in_the_report_and_in_the_trace(session, tmp_path):
    session.run(
        "import time\nfor _ in range(6):\n    with record_function('load'): time.sleep(0.02)\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step()",
        quiet=True,
    )
    (note,) = [note for note in session.recording.report().notes if note.startswith("Named blocks")]
    assert note.startswith("Named blocks of a step: load 2")
    trace = json.loads(session.recording.save_trace(tmp_path / "run.json").read_text())
    assert any(event.get("cat") == "block" and event["name"] == "load" for event in trace["traceEvents"])


@pytest.mark.parametrize(
    "code", ["torch.jit.script(scripted)", "torch.compile(scripted, backend='eager', fullgraph=True)"]
)
def test_scripted_and_compiled_functions_may_have_them(session, code):
    """torch compiles the methods of a block, or knows its class."""
    session.run(
        f"""
import importlib.util, os, tempfile
source = '''
import torch
def scripted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("inside"):
        return x + 1
'''
folder = tempfile.mkdtemp()
path = os.path.join(folder, "with_block.py")
open(path, "w").write(source)
spec = importlib.util.spec_from_file_location("with_block", path)
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
scripted = module.scripted
assert {code}(torch.zeros(1)).item() == 1
import shutil; shutil.rmtree(folder)
""",
        quiet=True,
    )


def test_a_profile_of_torchs_has_them_as_ever(session):
    session.run(
        """
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU]) as seen:
    with record_function("mine"): torch.ones(3) + 1
counts = {event.key: event.count for event in seen.key_averages()}
assert counts["mine"] == 1 and counts["aten::add"] == 1, counts
""",
        quiet=True,
    )
