"""Does something right after a module was imported: a script that sets variables before it imports torch finds that
they count, and one that imports no torch does not pay for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[], object]) -> None:
    """Act once: in the thread that imports it, when all of it is there; now, if it is there already.

    Args:
        name: of a module.
        act: what it raises is raised by the import.

    Example:
        >>> after_import("sys", lambda: print("it is there"))
        it is there
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, and has what loads it act afterwards."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # the class's own again
                load(module)
                self._act()

            _set(loader, "exec_module", exec_module)
        return spec


def _set(of: Any, name: str, value: object) -> None:
    setattr(of, name, value)
