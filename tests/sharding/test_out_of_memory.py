"""Facts about out-of-memory errors: on a rank, and as the answer of `%ddp_memory --why`."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

import ddp_notebook
from ddp_notebook.errors import RankDiedError, RankError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.memory_growth import growing_alone, growth_of
from ddp_notebook.rank.sharding import out_of_memory
from ddp_notebook.records.schema import RESOURCE, Rows
from ddp_notebook.run.sharding.out_of_memory import OutOfMemory, asked, explained, why_of_file
from ddp_notebook.widgets import simulate as simulate_ranks
from tests.observe.synthetic import Synthetic, simulate

GB, S = 10**9, 10**9


def _failed(function: Any) -> BaseException:
    try:
        function()
    except (RuntimeError, MemoryError) as error:
        return error
    raise AssertionError("nothing was raised")


def _facts(error: BaseException, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(out_of_memory, "_last", None)
    out_of_memory.note(error, namespace, lambda traceback: "cell line 3")
    return out_of_memory.told()["last"]


def test_the_parts_of_the_memory_are_counted(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 50, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(10, 100)).sum().backward()
    optimizer.step()
    data = torch.zeros(1000)

    def step() -> None:
        hidden = model(torch.randn(1000, 100)).square()
        torch.empty(1 << 60)
        del hidden

    found = _facts(_failed(step), {"model": model, "optimizer": optimizer, "data": data}, monkeypatch)
    weights = 4 * (100 * 200 + 200 + 200 * 50)
    assert (found["parameters"], found["gradients"]) == (weights, weights)
    assert 2 * weights <= found["optimizer_state"] <= 2 * weights + 100
    assert found["activations"] == {"model.2": 4 * 1000 * (200 + 50), "model.0": 4 * 1000 * 100}
    assert found["variables"] == {"data": 4000} and found["requested"] == 4 << 60
    assert found["site"] == "cell line 3" and 0 < found["rss"] <= found["peak_rss"]


def test_the_module_that_failed_is_named(monkeypatch):
    class Large(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(1 << 60)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Large())
    assert _facts(_failed(lambda: model(torch.ones(1, 2))), {"net": model}, monkeypatch)["module"] == "net.1"


def test_hooks_of_saved_tensors_are_not_called(monkeypatch):
    model, unpacked = torch.nn.Linear(10, 10), []

    def unpack(packed: Any) -> torch.Tensor:
        unpacked.append(packed)
        return torch.as_tensor(packed)

    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().numpy(), unpack):
        out = model(torch.randn(5, 10))
    found = _facts(MemoryError(), {"model": model, "out": out}, monkeypatch)
    assert unpacked == [] and found["activations"] == {} and found["requested"] == -1


def test_other_errors_leave_no_facts(monkeypatch):
    assert _facts(ValueError("tried to allocate 4 bytes"), {}, monkeypatch) == {}
    assert _facts(RuntimeError("shape mismatch"), {}, monkeypatch) == {}


# ---- growth


def _rows(*memory: list[float]) -> Rows:
    """Return rows with the memory of each rank in GB, one per second."""
    rows = np.zeros(sum(map(len, memory)), RESOURCE)
    rows["rank"] = np.concatenate([np.full(len(own), rank) for rank, own in enumerate(memory)])
    rows["time_ns"] = np.concatenate([np.arange(len(own)) * S for own in memory])
    rows["rss_bytes"] = (np.concatenate(memory) * GB).astype(np.int64)
    return rows


def test_the_growth_begins_after_the_last_low_sample():
    found = growth_of(_rows([1, 1, 1, 1.02, 3, 5, 5.5, 2]), 0)
    assert found is not None
    assert (found.begin_ns, found.end_ns, found.before, found.most) == (3 * S, 6 * S, 1_020_000_000, 5_500_000_000)
    assert str(found) == "from 1.0 GB to 5.5 GB in 3.00 s"
    assert growth_of(_rows([1, 1, 1.01]), 0) is None and growth_of(_rows([1]), 0) is None


def test_only_a_rank_that_grows_alone_is_named():
    rising, flat = [1 + 0.05 * k for k in range(20)], [1.0] * 20
    alone = growing_alone(_rows(flat, rising))
    assert alone is not None and alone.rank == 1
    assert growing_alone(_rows(rising, rising)) is None, "both grow"
    assert growing_alone(_rows(flat, [1.0] * 10 + [2.0] * 10)) is None, "it grew once"
    assert growing_alone(_rows(flat, [1 + 0.001 * k for k in range(20)])) is None, "19 MB"
    assert growing_alone(_rows(flat[:5], rising[:5])) is None, "too few samples"
    assert growing_alone(_rows(rising)) is None, "there is no other rank"


# ---- the answer

_FACTS = {
    "cell": 1,
    "site": "cell line 3",
    "module": "model.1",
    "requested": 2 * GB,
    "activations": {"model.0": 3 * GB, "": GB},
    "variables": {"kept": GB},
    **dict.fromkeys(("parameters", "gradients"), GB),
    "buffers": 0,
    "optimizer_state": 2 * GB,
    "rss": 9 * GB,
    "peak_rss": 9 * GB,
    "limit": (GB, 9 * GB, 10 * GB, "address space, RLIMIT_AS"),
    "gpu": None,
}


def test_the_answer_names_rank_line_parts_and_growth():
    now = {rank: {"limit": (8 * GB, 2 * GB, 10 * GB, "data")} for rank in range(2)}
    recording = Synthetic(world_size=2)
    recording.span(1, "cell", "In [1]", 0, 3 * S, cell=1)
    lines = str(explained(recording, {1: _FACTS}, now, _rows([1, 1, 1], [1, 1, 9]))).splitlines()
    assert lines[0] == (
        "Rank 1 ran out of memory in In [1], cell line 3, in model.1: it requested 2.0 GB when 9.0 GB of 10 GB were in "
        "use (address space, RLIMIT_AS). At most 1.0 GB would have fitted, 50 % of the request."
    )
    assert lines[2].split() == [
        *("parameters", "gradients", "optimizer", "state", "activations", "variables", "resident", "peak")
    ]
    cells = "rank 1|1.0 GB|1.0 GB|2.0 GB|4.0 GB|1.0 GB|9.0 GB|9.0 GB"
    assert re.sub(" {2,}", "|", lines[3]) == cells
    assert lines[5:] == [
        "Activations of rank 1: model.0 3.0 GB, no module 1.0 GB.",
        "Other tensors and arrays in variables of rank 1: kept 1.0 GB.",
        "The resident memory of rank 1 grew from 1.0 GB to 9.0 GB in 1.00 s.",
        "Near the limit: rank 1 90 %; not: rank 0.",
        "Other processes of the host use 0 B.",
    ]


def test_the_answer_names_the_cell_by_its_prompt():
    recording = Recording(2)
    recording.prompts[1] = "In [7]"
    text = str(explained(recording, {1: _FACTS}, {}, _rows([1])))
    assert text.startswith("Rank 1 ran out of memory in In [7], cell line 3, in model.1: it requested")


def test_the_peak_includes_the_samples():
    recording = Synthetic(world_size=2)
    recording.span(1, "cell", "In [1]", 0, 3 * S, cell=1)
    lines = str(explained(recording, {1: _FACTS}, {}, _rows([1, 1, 1], [1, 1, 9.5]))).splitlines()
    assert "from 1.0 GB to 9.5 GB" in "".join(lines) and lines[3].endswith("9.0 GB  9.5 GB")


def test_tensors_in_attributes_of_modules_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].__dict__["kept"] = [torch.ones(1000)]
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert out_of_memory._variables({"model": model, "x": torch.ones(10)}, known) == {"model.0.kept": 4000, "x": 40}


def test_growth_of_other_cells_is_not_reported():
    recording = Synthetic(world_size=2)
    recording.span(1, "cell", "In [1]", 0, 2 * S, cell=1)
    recording.span(1, "optimizer", "SGD", 0, S, cell=1)
    recording.span(1, "cell", "In [2]", 3 * S, 6 * S, cell=2)
    rows = _rows([1], [1, 5, 5, 5, 5, 7, 7])
    of_cell = {cell: explained(recording, {1: _FACTS | {"cell": cell}}, {}, rows) for cell in (1, 2, 3)}
    assert "grew from 1.0 GB to 5.0 GB in 1.00 s, from step 0 on." in str(of_cell[1])
    assert "grew from 5.0 GB to 7.0 GB in 1.00 s." in str(of_cell[2]), "cell 2 had no step"
    assert "grew" not in str(of_cell[3]), "the cell is not known"


def test_a_request_as_large_as_the_rest_is_not_compared():
    facts = _FACTS | {"requested": 40_000_000, "limit": (39_950_000, 9 * GB, 10 * GB, "data")}
    text = str(explained(Synthetic(world_size=2), {1: facts}, {}, _rows([1])))
    assert "would have fitted" not in text and "it requested 40 MB when 9.0 GB of 10 GB were in use" in text


def test_the_answer_has_the_parts_of_a_gpu():
    gpu = {"total": 80 * GB, "reserved": 60 * GB, "others": 15 * GB, "free": 5 * GB, "allocated": 50 * GB}
    found = str(explained(simulate(world_size=2), {0: _FACTS | {"gpu": gpu, "limit": None}}, {}, _rows([1])))
    assert "The GPU has 80 GB: 60 GB are reserved by the rank, 15 GB are used by other processes, and 5.0 GB" in found


def _why(session: Any) -> OutOfMemory:
    return asked(session)


_LEAKS = """
import resource
model = torch.nn.Linear(1000, 1000)
kept, before = [], resource.getrlimit(resource.RLIMIT_AS)
if rank == 1:
    used = int(next(one for one in open("/proc/self/status") if one.startswith("VmSize")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), before[1]))
    while True:
        kept.append(model(torch.randn(10_000, 1000)))
