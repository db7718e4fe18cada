"""Parts of the time of a step."""

from __future__ import annotations

import itertools

import pytest

from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.steps.steps import measure, steps
from ddp_notebook.observe.views import Step
from ddp_notebook.records.schema import RPC_SIDES
from tests.observe.synthetic import BEGIN_NS, MODEL, MS, Synthetic, simulate


def check_sums(found: list[Step]) -> None:
    """Check that the parts of each step add up to it, and that none is negative."""
    for step in found:
        parts = (
            step.input_ns,
            step.compute_ns,
            step.exposed_ns,
            step.waiting_ns,
            step.optimizer_ns,
            step.rest_ns,
        )
        assert sum(parts) == step.duration_ns, step
        assert min(*parts, step.overlapped_ns) >= 0, step
        assert step.overlapped_ns + step.exposed_ns + step.waiting_ns == step.communication_ns, step


def spans_of(run: Synthetic, *spans: tuple[str, float, float], rank: int = 0, **more) -> None:
    """Add spans by kind, start and end in ms. The number of an optimizer may follow its kind: "optimizer 2"."""
    for kind, begin, end in spans:
        run.span(rank, kind.split()[0], kind, int(BEGIN_NS + begin * MS), int(BEGIN_NS + end * MS), **more)


@pytest.mark.parametrize("is_ddp", [True, False], ids=["DDP", "all_reduce"])
@pytest.mark.parametrize(("phase", "extra_ms"), [("", 0), ("forward", 20), ("backward", 20), ("input", 20)])
@pytest.mark.parametrize("noise_ms", [0, 5])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_each_part_is_what_was_simulated(is_ddp, phase, extra_ms, noise_ms, micro_steps):
    run = simulate(
        is_ddp=is_ddp, slow=1, phase=phase, extra_ms=extra_ms, noise_ms=noise_ms, micro_steps=micro_steps, steps=8
    )

    found = steps(run)

    check_sums(found)
    assert [(step.rank, step.step) for step in found] == [(rank, step) for rank in range(4) for step in range(8)]
    for step in found:
        truth = run.truth[step.rank, step.step]
        # Buckets wait one after the other: the rank may wait for the last one during the transfer of an earlier one.
        assert step.waiting_ns + step.exposed_ns == truth["waiting"] + truth["exposed"]
        assert step.waiting_ns == pytest.approx(truth["waiting"], abs=2)
        assert step.compute_ns == truth["forward"] + truth["backward"]
        assert step.forward_ns == truth["forward"]
        assert step.input_ns == truth["input"]
        assert step.optimizer_ns == truth["optimizer"]
        assert step.rest_ns == truth["between"]
        assert step.samples == 32 * micro_steps


def test_steps_follow_each_other_without_a_gap():
    for before, after in itertools.pairwise(steps(simulate(steps=10, noise_ms=3), rank=2)):
        assert before.end_ns == after.start_ns


def test_forward_and_backward_without_waiting_are_told_apart():
    run = simulate(slow=1, phase="backward", extra_ms=20)

    found = measure(run)
    places = list(zip(found.rank.tolist(), found.number.tolist(), strict=True))
    for phase in ("forward", "backward"):
        assert found.parts[f"own_{phase}"].tolist() == [run.truth[place][phase] for place in places]


def test_buckets_have_the_parameters_of_the_layout_at_their_time():
    first, second = steps(simulate(steps=2, buckets=2), rank=0)

    assert [(one.bucket, one.nbytes, one.parameters) for one in first.buckets] == [
        (0, 2 << 20, ("layers.0.weight", "layers.1.weight"))
    ]
    assert [(one.bucket, one.nbytes, one.parameters) for one in second.buckets] == [
        (0, 1 << 20, ("layers.1.weight",)),
        (1, 1 << 20, ("layers.0.weight",)),
    ]
    assert all(one.end_ns is not None and one.issue_ns < one.end_ns for one in second.buckets)


def test_a_bucket_whose_layout_is_not_known_has_no_parameters():
    run = simulate(steps=2)
    run._rows["layout"].clear()

    assert {bucket.parameters for step in steps(run) for bucket in step.buckets} == {()}


# ---- where a step ends


