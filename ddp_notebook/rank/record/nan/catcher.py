"""Stops a cell before an optimizer step that would use NaN or infinite gradients.

Averages of DDP and FSDP are checked before they begin (`checked_calls`). Other gradients are checked before the step.
A `GradScaler` skips such a step itself, so its steps are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.nan.checked_calls import Checked, CheckedCalls, are_finite
from ddp_notebook.rank.record.nan.last_forward import LastForwards
from ddp_notebook.rank.record.nan.origin import Origin
from ddp_notebook.rank.record.nan.replay import Replay
from ddp_notebook.rank.record.training.wrapping import around, uncompiled

FACT = "caught-nan"  # name of the fact that the notebook gets
_LISTENER = "nan"


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
        self._forwards = LastForwards()
        self._replay = Replay(recorder, event_buffer)
        self._end: list[Callable[[], None]] = []

    def begin_cell(self) -> None:
        """Check the gradients of a cell that starts."""
        self.end_cell()  # the end of an earlier cell may have been interrupted
        forward = DistributedDataParallel.forward
        around(DistributedDataParallel, "forward", self._forwards.around_forward)
        hook = register_optimizer_step_pre_hook(uncompiled(self._before_step))
        self._recorder.listen(_LISTENER, self._calls.look)

        def end() -> None:
            DistributedDataParallel.forward = forward  # type: ignore[method-assign]
            hook.remove()
            self._recorder.listen(_LISTENER, None)

        self._end.append(end)

    def end_cell(self) -> None:
        """Check no longer, and drop the references to tensors."""
        while self._end:
            self._end.pop()()
        self._forget()

    def _forget(self) -> None:
        self._calls.forget()
        self._forwards.kept.clear()

    # ---- before a step

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler lets a fused optimizer skip the step
            self._forget()
            return
        gradients = [_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if unseen(self._is_clean, optimizer, gradients):
            self._forget()
            return
        step = self._event_buffer.moment.step
        try:
            bad = unseen(self._calls.bad)
            if bad or not self._calls.has_averages:
                self._note_origin(step, bad, gradients)
            else:
                self._note(FACT, step, is_clean=True)
        finally:
            self._forget()
        raise GradientsNotFiniteError(
            f"gradients were NaN or infinite in step {step:,} (counted from 0), so %ddp_nan --catch stopped the cell "
            "before the optimizer used them"
        )

    def _is_clean(self, optimizer: Optimizer, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether this step uses finite gradients. Ranks that share averages come to the same result."""
        if not self._calls.has_averages:
            return are_finite(gradients)
        # An average may belong to another optimizer, whose step the program has skipped.
        return not self._calls.is_any_bad() or (not _is_sharded(optimizer) and are_finite(gradients))

    def _note_origin(self, step: int, bad: Sequence[Checked], gradients: Sequence[torch.Tensor]) -> None:
        """Note the gradients of this rank, and the module that has made the first bad value."""
        nans_only = any(one.nans or (one.total is not None and bool(one.total.isnan())) for one in bad)
        if not bad:
            nans_only = any(bool(one.isnan().any()) for one in gradients)
        origin = Origin("")
        for kept in reversed(list(self._forwards.kept.values())):
            origin = self._replay.origin(kept, nans_only=nans_only)
            if origin.place:
                break
        self._note(
            FACT,
            step,
            gradients=[_facts(one) for one in bad[:1]],
            count=len(bad),
            finite_before=self._calls.finite_before,
            kind="NaN" if nans_only else "infinite values",
            has_forward=bool(self._forwards.kept),
            origin=list(origin),
        )


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


def _local(gradient: Any) -> torch.Tensor:
    """Return the part of a gradient that this rank has."""
    with torch.no_grad():
        found: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return found._values() if found.is_sparse else found


def _is_sharded(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has only a part of the parameters on this rank."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    is_part = hasattr(first, "to_local")
    return is_part or any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
