"""Buckets of steps without recorded values use a fast path through the kernel, with identical results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ddp_notebook import api
from ddp_notebook.errors import RankError
from ddp_notebook.rank.group.kernels.repeats import Repeat
from ddp_notebook.rank.record.training.buckets import Backward
from ddp_notebook.rank.record.value_sampling import FIRST_CALLS
from tests.recording.witness import cell_of_last, operations, spans
from tests.test_hang import wait_for_card

KEPT, STEPS = 4, 12
# Replaces the rate, so that a test knows which steps are left out.
SET_UP = f"""
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.value_sampling import ValueSampling
from ddp_notebook.rank.record.training.buckets import Backward
from tests.recording.on_rank import make, train
ValueSampling.keeps = lambda self, step: step < {KEPT}
repeated = []
def put(event_buffer, record, *rest, whole=EventBuffer.put, **named):
    if type(record) is Backward: repeated.extend(again[1] for again in record.again)
    whole(event_buffer, record, *rest, **named)
EventBuffer.put = put
"""


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Start two ranks that leave out the values of all steps except the first ones."""
    waiting_host_server()
    with api.start(2) as running:
        running.run(SET_UP, quiet=True)
        yield running


def repeated(session: Any, code: str, level: str = "values") -> list[list[int]]:
    """Run the code. Return the numbers of the calls that used the fast path, by rank."""
    session.run("repeated.clear()", quiet=True)
    session.record(level)
    try:
        session.run(code, quiet=True)
    finally:
        session.record("values")
    return values(session, "repeated")


def values(session: Any, name: str) -> list[Any]:
    """Return a variable, by rank."""
    pulled = session.pull(name)
    return [pulled[rank] for rank in range(2)]


def rows(session: Any, rank: int) -> list[tuple[Any, ...]]:
    """Return the rows of the last recorded cell, without times and values."""
    found = operations(session.recording, cell_of_last(session), rank)
    return [
        (
            *(one.op, one.api, one.group, one.number - found[0].number, one.step, one.reduce_op, one.dtype, one.shapes),
            *(one.module, one.bucket, one.nbytes_in, one.nbytes_out, one.origin, one.site, one.is_async, one.state),
        )
        for one in found
    ]


