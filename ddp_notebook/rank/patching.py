"""A function of a library's, replaced in every module that has it: `from torch.distributed import init_process_group`
has made references to it, in torch itself too.

A look into each of some thousand modules takes milliseconds, and a rank that was forked gets its own copy of every
page that it looks at. So the host server looks before it forks, and a rank only into what it has imported since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import takewhile
from types import ModuleType
from typing import Any

_found: dict[Callable[..., Any], list[ModuleType]] = {}  # who has a function that was looked for
_last: ModuleType | None = None  # the last module that was looked into


def look_for(originals: Iterable[Callable[..., Any]]) -> None:
    """Find the modules that have these functions, which are to be replaced after a fork."""
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
