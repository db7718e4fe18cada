"""Summary of an allocator snapshot, with the structure that torch documents for `_snapshot`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ddp_notebook.rank import gpu
from ddp_notebook.rank.sharding.allocator_history import AllocatorHistory, summary
from ddp_notebook.run.sharding.out_of_memory import explained
from tests.observe.synthetic import Synthetic
from tests.sharding.test_out_of_memory import _FACTS, GB, _rows

_TORCH = {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 116, "name": "forward"}
_MODEL = {"filename": "/home/model.py", "line": 12, "name": "forward"}
_CELL = {"filename": "cell", "line": 6, "name": "<module>"}


def _place(calls: list[tuple[str, int, str]]) -> str:
    """Return the innermost line outside of torch, as a rank does."""
    return next((f"{file} line {line}" for file, line, _ in calls if "site-packages" not in file), "")


def _block(size: int, frames: list[Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"size": size + 100, "requested_size": size, "address": 1, "state": state, "frames": frames}


def _event(action: str, size: int, frames: list[Any], **more: Any) -> dict[str, Any]:
    return {"action": action, "size": size, "stream": 0, "frames": frames, **more}


def _segment(device: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": device,
        "address": 1,
        "total_size": 1,
        "stream": 0,
        "segment_type": "large",
        "blocks": list(blocks),
    }


_SNAPSHOT = {
    "segments": [
        _segment(
            0, _block(3 * GB, [_TORCH, _CELL]), _block(GB, [_TORCH, _MODEL, _CELL]), _block(9 * GB, [], "inactive")
        ),
        _segment(0, _block(2 * GB, [_TORCH, _MODEL, _CELL]), _block(5, [_TORCH])),
        _segment(1, _block(70 * GB, [_CELL])),
    ],
    "device_traces": [
        [
            *(_event("alloc", number, [_TORCH, _CELL]) for number in range(500)),
            _event("oom", 8 * GB, [_TORCH, _MODEL, _CELL], device_free=GB),
            _event("snapshot", 0, []),
        ],
        [],
    ],
}


def test_the_summary_of_a_snapshot():
    found = summary(_SNAPSHOT, 0, _place)
    assert found["lines"] == {"cell line 6": 3 * GB, "/home/model.py line 12": 3 * GB, "": 5}
    assert found["largest"] == [3 * GB, "cell line 6"]
    assert found["failed"] == [8 * GB, "/home/model.py line 12"]
    assert found["count"] == 502 and len(found["events"]) == 200
    assert found["events"][0] == ["alloc", 302, "cell line 6"] and found["events"][-1] == ["snapshot", 0, ""]
    assert json.loads(json.dumps(found)) == found


def test_a_device_without_a_history_has_no_summary():
    assert summary(_SNAPSHOT, 1, _place) == {} and summary(_SNAPSHOT, 2, _place) == {}
    assert summary({"segments": [], "device_traces": []}, 0, _place) == {}


def test_the_answer_names_the_lines():
    gpu = {"total": 80 * GB, "reserved": 60 * GB, "others": 15 * GB, "free": 5 * GB, "allocated": 50 * GB}
    facts = _FACTS | {"gpu": gpu, "is_of_gpu": True, "history": summary(_SNAPSHOT, 0, _place)}
    lines = str(explained(Synthetic(world_size=2), {0: facts}, {}, _rows([1]))).splitlines()
    assert (
        "GPU memory of rank 0 by the line that allocated it: cell line 6 3.0 GB, /home/model.py line 12 3.0 GB, "
        "no line of yours 5 B. The largest tensor has 3.0 GB, from cell line 6."
    ) in lines


def test_without_a_gpu_nothing_is_recorded(monkeypatch):
    called: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **named: called.append(args))
    history = AllocatorHistory()
    history.begin()
    assert called == [] and history.read(_place) == {}


@pytest.mark.parametrize(("is_enabled", "count"), [(False, 1), (True, 0)])
def test_the_ring_is_bounded_and_begins_once(monkeypatch, is_enabled, count):
    called: list[Any] = []
    monkeypatch.setattr(gpu, "is_in_use", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: is_enabled, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **named: called.append(named))
    history = AllocatorHistory()
    history.begin()
    history.begin()
    assert [one["max_entries"] for one in called] == [10_000] * count


def test_a_torch_without_these_functions_keeps_no_history(monkeypatch):
    monkeypatch.setattr(gpu, "is_in_use", lambda: True)
    monkeypatch.delattr(torch._C, "_cuda_isHistoryEnabled", raising=False)
    monkeypatch.delattr(torch.cuda.memory, "_snapshot")
    history = AllocatorHistory()
    history.begin()
    assert history.read(_place) == {}
