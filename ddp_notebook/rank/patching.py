"""Replace a library function in every module that has a reference to it.

`from torch.distributed import init_process_group` makes such references, also in torch itself. A search through a
thousand modules takes milliseconds, and copies each page that it touches in a forked rank. So the host server searches
before it forks, and a rank searches only the modules that it has imported since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import takewhile
from types import ModuleType
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_found: dict[Callable[..., Any], list[ModuleType]] = {}  # modules that have the function
_last: ModuleType | None = None  # last searched module


def look_for(originals: Iterable[Callable[..., Any]]) -> None:
    """Find the modules that have these functions. Call it before the fork."""
    global _last
    modules = list(sys.modules.values())
    for original in originals:
        _found[original] = _having(original, modules)
    _last = modules[-1]


def replace(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Replace a function in every module that has it by its name."""
    modules = sys.modules.values()
    if original in _found:
        try:
            later = list(takewhile(lambda module: module is not _last, reversed(modules)))
        except RuntimeError:  # another thread imports
            later = list(modules)
        having = [*_found[original], *_having(original, later)]
    else:
        having = _having(original, list(modules))
    for module in having:
        setattr(module, original.__name__, ours)


def _having(original: Callable[..., Any], modules: Iterable[ModuleType]) -> list[ModuleType]:
    name = original.__name__
    return [module for module in modules if getattr(module, "__dict__", {}).get(name) is original]
