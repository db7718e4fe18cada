"""Pipelines of `torch.distributed.pipelining`: the actions of each stage on each microbatch.

    schedule.step      |pipeline                                |   a span, with the numbers of stages and microbatches
    stage's chunks       |forward 0|forward 1|   |backward 0|  ..    spans inside that one: the actions

All schedules use three methods of a stage, one for each kind of action. They get the messages around an action from the
stage. So this module is independent of schedules. It also provides the running action and the content of messages, as
text for errors and status displays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import get_process_group_ranks, get_world_size
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.training.wrapping import around, passed_over
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.words import list_ranks
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, time

FORWARD, BACKWARD, PIPELINE = map(SPANS.index, ("forward", "backward", "pipeline"))
INPUT_GRADIENT, WEIGHT_GRADIENT = map(SPANS.index, ("input gradient", "weight gradient"))
_MOST_SHOWN = 100  # characters of a module


class StageAction(NamedTuple):
    """An action of a stage on a microbatch. As text: `"stage 1, forward of microbatch 3"`."""

    kind: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"stage {self.stage}, {SPANS[self.kind]} of microbatch {self.microbatch}"


@dataclass(slots=True)
class _Step:
    """One running `step` of a schedule."""

    span: int
    samples: int | None  # size of the batch, if this rank has it
    explained: BaseException | None = None  # the error that already has a note


class Leave(Protocol):
    """Function that records a span that has ended."""

    def __call__(self, kind: int, name: str, start_ns: int, *, number: int, place: tuple[int, int, int]) -> None: ...


class Pipelines:
    """Observer of pipelines, from `install` on.

    Args:
        event_buffer: its level is OFF if nothing is recorded. It numbers spans.
        leave: records the spans; `place` is the span of the pipeline's step, the stage and the microbatch.
    """

    def __init__(self, event_buffer: EventBuffer, leave: Leave) -> None:
        self.doing: dict[int, StageAction] = {}  # running actions, by thread
        self._event_buffer = event_buffer
        self._leave = leave
        self.steps: dict[int, _Step] = {}  # running steps, by thread
        self._has_messages = False
        self._carried = WeakTensorKeyDictionary()  # description of the content of a sent or received tensor

    def install(self) -> None:
        """Wrap the methods of stages and schedules. Imports torch's pipelines."""
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
        from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

        around(Stage, "forward_one_chunk", self._around(lambda *_, **__: FORWARD))
        around(Stage, "backward_one_chunk", self._around(_kind_of_backward))
        around(Stage, "backward_weight_one_chunk", self._around(lambda *_, **__: WEIGHT_GRADIENT))
        for what, name in (("activations", "fwd"), ("gradients", "bwd")):
            around(Stage, f"get_{name}_recv_ops", self._around_messages(what, "for"))
            around(Stage, f"get_{name}_send_ops", self._around_messages(what, "from"))
        around(PipelineScheduleSingle, "step", self._around_step)
        around(PipelineScheduleMulti, "step", self._around_step)

    def words(self, thread: int) -> str:
        """Return the current action of a thread, as text; "" if there is none."""
        return str(self.doing.get(thread, ""))

    def meaning(self, call: Call) -> str:
        """Return the content of a message: `"activations of microbatch 3 for stage 2"`; "" if it does not belong to a
        pipeline."""
        if not self._has_messages:
            return ""
        at = call.kernel.at_tensors
        tensors = flat(call.arguments[at]) if at is not None and call.arguments else ()
        return self._carried.get(tensors[0], "") if tensors else ""

    # ---- actions

    def _around(self, kind_of: Callable[..., int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def act(stage: Any, microbatch: int, *args: Any, **named: Any) -> Any:
                kind = kind_of(*args, **named)
                if kind != FORWARD and not stage.has_backward:
                    return original(stage, microbatch, *args, **named)
                thread, began_ns = threading.get_ident(), time.monotonic_ns()
                self.doing[thread] = action = StageAction(kind, stage.stage_index, microbatch)
                try:
                    return original(stage, microbatch, *args, **named)
                except Exception as error:
                    self._explain(error, [stage], action)
                    raise
                finally:
                    self.doing.pop(thread, None)
                    if self._event_buffer.level != OFF:
                        self._put(action, began_ns, self.steps.get(thread))

            return act

        return make

    def _put(self, action: StageAction, began_ns: int, step: _Step | None) -> None:
        name = f"stage {action.stage}, microbatch {action.microbatch}"
        place = (step.span if step else 0), action.stage, action.microbatch
        self._leave(action.kind, name, began_ns, number=next(self._event_buffer.spans), place=place)

    def _around_messages(self, what: str, toward: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_ops(stage: Any, microbatch: int) -> Any:
                operations = original(stage, microbatch)
                self._has_messages = self._has_messages or bool(operations)
                for operation in operations:
                    words = f"{what} of microbatch {microbatch} {toward} stage {stage.stage_index}"
                    self._carried[operation.tensor] = words
                return operations

            return get_ops

        return make

    # ---- steps

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(schedule: Any, *args: Any, **named: Any) -> Any:
            stages = getattr(schedule, "_stages", None) or [schedule._stage]
            samples = _check(schedule, stages, args, named)
            thread, began_ns, span = threading.get_ident(), time.monotonic_ns(), next(self._event_buffer.spans)
            self.steps[thread] = _Step(span, samples)
            try:
                return original(schedule, *args, **named)
            except Exception as error:
                self._explain(error, stages, None, schedule._n_microbatches)
                raise
            finally:
                self.steps.pop(thread, None)
                if self._event_buffer.level != OFF:
                    place = span, stages[0].num_stages, schedule._n_microbatches
                    self._leave(PIPELINE, _name(schedule, stages[0].group), began_ns, number=span, place=place)

        return passed_over(step)

    def _explain(
        self, error: Exception, stages: Sequence[Any], action: StageAction | None, microbatches: int | None = None
    ) -> None:
        """Add a note to an error with the failed stage, its action and its inputs.

        Before the first action, torch queries the shapes of every stage. The stage of an error at that time is the one
        whose module has raised.
        """
        step = self.steps.get(threading.get_ident())
        if step is not None and step.explained is error:
            return
        of_stages = ((stage, _given(error, stage.submod)) for stage in stages)
        given = next(((stage, tensors) for stage, tensors in of_stages if tensors is not None), None)
        if action is None and given is None:  # a message has failed, or the schedule itself
            return
        stage = given[0] if given else stages[0]
        microbatches = microbatches or stage.chunks
        where = f"in stage {stage.stage_index} of {stage.num_stages}, "
        where += f"{SPANS[action.kind]} of microbatch {action.microbatch}" if action else "before the first microbatch"
        where += f" of {microbatches}"
        if given is not None and given[1]:
            giver = f"stage {stage.stage_index - 1}" if stage.stage_index else "the batch"
            where += f": {giver} gives it {', '.join(given[1])}"
            if not stage.stage_index and step is not None and step.samples is not None:
                where += f" ({step.samples} samples / {microbatches} microbatches)"
            module = " ".join(repr(stage.submod).split())
            where += f"; its module is {module if len(module) <= _MOST_SHOWN else module[:_MOST_SHOWN] + '...'}"
        error.add_note(where)
        if step is not None:
            step.explained = error


def _kind_of_backward(loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> int:
    return BACKWARD if full_backward else INPUT_GRADIENT


def _name(schedule: Any, group: Any) -> str:
    """Return the name of the schedule. It contains the ranks if these are not all, to distinguish parallel
    pipelines."""
    name = type(schedule).__name__
    if group is None or get_world_size(group) == get_world_size():
        return name
    return f"{name} on {list_ranks(get_process_group_ranks(group))}"


def _check(schedule: Any, stages: Sequence[Any], args: Iterable[Any], named: dict[str, Any]) -> int | None:
    """Refuse a batch that cannot be split into microbatches of equal size. Return its samples, if this rank has it.

    torch receives every microbatch in the shape of the first one, so a stage computes wrong results for a shorter one.

    Raises:
        ValueError: with the complete equation.
    """
    count, name, samples = schedule._n_microbatches, type(schedule).__name__, None
    whole = [*args] if schedule._args_chunk_spec is None else []
    for one in (*whole, named.get("target")):
        if not isinstance(one, torch.Tensor) or not one.dim():
            continue
        samples = one.size(0)
        equation = f"{samples} samples / {count} microbatches = {samples / count:.4g}"
        if samples < count:
            raise ValueError(
                f"{name} has more microbatches than samples: {equation}; pass n_microbatches={max(samples, 1)} or "
                f"less, or a batch of {count} or more"
            )
        if samples % count and stages[0].group_size > 1:
            raise ValueError(
                f"{name} needs microbatches of equal size, but {equation} is not a whole number; pass a batch of "
                f"{samples // count * count} or {(samples // count + 1) * count}"
            )
    return samples


def _given(error: BaseException | None, module: torch.nn.Module) -> list[str] | None:
    """Return the tensors that a module was called with when it raised, such as `["float32[8, 64]"]`; None if it did not
    raise."""
    while error is not None:
        for frame in _frames(error.__traceback__):
            if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
                tensors = [one for one in frame.f_locals.get("args", ()) if isinstance(one, torch.Tensor)]
                return [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors]
        error = error.__cause__
    return None


def _frames(traceback: TracebackType | None) -> Iterator[Any]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