"""


def test_a_rank_that_ran_out_of_memory_is_explained(make_session, tmp_path):
    session = make_session(2)
    assert str(_why(session)).startswith("No rank has had an out-of-memory error since its start.")
    with pytest.raises(RankError, match="allocate"):
        session.run(_LEAKS)
    found = _why(session)
    path = session.recording.save(tmp_path / "run.npz")
    session.run("resource.setrlimit(resource.RLIMIT_AS, before); del kept, model")
    assert list(found.last) == [1] and found.last[1]["requested"] == 40_000_000
    assert found.last[1]["activations"]["model"] >= 80_000_000 and found.last[1]["parameters"] == 4_004_000
    text = str(found)
    assert text.startswith("Rank 1 ran out of memory in cell line 9") and "(address space, RLIMIT_AS)" in text
    assert "Near the limit: rank 1 " in text and "; not: rank 0." in text
    saved = why_of_file(str(path))
    assert saved.last[1] == json.loads(json.dumps(found.last[1])) and list(saved.last) == [1]
    assert str(saved).splitlines()[0] == text.splitlines()[0] and "Near the limit: rank 1 " in str(saved)
    (sentence,) = (one for lines in ddp_notebook.load(path).findings.values() for one in lines)
    assert sentence.startswith("Rank 1 ran out of memory in cell line 9")
    nothing = why_of_file(str(simulate_ranks(world_size=2, steps=4).save(tmp_path / "none.npz")))
    assert str(nothing).startswith("No rank has had an out-of-memory error in this recording.")


_FAILS = """
import numpy, resource
from torch.utils.data import DataLoader
kept, before = [], resource.getrlimit(resource.RLIMIT_AS)

