"""Observe DDP comm hooks of users bucket by bucket, and replace them if a cell registers another one.

The reducer gets a wrapper that calls the user's hook; the model keeps the hook itself. A wrapper has no reference to
the model: the reducer is a C++ object, which would keep such a cycle alive for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.operators import nbytes_of
from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.record.training.buckets import Backward
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time, weakref


class Hooked(NamedTuple):
    """A bucket that a user's comm hook has synchronized."""

    model: str
    bucket: int
    hook: str
    nbytes: int
    moment: Moment
    backward: Backward | None
    start_ns: int
    end_ns: int


class StandIn:
    """Wrapper of a user's hook.

    Args:
        event_buffer: receives its buckets.
        model: name of the model.
        hook, state: hook and state of the user.
    """

    def __init__(self, event_buffer: EventBuffer, model: str, hook: Callable[..., Any], state: object) -> None:
        self._event_buffer = event_buffer
        self._model = model
        self.call_from_now_on(hook, state)

    def call_from_now_on(self, hook: Callable[..., Any], state: object) -> None:
        """Call this hook of the user from now on."""
        self._hook = hook
        self._state = state
        self._name = getattr(hook, "__qualname__", type(hook).__qualname__).rpartition(".")[2]

    def __call__(self, _: object, bucket: Any) -> Any:
        event_buffer, hook = self._event_buffer, self._hook
        if event_buffer.level == OFF:
            return hook(self._state, bucket)
        moment, backward, began_ns = event_buffer.moment, event_buffer.backward, time.monotonic_ns()
        index, nbytes = bucket.index(), nbytes_of(bucket.buffer())
        event_buffer.bucket = self._model, index
        try:
            future = hook(self._state, bucket)
        finally:
            event_buffer.bucket = None

        def ended(_: Any) -> None:
            event_buffer.put(
                Hooked(self._model, index, self._name, nbytes, moment, backward, began_ns, time.monotonic_ns())
            )

        if not hasattr(future, "add_done_callback"):  # it is not a future, neither of Python nor of C++
            return future  # torch refuses it
        if future.done():  # otherwise its callback would run here, where it would drop an interrupt
            ended(future)
        else:
            future.add_done_callback(ended)
        return future


class ObservedCommHooks:
    """Comm hooks of this process.

    Args:
        event_buffer: receives their buckets.
        model_of: returns the model of a reducer, and the model's name.
    """

    def __init__(
        self, event_buffer: EventBuffer, model_of: Callable[[Any], tuple[DistributedDataParallel, str] | None]
    ) -> None:
        self._event_buffer = event_buffer
        self._model_of = model_of
        self._stand_ins: weakref.WeakKeyDictionary[Any, StandIn] = weakref.WeakKeyDictionary()  # hooks by reducer

    def around_register(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper for `_register_comm_hook` of torch, which adds a hook to a reducer."""

        def _register_comm_hook(reducer: Any, state: object, hook: Callable[..., Any]) -> None:
            found = self._model_of(reducer)
            if found is None:  # for example an unpickled model
                original(reducer, state, hook)
                return
            model, name = found
            before = self._stand_ins.get(reducer)
            if before is not None and getattr(model, "mixed_precision", None) is not None:
                original(reducer, state, hook)  # this raises: the registered hook belongs to torch
            elif before is None:
                stand_in = StandIn(self._event_buffer, name, hook, state)
                original(reducer, state, stand_in)
                self._stand_ins[reducer] = stand_in
            else:  # torch accepts only one hook; the wrapper calls the last one
                before.call_from_now_on(hook, state)
                del model._comm_hooks[:-1]

        return _register_comm_hook
