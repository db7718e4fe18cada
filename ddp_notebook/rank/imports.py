"""Imports of a rank: of ipykernel without debugpy, and a call right after a module was imported.

With `after_import`, a script can set environment variables before it imports torch. A script that never imports torch
pays nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401


def import_without_debugpy() -> None:
    """Import the debugger module of ipykernel without debugpy. Call it before the first import of ipykernel.

    An engine has no debugger channel, and importing debugpy takes 0.1 s. `rank/debug/adapter` imports debugpy later,
    with its own settings. Cells can import debugpy, too. ipykernel 6 imports its debugger module with its kernel.
    """
    if "debugpy" in sys.modules or "ipykernel.debugger" in sys.modules:
        return
    sys.modules["debugpy"] = cast(ModuleType, None)  # makes its import fail
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


def after_import(name: str, act: Callable[[], object]) -> None:
    """Call a function once after a module was imported, in the importing thread; now if it is imported already.

    Args:
        name: name of the module.
        act: the function. The import raises its exceptions.

    Example:
        >>> after_import("sys", lambda: print("it is there"))
        it is there
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of one module through the other finders. Its loader calls a function afterwards."""

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
                del loader.exec_module  # restores the method of the class
                load(module)
                self._act()

            _set(loader, "exec_module", exec_module)
        return spec


def _set(of: Any, name: str, value: object) -> None:
    setattr(of, name, value)
