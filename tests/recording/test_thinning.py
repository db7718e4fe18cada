"""If training is fast, the values of only some steps are recorded, the same on all ranks. Other data is complete."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest

import ddp_notebook
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.event_buffer import MOST, EventBuffer
from ddp_notebook.rank.record.flusher import _STEADY_S, Flusher
from ddp_notebook.rank.record.metrics import LoggedValue
from ddp_notebook.rank.record.value_sampling import FIRST_CALLS, FIRST_STEPS, PER_S, ValueSampling
from ddp_notebook.records.schema import SPANS
from ddp_notebook.run.cells.cell_options import FULL_BYTES
from ddp_notebook.widgets.still import saved_page
from tests.conftest import wait_until

STEPS = 200
_NEVER_S = 4e9  # pause of a continuing loop, longer than any test
_TRAIN = """
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
model = DistributedDataParallel(model, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, total = torch.ones(4, 64), torch.ones(1)
def train(steps, every=0):
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if every and step % every == 0:
            dist.all_reduce(total)
"""


@pytest.fixture(scope="module")
def trained(session):
    session.run(_TRAIN)
    return session


def _calls(session, code: str, **options):
    """Return the calls of a cell."""
    session.run(code, record=RecordOptions(**options))
    return session.recording.collectives(cell=int(session.recording.rows("call")["cell"].max()))


class _Clock:
    """Simulated training with a given rate of steps and calls."""

    def __init__(self, monkeypatch) -> None:
        self.now_ns = 0
        monkeypatch.setattr("ddp_notebook.rank.record.value_sampling.time.monotonic_ns", lambda: self.now_ns)

    def run(self, decides: ValueSampling, steps: int, per_s: float, calls: int, first: int = 0) -> list[int]:
        """Return the steps whose values are kept."""
        kept = []
        for step in range(first, first + steps):
            if decides.keeps(step):
                kept.append(step)
            decides.calls += calls
            self.now_ns += int(1e9 / per_s)
        return kept


@pytest.mark.parametrize(
    ("steps_per_s", "calls", "turns", "period"),
    [
        (1, 100, 1, 4),
        (2.5, 6, 1, 8),
        (4, 4, 1, 8),
        (10, 4, 1, 16),
        (100, 1, 1, 64),
        (100, 6, 1, 128),
        (50, 1000, 1, 64),
        (20, 1, 1, 8),
        (20, 1, 7, 16),
        (2.5, 6, 7, 8),
        (1, 1, 7, 2),
    ],
)
def test_the_period_follows_the_rate(monkeypatch, steps_per_s, calls, turns, period):
    decides = ValueSampling()
    decides.begin_cell()
    decides.turns = turns
    kept = _Clock(monkeypatch).run(decides, 400, steps_per_s, calls)
    assert kept[:FIRST_STEPS] == list(range(FIRST_STEPS))
    run = min(turns, 2)
    for begin in range(128, 384, period):
        of_period = [step for step in kept if begin <= step < begin + period]
        assert len(of_period) == run and of_period[-1] // run == of_period[0] // run
    seconds = period / steps_per_s
    assert run * calls / seconds <= PER_S or 2 * seconds > 2


@pytest.mark.parametrize("period", [4, 16, 128])
def test_sampled_steps_include_some_of_each_periodic_action(monkeypatch, period):
    decides, clock = ValueSampling(), _Clock(monkeypatch)
    decides.begin_cell()
    monkeypatch.setattr(decides, "_choose_period", lambda seconds: setattr(decides, "period", period))
    kept = clock.run(decides, 40 * period, 100, 6)[FIRST_STEPS:]
    for every in (2, 5, 10):
        for offset in range(every):
            assert any(step % every == offset for step in kept), (every, offset)


def test_what_the_slower_rank_keeps_the_faster_one_keeps_too(monkeypatch):
    kept = []
    for per_s in (90, 210):
        decides = ValueSampling()
        decides.begin_cell()
        kept.append(set(_Clock(monkeypatch).run(decides, 400, per_s, 3)))
    assert kept[1] < kept[0]


def test_the_period_does_not_change_at_a_limit(monkeypatch):
    decides, clock, periods = ValueSampling(), _Clock(monkeypatch), set()
    decides.begin_cell()
    for window in range(20):
        clock.run(decides, 16, 78 if window % 2 else 82, 1, first=16 * window)
        periods.add(decides.period)
    assert periods == {1, 64}


def test_a_collective_is_whole_or_absent_and_no_row_is_missing(trained):
    calls = _calls(trained, f"train({STEPS})")
    rows = calls.rows
    buckets = rows[rows["bucket"] >= 0]
    assert len(buckets) == 2 * STEPS * len(np.unique(buckets["bucket"]))  # every call of every step
    kept = {(call.step, call.bucket, call.rank) for call in calls if call.bucket is not None and not call.left_out}
    assert {step for step, _, _ in kept} >= set(range(FIRST_STEPS))
    assert len({step for step, _, _ in kept}) < STEPS / 2
    for step in {step for step, _, _ in kept}:
        ranks_of = [
            {rank for one, at, rank in kept if (one, at) == (step, bucket)} for bucket in np.unique(buckets["bucket"])
        ]
        assert len(set(map(frozenset, ranks_of))) == 1, "all buckets of a step"
    of_ranks = [{step for step, _, one in kept if one == rank} for rank in (0, 1)]
    assert of_ranks[0] <= of_ranks[1] or of_ranks[1] <= of_ranks[0]
    for call in calls:
        assert (call.input is None) == (call.output is None) == call.left_out, call
    left_out = int(np.count_nonzero(rows["left_out"]))
    assert repr(calls).endswith(f"; values of {left_out} left out>") and trained.recording.store.left_out >= left_out
    assert len(trained.recording.steps(cell=int(rows["cell"][0]))) == 2 * STEPS


def test_optimizers_that_take_turns_both_have_their_values(trained):
    trained.run(
        "from ddp_notebook.rank.engine import RankEngine\n"
        "thinning = RankEngine.instance()._rank._core.recording.event_buffer.thinning\n"
        "thinning._choose_period = lambda seconds: setattr(thinning, 'period', 8)\n"
        "other = torch.optim.Adam(model.parameters())\n"
        "def train_both(optimizers, steps):\n"
        "    for step in range(steps):\n"
        "        one = optimizers[step % len(optimizers)]\n"
        "        one.zero_grad(); model(x).square().mean().backward(); one.step()"
    )
    try:
        for optimizers, kept in (("optimizer, other", {32, 33, 40, 41}), ("other,", {33, 41})):
            calls = _calls(trained, f"train_both([{optimizers}], 48)")
            assert {call.step for call in calls if not call.left_out and call.step >= 32} == kept
    finally:
        trained.run("del thinning._choose_period")


@pytest.mark.long
def test_the_monitor_and_a_saved_recording_count_left_out_values(trained, tmp_path):
    calls = _calls(trained, f"train({STEPS})")
    recording = trained.recording
    assert saved_page.message(recording).header["notes"]["values_left_out"] == recording.store.left_out > 0
    saved = ddp_notebook.load(recording.save(tmp_path / "training.npz"))
    assert saved.store.left_out == recording.store.left_out
    cell = int(calls.rows["cell"][0])
    assert repr(saved.collectives(cell=cell)) == repr(calls)


def test_the_first_calls_of_a_line_are_kept(trained):
    calls = [call for call in _calls(trained, f"train({STEPS}, every=4)") if call.bucket is None]
    for rank in (0, 1):
        left_out = [call.left_out for call in calls if call.rank == rank and call.op == "all_reduce"]
        assert not any(left_out[:FIRST_CALLS]) and any(left_out[FIRST_CALLS:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "options"),
    [
        (f"train({STEPS})", {"level": "all"}),
        (f"train({STEPS})", {"full_bytes": FULL_BYTES}),
        (f"train({STEPS})", {"watch": ["step"]}),
        (f"for _ in range({STEPS}): dist.all_reduce(total)", {}),
        (f"train({FIRST_STEPS})", {}),
    ],
    ids=["%ddp_record all", "--tensors full", "--watch", "no training", "a short training"],
)
def test_nothing_is_left_out(trained, code, options):
    calls = _calls(trained, code, **options)
    assert len(calls) > FIRST_STEPS and not calls.rows["left_out"].any() and "left out" not in repr(calls)


def test_without_values_nothing_is_called_left_out(trained):
    assert not _calls(trained, f"train({STEPS})", level="meta").rows["left_out"].any()


@pytest.mark.slow
def test_a_loop_flushes_at_full_seconds_and_logs_immediately(monkeypatch):
    told_s: list[float] = []
    event_buffer = EventBuffer({})
    flusher = Flusher(
        event_buffer, BatchMaker(lambda: 0, lambda *_: ""), lambda _: told_s.append(time.time()), lambda: False
    )
    for _ in range(FIRST_STEPS):
        event_buffer.count_step()
    wait_until(lambda: time.time() % 1 < 0.1)
    put_s = time.time()
    event_buffer.put(LoggedValue("loss", 0.5, None, 0, False, 1, event_buffer.moment))
    with closing(flusher):
        flusher.start()
        wait_until(lambda: told_s)
        assert int(told_s[0] + 0.01) > int(put_s), "all ranks at the same moment"
        monkeypatch.setattr("ddp_notebook.rank.record.flusher._STEADY_S", _NEVER_S)
        event_buffer.put(LoggedValue("loss", 0.5, None, 0, False, 1, event_buffer.moment), hurries=True)
        wait_until(lambda: len(event_buffer) == 0)


def test_the_end_of_a_loop_that_went_on_is_told_at_once(trained):
    recording, pause = trained.recording, "from ddp_notebook.rank.record import flusher; flusher._STEADY_S = {}"
    _, index, _ = recording.follow("span", 0)
    trained.run(f"{pause.format(_NEVER_S)}\ntrain({STEPS})", quiet=True)

    def has_come() -> bool:
        rows, _, _ = recording.follow("span", index)
        return set(rows["rank"][rows["kind"] == SPANS.index("cell")].tolist()) == {0, 1}

    wait_until(has_come)
    trained.run(pause.format(_STEADY_S), quiet=True)


def test_a_fast_loop_flushes_a_large_record_before_a_drop():
    """At 2,200 records per second, one or two per second were dropped."""
    event_buffer = EventBuffer({})
    for _ in range(MOST - 1):
        event_buffer.put("a small one")
    assert not event_buffer.hurries.is_set()
    event_buffer.put("a large one", is_large=True)
    assert event_buffer.hurries.is_set() and len(event_buffer) == MOST and not event_buffer.dropped
