"""How far a rank has come in its cell: what tells ranks apart that were stopped at different places."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddp_notebook.rank.recorder import Recorder


class Progress:
    """Counts optimizer steps and operations of the cell under way."""

    def __init__(self, recorder: Recorder) -> None:
        self.steps = 0
        self._recorder = recorder
        self._begun = 0
        register_optimizer_step_post_hook(self._on_step)

    def begin(self) -> None:
        """A cell begins."""
        self.steps = 0
        self._begun = self._recorder.begun

    @property
    def has_communicated(self) -> bool:
        """Whether the cell has begun an operation."""
        return self._recorder.begun != self._begun

    def _on_step(self, _: Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        self.steps += 1