class Large:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return numpy.ones(2_500_000_000, numpy.uint8)

def limit(nbytes):
    used = int(next(one for one in open("/proc/self/status") if one.startswith("VmSize")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
"""


def test_each_way_to_run_out_of_memory(make_session):
    """A worker, a wrapped error of NumPy, a backward that frees memory while it fails, and a dead rank."""
    session = make_session(2)
    session.run(_FAILS)

    def why_of(code: str) -> str:
        with pytest.raises(RankError):
            session.run(code)
        session.run("resource.setrlimit(resource.RLIMIT_AS, before); kept.clear()")
        return str(asked(session))

    text = why_of("if rank == 1:\n    limit(1 << 30)\n    next(iter(DataLoader(Large(), num_workers=1)))")
    assert text.startswith("Worker 0 of a data loader of rank 1 ran out of memory: it requested 2.5 GB. The rank got")
    assert "Workers inherit the limit of their rank: " in text and "Near the limit" not in text

    array = "numpy.ones((250_000, 100_000), numpy.uint8)"
    text = why_of(f"""
kept = [numpy.ones(30_000_000, numpy.uint8)]
if rank == 0:
    limit(200 << 20)
    try:
        {array}
    except MemoryError as error:
        raise RuntimeError("no data") from error
""")
    first, *others = text.splitlines()
    assert first.startswith("Rank 0 ran out of memory in cell line 6, in ones: it requested 25 GB when "), first
    assert "Other tensors and arrays in variables of rank 0: kept 30 MB." in others
    assert any(one.startswith("Rank 1 ran out of memory before that, in cell ") for one in others)

    text = why_of("""
x = torch.ones(10_000_000, requires_grad=True)
y = x.sin().sin().sum()
if rank == 1:
    limit(20 << 20)
    y.backward()
""")
    assert re.match(r"Rank 1 ran out of memory in cell line 6, in backward: it requested 40 MB(\.| when)", text), text

    with pytest.raises(RankDiedError):
        session.run("import os, signal, time\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1)")
    first = str(asked(session)).splitlines()[0]
    assert first.startswith("Rank 1 died: killed by SIGKILL") and " of resident memory, and " in first


def test_an_error_of_a_gpu_is_compared_with_the_gpu():
    gpu = {"total": 80 * GB, "reserved": 60 * GB, "others": 15 * GB, "free": 5 * GB, "allocated": 50 * GB}
    found = str(explained(simulate(world_size=2), {0: _FACTS | {"gpu": gpu, "is_of_gpu": True}}, {}, _rows([1])))
    assert found.splitlines()[0].startswith(
        "Rank 0 ran out of memory in cell line 3, in model.1: it requested 2.0 GB. The GPU"
    )
    assert "RLIMIT_AS" not in found and "Near the limit: rank 0 94 %" in found


_GROWS = """
import time
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    if rank in {leaking}:
        kept.append(torch.ones(4_000_000))
    if step % {kept} == 0:
        kept.clear()
    time.sleep(0.5)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("leaking", "kept", "count"),
    [([1], 1000, 1), ([0, 1], 1000, 0), ([], 1000, 0), ([1], 8, 0)],
    ids=["one rank", "all ranks", "no rank", "a list that is freed"],
)
def test_growth_of_one_rank_is_reported_once_while_the_cell_runs(session, capsys, leaking, kept, count):
    session.run(_GROWS.format(steps=70, leaking=leaking, kept=kept))
    session.run("del kept")
    told = capsys.readouterr().err.count("the resident memory of rank 1 alone grows: from ")
    assert told == count