def test_optimizers_that_take_turns_are_one_step():
    run = Synthetic(1)
    for at in (0, 100, 200):
        spans_of(
            run,
            ("forward", at, at + 10),
            ("backward", at + 10, at + 20),
            ("optimizer 1", at + 20, at + 25),
            ("forward", at + 30, at + 40),
            ("backward", at + 40, at + 55),
            ("optimizer 2", at + 60, at + 70),
        )

    found = steps(run)

    check_sums(found)
    assert [(step.end_ns - BEGIN_NS) / MS for step in found] == [70, 170, 270]
    assert [(step.forward_ns, step.backward_ns, step.optimizer_ns, step.rest_ns) for step in found] == [
        (20 * MS, 25 * MS, 15 * MS, 10 * MS),
        (20 * MS, 25 * MS, 15 * MS, 40 * MS),
        (20 * MS, 25 * MS, 15 * MS, 40 * MS),
    ]


def test_a_critic_steps_several_times_for_one_of_its_generator():
    run = Synthetic(1)
    for cycle in range(3):
        for turn in range(5):
            spans_of(run, ("optimizer critic", cycle * 60 + turn * 10, cycle * 60 + turn * 10 + 1))
        spans_of(run, ("optimizer generator", cycle * 60 + 50, cycle * 60 + 51))

    assert [(step.end_ns - BEGIN_NS) / MS for step in steps(run)] == [51, 111, 171]


def test_an_optimizer_inside_another_one_is_the_same_step():
    """`ZeroRedundancyOptimizer` steps its inner optimizer; its broadcasts are exposed, and not a part of the
    optimizer."""
    run = Synthetic(2)
    for rank in (0, 1):
        for at in (0, 50, 100):
            spans_of(run, ("optimizer", at, at + 20), ("optimizer inner", at + 2, at + 10), rank=rank)
            run.call(rank, "broadcast", BEGIN_NS + (at + 10) * MS, BEGIN_NS + (at + 14) * MS)

    found = steps(run)

    check_sums(found)
    assert len(found) == 6
    assert {(step.optimizer_ns, step.exposed_ns) for step in found} == {(16 * MS, 4 * MS)}


def test_forwards_inside_the_optimizer_compute():
    """LBFGS calls them in its step."""
    run = Synthetic(1)
    spans_of(run, ("optimizer", 0, 20), ("forward", 2, 6), ("backward", 6, 12))

    (step,) = steps(run)

    check_sums([step])
    assert (step.compute_ns, step.optimizer_ns) == (10 * MS, 10 * MS)


def test_spans_of_other_threads_and_open_ones_do_not_count():
    run = Synthetic(1)
    spans_of(run, ("forward", 0, 10), ("optimizer", 10, 12))
    spans_of(run, ("input", 0, 12), thread=3)
    run.span(0, "forward", MODEL, BEGIN_NS + 12 * MS, -1)

    (step,) = steps(run)

    assert (step.input_ns, step.compute_ns, step.duration_ns) == (0, 10 * MS, 12 * MS)


@pytest.mark.parametrize("is_ddp", [True, False], ids=["DDP", "all_reduce"])
def test_steps_of_successive_threads_equal_steps_of_one_thread(is_ddp):
    assert steps(simulate(steps=20, is_ddp=is_ddp, threads=7)) == steps(simulate(steps=20, is_ddp=is_ddp))


