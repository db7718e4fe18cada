"""DDP from the inside, on two real ranks: the stages show the values of the ranks."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from ddp_notebook.errors import NoSessionError, RankError, UsageError
from ddp_notebook.lessons.ddp.inside import inside_ddp
from ddp_notebook.lessons.ddp.times import StepSpan, medians_ms, pieces
from ddp_notebook.observe.figures.drawing import fill_style
from ddp_notebook.observe.views import Bucket, Step

# Buckets of 1 MB for the lesson's model from the second step on. Autograd starts at the last layer.
BUCKETS = [
    (1_666_600, ("last.bias", "last.weight", "third.bias", "third.weight")),
    (1_640_960, ("second.bias", "second.weight")),
    (166_400, ("first.bias", "first.weight")),
]


@pytest.fixture(scope="module")
def ddp(session):
    return inside_ddp(bucket_cap_mb=1)


def mean(of_rank):
    return np.mean([of_rank[rank] for rank in sorted(of_rank)], axis=0)


def told(buckets):
    return [(one.nbytes, one.parameters) for one in buckets]


# ---- one stage at a time


def test_two_steps_go_through_the_five_stages(ddp, session):
    first, second = ddp.play(), ddp.play()

    assert [stage.number for stage in first] == [1, 2, 3, 4, 5]  # in the first step all gradients share a bucket
    assert [stage.number for stage in second] == [2, 3, 4, 4, 4, 5]
    construction, forward, backward, reduction, update = first

    # 1: the ranks drew different weights, and receive those of rank 0
    assert construction.before[0] != construction.before[1]
    assert construction.after == {0: construction.before[0], 1: construction.before[0]}
    assert construction.agreement.agrees and "broadcast" in construction.calls

    # 2: nothing is sent, and the losses are those of different images
    assert forward.losses[0] != forward.losses[1] and forward.calls == ()

    # 3: local gradients, different by rank; those of the last layer come first
    assert backward.before[0] != backward.before[1] and not backward.agreement.agrees
    names = [whose for _, what, whose in backward.events if what == "gradient"]
    assert names[:2] in (["last.bias", "last.weight"], ["last.weight", "last.bias"]) and len(names) == 8
    assert backward.calls == ()

    # 4: the mean of the local gradients
    np.testing.assert_allclose(mean(reduction.before), reduction.after[0], rtol=1e-5, atol=1e-8)
    assert reduction.after[0] == reduction.after[1] and reduction.calls == ("all_reduce",)
    assert reduction.agreement.agrees

    # 5: weights minus the learning rate times that mean, with nothing sent
    gradient = mean(backward.before)
    np.testing.assert_allclose(np.subtract(update.before[0], 0.5 * gradient), update.after[0], rtol=1e-5, atol=1e-7)
    assert update.calls == () and update.agreement.agrees
    assert session.check("_inside_network").agrees


def test_the_second_step_fills_buckets_from_the_last_layer_on(ddp):
    backward = next(stage for stage in reversed(ddp.stages) if stage.number == 3)

    assert told(backward.buckets) == BUCKETS
    full = [(at, what) for at, (_, what, _) in enumerate(backward.events) if what == "bucket"]
    assert [at for at, _ in full] == [4, 7, 10]  # after 4, 6 and 8 gradients
    reductions = [stage for stage in ddp.stages if stage.number == 4][-3:]
    # The observed gradient, last.bias, is in the first bucket.
    assert [stage.agreement.agrees for stage in reductions] == [True, True, True]
    assert reductions[0].before[0] != reductions[0].before[1]


def test_stage_by_stage_gives_what_ddp_gives_at_speed(session):
    slow = inside_ddp(bucket_cap_mb=1)
    slow.play(), slow.play()
    session.run("_slow = [one.detach().clone() for one in _inside_network.parameters()]", quiet=True)
    slow.run(steps=2)
    code = "_same = all(torch.equal(a, b) for a, b in zip(_slow, _inside_network.parameters(), strict=True))"
    session.run(code, quiet=True)

    assert dict(session["_same"].items()) == {0: True, 1: True}


def test_every_stage_has_a_text_and_a_picture(ddp, capsys):
    for stage in ddp.stages[:6]:
        stage._ipython_display_()
        assert stage.text in capsys.readouterr().out  # the picture has the title
        assert stage.title in stage.picture().get_suptitle()
    grid = [text.get_text() for text in ddp.stages[0].picture().axes[0].texts]
    for value in ddp.stages[0].before[1]:
        assert f"{value:.2g}" in grid


# ---- at speed


@pytest.fixture(scope="module")
def plain(ddp):
    return ddp.run()


def test_a_run_tells_what_the_ranks_did(plain):
    assert told(plain.buckets) == BUCKETS
    assert [len(one.parameters) for one in plain.first_buckets] == [8]
    assert len(plain.steps) == 16 and plain.sent_bytes == 3_473_960
    assert plain.agreement.agrees
    assert plain.losses[0][-1] < plain.losses[0][0]
    ms = plain.ms
    assert ms["step"] >= ms["compute"] > 0 and ms["exposed"] > 0
    local = [plain.gradients[rank].local.first for rank in (0, 1)]
    after = [plain.gradients[rank].synchronised.first for rank in (0, 1)]
    assert not np.array_equal(*local)
    np.testing.assert_array_equal(*after)
    np.testing.assert_allclose(np.mean(local, axis=0), after[0], rtol=1e-5, atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 25}])
def test_options_of_memory_and_order_change_no_number(ddp, plain, options):
    found = ddp.run(**options)

    assert found.agreement.agrees
    np.testing.assert_allclose(found.losses[0], plain.losses[0], rtol=1e-4)
    assert len(found.buckets) == (1 if "bucket_cap_mb" in options else 3)
    assert next(iter(options)) in found.name or "25 MB" in found.name


@pytest.mark.long
def test_a_slower_link_shows_where_nothing_hides_it(ddp, plain):
    found = ddp.run(steps=5, link_mb_s=20)

    # A ring of two ranks moves each byte once: 174 ms, of which only the time of the backward can be hidden.
    moved_ms = 3_473_960 / 20e6 * 1e3
    assert found.ms["exposed"] + found.ms["compute"] > moved_ms
    assert found.ms["exposed"] > plain.ms["exposed"] + moved_ms / 4
    assert found.losses == {rank: losses[:5] for rank, losses in plain.losses.items()}  # only slower
    half = ddp.run(steps=5, link_mb_s=20, comm_hook="fp16")
    assert half.sent_bytes == found.sent_bytes / 2
    assert half.ms["exposed"] + half.ms["compute"] > moved_ms / 2
    # A busy machine can hide more communication in one run than in the other. Half of the difference is enough.
    assert half.ms["exposed"] < found.ms["exposed"] - moved_ms / 4
    rounded = half.gradients[0].synchronised.first
    np.testing.assert_array_equal(rounded.astype(np.float16), rounded)
    assert not np.array_equal(rounded, found.gradients[0].synchronised.first)
    np.testing.assert_allclose(half.losses[0], found.losses[0], rtol=1e-2)


def test_powersgd_sends_little_and_its_ranks_agree(ddp, plain):
    found = ddp.run(comm_hook="powersgd")

    assert found.sent_bytes < 0.03 * plain.sent_bytes
    assert found.agreement.agrees and found.losses[0][-1] < found.losses[0][0]
    assert found.losses[0][:3] == pytest.approx(plain.losses[0][:3], rel=1e-5)  # compression starts at the third step
    assert found.losses[0][-1] != plain.losses[0][-1]


def test_the_others_wait_for_a_straggler(ddp, plain):
    found = ddp.run(straggler=1, straggler_ms=150)

    # If other processes use the cores, rank 0 may be late itself and wait for less than the whole time.
    assert found.ms_of(0)["waiting"] > 75 > found.ms_of(1)["waiting"]
    assert found.losses == plain.losses
    assert any(text.get_text() == "asleep" for text in found.picture().axes[0].texts)


def test_small_buckets_are_hidden_by_a_simulated_backward(ddp):
    """Sleeping takes at least its time, and one bucket is full only when nothing is left to compute."""

    def hidden_ns(run):
        parts = [one for step in run.steps if step.step >= 2 for one in pieces(run.spans, run.steps, step)]
        return sum(one.end_ns - one.start_ns for one in parts if one.meaning == "hidden")

    small = ddp.run(4, compute_ms=80, link_mb_s=50)
    large = ddp.run(4, compute_ms=80, link_mb_s=50, bucket_cap_mb=25)
    assert small.ms["compute"] >= 120 and large.ms["compute"] >= 120, "forward and backward"
    assert hidden_ns(small) > 0 == hidden_ns(large)
    assert small.name == "buckets of 1 MB, backward of 80 ms, link of 50 MB/s"


@pytest.mark.long
def test_passes_without_synchronisation_send_nothing(ddp, plain):
    found = ddp.run(no_sync=2)

    assert found.sent_bytes == plain.sent_bytes  # per optimizer step, although each has three passes
    backwards = [one for one in found.spans if one.kind == "backward" and one.rank == 0]
    assert len(backwards) == 3 * len(plain.losses[0])


@pytest.mark.long
def test_a_layer_without_a_part_in_the_loss(ddp, session):
    with pytest.raises(RankError, match="parameters that were not used in producing loss"):
        ddp.run(unused=True)

    found = ddp.run(unused=True, find_unused_parameters=True)

    assert found.agreement.agrees
    names = [name for one in found.buckets for name in one.parameters]
    assert {"unused.weight", "unused.bias"} <= set(names)
    # An additional all_reduce in each step agrees on the used parameters: a number of 4 bytes for each.
    assert found.sent_bytes == sum(one.nbytes for one in found.buckets) + 4 * 10


def test_other_models(session):
    found = inside_ddp("nn.Sequential(nn.Linear(64, 10))", parameter="0.weight").run(steps=3)

    assert {name for one in found.buckets for name in one.parameters} == {"0.weight", "0.bias"}
    assert found.agreement.agrees


# ---- pictures and words


def test_the_picture_of_a_run_draws_its_buckets_by_what_they_did(plain):
    (axes,) = plain.picture().axes
    step = next(one for one in plain.steps if (one.rank, one.step) == (0, plain.typical))
    zero = min(one.start_ns for one in plain.steps if one.step == plain.typical)
    drawn = {(round(bar.get_x(), 3), round(bar.get_width(), 3), bar.get_facecolor()) for bar in axes.patches}

    for piece in pieces(plain.spans, plain.steps, step):
        left, width = (piece.start_ns - zero) / 1e6, (piece.end_ns - piece.start_ns) / 1e6
        assert (round(left, 3), round(width, 3), to_rgba(fill_style(piece.meaning)["facecolor"])) in drawn
    assert plain.layout().get_suptitle() == "1 bucket in the first step, 3 from the second on"


def test_runs_are_compared_in_a_table_and_a_picture(ddp, plain):
    other = ddp.run(straggler=1, straggler_ms=60)
    lines = ddp.table(plain, other).splitlines()
    picture = ddp.compare(plain, other)

    assert lines[0].split() == ["buckets", "MB", "sent", "step", "ms", "compute", "exposed", "waiting", "loss"]
    assert lines[1].startswith("buckets of 1 MB ") and lines[2].startswith("buckets of 1 MB, rank 1 60 ms late")
    options = replace(plain.options, comm_hook="powersgd", powersgd_rank=2, compute_ms=60.0, link_mb_s=30.0)
    lines = ddp.table(replace(plain, options=options)).splitlines()
    assert lines[2] == "  backward of 60 ms, link of 30 MB/s" and max(map(len, lines)) <= 100, "a line of JupyterLab"
    title = picture.get_suptitle()  # the faster one first, which may be the other one on a busy machine
    first, second = sorted((plain, other), key=lambda run: run.ms["step"])
    assert re.fullmatch(rf"A step takes \d+ ms with {first.name}, \d+ ms with {second.name}", title), title
    words = [text.get_text() for text in picture.axes[0].texts]
    assert plain.name in words and other.name in words
    assert repr(ddp).startswith("<InsideDDP on 2 ranks: after <stage 5 of 5")


def test_pieces_of_a_step_that_is_known():
    def step(rank, issued, ended):
        bucket = Bucket(bucket=0, nbytes=4, parameters=(), issue_ns=issued, end_ns=ended)
        times = {one.name: 0 for one in fields(Step) if one.name.endswith("_ns")} | {"end_ns": 100}
        return Step(rank=rank, cell=1, step=2, samples=None, buckets=(bucket,), **times)

    spans = [StepSpan(0, 5, 20, "forward"), StepSpan(0, 20, 90, "backward"), StepSpan(0, 92, 99, "optimizer")]
    steps = [step(0, 50, 85), step(1, 60, 85)]

    assert [tuple(one) for one in pieces(spans, steps, steps[0])] == [
        (None, 5, 20, "forward", "forward"),
        (None, 20, 50, "backward", "backward"),
        (None, 50, 60, "waiting", ""),
        (None, 60, 90, "exposed", ""),
        (None, 92, 99, "optimizer", "optimizer"),
        (0, 50, 60, "waiting", ""),
        (0, 60, 85, "exposed", ""),
    ]
    ms = medians_ms(spans, steps, steps[:1])
    assert {name: round(1e6 * value) for name, value in ms.items()} == {
        "step": 100,
        "compute": 45,
        "waiting": 10,
        "exposed": 30,
        "optimizer": 7,
    }


# ---- sliders


@pytest.mark.long
def test_what_is_moved_runs_anew(ddp):
    from ddp_notebook.lessons.ddp.sliders import DDPSliders

    sliders = DDPSliders(ddp, ddp._session)
    sliders.show()
    before = len(ddp.runs)
    sliders.controls["bucket_cap_mb"].value = 25.0
    sliders.controls["comm_hook"].value = "fp16"

    assert [run.name for run in ddp.runs[before:]] == ["buckets of 25 MB", "buckets of 25 MB, fp16"]
    assert set(sliders.controls) <= {one.name for one in fields(ddp.options)}


def test_a_list_shows_that_nothing_is_chosen(ddp):
    from ddp_notebook.lessons.ddp.sliders import DDPSliders

    sliders = DDPSliders(ddp, ddp._session)
    lists = [sliders.controls[name] for name in ("straggler", "link_mb_s", "comm_hook")]
    assert [one.label for one in lists] == ["none", "as it is", "none"]

    sliders.controls["comm_hook"].value = "fp16"
    sliders.controls["comm_hook"].index = 0

    assert sliders.controls["comm_hook"].label == "none"
    assert sliders.run().name == "buckets of 1 MB"


# ---- mistakes


def test_mistakes_are_said(ddp):
    with pytest.raises(UsageError, match="unknown option buckets; the options are bucket_cap_mb"):
        ddp.run(buckets=3)
    with pytest.raises(UsageError, match="comm_hook must be one of None, 'fp16'"):
        ddp.run(comm_hook="fp8")
    with pytest.raises(UsageError, match="straggler must be a rank from 0 to 1, got 2"):
        ddp.run(straggler=2)
    with pytest.raises(UsageError, match="link_mb_s must be greater than 0, got 0"):
        ddp.run(link_mb_s=0)


# ---- when the ranks have ended


def test_without_ranks_there_is_nothing_to_look_into(session):
    session.stop()
    with pytest.raises(NoSessionError):
        inside_ddp()


@pytest.mark.long
def test_sliders_leave_a_picture_when_the_ranks_have_ended(make_kernel, session):
    """The controls cannot work then, and in a saved notebook they would be an error message."""
    session.stop()
    kernel = make_kernel()
    assert kernel.run("%load_ext ddp_notebook\n%ddp_start 2").status == "ok"
    reply = kernel.run("from ddp_notebook.lessons import inside_ddp\nddp = inside_ddp(); ddp.sliders()")
    assert reply.status == "ok", reply

    assert "application/vnd.jupyter.widget-view+json" in reply.displays[0]
    assert "image/png" in reply.displays[1]
    assert "2 ranks agree" in reply.displays[2]["text/plain"]

    message = kernel.start("%ddp_stop")
    updates: list[dict[str, Any]] = []
    while not updates or updates[-1]["msg_type"] != "status" or updates[-1]["content"]["execution_state"] != "idle":
        one = kernel.client.get_iopub_msg(timeout=20)
        if one["parent_header"].get("msg_id") == message:
            updates.append(one)
    left = [one["content"]["data"] for one in updates if one["msg_type"] == "update_display_data"]
    assert left == [{"text/plain": "(The sliders ended with the ranks.)"}]
