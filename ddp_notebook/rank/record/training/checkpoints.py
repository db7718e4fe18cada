"""Checkpoints that this process saves, as spans: `torch.save` and `torch.distributed.checkpoint.save`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.record.tape import OFF, Tape
from ddp_notebook.rank.record.training.wrapping import around
from ddp_notebook.stdlib import threading, time

_DISTRIBUTED = "torch.distributed.checkpoint"


class Checkpoints:
    """Sees checkpoints from `look` on.

    Args:
        tape: says whether anything is recorded.
        leave: takes the name of the function, and when it was called.
    """

    def __init__(self, tape: Tape, leave: Callable[[str, int], None]) -> None:
        self._tape = tape
        self._leave = leave
        self._saving: set[int] = set()  # threads that are in one: a checkpoint may be saved by another function

    def look(self) -> None:
        """Begin to look."""
        around(torch, "save", lambda original: self._around("torch.save", original))
        torch.serialization.save = torch.save  # pickle finds the function by this name
        after_import(_DISTRIBUTED, self._look_at_distributed)

    def _look_at_distributed(self) -> None:
        package, module = sys.modules[_DISTRIBUTED], sys.modules[f"{_DISTRIBUTED}.state_dict_saver"]
        around(module, "save", lambda original: self._around("torch.distributed.checkpoint.save", original))
        package.save = module.save  # type: ignore[attr-defined]

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **named: Any) -> Any:
            thread = threading.get_ident()
            if self._tape.level == OFF or thread in self._saving:
                return original(*args, **named)
            began_ns = time.monotonic_ns()
            self._saving.add(thread)
            try:
                return original(*args, **named)
            finally:
                self._saving.discard(thread)
                self._leave(name, began_ns)

        return save