CASES = {
    "many buckets": ("make('Deep')", ""),
    "find_unused_parameters": ("make('Branching', find_unused_parameters=True)", ""),
    "static_graph": ("make('Deep', static_graph=True)", ""),
    "without views": ("make('Deep', gradient_as_bucket_view=False)", ""),
    "no_sync": ("make('Deep')", ", accumulate=2"),
    "two backwards": ("make('Deep')", ", backwards=2"),
    "two models": ("make('Deep'), make('Small')", ""),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_rows_are_those_of_the_long_way(session, case):
    models, how = CASES[case]
    code = f"models = None; models = [{models}]; train(models, {STEPS}{how})"
    assert repeated(session, code, "all") == [[], []]
    expected = [rows(session, rank) for rank in range(2)]
    short = repeated(session, code)
    cell = cell_of_last(session)
    for rank in range(2):
        assert rows(session, rank) == expected[rank]
        found = operations(session.recording, cell, rank)
        buckets = [
            one for one in found if one.bucket is not None and one.step > KEPT
        ]  # in the step before some are learned
        assert [one.number for one in buckets] == short[rank][-len(buckets) :], "all of them took it"
        backwards = {int(row["span"]): row for row in spans(session.recording, cell, rank, "backward")}
        by_number = {int(row["number"]): row for row in session.recording.rows("call") if row["rank"] == rank}
        for one in buckets:
            backward = backwards[int(by_number[one.number]["backward"])]
            assert backward["start_ns"] <= one.issue_ns <= (one.end_ns or 0) <= backward["end_ns"]
            assert one.left_out and one.input is None and one.output is None
        numbers = [one.number for one in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "each is there once"
        assert len(session.recording.steps(cell=cell, rank=rank)) == STEPS


def test_each_line_has_its_own(session):
    """A model with backward calls in two lines, like the critic of a GAN."""
    code = f"""
(model,) = models = [make('Deep')]
optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(128, 512)
for _ in range({STEPS}):
    model(x).square().mean().backward()
    optimizer.step()
    model(x).abs().mean().backward()
    optimizer.step()
"""
    short = repeated(session, code)
    for rank in range(2):
        found = operations(session.recording, cell_of_last(session), rank)
        assert len(short[rank]) > len(found) / 2
        assert {(one.step % 2, one.site) for one in found if one.bucket is not None} == {
            (0, "cell line 5"),
            (1, "cell line 7"),
        }


def test_a_model_in_the_place_of_another_has_its_own_buckets(session):
    """Its memory may start at the address of the other one."""
    code = f"""
for kind in ("Deep", "Small", "Deep"):
    models = None
    models = [make(kind)]
    train(models, {STEPS})
"""
    short = repeated(session, code)
    for rank in range(2):
        found = [one for one in operations(session.recording, cell_of_last(session), rank) if one.bucket is not None]
        of_step = Counter((one.step, one.module, one.bucket) for one in found)
        assert set(of_step.values()) == {1} and len(short[rank]) > STEPS
        assert [one.number for one in found if one.step >= KEPT and one.number in set(short[rank])] == short[rank]


@pytest.mark.long
def test_a_rare_line_keeps_the_values_of_its_first_calls(session):
    """Each rank keeps the same number, independent of how many are in steps that keep values."""
    code = f"""
main, rare = models = [make('Deep'), make('Small', bucket_cap_mb=25)]
optimizer, x, y = torch.optim.SGD(main.parameters(), lr=1e-4), torch.randn(128, 512), torch.randn(128, 256)
for step in range(4 * {STEPS}):
    main(x).square().mean().backward()
    optimizer.step()
    if step % 3 == 0:
        rare(y).sum().backward()
"""
    short = repeated(session, code)
    for rank in range(2):
        found = operations(session.recording, cell_of_last(session), rank)
        own = [one for one in found if one.site == "cell line 8" and one.bucket is not None]
        assert [one.left_out for one in own] == [False] * FIRST_CALLS + [True] * (len(own) - FIRST_CALLS)
        assert len(set(short[rank]) & {one.number for one in own}) == len(own) - FIRST_CALLS - 1, "one is learned"


@pytest.mark.long
def test_a_model_that_is_gone_gives_its_place(session):
    """It ran forward but never backward, and the next model may reuse its memory."""
    code = f"""
models = [make('Deep')]
train(models, {STEPS})
models[0](torch.randn(128, 512))
models = None
models = [make('Small')]
train(models, {STEPS})
"""
    repeated(session, code)
    for rank in range(2):
        buckets = [one for one in operations(session.recording, cell_of_last(session), rank) if one.bucket is not None]
        assert {one.module.split()[0] for one in buckets if one.step >= STEPS} == {"Small"}
        of_step = Counter(one.step for one in buckets if one.step >= STEPS + 2)
        assert set(of_step.values()) == {2} and len(of_step) == STEPS - 2, "once rebuilt they are two"


def test_an_optimizer_step_inside_a_backward_begins_a_step(session):
    code = f"""
(model,) = models = [make('Deep')]
inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
ValueSampling.keeps, keeps = lambda self, step: step < {KEPT} or step % 2, ValueSampling.keeps
handle = model.module[1].weight.register_post_accumulate_grad_hook(lambda _: inner.step())
try: train(models, {STEPS})
finally: ValueSampling.keeps = keeps
"""
    short = repeated(session, code)
    for rank in range(2):
        found = operations(session.recording, cell_of_last(session), rank)
        buckets = [one for one in found if one.bucket is not None]
        assert len(buckets) == 4 * STEPS - 3 and len(short[rank]) > STEPS
        assert [one.step for one in buckets] == sorted(one.step for one in buckets)
        for one in buckets:
            assert one.left_out == (one.step >= KEPT and one.step % 2 == 0 and one.number > buckets[8].number), one
        assert [one.number for one in found] == list(range(found[0].number, found[0].number + len(found)))


@pytest.mark.long
def test_a_thread_has_its_own(session):
    """A function that each epoch calls in a new thread."""
    code = f"""
import threading
models = [make('Deep')]
def epoch(): train(models, {STEPS})
epoch()
thread = threading.Thread(target=epoch); thread.start(); thread.join()
"""
    short = repeated(session, code)
    cell = cell_of_last(session)
    for rank in range(2):
        calls = session.recording.rows("call")
        calls = calls[(calls["rank"] == rank) & (calls["cell"] == cell) & (calls["bucket"] >= 0)]
        half = len(calls) // 2
        assert len({*calls["thread"][half + 4 :].tolist()}) == 1 and calls["thread"][0] != calls["thread"][-1]
        assert set(short[rank]) <= {*calls["number"].tolist()} and len(short[rank]) > STEPS


def test_what_a_hook_in_cpp_makes_smaller_takes_the_long_way(session):
    """The data is copied to memory that belongs to another bucket the next time."""
    code = f"""
(model,) = models = [make('Deep')]
model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
train(models, {STEPS})
"""
    assert repeated(session, code) == [[], []]
    found = operations(session.recording, cell_of_last(session), 0)
    assert {one.dtype for one in found if one.bucket is not None} == {"float16"}


@pytest.mark.long
def test_what_a_hook_of_the_users_calls_is_looked_at(session):
    """A call during a backward whose buckets use the fast path: recorded with its own line, and compared."""
    code = f"""
(model,) = models = [make('Deep')]
calls = 0
def hook(parameter):
    global calls; calls += 1
    dist.all_reduce(torch.ones(1 + rank * (calls == {STEPS})))
handle = model.module[1].weight.register_post_accumulate_grad_hook(hook)
train(models, {STEPS})
"""
    with pytest.raises(RankError, match=r"CollectiveMismatchError: .*all_reduce\(SUM, float32\[1\]"):
        repeated(session, code)
    for rank, short in enumerate(values(session, "repeated")):
        found = operations(session.recording, cell_of_last(session), rank)
        own = [one for one in found if one.site.startswith("cell line 6")]
        assert len(own) == STEPS and [one.state for one in own] == ["done"] * (STEPS - 1) + ["failed"]
        assert len(short) > STEPS and not {one.number for one in own} & set(short)
    session.run("handle.remove(); x = torch.ones(1); dist.all_reduce(x)", quiet=True)
    assert session["x"][0].item() == 2.0


@pytest.mark.long
def test_a_backward_that_fails_leaves_what_it_has_begun(session):
    """One rank raises before its last bucket. Started operations of the other rank are reported, and finished ones
    completed."""
    code = f"""
(model,) = models = [make('Deep')]
calls = 0
def hook(parameter):
    global calls; calls += 1
    if rank and calls == {STEPS}: raise ValueError("a bad batch")
handle = model.module[0].weight.register_post_accumulate_grad_hook(hook)
train(models, {STEPS})
"""
    with pytest.raises(RankError, match="a bad batch"):
        repeated(session, code)
    session.run("handle.remove()", quiet=True)
    for rank in range(2):
        found = operations(session.recording, cell_of_last(session), rank)
        last = [one for one in found if one.step == STEPS - 1]
        assert len(last) == (4 if rank == 0 else 3), "rank 1 raised before its last bucket"
        assert [one.bucket for one in last] == list(range(len(last)))
        assert all(one.state == "done" for one in found if one.step < STEPS - 1)
        assert "done" not in {one.state for one in last if one.bucket == 3}
    short = repeated(session, f"models = [make('Deep')]; train(models, {STEPS}); x = model.module[0].weight.sum()")
    assert all(len(one) > STEPS for one in short), "the next ones take it again"


@pytest.mark.long
@pytest.mark.parametrize(
    "hook",
    [
        "recorder.pause = lambda: counted.append(1)",
        "recorder.look = lambda call: counted.append(1)",
    ],
)
def test_where_there_is_more_to_do_than_to_note_nothing_takes_it(session, hook):
    """From the moment when this is requested, in any thread."""
    code = f"""
import threading
recorder, counted = RankEngine.instance()._rank._network.recorder, []
def on_step(step):
    if step == {STEPS - 3}:
        def say(): {hook}
        thread = threading.Thread(target=say); thread.start(); thread.join()
try: train([make('Deep')], {STEPS}, on_step=on_step)
finally: recorder.pause = recorder.look = None
"""
    short = repeated(session, code)
    assert [len(one) for one in short] == [4 * (STEPS - 2 - KEPT)] * 2
    session.run("counted = len(counted)", quiet=True)
    assert all(count >= 2 * 4 for count in values(session, "counted"))


def test_it_holds_no_tensors(session):
    """It holds no tensors of a model or its buckets after it was deleted and the records were sent."""
    code = f"""
import gc, weakref
models = [make('Deep')]
train(models, {STEPS})
held = weakref.ref(next(models[0].parameters()))
recorder = RankEngine.instance()._rank._network.recorder
calls = [call for call in list(recorder.live.values()) if type(call).__name__ == "Repeat"]
before = [call.kept for call in calls]
del models; gc.collect(); held = held() is not None
RankEngine.instance()._rank._core.recording.flusher.flush()
again = [call.backward.again for call in calls]
kept, is_done, works = [call.kept for call in calls], [call.is_done for call in calls], [call.work for call in calls]
"""
    repeated(session, code)
    assert values(session, "held") == [False, False]
    for rank in range(2):
        for future, end_ns in values(session, "before")[rank]:  # the backward has succeeded
            assert future is None and end_ns > 0
        assert values(session, "kept")[rank] == [[None, 0]] * 4 and values(session, "works")[rank] == [None] * 4
        assert values(session, "again")[rank] == [[]] * 4
        assert values(session, "is_done")[rank] == [True] * 4


def test_what_has_failed_stays_known_when_nobody_makes_it_again():
    """An error names the failed operation, after the backward has raised."""
    futures = {False: torch.futures.Future(), True: torch.futures.Future()}  # type: ignore[var-annotated]
    futures[False].set_result(1)
    futures[True].set_exception(RuntimeError("Connection closed by peer"))
    for has_failed, future in futures.items():
        repeat = Repeat.__new__(Repeat)
        backward = Backward(1, [])
        repeat.backward, repeat.kept = backward, []
        are_done = [repeat.is_done]
        repeat.kept = [future]  # and its end has not been noted
        are_done.append(repeat.is_done)
        repeat.forget()
        are_done.append(repeat.is_done)
        assert are_done == [False, True, True] and repeat.has_failed == has_failed
        assert repeat.kept == ([future] if has_failed else [None, 0])
    repeat.kept, backward.end_ns = [], 1
    assert repeat.is_done, "interrupted before anything was kept of it"


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run("%ddp_start 2 --hang-after 1").status == "ok"
    assert kernel.run(f"%%on_all_ranks\n{SET_UP}").status == "ok"
    yield kernel
    kernel.run("%ddp_stop")


@pytest.mark.long
def test_a_hang_and_a_stop_name_the_bucket(ranks):
    """Rank 1 does not reach the last bucket of a step whose buckets use the fast path."""
    message = ranks.start(
        f"""%%on_all_ranks
import time
(model,) = models = [make('Deep')]
calls = 0
def hook(parameter):
    global calls; calls += 1
    while rank and calls == {STEPS}: time.sleep(0.05)
handle = model.module[0].weight.register_post_accumulate_grad_hook(hook)
train(models, {2 * STEPS})"""
    )
    waiting = r"rank 0: waiting in all_reduce #(\d+) of group default \(mean of gradients, float32\[262656\], 1.1 MB,"
    card = wait_for_card(ranks)["text/plain"]
    found = re.search(waiting, card)
    assert found is not None, card
    number = found[1]
    assert f"not arrived at all_reduce #{number}: rank 1 is at cell line 6 in hook" in card
    ranks.interrupt()
    reply = ranks.finish(message)
    assert reply.ename == "KeyboardInterrupt"
    assert f"rank 0 waited in all_reduce #{number} of group default (float32[262656], " in reply.evalue
    reply = ranks.run(f"%%on_all_ranks\nhandle.remove(); repeated.clear(); train(models, {STEPS}); len(repeated)")
    assert reply.stdout == f"[0-1] {4 * (STEPS - KEPT)}\n"


@pytest.mark.long
def test_the_oldest_call_under_way_is_named(ranks):
    """A call from before the backward, which rank 1 does not reach."""
    message = ranks.start(
        f"""%%on_all_ranks
(model,) = models = [make('Deep')]
def on_step(step):
    if step < {STEPS - 1}: return
    if rank: time.sleep(600)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    model(torch.randn(128, 512)).sum().backward()
train(models, {STEPS}, on_step=on_step)"""
    )
    card = wait_for_card(ranks)["text/plain"]
    assert re.search(r"rank 0: waiting in all_reduce #\d+ of group default \(float32\[3\], 12 B, ", card), card
    ranks.interrupt()
    assert ranks.finish(message).ename == "KeyboardInterrupt"
