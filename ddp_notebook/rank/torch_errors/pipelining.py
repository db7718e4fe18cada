"""Errors of pipelines. The recorder of pipelines adds stage, microbatch and shapes to errors of a stage's module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised, variables
from ddp_notebook.stdlib import re

_PIPELINING = r"^torch\.distributed\.pipelining\."
_SIZES = re.compile(r"torch\.Size\(\[(\d+)")


def _schedule(raised: Raised, found: Mapping[str, str]) -> Values:
    # the class that the user calls is the outermost one; its base classes come after it
    schedule = next((one for frame in raised.frames if (one := _self(frame, "schedules")) is not None), None)
    return {"schedule": type(schedule).__name__ if schedule is not None else "this schedule"}


def _self(frame: Any, module: str) -> Any:
    is_of = frame.f_globals.get("__name__") == f"torch.distributed.pipelining.{module}"
    return variables(frame).get("self") if is_of else None


def _other_batch(_: Raised, found: Mapping[str, str]) -> Values | None:
    output, gradient = (_SIZES.search(found[name]) for name in ("output", "gradient"))
    if output is None or gradient is None or output[1] == gradient[1]:
        return None
    return {"now": output[1], "before": gradient[1]}


def _first_without_batch(raised: Raised, found: Mapping[str, str]) -> Values | None:
    stage = next((one for frame in raised.frames if (one := _self(frame, "stage")) is not None), None)
    step = _PIPELINING + r"schedules:PipelineSchedule(Single|Multi)\.step$"
    if stage is None or not stage.is_first or raised.local(step, "args") != ():
        return None
    return {"stage": stage.stage_index}


def _last(_: Raised, found: Mapping[str, str]) -> Values:
    return {"last": int(found["stages"]) - 1}


ENTRIES = (
    KnownError(
        name="fewer microbatches than stages",
        text="Number of microbatches ({count:d}) must be greater than or equal to the number of stages ({stages:d}).",
        kind="ValueError",
        where=_PIPELINING + "schedules:",
        facts=_schedule,
        cause="{schedule} keeps {stages} stages busy at the same time, and n_microbatches={count} is less",
        fix="pass n_microbatches={stages} or more, or use ScheduleGPipe",
    ),
    KnownError(
        name="batch of another size",
        text="{}Failed to run stage backward:\n{}Stage output: {output}\n{}Output gradient: {gradient}\n",
        kind="RuntimeError",
        where=_PIPELINING + "_backward:stage_backward$",
        facts=_other_batch,
        cause="microbatches have {now} samples in this step, and the stages keep the first size, {before}",
        fix="pass drop_last=True to the DataLoader, or make stages and schedule again for another batch size",
    ),
    KnownError(
        name="number of a stage",
        text="Stage index {index:d} is out of range of {stages:d}",
        kind="ValueError",
        where=_PIPELINING + "stage:",
        facts=_last,
        cause="stage {index} does not exist in a pipeline of {stages} stages",
        fix="use numbers from 0 to {last}, and pass the number of all stages on all ranks as num_stages",
    ),
    KnownError(
        name="no target in the last stage",
        text="Stage {index:d}: loss_fn and target required for last stage",
        kind="PipeliningMetadataError RuntimeError ValueError",
        where=_PIPELINING + "stage:",
        cause="stage {index} is the last one, and it needs a loss_fn in the schedule and a target in step()",
        fix="call schedule.step(target=y) on its rank, or schedule.eval() without a backward",
    ),
    KnownError(
        name="no batch in the first stage",
        text="{}missing {:d} required positional argument",
        kind="TypeError",
        where=r"^torch\.nn\.modules\.module:",
        facts=_first_without_batch,
        cause="stage {stage} is the first one and takes the batch, and step() got none",
        fix="call schedule.step(x) on the rank of stage {stage}",
    ),
    KnownError(
        name="pipeline without gradients",
        text="step() requires gradients to be enabled for backward computation",
        kind="RuntimeError",
        where=_PIPELINING + "schedules:",
        cause="step() runs forward and backward, and gradients are switched off here",
        fix="call schedule.eval(x) within torch.no_grad(), or leave no_grad out",
    ),
)
