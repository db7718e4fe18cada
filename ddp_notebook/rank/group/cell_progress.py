"""Progress of a rank in its cell, to detect ranks that stopped at different points or train without synchronization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import rpc
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, weakref


class Progress:
    """Counter of optimizer steps and operations of the running cell. Made in the main thread.

    Args:
        recorder: observes the operations.
        kind_of: returns "ddp" or "sharded" for an optimizer of such a model, else "".
    """

    def __init__(self, recorder: Recorder, kind_of: Callable[[Optimizer], str]) -> None:
        self.steps = 0
        self._kind_of = kind_of
        self._apart = ""  # how the rank trains without synchronization
        self.sees_operations = True  # False if the recorder could not be installed
        self._recorder = recorder
        self._begun = 0  # operations before the cell
        self._since = 0  # operations before the first step: the cell may create a DDP model or read data first
        self._main = threading.get_ident()
        self._optimizer: Callable[[], Optimizer | None] = lambda: None  # the first optimizer to step in the cell
        self._stepped: set[int] = set()  # ids of optimizers that stepped after the last operation
        self._depth = 0  # nested steps of the main thread: a step may call the same or another optimizer
        self._steps_twice = False  # an optimizer has stepped twice
        self._is_decided = False  # it is known whether the ranks train without synchronization: skip further steps
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def begin(self) -> None:
        """Reset the counters for a new cell."""
        begun = self._recorder.begun
        if begun != self._begun:
            self._stepped.clear()
        self.steps, self._begun, self._since, self._depth = 0, begun, begun, 0
        self._optimizer = lambda: None
        self._steps_twice = self._is_decided = False
        self._apart = ""

    @property
    def stepped(self) -> Optimizer | None:
        """Return the optimizer that stepped first in the cell; None if none has, or if it was deleted."""
        return self._optimizer()

    @property
    def has_communicated(self) -> bool:
        """Return whether the cell has started an operation."""
        return self._recorder.begun != self._begun

    @property
    def trains_apart(self) -> str:
        """Return how the main thread trains without communication, a key of `records.words.APART`; "" if it does not.

        This holds if an optimizer has stepped twice, and the cell has started no operation since the first step. A
        single step may use gradients that were averaged before.
        """
        is_apart = self._steps_twice and self.sees_operations and self._recorder.begun == self._since
        return self._apart if is_apart else ""

    def _before_step(self, _: Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1
            if self.steps == 0 and (begun := self._recorder.begun) != self._since:
                self._since = begun
                self._stepped.clear()

    def _after_step(self, optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        self.steps += 1
        if self.steps == 1:
            self._optimizer = weakref.ref(optimizer)
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._is_decided or self._depth > 0:
            return
        if self._recorder.begun != self._since:
            self._is_decided = True
        elif id(optimizer) in self._stepped:
            self._steps_twice, self._is_decided = not uses_rpc(), True
            self._apart = self._how(optimizer)
        else:
            self._stepped.add(id(optimizer))

    def _how(self, optimizer: Optimizer) -> str:
        has_gradients = any(one.grad is not None for group in optimizer.param_groups for one in group["params"])
        in_ddp = self._kind_of(optimizer) == "ddp"
        if has_gradients:
            return "ddp" if in_ddp else "unwrapped"
        return "ddp, no gradients" if in_ddp else "no gradients"


def uses_rpc() -> bool:
    """Return whether gradients may be sent by RPC, which the recorder does not see."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
