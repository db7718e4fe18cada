"""Stops a cell before an optimizer step that would use NaN or infinite gradients.

Averages of DDP and FSDP are checked before they begin (`checked_calls`). Other gradients are checked before the step,
and after each call of the step's closure. A `GradScaler` skips such a step itself, so its steps are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.nan.checked_calls import Checked, CheckedCalls
from ddp_notebook.rank.record.nan.gradients import all_finite, local_part
from ddp_notebook.rank.record.nan.last_forward import KeptForward, LastForwards, without_wrappers
from ddp_notebook.rank.record.nan.origin import Origin, kind_of
from ddp_notebook.rank.record.nan.replay import Replay, bad_parameters
from ddp_notebook.rank.record.nan.shared_models import (
    GradientsAside,
    groups_of,
    mesh_groups,
    obstacle,
    smallest,
)
from ddp_notebook.rank.record.training.model_names import variable_of
from ddp_notebook.rank.record.training.wrapping import around, uncompiled
from ddp_notebook.stdlib import functools

FACT = "caught-nan"  # name of the fact that the notebook gets
_LISTENER = "nan"
_SCALED_STEP = GradScaler._maybe_opt_step.__code__
_FRAMES_TO_SCALER = 12


class GradientsNotFiniteError(RuntimeError):
    """Gradients are NaN or infinite before an optimizer step, and `%ddp_nan --catch` is on."""


class NanCatcher:
    """Checks of this rank's cells.

    Args:
        recorder: the collectives of this rank.
        event_buffer: has the number of the step.
        note: keeps a fact for the notebook: its name, the step and details.
    """

    def __init__(self, recorder: Recorder, event_buffer: EventBuffer, note: Callable[..., None]) -> None:
        self._recorder, self._event_buffer, self._note = recorder, event_buffer, note
        self._calls = CheckedCalls(event_buffer)
        self._forwards = LastForwards(self._calls.note_gradients)
        self._replay = Replay(recorder, event_buffer)
        self._namespace: Mapping[str, Any] = {}
        self._end: list[Callable[[], None]] = []

    def begin_cell(self, namespace: Mapping[str, Any]) -> None:
        """Check the gradients of a cell that starts.

        Args:
            namespace: the user's variables, which name models.
        """
        self.end_cell()  # the end of an earlier cell may have been interrupted
        self._namespace = namespace
        call = torch.nn.Module.__call__
        around(torch.nn.Module, "__call__", self._forwards.around_call)
        hook = register_optimizer_step_pre_hook(uncompiled(self._before_step))
        self._recorder.listen(_LISTENER, self._calls.look)

        def end() -> None:
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]
            hook.remove()
            self._recorder.listen(_LISTENER, None)

        self._end.append(end)

    def end_cell(self) -> None:
        """Check no longer, and drop the references to tensors."""
        while self._end:
            self._end.pop()()
        self._calls.forget()
        self._forwards.forget()
        self._namespace = {}

    # ---- before a step

    def _before_step(self, optimizer: Optimizer, args: Any, named: Any) -> Any:
        """Check the gradients, or those of each call of the step's closure, such as that of LBFGS."""
        closure = args[1] if len(args) > 1 else named.get("closure")
        if not callable(closure):
            self._check(optimizer)
            return None

        @functools.wraps(closure)
        def checked(*its: Any, **options: Any) -> Any:
            loss = closure(*its, **options)
            self._check(optimizer)
            return loss

        return ((args[0], checked, *args[2:]), named) if len(args) > 1 else (args, {**named, "closure": checked})

    def _check(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # A GradScaler lets a fused optimizer skip the step.
        if getattr(optimizer, "found_inf", None) is not None or unseen(self._is_clean, optimizer, parameters):
            self._calls.forget()
            self._forwards.forget(parameters)
            return
        step = self._event_buffer.moment.step
        self._calls.is_on = self._forwards.is_on = False  # while forwards are repeated
        try:
            self._note_origin(step, parameters)
        finally:
            self._calls.forget()
            self._forwards.forget()
            self._calls.is_on = self._forwards.is_on = True
        raise GradientsNotFiniteError(
            f"gradients were NaN or infinite in step {step:,} (counted from 0), so %ddp_nan --catch stopped the cell "
            "before the optimizer used them"
        )

    def _is_clean(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether this step uses finite gradients. Ranks that share averages come to the same result."""
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        if not self._calls.has_averages:
            is_clean = all_finite(gradients)
        else:
            # An average may belong to another optimizer, whose step the program has skipped.
            is_clean = not self._calls.is_any_bad() or (not _is_sharded(optimizer) and all_finite(gradients))
        # An average of FSDP on a mesh with one dimension has the same result on all ranks. Those of tensor parallel
        # have not: a rank that stops alone would leave the others waiting.
        groups = mesh_groups(parameters)
        if not groups or (self._calls.has_averages and len(groups) == 1) or _is_scaled():
            return is_clean
        return self._agreed([is_clean], groups, parameters[0].device) == [1.0]

    def _agreed(self, values: Sequence[float], groups: Sequence[Any], device: torch.device) -> list[float]:
        """Return the smallest values of all ranks. The collective is not recorded."""
        level, self._event_buffer.level = self._event_buffer.level, OFF
        is_on, self._calls.is_on = self._calls.is_on, False
        try:
            return smallest(values, groups, device)
        finally:
            self._event_buffer.level, self._calls.is_on = level, is_on

    # ---- the origin

    def _note_origin(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Note the gradients of this rank, and the module that has made the first bad value."""
        bad = unseen(self._calls.bad)
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        is_bad = bool(bad) or (not self._calls.has_averages and not all_finite(gradients))
        nans_only = any(one.nans or (one.total is not None and bool(one.total.isnan())) for one in bad)
        if not bad:
            nans_only = any(bool(one.isnan().any()) for one in gradients)
        forwards = self._forwards.in_order()
        origin, model = self._origin(forwards, is_bad=is_bad, nans_only=nans_only)
        # The sums of the user had finite inputs on this rank, and so has its repeated backward.
        if not is_bad or (not bad and self._calls.has_sums_of_user and not origin.place and forwards):
            self._note(FACT, step, is_clean=True)
            return
        self._note(
            FACT,
            step,
            gradients=[_facts(one) for one in bad[:1]],
            count=len(bad),
            finite_before=self._calls.finite_before,
            kind="NaN" if nans_only else "infinite values",
            has_forward=bool(forwards),
            model=self._name(model) if model is not None and len({id(one.module) for one in forwards}) > 1 else "",
            origin=list(origin[:4]),
        )

    def _origin(
        self, forwards: Sequence[KeptForward], *, is_bad: bool, nans_only: bool
    ) -> tuple[Origin, torch.nn.Module | None]:
        """Return the place that made the first bad value, and its model.

        Args:
            is_bad: gradients of this rank are bad. Otherwise it only takes part in forwards that need all ranks.
        """
        found: list[tuple[Origin, torch.nn.Module]] = []
        for kept in forwards:
            if groups := groups_of(kept):
                origin = self._origin_together(kept, groups, nans_only=nans_only)
            elif is_bad:
                origin = self._replay.origin(kept, nans_only=nans_only)
                if origin.place in _BEFORE_LOSS:
                    return origin, kept.module
            else:
                continue
            found.append((origin, kept.module))
        # Forwards come in their order, and backwards in the opposite one.
        in_forward = [one for one in found if one[0].place in _BEFORE_LOSS]
        in_backward = [one for one in found if one[0].place == "backward"]
        with_place = [one for one in found if one[0].place]
        for some in (in_forward[:1], in_backward[-1:], with_place[-1:], found[-1:]):
            if some:
                return some[0]
        return Origin(""), None

    def _origin_together(self, kept: KeptForward, groups: Sequence[Any], *, nans_only: bool) -> Origin:
        """Repeat a forward on all ranks at the same time, if all can."""
        why = obstacle(kept)
        bad = bad_parameters(kept, nans_only=nans_only)
        device = kept.parameters[0].device
        can, are_finite_everywhere = self._agreed([not why and bool(kept.gradients), not bad], groups, device)
        if not are_finite_everywhere:
            return Origin("parameters", ", ".join(bad[:_MOST_NAMES]) or "those of another rank")
        if not can:
            return Origin("", details=why or "another rank cannot repeat its forward")
        aside = GradientsAside(kept)
        origin = self._replay.origin(kept, nans_only=nans_only, aside=aside)
        if aside.is_needed:  # each rank of FSDP has another batch
            return origin
        # Ranks of tensor parallel compute parts of the same values, and receive bad values from each other.
        (first,) = self._agreed([origin.order], groups, device)
        return Origin("", details="another rank made the first one") if first < origin.order else origin

    def _name(self, model: torch.nn.Module) -> str:
        """Return the variable of a model or of its wrapper, or its class."""
        wrappers = (one for one in list(self._namespace.values()) if _is_around(one, model))
        names = (variable_of(one, self._namespace) for one in (*wrappers, model))
        return next(filter(None, names), kind_of(model))


_BEFORE_LOSS = ("input", "parameters", "forward")
_MOST_NAMES = 4


def _is_around(wrapper: Any, model: torch.nn.Module) -> bool:
    return isinstance(wrapper, torch.nn.Module) and wrapper is not model and without_wrappers(wrapper) is model


def _is_scaled() -> bool:
    """Return whether a `GradScaler` makes the step, because it has found finite gradients on this rank."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_SCALER):
        if frame is None or frame.f_code is _SCALED_STEP:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code is _SCALED_STEP


def _facts(one: Checked) -> dict[str, Any]:
    call = one.call
    model, bucket = call.bucket if call.bucket is not None else (call.site[5] if call.site is not None else "", -1)
    return {
        "model": model,
        "bucket": bucket,
        "operation": call.kernel.spec.name,
        "nans": one.nans,
        "infs": one.infs,
        "numel": one.numel,
        "is_of_user": one.is_of_user,
    }


def _is_sharded(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has only a part of the parameters on this rank."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    is_part = hasattr(first, "to_local")
    return is_part or any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
