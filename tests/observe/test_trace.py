"""Traces are readable by Perfetto, and show the actions of the ranks."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.clock import Clock
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.trace.trace import chrome_trace, save
from ddp_notebook.records.schema import RESOURCE, STATES
from tests.observe.chrome import arrows, check, parse, slices, tracks
from tests.observe.synthetic import BEGIN_NS, MS, Synthetic, simulate

PHASES = "forward, backward, optimizer, input"
ALL = "communication: default"


def trace_of(recording, **more):
    return check(chrome_trace(recording, **more))


def fed(run, clock=None):
    recording = Recording(run.world_size, clock=clock)
    for batch in run.batches():
        recording._feed(batch)
    return recording


# ---- what it holds


@pytest.mark.parametrize(
    "run",
    [
        {},
        {"world_size": 1, "steps": 2},
        {"slow": 2, "phase": "backward", "extra_ms": 20, "noise_ms": 3, "clock_error_ns": 200_000},
        {"transfer_ms": 15},  # each bucket is under way during the next ones
        {"is_ddp": False, "has_optimizer": False},
        {"micro_steps": 3},
        {"world_size": 64, "steps": 3, "noise_ms": 1},
    ],
    ids=str,
)
def test_a_trace_can_be_read(run):
    events = trace_of(simulate(**run))

    assert len([event for event in events if event["ph"] == "X"]) > 10


def test_a_recording_is_drawn_as_its_tables_are():
    run = simulate(slow=1, phase="input", extra_ms=20)

    assert chrome_trace(fed(run)) == chrome_trace(run)


def test_each_rank_is_a_process_with_tracks_in_a_fixed_order():
    run = simulate(world_size=3, steps=2)
    run.call(1, "broadcast", BEGIN_NS, BEGIN_NS + MS, group="7", ranks=[1, 2])
    run.call(1, "send", BEGIN_NS + MS, BEGIN_NS + 2 * MS, peer=2)
    events = trace_of(run)

    def named(events):
        return [event["args"]["name"] for event in events if event["name"] == "process_name"]

    assert named(events) == ["rank 0", "rank 1", "rank 2"]
    run.hosts = ("gpu1", "gpu1", "gpu2")
    assert named(trace_of(run)) == ["rank 0 on gpu1", "rank 1 on gpu1", "rank 2 on gpu2"]
    shown = [name for (pid, _), name in tracks(events).items() if pid == 1]
    assert shown == ["cell", "step", PHASES, "communication: 7", ALL, "send and recv"]


def test_collectives_that_overlap_lie_on_tracks_of_their_own():
    events = trace_of(simulate(world_size=2, steps=3, buckets=4, transfer_ms=15))

    of_second_step = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e.get("args", {}).get("step") == 1]
    lanes = {e["name"]: tracks(events)[0, e["tid"]] for e in of_second_step if e["cat"] == "collective"}
    assert lanes == {
        "all_reduce (bucket 0)": ALL,
        "all_reduce (bucket 1)": f"{ALL} (2)",
        "all_reduce (bucket 2)": f"{ALL} (3)",
        "all_reduce (bucket 3)": ALL,  # bucket 0 has finished by then
    }


def test_a_collective_during_another_one_is_no_part_of_it():
    run = Synthetic(1)
    run.call(0, "all_gather", BEGIN_NS, BEGIN_NS + 9 * MS, is_async=True)
    run.call(0, "barrier", BEGIN_NS + 2 * MS, BEGIN_NS + 3 * MS)
    events = trace_of(run)

    assert [e["name"] for e in slices(events, ALL)] == ["all_gather"]
    assert [e["name"] for e in slices(events, f"{ALL} (2)")] == ["barrier"]


def test_a_bucket_says_all_that_is_known_of_it():
    events = trace_of(simulate(slow=2, phase="forward", extra_ms=50, steps=2))

    bucket = next(e for e in slices(events, ALL) if e["args"]["step"] == 1)
    assert bucket["name"] == "all_reduce (bucket 0)"
    assert bucket["args"] == {
        "op": "all_reduce",
        "number": 2,
        "group": "default",
        "ranks": "0-3",
        "reduce_op": "SUM",
        "dtype": "float32",
        "shapes": [[262144]],
        "bytes_in": 1 << 20,
        "bytes_out": 1 << 20,
        "origin": "ddp",
        "api": "backward",
        "site": "cell line 7",
        "module": "DistributedDataParallel(Net)",
        "meaning": "mean of gradients",
        "cell": 1,
        "step": 1,
        "state": "done",
        "bucket": 0,
        "parameters": ["layers.3.weight"],
        "waited_ms": 50.0,
        "waited_for": "rank 2",
    }


def test_times_are_microseconds_since_the_first_event():
    trace = chrome_trace(simulate(world_size=1, steps=1))

    forward = next(e for e in check(trace) if e["name"] == "forward")
    assert (forward["ts"], forward["dur"]) == (1500.0, 10_000.0)  # after 1 ms of input and 0.5 ms in between
    assert trace["otherData"]["begin_ns"] == BEGIN_NS


def test_ranks_use_the_notebooks_clock_and_report_its_error():
    run = simulate(world_size=2, steps=2)
    clock = Clock()
    for rank, offset_ns in enumerate((0, 3_000_000_000)):  # the clock of rank 1 is 3 s ahead
        clock.add(rank, BEGIN_NS, BEGIN_NS + 10_000 + offset_ns, BEGIN_NS + 20_000)
    batches = run.batches()
    for table, columns in {"span": ["start_ns", "end_ns"], "call": ["issue_ns", "end_ns"]}.items():
        for column in columns:
            batches[1].tables[table][column] += 3_000_000_000
    recording = Recording(2, clock=clock)
    for batch in batches:
        recording._feed(batch)
    trace = chrome_trace(recording)
    events = check(trace)

    assert [s["ts"] for s in slices(events, PHASES, 1)] == [s["ts"] for s in slices(events, PHASES, 0)]
    assert trace["otherData"]["clock_error_us"] == {"0": 10.0, "1": 10.0}
    assert [e["args"]["labels"] for e in events if e["name"] == "process_labels"] == ["clock ±10.0 µs"] * 2


def test_a_step_says_what_its_time_went_into():
    events = trace_of(simulate(slow=2, phase="forward", extra_ms=50))

    step = slices(events, "step")[3]
    assert (step["name"], step["dur"]) == ("step 3", 84_500.0)
    assert (step["args"]["compute_ms"], step["args"]["waiting_ms"], step["args"]["samples"]) == (30.0, 50.0, 32)


# ---- arrows


def test_an_arrow_follows_a_collective_in_the_order_of_arrivals():
    events = trace_of(simulate(slow=1, phase="forward", extra_ms=5, noise_ms=0, steps=4))

    found = arrows(events, "collective")
    assert len(found) == 1 + 3 * 4  # one bucket in the first step, then four
    assert {tuple(point["ph"] for point in points) for points in found} == {("s", "t", "t", "f")}
    assert [points[-1]["pid"] for points in found] == [1] * 13
    assert all([p["ts"] for p in points] == sorted(p["ts"] for p in points) for points in found)


def test_an_arrow_goes_from_a_send_to_its_receive():
    run = Synthetic(3)
    run.call(0, "send", BEGIN_NS, BEGIN_NS + 3 * MS, peer=2, tag=4)
    run.call(2, "recv", BEGIN_NS + MS, BEGIN_NS + 4 * MS, peer=0, tag=4)
    events = trace_of(run)

    ((begin, end),) = arrows(events, "p2p")
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"]) == (0, 0.0, 2, 1000.0)
    assert slices(events, "send and recv", 2)[0]["args"]["peer"] == 0


def test_no_arrow_points_back_in_time():
    run = Synthetic(2)
    run.call(1, "recv", BEGIN_NS, BEGIN_NS + 4 * MS, peer=0)  # waits for the send
    run.call(0, "send", BEGIN_NS + 3 * MS, BEGIN_NS + 4 * MS, peer=1)
    run.call(1, "recv", BEGIN_NS + 5 * MS, BEGIN_NS + 6 * MS, peer=0)  # ends before the send: the clocks are wrong
    run.call(0, "send", BEGIN_NS + 7 * MS, BEGIN_NS + 8 * MS, peer=1)
    events = trace_of(run)

    ((begin, end),) = arrows(events, "p2p")
    assert (begin["ts"], end["ts"]) == (3000.0, 3000.0)


def test_the_same_moment_on_all_ranks_is_no_trouble_for_an_arrow():
    run = Synthetic(8)
    for rank in reversed(range(8)):
        run.call(rank, "barrier", BEGIN_NS, BEGIN_NS, nbytes=0)

    ((*_, end),) = arrows(trace_of(run), "collective")
    assert end["ph"] == "f"


# ---- what has not ended, and what is no number


def test_unfinished_calls_are_drawn_until_the_last_known_time():
    run = Synthetic(2)
    run.span(0, "cell", "", BEGIN_NS, -1)
    run.call(0, "all_reduce", BEGIN_NS + MS, -1, state=STATES.index("issued"), blocked_ns=0)
    run.call(0, "all_gather", BEGIN_NS + MS, -1, state=STATES.index("unwaited"), blocked_ns=0)
    run.call(1, "barrier", BEGIN_NS + 8 * MS, BEGIN_NS + 9 * MS)
    events = trace_of(run)

    found = {e["name"]: (e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert found == {"cell 1": (0, 9000), "all_reduce": (1000, 8000), "all_gather": (1000, 0)}
    assert slices(events, "cell")[0]["args"]["state"] == "not ended yet"


def test_a_collective_on_a_gpu_begins_when_the_device_starts_it():
    run = Synthetic(1)
    run.span(0, "cell", "", BEGIN_NS, BEGIN_NS + 9 * MS)
    run.call(0, "all_reduce", BEGIN_NS + MS, BEGIN_NS + 6 * MS, start_ns=BEGIN_NS + 4 * MS, is_async=True)

    (call,) = slices(trace_of(run), ALL)
    assert (call["ts"], call["dur"], call["args"]["issued_before_ms"]) == (4000, 2000, 3.0)


def test_metrics_and_resources_are_curves():
    run = simulate(world_size=2, steps=1)
    for step, value in enumerate((0.5, float("nan"))):
        run.add("metric", rank=1, name="loss", cell=1, step=step, value=value, time_ns=BEGIN_NS + step * MS)
    of_host = {"rss_bytes": 3e6, "cpu_percent": 50, "host_used_bytes": 9e6, "host_total_bytes": 10e6}
    of_gpu = dict.fromkeys(("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_peak_bytes"), -1)
    run.add("resource", rank=0, time_ns=BEGIN_NS, gpu_percent=np.nan, cores=2, **of_host, **of_gpu)
    counted = {"page_faults", "ready_ns", "ran_ns", "host_busy_ns", "host_cores"}
    assert set(RESOURCE.names or ()) == {"rank", "time_ns", "gpu_percent", "cores", *counted, *of_host, *of_gpu}
    events = trace_of(run)

    assert {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "C"} == {
        (1, "loss"): {"value": 0.5},
        (0, "memory of the process (MB)"): {"resident": 3.0},
        (0, "CPU (% of one core)"): {"process": 50.0},
        (0, "memory of the host (MB)"): {"used": 9.0},
    }
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert (mark["name"], mark["pid"], mark["ts"], mark["args"]) == ("loss is nan", 1, 1000.0, {"step": 1})


def test_a_thread_of_the_users_own_has_a_track_of_its_own():
    run = simulate(world_size=1, steps=1)
    # partly overlaps that of the step
    run.span(0, "input", "DataLoader", BEGIN_NS + MS // 2, BEGIN_NS + 3 * MS, thread=1)
    events = trace_of(run)

    assert [e["name"] for e in slices(events, f"{PHASES}: thread 1")] == ["input"]


def test_one_cell_can_be_had_alone():
    run = simulate(world_size=2, steps=2)
    simulate(world_size=2, steps=3, cell=2, into=run)
    run.add("metric", rank=0, name="loss", cell=1, step=0, value=1.0, time_ns=BEGIN_NS)
    events = trace_of(run, cell=2)

    assert [e["name"] for e in slices(events, "cell")] == ["cell 2"]
    assert {e["args"]["cell"] for e in events if e["ph"] == "X"} == {2}
    assert len(slices(events, "step")) == 3
    assert not [e for e in events if e["ph"] == "C"]


# ---- files


def test_a_trace_is_a_file(tmp_path):
    run = simulate(world_size=2, steps=1)
    plain, packed = save(run, tmp_path / "run.json"), save(run, str(tmp_path / "run.json.gz"))

    assert parse(plain.read_bytes()) == json.loads(json.dumps(chrome_trace(run)))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.json.gz"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no/run.json", "the folder '{}/no' for run.json does not exist; create it first"),
        ("", "'{}' is a folder; pass a file in it, such as '{}/run.json'"),
    ],
)
def test_where_no_file_can_be_written_is_said(tmp_path, where, message):
    with pytest.raises(UsageError) as error:
        save(simulate(world_size=1, steps=1), tmp_path / where)

    assert str(error.value) == message.replace("{}", str(tmp_path))


def test_a_trace_of_nothing_is_none(tmp_path):
    with pytest.raises(UsageError, match=r"nothing was recorded in cell 3; run a cell .* %ddp_record meta or values"):
        save(simulate(world_size=1, steps=1), tmp_path / "run.json", cell=3)

    assert not list(tmp_path.iterdir())


# ---- the check itself


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda events: events[-1].update(dur=-1), "dur"),
        (lambda events: events[-1].update(ts=0.0), "order of time"),
        (lambda events: events[-1].update(tid=7), "a track without a name"),
        (lambda events: events[-1].update(pid=7), "a process without a name"),
        (lambda events: [e.update(dur=15_000) for e in events if e["name"] == "forward"], "overlaps another slice"),
        (lambda events: events.remove(next(e for e in events if e["ph"] == "f")), "an arrow without an end"),
        (lambda events: next(e for e in events if e["ph"] == "s").update(ph="t"), "an arrow without a begin"),
        (lambda events: [events.remove(e) for e in events[:] if e["name"] == "all_reduce (bucket 0)"], "no slice"),
        (lambda events: events[-1].update(args={"value": float("inf")}), "Infinity is not in JSON"),
    ],
)
def test_the_check_sees_what_is_wrong(change, message):
    trace = chrome_trace(simulate(world_size=2, steps=1))
    change(trace["traceEvents"])

    with pytest.raises(AssertionError, match=message):
        check(trace)