def test_steps_of_threads_at_the_same_time_all_count():
    """A step inside a step of another thread is not nested. Optimizers alternate only within a thread."""
    run = Synthetic(1)
    spans_of(run, ("optimizer", 0, 20), ("optimizer", 30, 40), thread=1)
    spans_of(run, ("optimizer 2", 5, 10), ("optimizer 2", 25, 35), ("optimizer 2", 36, 39), thread=2)

    found = steps(run)

    check_sums(found)
    assert [one.duration_ns // MS for one in found] == [10, 10, 15, 4, 1]


def test_steps_keep_their_numbers_after_rows_were_dropped():
    run = simulate(steps=12)
    whole = steps(run, rank=1)
    for table in ("span", "call"):
        rows = run.rows(table)
        run._tables[table] = rows[rows["step"] >= 4]

    assert steps(run, rank=1) == whole[5:], "step 4 itself may have begun before what is left"


# ---- what blocks


def test_what_a_caller_waits_for_later_is_hidden_until_then():
    run = Synthetic(2)
    for rank in (0, 1):
        spans_of(run, ("forward", 0, 20), ("optimizer", 30, 40), rank=rank)
        # issued at 5 ms and waited for from 20 to 28 ms; the other rank arrived at 9 ms
        begin = BEGIN_NS + (5, 9)[rank] * MS
        run.call(rank, "all_reduce", begin, BEGIN_NS + 28 * MS, is_async=True, blocked_ns=8 * MS)

    found = steps(run)

    check_sums(found)
    assert [step.overlapped_ns / MS for step in found] == [15, 11]
    assert [(step.exposed_ns, step.waiting_ns, step.rest_ns) for step in found] == [(8 * MS, 0, 2 * MS)] * 2


def test_a_receive_waits_for_its_sender():
    run = Synthetic(2)
    spans_of(run, ("optimizer", 90, 100), ("forward", 0, 50))
    spans_of(run, ("optimizer", 90, 100), ("forward", 0, 1), rank=1)
    run.call(0, "send", BEGIN_NS + 50 * MS, BEGIN_NS + 52 * MS, peer=1)
    run.call(1, "recv", BEGIN_NS + 1 * MS, BEGIN_NS + 52 * MS, peer=0)

    sender, receiver = steps(run)

    check_sums([sender, receiver])
    assert (sender.waiting_ns, sender.exposed_ns) == (0, 2 * MS)
    assert (receiver.waiting_ns, receiver.exposed_ns) == (49 * MS, 2 * MS)


def test_ddp_waits_at_once_for_what_it_sends_outside_a_backward():
    """Buffers at the start of a forward, sent by C++ code that is not observable."""
    run = Synthetic(2)
    for rank in (0, 1):
        spans_of(run, ("forward", 0, 20), ("optimizer", 20, 22), rank=rank)
        run.call(rank, "broadcast", BEGIN_NS + MS, BEGIN_NS + 4 * MS, origin="ddp", is_async=True)

    for step in steps(run):
        assert (step.exposed_ns, step.compute_ns) == (3 * MS, 17 * MS)


def test_one_cell_and_one_rank_can_be_asked_for():
    run = simulate(steps=3, cell=1)
    run = simulate(steps=2, cell=2, into=run)

    assert {(step.cell, step.rank) for step in steps(run, cell=2, rank=3)} == {(2, 3)}
    assert [step.step for step in steps(run, rank=0)] == [0, 1, 2, 0, 1]
    assert steps(run, cell=9) == []
    assert steps(Synthetic(2)) == []


def test_the_real_recording_gives_the_same():
    run = simulate(noise_ms=3, micro_steps=2)
    recording = Recording(4)
    for batch in run.batches():
        recording._feed(batch)

    assert recording.steps() == steps(run)


# ---- remote calls


def with_remote_calls() -> Synthetic:
    """Return two steps of 100 ms on rank 0.

    It waits 50 ms for futures, during 20 of which it executes calls of rank 1, and 20 ms in an `rpc_sync`.
    """
    run = Synthetic(2)
    for at in (0, 100):
        spans_of(run, ("future", at, at + 50), ("backward", at + 70, at + 80), ("optimizer", at + 80, at + 100))
        run.add(
            "rpc",
            **{"rank": 0, "side": RPC_SIDES.index("callee"), "number": 2 * at + 1, "kind": 0, "src": -1, "dst": 0},
            **{
                "function": "act",
                "site": "",
                "parent": 0,
                "nbytes": -1,
                "nbytes_back": -1,
                "reference": 0,
                "error": "",
            },
            **{"cell": 1, "start_ns": BEGIN_NS + (at + 10) * MS, "end_ns": BEGIN_NS + (at + 30) * MS, "done_ns": -1},
            thread=3,
        )
        run.add(
            "rpc",
            **{"rank": 0, "side": RPC_SIDES.index("caller"), "number": 2 * at + 2, "kind": 0, "src": 0, "dst": 1},
            **{"function": "ask", "site": "", "parent": 0, "nbytes": 8, "nbytes_back": 8, "reference": 0, "error": ""},
            **{"cell": 1, "start_ns": BEGIN_NS + (at + 50) * MS, "end_ns": BEGIN_NS + (at + 70) * MS, "done_ns": -1},
            thread=0,
        )
    return run


def test_answers_count_as_waiting_and_served_calls_as_compute():
    found = steps(with_remote_calls())
    assert len(found) == 2
    for step in found:
        parts = (step.waiting_ns, step.answers_ns, step.compute_ns, step.optimizer_ns, step.rest_ns)
        assert [ns // MS for ns in parts] == [50, 50, 30, 20, 0]
        assert step.waiting_ns + step.compute_ns + step.optimizer_ns + step.rest_ns == step.duration_ns
