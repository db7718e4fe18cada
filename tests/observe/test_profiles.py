"""The torch.profiler data of a rank is in the same trace, at the right time."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.trace.trace import chrome_trace
from tests.observe.chrome import arrows, check, slices, tracks
from tests.observe.synthetic import BEGIN_NS, MS, simulate

EPOCH_NS = 1_700_000_000_000_000_000  # the rank's wall clock when the notebook's was at BEGIN_NS
BASE_NS = EPOCH_NS - 5_000_000_000
OFFSETS = {rank: EPOCH_NS - BEGIN_NS for rank in range(4)}


def event(name, at_ms, lasts_ms, pid=4711, tid=4711, **more):
    """Return a slice in the format of Kineto; the time is relative to the start of the run."""
    ts = (EPOCH_NS - BASE_NS) / 1000 + at_ms * 1000
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": lasts_ms * 1000} | more


def arrow(phase, at, **more):
    return {"ph": phase, "cat": "ac2g", "name": "ac2g", "id": 9, **{k: at[k] for k in ("pid", "tid", "ts")}} | more


def named(what, pid, tid, **args):
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def profile():
    """Return the profile of a rank with a GPU: an operator, its kernel, and marks of the profiler."""
    launch, kernel = event("cudaLaunchKernel", 2.5, 0.5), event("gemm", 4, 2, pid=0, tid=7, cat="kernel")
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [
            named("process_name", 4711, 0, name="python"),
            named("process_labels", 4711, 0, labels="CPU"),
            named("thread_name", 4711, 4711, name="thread 4711 (python)"),
            named("process_labels", 0, 0, labels="GPU 0"),
            named("thread_name", 0, 7, name="stream 7 "),
            event("aten::mm", 2, 2, args={"Input Dims": [[2, 3]], "scale": float("inf")}),
            launch,
            kernel,
            arrow("s", launch),
            arrow("f", kernel, bp="e"),
            event("PyTorch Profiler (0)", 0, 9, pid="Spans", tid="PyTorch Profiler", cat="Trace"),
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": kernel["ts"]},
            event("[memory]", 3, 0, ph="i", s="t", args={"Bytes": 512}),
        ],
    }


def merged(profiles, **more):
    run = simulate(steps=1)
    return check(chrome_trace(run, profiles=profiles, profile_offsets_ns=OFFSETS, **more))


def test_its_slices_stand_in_the_ranks_process_at_their_time():
    events = merged({1: profile()})

    (operator, launch), (kernel,) = (
        slices(events, track, 1) for track in ("profiler: thread 4711 (python)", "profiler: GPU 0 stream 7")
    )
    assert (operator["name"], operator["ts"], operator["dur"]) == ("aten::mm", 2000, 2000)
    assert operator["args"] == {"Input Dims": [[2, 3]], "scale": "inf"}
    assert (launch["ts"], kernel["name"], kernel["ts"]) == (2500, "gemm", 4000)
    ((begin, end),) = arrows(events, "ac2g")
    assert (begin["tid"], end["tid"], end["ts"]) == (launch["tid"], kernel["tid"], 4000)
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("[memory]", 3000, {"Bytes": 512})
    assert not [e for e in events if "PyTorch Profiler" in e["name"]]
    shown = [name for (pid, _), name in tracks(events).items() if pid == 1]
    assert shown[-2:] == ["profiler: thread 4711 (python)", "profiler: GPU 0 stream 7"]


def test_profiles_of_several_ranks_are_kept_apart():
    events = merged({0: profile(), 3: profile()})  # both have the same numbers of processes, threads and arrows

    assert [len(slices(events, "profiler: GPU 0 stream 7", rank)) for rank in range(4)] == [1, 0, 0, 1]
    assert [{point["pid"] for point in points} for points in arrows(events, "ac2g")] == [{0}, {3}]


def test_a_profile_can_begin_before_the_recording():
    early = profile()
    early["traceEvents"].append(event("before", -3, 1))
    events = merged({0: early})

    times = {e["name"]: e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert (times["before"], times["cell 1"], times["aten::mm"]) == (0, 3000, 5000)


def test_what_does_not_fit_a_viewer_is_put_right():
    odd = profile()
    odd["traceEvents"] += [
        event("across", 3.5, 9),  # partly overlaps aten::mm
        event("backwards", 30, -1),
        arrow("s", event("", 2, 0), id=10),  # its other end was not profiled
        arrow("f", event("", 70, 0), id=11, bp="e"),
        {"ph": "X", "name": "no time", "pid": 4711, "tid": 4711},
    ]
    events = merged({0: odd})

    assert [e["name"] for e in slices(events, "profiler: thread 4711 (python) (2)")] == ["across"]
    assert next(e["dur"] for e in events if e["name"] == "backwards") == 0
    assert len(arrows(events, "ac2g")) == 1


def test_an_old_profile_has_times_of_the_epoch():
    old = profile()
    del old["baseTimeNanoseconds"]
    for one in old["traceEvents"]:
        one["ts"] += BASE_NS / 1000

    (kernel,) = slices(merged({0: old}), "profiler: GPU 0 stream 7")
    assert kernel["ts"] == pytest.approx(4000, abs=0.5)  # the precision of a float


def test_a_profile_may_be_a_file_and_is_left_as_it_is(tmp_path):
    found = profile()
    before = copy.deepcopy(found)
    plain, packed = tmp_path / "0.json", tmp_path / "1.json.gz"
    plain.write_text(json.dumps(found))
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    assert merged({0: plain, 1: str(packed)}) == merged({0: found, 1: found})
    assert found == before


@pytest.mark.parametrize(
    ("rank", "content", "message"),
    [
        (1, "{", r"the profile of rank 1, '.*profile.json', cannot be read: Expecting property name"),
        (1, "[]", r"the profile of rank 1 has no traceEvents; pass a file from export_chrome_trace of torch.profiler"),
        (4, "{}", r"profiles must have ranks from 0 to 3 as keys, got 4"),
        (1, None, r"the profile of rank 1, '.*profile.json', cannot be read: .*No such file"),
    ],
)
def test_what_is_no_profile_is_said(tmp_path, rank, content, message):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(UsageError, match=message):
        merged({rank: path})


PROFILED = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, record_function
torch.set_num_threads(1)
with profile(activities=[ProfilerActivity.CPU]) as seen:
    with record_function("warm"):
        torch.ones(8) @ torch.ones(8)
    begin = time.monotonic_ns()
    with record_function("marked"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    end = time.monotonic_ns()
seen.export_chrome_trace(sys.argv[1])
print(begin, end)
"""


@pytest.mark.long
def test_what_torch_writes_comes_to_stand_where_it_was(tmp_path):
    path = tmp_path / "profile.json"
    done = subprocess.run([sys.executable, "-c", PROFILED, path], capture_output=True, text=True, check=True)
    begin_ns, end_ns = map(int, done.stdout.split())
    run = simulate(world_size=1, steps=1)
    trace = chrome_trace(run, profiles={0: path})  # on this machine the offset is known
    check(trace)

    marked = next(e for e in trace["traceEvents"] if e["name"] == "marked")
    start_ns = trace["otherData"]["begin_ns"] + marked["ts"] * 1000
    assert begin_ns - MS // 2 < start_ns < start_ns + marked["dur"] * 1000 < end_ns + MS // 2
