"""How far a rank has come in its cell, to notice ranks that were stopped at different places or train apart."""

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
from ddp_notebook.stdlib import threading, weakref


class Progress:
    """Counts optimizer steps and operations of the cell under way. Made in the main thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.steps = 0
        self.sees_operations = True  # False: the recorder could not be installed
        self._recorder = recorder
        self._begun = 0  # operations, before the cell
        self._since = 0  # likewise before its first step: a model in DDP may be made, or data read, in the same cell
        self._main = threading.get_ident()
        self._optimizer: Callable[[], Optimizer | None] = lambda: None  # the first one to step in the cell
        self._stepped: set[int] = set()  # ids of optimizers that have stepped since the last operation
        self._depth = 0  # of the main thread's steps: an optimizer may step inside another one's step, or its own
        self._steps_twice = False  # one of them has stepped again
        self._is_decided = False  # it is known whether the ranks train apart in this cell: skip further steps
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def begin(self) -> None:
        """A cell begins."""
        begun = self._recorder.begun
        if begun != self._begun:
            self._stepped.clear()
        self.steps, self._begun, self._since, self._depth = 0, begun, begun, 0
        self._optimizer = lambda: None
        self._steps_twice = self._is_decided = False

    @property
    def stepped(self) -> Optimizer | None:
        """The optimizer that has stepped first in the cell; None: none has, or it is gone."""
        return self._optimizer()

    @property
    def has_communicated(self) -> bool:
        """Whether the cell has begun an operation."""
        return self._recorder.begun != self._begun

    @property
    def trains_apart(self) -> bool:
        """Whether the main thread trains and sends nothing: an optimizer has stepped twice, and from the first step on
        the cell has begun no operation. A single step may use gradients that were averaged before."""
        return self._steps_twice and self.sees_operations and self._recorder.begun == self._since

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
            self._steps_twice, self._is_decided = not _uses_rpc(), True
        else:
            self._stepped.add(id(optimizer))


def _uses_rpc() -> bool:
    """Whether gradients may travel by RPC, which the recorder does not see."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
