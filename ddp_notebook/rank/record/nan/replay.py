"""Repeat the last forward of a model and its backward, to find the module that made a bad value.

Afterwards everything is as before: buffers, other attributes of modules, gradients, random state.

- A model that is complete on this rank is repeated by this rank alone. Collectives raise in the meantime.
- FSDP and tensor parallel need all ranks. `agreed` must be called on all of them; then all repeat the same forward.

Gradients of parameters are not touched, because `torch.autograd.grad` returns them instead of adding them. The
backward of FSDP adds them, so the gradients are put aside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.nan.last_forward import KeptForward, outputs_of
from ddp_notebook.rank.record.nan.origin import (
    BackwardSearch,
    ForwardSearch,
    Origin,
    bad_input,
    clean_name,
    is_bad,
    tensors_of,
)
from ddp_notebook.rank.record.nan.shared_models import GradientsAside
from ddp_notebook.rank.variables import random_states
from ddp_notebook.stdlib import contextlib, io

_MOST_TRIES = 8
_MOST_NAMES = 4
_T = TypeVar("_T")


class ReplayNeedsRanksError(RuntimeError):
    """The repeated forward has called a collective."""


class Replay:
    """Repeats forwards.

    Args:
        recorder: the collectives of this rank.
        event_buffer: records nothing in the meantime.
    """

    def __init__(self, recorder: Recorder, event_buffer: EventBuffer) -> None:
        self._recorder, self._event_buffer = recorder, event_buffer

    def origin(self, kept: KeptForward, *, nans_only: bool, aside: GradientsAside | None = None) -> Origin:
        """Return the place that made the first bad value.

        Args:
            kept: the forward.
            nans_only: look for NaN only. Otherwise infinite values count too.
            aside: all ranks repeat the forward together; None: this rank does alone.
        """
        given = Origin("")
        if found := bad_input([*kept.inputs, *kept.named.values()], nans_only=True):
            given = Origin("input", details=found)
        elif bad := bad_parameters(kept, nans_only=nans_only):
            given = Origin("parameters", _first_names(bad))
        infinite = bad_parameters(kept, nans_only=False)
        if aside is None:
            if given.place:
                return given
            if why := kept.changed():
                return Origin("", details=why)
        try:
            restore = self._state(kept, aside)
            found_here = restored(lambda: self._search(kept, nans_only=nans_only, aside=aside), restore)
        except ReplayNeedsRanksError:
            return Origin("", details="its forward or backward calls a collective")
        except Exception as error:
            found_here = Origin("", details=f"repeating its forward raised {type(error).__name__}")
        return given if given.place else _with_infinite_parameters(found_here, infinite)

    def _search(self, kept: KeptForward, *, nans_only: bool, aside: GradientsAside | None) -> Origin:
        def check() -> None:
            if self._recorder.refusal is not None:  # the cell is being stopped
                raise KeyboardInterrupt

        self._event_buffer.level = OFF
        if aside is None:
            self._recorder.instead = _refuse
        module = kept.module
        forward = ForwardSearch(module, check)
        torch.nn.Module.__call__ = forward.around_call(torch.nn.Module.__call__)  # type: ignore[method-assign]
        random_states.restore(kept.random_states)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(torch.enable_grad())
            for device, is_on, dtype in kept.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=False))
            if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            outputs = outputs_of(module(*kept.inputs, **kept.named))
        found = forward.origin(nans_only=nans_only)
        if found is not None and aside is None:
            return found
        of_backward = self._search_backward(
            kept, outputs, forward, nans_only=nans_only, check=check, aside=aside, only_runs=found is not None
        )
        return found or of_backward

    def _search_backward(
        self,
        kept: KeptForward,
        outputs: list[torch.Tensor],
        forward: ForwardSearch,
        *,
        nans_only: bool,
        check: Callable[[], None],
        aside: GradientsAside | None,
        only_runs: bool,
    ) -> Origin:
        """Repeat the backward.

        Args:
            only_runs: the place is known already, but other ranks repeat the backward too.
        """
        of_loss = _has_bad((one for one, _ in kept.gradients.values()), nans_only=nans_only)
        loss = _of_loss(kept, outputs)
        if of_loss and aside is None:
            return loss
        known = [(outputs[at], one) for at, (one, _) in sorted(kept.gradients.items()) if at < len(outputs)]
        backward = BackwardSearch(forward, check)
        if not only_runs:
            backward.watch(one for one, _ in known)
        heads, gradients = [one for one, _ in known], [one for _, one in known]
        if aside is not None and aside.is_needed:
            aside.put_aside()
            torch.autograd.backward(heads, gradients)
        else:
            wanted = [one for one in (*kept.parameters, *kept.tensors()) if one.requires_grad]
            if not known or not wanted:
                return Origin("", details="no gradient of its output was computed")
            torch.autograd.grad(heads, wanted, grad_outputs=gradients, allow_unused=True)
        if of_loss:
            return loss
        return backward.origin(nans_only=nans_only) or Origin(
            "", details="its last forward and backward gave finite values when repeated"
        )

    def _state(self, kept: KeptForward, aside: GradientsAside | None) -> Callable[[], None]:
        """Keep the state that the repetition changes. Return a function that restores it, which may be called again."""
        recorder, event_buffer = self._recorder, self._event_buffer
        level, instead, call = event_buffer.level, recorder.instead, torch.nn.Module.__call__
        states = unseen(random_states.read)
        modules = list(kept.module.modules())
        attributes = [(module, dict(module.__dict__)) for module in modules]
        containers: list[tuple[Any, Any]] = [
            (one, dict(one)) for module in modules for one in (module._buffers, module._parameters, module._modules)
        ]
        buffers = [(one, one.detach().clone()) for one in _plain_tensors(modules)]

        def restore() -> None:
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]
            recorder.instead = instead
            event_buffer.level = level
            for module, its in attributes:
                for name in [name for name in module.__dict__ if name not in its]:
                    del module.__dict__[name]
                module.__dict__.update(its)
            for container, its in containers:
                container.update(its)
            with torch.no_grad():
                for tensor, values in buffers:  # BatchNorm changes its statistics without a new version
                    tensor.detach().copy_(values)
            if aside is not None:
                aside.restore()
            random_states.restore(states)

        return restore


_OF_LOSS = Origin("loss", details="the gradient of its output was not finite")
_OTHER_VALUES = Origin("", details="its last forward gave other values when repeated")
_INFINITE_OUTPUT = Origin("", details="the output of the model had infinite values, and its gradient was not finite")


def _of_loss(kept: KeptForward, outputs: list[torch.Tensor]) -> Origin:
    """Return the words about a gradient of the output that was not finite.

    Args:
        outputs: those of the repeated forward. Infinite ones may be right, as in a mask.
    """
    if kept.had_finite_outputs():
        return _OF_LOSS
    if not kept.has_sums_of(outputs):
        return _OTHER_VALUES
    return _INFINITE_OUTPUT if _has_bad(outputs, nans_only=False) else _OF_LOSS  # only the sum may have overflowed


def bad_parameters(kept: KeptForward, *, nans_only: bool) -> list[str]:
    """Return the names of the parameters that are not finite on this rank."""
    return [clean_name(name) for name, one in kept.module.named_parameters() if _has_bad([one], nans_only=nans_only)]


def _with_infinite_parameters(found: Origin, names: list[str]) -> Origin:
    """Add the names of infinite parameters to a place. An infinite parameter may be right, as in a mask."""
    if not names or found.place not in ("forward", "backward"):
        return found
    return found._replace(details=f"{found.details}; parameters infinite before this forward: {_first_names(names)}")


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)


def _has_bad(tensors: Iterable[torch.Tensor], *, nans_only: bool) -> bool:
    return any(is_bad(one, nans_only=nans_only) for one in tensors_of(list(tensors)))


def _plain_tensors(modules: list[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the buffers, and the tensors in other attributes."""
    seen: set[int] = set()
    for module in modules:
        for one in (*module._buffers.values(), *module.__dict__.values()):
            if type(one) is torch.Tensor and id(one) not in seen and not one.is_inference() and _has_memory(one):
                seen.add(id(one))
                yield one


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor exist. FSDP frees the memory of complete parameters, not their views."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return not tensor.is_meta
    last = tensor.storage_offset() + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() >= (last + 1) * tensor.itemsize


def _refuse(*_: Any) -> Any:
    raise ReplayNeedsRanksError


def restored(work: Callable[[], _T], restore: Callable[[], None]) -> _T:
    """Call a function, and then restore the state, also if an interrupt arrives while it is restored.

    Args:
        work: the function.
        restore: restores the state; it may be called again.

    Example:
        >>> restored(lambda: 3, lambda: None)
        3
    """
    failure: BaseException | None = None
    found: Any = None
    try:
        found = work()
    except BaseException as error:
        failure = error
    for _ in range(_MOST_TRIES):
        try:
            restore()
            break
        except KeyboardInterrupt as error:
            failure = error
    if failure is not None:
        raise failure
    return found
