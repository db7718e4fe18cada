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
    """Calls of `load_state_dict(strict=False)` in the running cell that have loaded nothing.

    Args:
        line: returns the line of the cell that is running.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._main = threading.get_ident()
        self.found: dict[int, dict[str, Any]] = {}  # details of the last call of a module, if it has loaded nothing
        self._inside: dict[int, set[int]] = {}  # the ids of its modules
        around(torch.nn.Module, "load_state_dict", self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state_dict(module: Any, state_dict: Any, *args: Any, **named: Any) -> Any:
            result = original(module, state_dict, *args, **named)
            if threading.get_ident() == self._main:
                tell(self._loaded, module, state_dict, result)
            return result

        return passed_over(load_state_dict)

    def _loaded(self, module: Any, state_dict: Mapping[str, Any], result: Any) -> None:
        inside = set(map(id, module.modules()))
        for other in list(self.found):  # a program may try several prefixes, or the module inside DDP
            if other in inside or id(module) in self._inside[other]:
                del self.found[other], self._inside[other]
        if not (unexpected := getattr(result, "unexpected_keys", None)):
            return
        names, missing = set(unexpected), set(result.missing_keys)
        if not names.issuperset(state_dict):
            return  # some were loaded
        for prefix in _PREFIXES:
            if missing.issuperset(name.removeprefix(prefix) for name in names):
                where = "state dict"
            elif missing.issuperset(prefix + name for name in names):
                where = "model"
            else:
                continue
            self.found[id(module)] = {"line": self._line(), "prefix": prefix, "where": where}
            self._inside[id(module)] = inside
            return
