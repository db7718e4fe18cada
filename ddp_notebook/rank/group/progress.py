"""How far a rank has come in its cell: what tells ranks apart that were stopped at different places, or train apart."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import rpc
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_notebook.rank.group.recorder import Recorder


class Progress:
    """Counts optimizer steps and operations of the cell under way. Made in the main thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.steps = 0
        self.sees_operations = True  # else nothing is known of what is sent
        self._recorder = recorder
        self._begun = 0
        self._main = threading.get_ident()
        self._stepped: set[int] = set()  # optimizers by `id` that have stepped since an operation was begun
        self._depth = 0  # of steps of the main thread: an optimizer may step inside another one's, or its own, step
        self._steps_twice = False  # one of them again
        self._is_decided = False  # whether the ranks train apart in this cell: further steps need no look
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def begin(self) -> None:
        """A cell begins."""
        begun = self._recorder.begun
        if begun != self._begun:
            self._stepped.clear()
        self.steps, self._begun, self._depth = 0, begun, 0
        self._steps_twice = self._is_decided = False

    @property
    def has_communicated(self) -> bool:
        """Whether the cell has begun an operation."""
        return self._recorder.begun != self._begun

    @property
    def trains_apart(self) -> bool:
        """Whether the main thread trains, and sends nothing: an optimizer has stepped again, without an operation in
        between, nor anywhere in the cell. A single step may be that of gradients which an earlier cell has averaged."""
        return self._steps_twice and self.sees_operations and not self.has_communicated

    def _before_step(self, _: Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1

    def _after_step(self, optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        self.steps += 1
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        if self._is_decided or self._depth > 0:
            return
        if self.has_communicated:
            self._is_decided = True
        elif id(optimizer) in self._stepped:
            self._steps_twice, self._is_decided = not _uses_rpc(), True
        else:
            self._stepped.add(id(optimizer))


def _uses_rpc() -> bool:
    """Whether gradients may travel where the recorder does not look."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
