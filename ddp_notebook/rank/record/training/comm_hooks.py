"""Users' comm hooks of DDP: seen bucket by bucket, and replaced if a cell registers another one.

torch gets a stand-in that calls the user's hook. It looks like that hook (in name and signature; pickled, it is the
hook itself) and holds no model: the reducer is C++ and would keep such a cycle alive for ever.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.record.tape import OFF, Moment, Tape


class Hooked(NamedTuple):
    """A bucket that a user's comm hook has synchronised."""

    model: str
    bucket: int
    hook: str
    nbytes: int
    moment: Moment
    backward: int
    start_ns: int
    end_ns: int


class StandIn:
    """Stands in for a user's hook.

    Args:
        tape: where its buckets are left.
        model: the model's name.
        hook, state: the user's.
    """

    def __init__(self, tape: Tape, model: str, hook: Callable[..., Any], state: object) -> None:
        self._tape = tape
        self._model = model
        self.call_from_now_on(hook, state)

    def call_from_now_on(self, hook: Callable[..., Any], state: object) -> None:
        """Call this hook of the user's from now on."""
        self._hook = hook
        self._state = state
        self.__name__ = getattr(hook, "__name__", type(hook).__name__)
        self.__qualname__ = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.__signature__ = inspect.signature(hook)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._hook,)

    def __call__(self, _: object, bucket: Any) -> Any:
        tape, hook = self._tape, self._hook
        if tape.level == OFF:
            return hook(self._state, bucket)
        moment, began_ns, index, nbytes = tape.moment, time.monotonic_ns(), bucket.index(), bucket.buffer().nbytes
        tape.bucket = self._model, index
        try:
            future = hook(self._state, bucket)
        finally:
            tape.bucket = None
        name = self.__qualname__.rpartition(".")[2]
        backward = 0 if moment.backward is None else moment.backward.number

        def ended(_: Any) -> None:
            tape.put(Hooked(self._model, index, name, nbytes, moment, backward, began_ns, time.monotonic_ns()))

        if future.done():  # its callback would run here, where it swallows an interrupt
            ended(future)
        else:
            future.add_done_callback(ended)
        return future


def _itself(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def around_register(
    tape: Tape, name_of: Callable[[DistributedDataParallel], str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for torch's `register_comm_hook`.

    Args:
        name_of: the name of a model.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            before = model._comm_hooks[-1][0] if model._comm_hooks else None
            if isinstance(before, StandIn):  # torch takes one hook only; the stand-in calls the last one
                model._check_comm_hook(hook)
                before.call_from_now_on(hook, state)
            else:
                original(model, state, StandIn(tape, name_of(model), hook, state))

        return register_comm_hook

    return make
