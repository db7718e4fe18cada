"""`%ddp_memory --why` after an out-of-memory error of a GPU. Not run yet: no GPU was available."""

from __future__ import annotations

import pytest

import ddp_notebook
from ddp_notebook.errors import RankError
from ddp_notebook.run.sharding.out_of_memory import asked, why_of_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_FILLS = """
model = torch.nn.Linear(1024, 1024, device=device)
kept = []
if rank == 0:
    while True:
        kept.append(model(torch.randn(1 << 17, 1024, device=device)))
"""


def test_a_full_gpu_is_explained():
    with ddp_notebook.start() as session:
        with pytest.raises(RankError, match="out of memory"):
            session.run(_FILLS)
        found = asked(session)
        session.run("del kept, model; torch.cuda.empty_cache()")
    facts = found.last[0]
    assert facts["requested"] > 0 and facts["activations"]["model"] > 1 << 29
    assert 0 <= facts["gpu"]["free"] < facts["gpu"]["total"]
    assert "The GPU has " in str(found)


def test_the_lines_that_allocated_the_memory_are_named(tmp_path):
    """The ring begins with the first cell that finds CUDA in use, so another cell uses it first."""
    with ddp_notebook.start() as session:
        session.run("torch.ones(1, device=device)")
        with pytest.raises(RankError, match="out of memory"):
            session.run(_FILLS)
        found = asked(session)
        saved = why_of_file(str(session.recording.save(tmp_path / "run.npz")))
        session.run("del kept, model; torch.cuda.empty_cache()")
    history = found.last[0]["history"]
    assert next(iter(history["lines"])).startswith("cell line 6"), "the line with most memory"
    assert history["failed"][0] == found.last[0]["requested"] and 0 < history["count"] <= 10_000
    assert {action for action, _, _ in history["events"]} >= {"alloc", "oom"}
    assert "GPU memory of rank 0 by the line that allocated it: cell line 6" in str(found)
    assert saved.last[0]["history"] == history


def test_a_history_that_the_program_began_is_kept():
    with ddp_notebook.start(1) as session:
        session.run("torch.cuda.memory._record_memory_history(max_entries=50)\nx = torch.ones(1, device=device)")
        session.run("y = [torch.ones(1, device=device) for _ in range(80)]")
        count = session.run("len(torch.cuda.memory._snapshot()['device_traces'][torch.cuda.current_device()])")
        session.run("torch.cuda.memory._record_memory_history(None)")
    assert count[0].result == "50"
