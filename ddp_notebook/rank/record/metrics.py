"""Metrics: numbers that the user logs, and watched variables, which are read after each optimizer step."""

from __future__ import annotations

import operator
import reprlib
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from types import FrameType
from typing import Any, NamedTuple

import torch

from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.previews import on_its_way
from ddp_notebook.rank.record.training.spans import TrainingSpans
from ddp_notebook.records.schema import STEP_UNITS
from ddp_notebook.records.words import in_function
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time

_STEP, _VALUE, _OPTIMIZER_STEP = map(STEP_UNITS.index, ("step", "value", "optimizer step"))
_MOST_STEP = 2**63 - 1
_OWN_REFERENCES = 3  # to the copy of a frame's variables; a further one is the user's, from `locals()`
_DEEPEST = 64  # maximum number of frames that are searched around an optimizer's step


class LoggedValue(NamedTuple):
    """A logged number, or a tensor that is being copied from a GPU."""

    name: str
    value: float | torch.Tensor
    event: Any  # GPU event after which the tensor is complete; None if it is
    step: int
    is_given: bool  # the program has passed `step`
    time_ns: int
    moment: Moment
    unit: int = _STEP  # unit of `step`, an index of `STEP_UNITS`


class MetricLogger:
    """`log` in the ranks' namespace.

    Args:
        event_buffer: receives the numbers.
        training: observes optimizer steps.
        cells: files of cells.
    """

    def __init__(self, event_buffer: EventBuffer, training: TrainingSpans, cells: dict[str, int]) -> None:
        self.watched: tuple[str, ...] = ()
        self._found: set[str] = set()  # variables that were found
        self.counts: dict[str, int] = {}  # number of counted values, by name; each cell clears it
        self._event_buffer = event_buffer
        self._cells = cells
        self._training = training
        self._on_step = training.on_step

    def watch(self, watched: Sequence[str]) -> None:
        """Read only these variables in the starting cell.

        Args:
            watched: names of variables to read after each optimizer step.
        """
        self.watched = tuple(watched)
        self._found.clear()
        if self._read_watched in self._on_step:  # from the last cell
            self._on_step.remove(self._read_watched)
        if watched:
            self._on_step.append(self._read_watched)

    def end_cell(self) -> None:
        """Print a message if a watched variable was not found."""
        missing = [name for name in self.watched if name not in self._found]
        if not missing:
            return
        if self._event_buffer.level == OFF:
            why = "nothing is recorded, see %ddp_record"
        elif not self._event_buffer.moment.step:
            why = "no optimizer of torch.optim has stepped"
        else:
            why = "when an optimizer stepped, no variable of the cell or its functions with that name held a number"
        print(f"ddp_notebook: --watch {','.join(missing)} recorded nothing: {why}", file=sys.stderr)

    def log(self, *unnamed: Any, step: int | None = None, **values: Any) -> None:
        """Log numbers of this rank. The notebook plots and stores them. Never waits for a GPU, but waits if a loop logs
        faster than the recorder sends.

        Args:
            step: an integer. None for the optimizer step in progress, or else the last one, counted from 0 in the cell.
                The values themselves are counted if a name is logged several times before the first step, as in an
                evaluation or with accumulated gradients; views then name the axis "value". If several optimizers step
                in the cell, each of their steps counts; views then name the axis "optimizer step".
            values: numbers, or tensors of one element, by name.

        Raises:
            TypeError: a value is neither, or has no name, or the step is not an integer.

        Example:
            >>> session.run("log(loss=0.7, accuracy=0.5)").ok
            True
        """
        if unnamed:
            raise TypeError(f"log() takes only keyword arguments, as in log(loss=...), got {reprlib.repr(unnamed[0])}")
        if self._event_buffer.level != OFF:
            self._log(values, None if step is None else _whole_number(step), is_given=step is not None)

    def _log(self, values: Mapping[str, Any], step: int | None, *, is_given: bool) -> None:
        given_unit = _STEP if is_given else self._unit
        event_buffer = self._event_buffer
        event_buffer.hold_back()
        moment, now_ns = event_buffer.moment, time.monotonic_ns()
        for name, value in values.items():
            at, unit = self._step_of(name, moment.step) if step is None else (step, given_unit)
            if type(value) is float:
                event_buffer.put(LoggedValue(name, value, None, at, is_given, now_ns, moment, unit), hurries=True)
            else:
                event_buffer.put(unseen(_logged, name, value, at, is_given, now_ns, moment, unit), hurries=True)

    @property
    def _unit(self) -> int:
        """Return the unit of optimizer steps.

        It is known only later whether several of them make up one step of the training loop, when optimizers have
        alternated.
        """
        return _OPTIMIZER_STEP if self._training.has_several_optimizers else _STEP

    def _step_of(self, name: str, steps: int) -> tuple[int, int]:
        """Return the step of a value after `steps` optimizer steps in the cell, and its unit."""
        if not steps or self.counts.get(name, 0) > 1:
            at = self.counts.get(name, 0)
            self.counts[name] = at + 1
            return at, _VALUE if at else _STEP
        event_buffer = self._event_buffer
        # Without forwards, a loop that logged this name before its first optimizer step does so before each of them.
        is_before = event_buffer.has_begun or (not event_buffer.sees_forwards and name in self.counts)
        return (steps if is_before else steps - 1), self._unit

    def _read_watched(self) -> None:
        """Read the watched variables after an optimizer step: in the cell's functions, or else in the cell."""
        missing, found = list(self.watched), {}
        scope: dict[str, Any] = {}
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_DEEPEST):
            if frame is None or not missing:
                break
            if frame.f_code.co_filename in self._cells:
                scope = frame.f_globals
                if not in_function(frame.f_code.co_name):
                    break
                variables = frame.f_locals
                found.update(unseen(_numbers, missing, variables))
                if sys.version_info < (3, 13) and sys.getrefcount(variables) <= _OWN_REFERENCES:
                    variables.clear()  # the copy would keep variables alive that the function has deleted
                missing = [name for name in missing if name not in found]
            frame = frame.f_back
        found.update(unseen(_numbers, missing, scope))  # last: a variable there may belong to an earlier cell
        if found:
            self._found.update(found)
            values = {name: found[name] for name in self.watched if name in found}
            self._log(values, self._event_buffer.moment.step - 1, is_given=False)  # the step has just ended


def _numbers(names: Sequence[str], scope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: scope[name] for name in names if name in scope and _is_number(scope[name])}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _whole_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = _MOST_STEP + 1
    if abs(number) > _MOST_STEP:
        raise TypeError(f"log(step=...) takes a 64-bit integer, got {step!r}")
    return number


def _logged(name: str, value: Any, step: int, is_given: bool, now_ns: int, moment: Moment, unit: int) -> LoggedValue:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(
                f"log({name}=...) takes a number or a tensor of one element, got shape {tuple(value.shape)}: log its "
                ".mean()"
            )
        if value.is_complex():
            raise TypeError(f"log({name}=...) takes a real number, got a complex tensor: log its .abs()")
        if value.is_cuda:
            pinned, event = on_its_way(value.detach().reshape(()))
            return LoggedValue(name, pinned, event, step, is_given, now_ns, moment, unit)
        return LoggedValue(name, float(value.detach()), None, step, is_given, now_ns, moment, unit)
    try:
        return LoggedValue(name, float(value), None, step, is_given, now_ns, moment, unit)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"log({name}=...) takes a number or a tensor of one element, got {type(value).__name__}"
        ) from None
