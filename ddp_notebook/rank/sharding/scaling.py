"""Gradients that are clipped while a `GradScaler` has scaled them, or averaged after `unscale_`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any, cast

import torch

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.sharding.observed_functions import before
from ddp_notebook.stdlib import functools, logging, weakref

_SUMS = ("all_reduce", "all_reduce_coalesced")
_log = logging.getLogger(__name__)


class Scaling:
    """Checks the use of gradients between `scale`, `unscale_` and `step`.

    Scaling is linear, so gradients may be averaged while they are scaled. Then an inf of one rank reaches all ranks.
    `unscale_` searches for inf and divides by the scale. So clipping before it uses a wrong length. Averaging after it
    brings an inf to ranks that have found none, and these ranks step with it.

    Args:
        listen: registers a function that is called at the start of each collective; None removes it.
        cell: returns the number of the running cell.

    Example:
        >>> Scaling(lambda look: None, lambda: 1).facts()
        []
    """

    def __init__(self, listen: Callable[[Callable[[Call], None] | None], None], cell: Callable[[], int]) -> None:
        self._listen = listen
        self._cell = cell
        self._seen_in = 0  # cell of `_scaled`, `_clipped` and `_unscaled`
        self._scaled: weakref.WeakSet[Any] = weakref.WeakSet()  # scalers that scaled a loss and have not unscaled since
        self._clipped: dict[str, set[int]] = {}  # function -> ids of parameters clipped while scaled
        self._clips: dict[str, int] = {}  # function -> number of wrong calls
        self._unscaled: list[weakref.ref[torch.Tensor]] = []  # gradients of the optimizers that step next
        self._averages: dict[str, int] = {}  # operation -> number of steps with a wrong average
        self._told_in = 0  # cell of `_clips` and `_averages`

    def facts(self) -> list[str]:
        """Return sentences about the last cell that scaled a loss."""
        clips = [
            f"gradients were clipped by {name} {_times(n)} while a GradScaler had them scaled: "
            "call scaler.unscale_(optimizer) before"
            for name, n in self._clips.items()
        ]
        averages = [
            f"gradients were averaged by {name} {_times(n)} after scaler.unscale_(optimizer), which checks for inf on "
            "each rank alone. A rank with inf skips its step, and the others do not; average before unscale_"
            for name, n in self._averages.items()
        ]
        return clips + averages

    def _forget_last_cell(self) -> None:
        if (cell := self._cell()) != self._seen_in:
            self._seen_in = cell
            self._scaled.clear()
            self._clipped.clear()
            self._close()

    def watch(self) -> None:
        """Replace the torch functions.

        Raises:
            AttributeError: this torch version lacks the functions.
        """
        scaler = torch.amp.GradScaler
        for name, look in (
            ("scale", self._scale),
            ("unscale_", self._unscale),
            ("step", self._step),
            ("update", self._update),
        ):
            before(scaler, name, look)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            before(torch.nn.utils, name, functools.partial(self._clip, name))

    def _scale(self, scaler: Any, *_: Any, **__: Any) -> None:
        self._forget_last_cell()
        if scaler.is_enabled():
            self._scaled.add(scaler)
            self._close()
            if self._told_in != self._seen_in:
                self._told_in = self._seen_in
                self._clips.clear()
                self._averages.clear()

    def _clip(self, name: str, parameters: Any = (), *_: Any, **__: Any) -> None:
        self._forget_last_cell()
        if not self._scaled:
            return
        if isinstance(parameters, Iterator):  # an iterator must not be consumed
            ones = _of_generator(parameters)
        else:
            ones = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        self._clipped.setdefault(name, set()).update(map(id, ones))

    def _step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._forget_last_cell()
        self._close()
        self._look_at_clips(scaler, optimizer)

    def _update(self, *_: Any, **__: Any) -> None:
        self._close()

    def _unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._forget_last_cell()
        self._look_at_clips(scaler, optimizer)
        if scaler.is_enabled() and type(scaler) is torch.amp.GradScaler:  # the one of FSDP searches on all ranks
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._unscaled += [weakref.ref(p.grad) for p in parameters if p.grad is not None]
            self._listen(self._reduced)

    def _look_at_clips(self, scaler: Any, optimizer: Any) -> None:
        """Count clips of parameters that this scaler's optimizer steps.

        Clipping the parameters of another model may be correct.
        """
        if scaler not in self._scaled:
            return
        self._scaled.discard(scaler)
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, clipped in self._clipped.items():
            if not its.isdisjoint(clipped) and scaler.get_scale() != 1.0:
                self._clips[name] = self._clips.get(name, 0) + 1
        self._clipped.clear()

    def _reduced(self, call: Call) -> None:
        """Check a collective that starts between `unscale_` and `step`."""
        self._forget_last_cell()  # a stopped cell may leave gradients without a `step`
        kernel = call.kernel
        if not self._unscaled or kernel.spec.name not in _SUMS or kernel.at_input is None or len(call.group.ranks) < 2:
            return
        try:
            if unseen(self._are_gradients, flat(call.arguments[kernel.at_input])):
                self._averages[kernel.spec.name] = self._averages.get(kernel.spec.name, 0) + 1
                self._close()  # count it once per step
        except Exception:  # the user's call must continue
            _log.info("a collective was not looked at", exc_info=True)

    def _are_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these tensors is a gradient, or the concatenation of all gradients."""
        gradients = [_local(one) for reference in self._unscaled if (one := reference()) is not None]
        places = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        if any(tensor.untyped_storage().data_ptr() in places for tensor in tensors):
            return True
        together = sum(gradient.numel() for gradient in gradients)
        return len(gradients) > 1 and any(
            tensor.numel() == together
            and tensor.dtype == gradients[0].dtype
            and torch.equal(tensor.reshape(-1), torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for tensor in tensors
        )

    def _close(self) -> None:
        if self._unscaled:
            self._unscaled = []
            self._listen(None)


def _of_generator(parameters: Iterator[Any]) -> Iterable[Any]:
    """Return the parameters that `model.parameters()` will yield, without a step of it; empty for others."""
    code = torch.nn.Module.parameters.__code__
    if isinstance(parameters, GeneratorType) and parameters.gi_code is code and (frame := parameters.gi_frame):
        its = frame.f_locals  # the arguments of the call
        return torch.nn.Module.parameters(its["self"], its["recurse"])
    return ()


def _local(gradient: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return cast(Any, gradient).to_local() if hasattr(gradient, "placements") else gradient


def _times(n: int) -> str:
    return f"{n} time{'s' * (n > 1)}"
