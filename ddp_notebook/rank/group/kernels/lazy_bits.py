"""Kernels for tensors with a lazy negation or conjugation, such as `z.conj().imag`.

torch's own kernel passes a copy with the actual values to the operator. A result in that copy is lost without an error.
These kernels pass copies of inputs, but keep an output as it is while the guard sees the call, so that it is refused.
They run only for such tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.rank.group.operators import Operator
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading

_BITS: dict[str, tuple[str, Callable[[torch.Tensor], bool], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Negative": ("negation", torch.is_neg, torch.resolve_neg),
    "Conjugate": ("conjugate", torch.is_conj, torch.resolve_conj),
}
_outputs: dict[int, str] = {}  # threads that are in a call with such an output: "negation" or "conjugate"


def kept_in(thread: int) -> str | None:
    """Return the lazy operation of an output of the call that a thread is about to start; None if it has none."""
    return _outputs.get(thread) if _outputs else None


def kernels(is_guarded: Callable[[], bool], name: str) -> dict[str, Callable[..., Any]]:
    """Return the kernels of an operator by dispatch key.

    Args:
        is_guarded: returns whether the guard sees the call.
    """
    return {key: _kernel(is_guarded, Operator(name), key) for key in _BITS}


def _kernel(is_guarded: Callable[[], bool], operator: Operator, key: str) -> Callable[..., Any]:
    word, has_bit, resolve = _BITS[key]
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

    def run(keys: Any, *arguments: Any, **named: Any) -> Any:
        if named:
            arguments += operator.defaults_from(len(arguments), named)
        at, thread = operator.at_output, threading.get_ident()
        if is_guarded() and at is not None and any(map(has_bit, _of_dispatch(arguments[at]))):
            _outputs[thread] = word
        try:
            resolved = [_resolved(one, resolve) for one in arguments]
            return operator.redispatch(keys & after, *resolved)
        finally:
            _outputs.pop(thread, None)

    return run


def _of_dispatch(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument whose bits torch sees. It sees those of a list, but not of a nested list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return value if isinstance(value, list) and value and isinstance(value[0], torch.Tensor) else []


def _resolved(value: Any, resolve: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    tensors = _of_dispatch(value)
    if isinstance(value, torch.Tensor):
        return resolve(value)
    return [resolve(one) for one in tensors] if tensors else value
