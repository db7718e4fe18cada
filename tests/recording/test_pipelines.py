"""Pipelines of `torch.distributed.pipelining`: all schedules as actions, the bubble, and errors that contain the
stage."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ddp_notebook.errors import CellTimeoutError, RankError, UsageError

_BLOCKS = '''
import time
import torch.nn as nn
from ddp_notebook.lessons.pipelines.ranks import PipelineStageOnRank
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS, ScheduleZBVZeroBubble,
)

torch.manual_seed(0)
X, Y = torch.randn(16, 8), torch.randn(16, 8)
SLEEP_S = 0.0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
    def forward(self, x):
        time.sleep(SLEEP_S)
        return torch.tanh(x @ self.weight)

def loss_of(out, target):
    return ((out - target) ** 2).mean()

def step(schedule, stages, batch=None):
    losses, batch = [], X if batch is None else batch
    inputs = (batch,) if any(stage.is_first for stage in stages) else ()
    outputs = {"target": Y[:len(batch)], "losses": losses} if any(stage.is_last for stage in stages) else {}
    schedule.step(*inputs, **outputs)

def make(Schedule, places, count, microbatches=8):
    """The stages at these places of a model of `count` blocks, and the model."""
    torch.manual_seed(1)
    model = [Block() for _ in range(count)]
    stages = [PipelineStageOnRank(model[at], at, count, device) for at in places]
    return Schedule(stages if count > world_size else stages[0], microbatches, loss_fn=loss_of), stages, model

def is_like_one_process(stages, model):
    """Whether the gradients of its stages are those of the model in one process."""
    own = {stage.stage_index: stage.submod.weight.grad.clone() for stage in stages}
    for block in model:
        block.weight.grad = None
    out = X
    for block in model:
        out = block(out)
    loss_of(out, Y).backward()
    return all(torch.allclose(grad, model[at].weight.grad, atol=1e-6) for at, grad in own.items())
'''
_LOOP, _VEE = "(rank, rank + 2)", "(rank, 3 - rank)"
_SCHEDULES = {  # with the stages of a rank, the number of stages, and the kinds of actions
    "ScheduleGPipe": ("(rank,)", 2, {"forward", "backward"}),
    "Schedule1F1B": ("(rank,)", 2, {"forward", "backward"}),
    "ScheduleInterleaved1F1B": (_LOOP, 4, {"forward", "backward"}),
    "ScheduleLoopedBFS": (_LOOP, 4, {"forward", "backward"}),
    "ScheduleInterleavedZeroBubble": (_LOOP, 4, {"forward", "input gradient", "weight gradient"}),
    "ScheduleZBVZeroBubble": (_VEE, 4, {"forward", "input gradient", "weight gradient"}),
    "ScheduleDualPipeV": (_VEE, 4, {"forward", "backward", "input gradient", "weight gradient"}),
}


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_BLOCKS, quiet=True)
    return session


@pytest.mark.parametrize("name", _SCHEDULES)
def test_every_schedule_is_recorded_and_equals_one_process(ranks, name):
    places, count, kinds = _SCHEDULES[name]
    ranks.run(f"schedule, stages, model = make({name}, {places}, {count})\nstep(schedule, stages)", quiet=True)
    out = ranks.run("is_like_one_process(stages, model)", quiet=True)
    assert {out[rank].result for rank in out.ranks} == {"True"}

    found = ranks.recording.pipeline()
    assert (found.schedule, found.stages, found.microbatches, found.ranks) == (name, count, 8, (0, 1))
    actions = [(one.kind, one.stage, one.microbatch) for one in found.actions]
    assert len(set(actions)) == len(actions) and {kind for kind, _, _ in actions} == kinds
    for stage in range(count):
        assert sorted(mb for kind, at, mb in actions if (kind, at) == ("forward", stage)) == list(range(8))
        ends = [mb for kind, at, mb in actions if at == stage and kind in ("backward", "weight gradient")]
        assert sorted(ends) == list(range(8))
    assert sorted(actions) == sorted((one.kind, one.stage, one.microbatch) for one in found.ideal)
    assert found.ideal_span_ns <= found.span_ns and 0 <= found.ideal_bubble <= found.bubble < 1


def test_the_report_has_a_bubble_line_and_blames_no_rank(ranks):
    # The bubble is longer than the wait for a core, which would be the verdict on a busy machine.
    ranks.run(
        "schedule, stages, model = make(Schedule1F1B, (rank,), 2, 4)\nSLEEP_S = 0.04 * (1 + rank)\n"
        "optimizer = torch.optim.SGD([stages[0].submod.weight], lr=0.1)\n"
        "for _ in range(6): optimizer.zero_grad(); step(schedule, stages); optimizer.step()\nSLEEP_S = 0.0",
        quiet=True,
    )
    report = ranks.recording.report()
    assert report.straggler is None and ranks.recording.straggler() is None
    (line,) = [note for note in report.notes if note.startswith("Bubble")]
    words = r"Bubble of Schedule1F1B with 2 stages and 4 microbatches: \d+ % of the ranks' time; \d+ % would be .*"
    assert re.fullmatch(words, line)
    assert re.fullmatch(r"\d+ % of the step is the bubble of the pipeline: Schedule1F1B with 2 .*", report.verdict)
    assert any("n_microbatches=8" in text for text in report.suggestions)
    assert not any("equal work" in text or "Distributed" in text for text in report.suggestions)
    computed = [parts.compute_ns / parts.step_ns for parts in report.ranks]
    assert computed[1] > computed[0] > 0.1  # forwards of stages are compute
    assert {step.samples for step in ranks.recording.steps()} >= {None}


def test_a_chart_a_trace_and_messages_name_stage_and_microbatch(ranks, tmp_path):
    ranks.run("schedule, stages, model = make(ScheduleGPipe, (rank,), 2, 4)\nstep(schedule, stages)", quiet=True)
    cell = int(ranks.recording.rows("span")["cell"].max())
    title = ranks.recording.plot.pipeline(cell).get_suptitle()
    assert re.match(r"GPipe, 2 stages, 4 microbatches: bubble \d+ %, \d+ % if messages", title)
    events = json.loads(ranks.recording.save_trace(tmp_path / "run.json", cell).read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"ScheduleGPipe", "forward of stage 1, microbatch 3", "backward of stage 0, microbatch 0"} <= names
    carried = {call.module for call in ranks.recording.collectives(cell=cell) if call.origin == "pipeline"}
    assert {"activations of microbatch 3 for stage 1", "gradients of microbatch 0 from stage 1"} <= carried


def test_an_evaluation_is_a_pipeline_of_forwards(ranks):
    ranks.run("schedule.eval(*((X,) if rank == 0 else ()), **({} if rank == 0 else {'target': Y}))\nNone", quiet=True)
    assert {one.kind for one in ranks.recording.pipeline().actions} == {"forward"}


def test_what_is_not_there_is_said(ranks):
    found = ranks.recording.pipeline()
    with pytest.raises(UsageError, match=f"ScheduleGPipe in cell {found.cell} has no step 9; its steps are 0 to 0"):
        ranks.recording.pipeline(cell=found.cell, step=9)
    with pytest.raises(
        UsageError, match=r"no complete pipeline step was recorded in cell 999: run a schedule of torch\.distributed"
    ):
        ranks.recording.plot.pipeline(cell=999)


# ---- bad input


def _fails(ranks: Any, code: str) -> str:
    with pytest.raises(RankError) as caught:
        ranks.run(code, quiet=True)
    ranks.run("x = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size", quiet=True)  # still usable
    return str(caught.value)


@pytest.mark.long
def test_a_stage_that_gets_a_wrong_shape_is_named(ranks):
    code = "schedule, stages, model = make(ScheduleGPipe, (rank,), 2)\n"
    early = "if rank == 1: stages[0].submod = nn.Linear(5, 8)\n"
    assert (
        "mat1 and mat2 shapes cannot be multiplied (2x8 and 5x8) (in stage 1 of 2, before the first microbatch of 8: "
        "stage 0 gives it float32[2, 8]; its module is Linear(in_features=5, out_features=8, bias=True))"
    ) in _fails(ranks, code + early + "step(schedule, stages)")
    late = (
        "class Late(Block):\n    count = 0\n    def forward(self, x):\n        Late.count += 1\n"
        "        return super().forward(x if Late.count < 6 else x[:, :4])\n"
        "if rank == 0: stages[0].submod = Late()\n"
    )
    assert re.search(
        r"in stage 0 of 2, forward of microbatch \d of 8: the batch gives it float32\[2, 8\] "
        r"\(16 samples / 8 microbatches\)",
        _fails(ranks, code + late + "step(schedule, stages)"),
    )


def test_a_batch_that_microbatches_do_not_divide_is_refused(ranks):
    code = "schedule, stages, model = make(ScheduleGPipe, (rank,), 2)\n"
    assert (
        "ScheduleGPipe has more microbatches than samples: 4 samples / 8 microbatches = 0.5; pass n_microbatches=4 "
        "or less, or a batch of 8 or more"
    ) in _fails(ranks, code + "step(schedule, stages, X[:4])")
    assert (
        "needs microbatches of equal size, but 12 samples / 8 microbatches = 1.5 is not a whole number; pass a batch "
        "of 8 or 16"
    ) in _fails(ranks, code + "step(schedule, stages, X[:12])")


def test_waiting_and_computing_ranks_name_microbatch_and_stage(ranks):
    code = "schedule, stages, model = make(ScheduleGPipe, (rank,), 2)\nstep(schedule, stages)\n"
    with pytest.raises(CellTimeoutError) as caught:
        ranks.run(code + "SLEEP_S = 30 * rank\nstep(schedule, stages)", quiet=True, timeout_s=4)
    said = str(caught.value)
    assert re.search(
        r"rank 0: waiting in \w+ #\d+ \w+ rank 1 \((activations|gradients) of microbatch \d \w+ stage 0, ", said
    )
    assert re.search(r"rank 1: at .*cell line \d+.* \(stage 1, forward of microbatch 0\)", said)
    ranks.run("SLEEP_S = 0.0\nx = torch.ones(1); dist.all_reduce(x); assert x.item() == world_size", quiet=True)
