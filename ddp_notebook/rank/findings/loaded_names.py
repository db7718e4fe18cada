"""State dicts whose names fit no parameter, because those of DDP or torch.compile begin with a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp_notebook.rank.record.training.step_observer import tell
from ddp_notebook.rank.record.training.wrapping import around, passed_over
from ddp_notebook.stdlib import threading

_PREFIXES = "module.", "_orig_mod."


class LoadedNames:
    """Calls of `load_state_dict(strict=False)` that have loaded nothing.

    Args:
        note: keeps a fact.
        line: returns the line of the cell that is running.
    """

    def __init__(self, note: Callable[..., None], line: Callable[[], str]) -> None:
        self._note, self._line = note, line
        self._main = threading.get_ident()
        around(torch.nn.Module, "load_state_dict", self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(module: Any, state_dict: Any, *args: Any, **named: Any) -> Any:
            result = original(module, state_dict, *args, **named)
            if threading.get_ident() == self._main and getattr(result, "unexpected_keys", None):
                tell(self._loaded, state_dict, result)
            return result

        return passed_over(load_state_dict)

    def _loaded(self, state_dict: Mapping[str, Any], result: Any) -> None:
        names, missing = set(result.unexpected_keys), set(result.missing_keys)
        if not names.issuperset(state_dict):
            return  # some were loaded
        for prefix in _PREFIXES:
            if missing.issuperset(name.removeprefix(prefix) for name in names):
                self._note("nothing-loaded", 0, line=self._line(), prefix=prefix, where="state dict")
            elif missing.issuperset(prefix + name for name in names):
                self._note("nothing-loaded", 0, line=self._line(), prefix=prefix, where="model")
