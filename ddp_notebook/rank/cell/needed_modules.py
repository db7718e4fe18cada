"""Functions and classes of modules without which the rank cannot continue. They are restored when something fails.

A cell may replace any of them, and the replacement normally stays. Two failures would end the session: the rank's event
loop raises, or IPython raises before it runs the code of a cell. After such a failure all replaced functions and
classes are restored, and a line names them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

# packages that the event loop, ipykernel and IPython use
_PACKAGES = frozenset(
    (
        *("IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq", "dateutil"),
        *("_collections_abc", "abc", "ast", "asyncio", "bisect", "codecs", "collections", "concurrent", "contextlib"),
        *("contextvars", "copy", "datetime", "enum", "functools", "genericpath", "getpass", "hashlib", "heapq", "hmac"),
        *("inspect", "io", "itertools", "json", "linecache", "locale", "logging", "math", "operator", "os", "pickle"),
        *("posixpath", "queue", "random", "re", "reprlib", "select", "selectors", "socket", "string", "struct", "sys"),
        *("textwrap", "threading", "time", "tokenize", "traceback", "types", "typing", "uuid", "warnings", "weakref"),
    )
)
_HOOKS = frozenset({"breakpointhook", "displayhook", "excepthook", "exit", "showwarning", "unraisablehook"})
_KINDS = (ModuleType, staticmethod, classmethod, property)
_ABSENT = object()
_MOST_NAMES = 5


class NeededModules:
    """Snapshot of functions and classes. Create it before the first cell.

    Args:
        loop: the event loop of the main thread. Its attributes and those of its selector are part of the snapshot.
    """

    def __init__(self, loop: Any) -> None:
        modules = [
            module
            for name, module in sys.modules.copy().items()
            if name.partition(".")[0] in _PACKAGES and type(module) is ModuleType
        ]
        self._modules = [(module, _functions(module)) for module in modules]
        objects = (loop, loop._selector)
        classes = [one for of in objects for one in type(of).__mro__ if one is not object]
        self._classes = [(one, _functions(one), set(vars(one))) for one in classes]
        self._objects = [(of, dict(vars(of))) for of in objects if hasattr(of, "__dict__")]

    def note_selector(self, loop: Any) -> None:
        """Keep the selector that the loop has now, in place of a closed one."""
        self._objects = [(of, {**vars_of, "_selector": loop._selector}) for of, vars_of in self._objects if of is loop]
        if hasattr(loop._selector, "__dict__"):
            self._objects.append((loop._selector, dict(vars(loop._selector))))

    def put_back(self) -> list[str]:
        """Restore all replaced functions and classes. Return their names."""
        names: list[str] = []
        for module, values in self._modules:
            names += _put_functions_back(module, values)
        for one, values, known in self._classes:
            names += _put_functions_back(one, values)
            names += _remove_hiding(one, known)
        for owner, values in self._objects:
            names += _put_attributes_back(owner, values)
        return list(dict.fromkeys(names))


def _put_functions_back(owner: Any, values: dict[str, Any]) -> list[str]:
    now = vars(owner)
    changed = [name for name, value in values.items() if now.get(name, _ABSENT) is not value]
    for name in changed:
        setattr(owner, name, values[name])
    return [f"{owner.__name__}.{name}" for name in changed]


def _remove_hiding(one: type, known: set[str]) -> list[str]:
    """Remove new attributes of a class that hide those of its base classes."""
    added = [name for name in set(vars(one)) - known if any(name in vars(base) for base in one.__mro__[1:])]
    for name in added:
        delattr(one, name)
    return [f"{one.__name__}.{name}" for name in added]


def _put_attributes_back(owner: Any, values: dict[str, Any]) -> list[str]:
    """Restore the attributes of the event loop or its selector. Remove those that hide methods."""
    now = vars(owner)
    replaced = [name for name, value in values.items() if _is_state(value) and now.get(name) is not value]
    added = [name for name in now if name not in values and hasattr(type(owner), name)]
    for name in replaced:
        now[name] = values[name]
    for name in added:
        del now[name]
    return [f"{type(owner).__name__}.{name}" for name in (*replaced, *added)]


def replaced(names: list[str]) -> str:
    """Return a clause about replaced names, with a bounded number of them.

    Example:
        >>> replaced(["math.ceil"]), replaced(["math.ceil", "math.floor"])
        ('math.ceil was replaced; it was put back', 'math.ceil, math.floor were replaced; they were put back')
    """
    more = len(names) - _MOST_NAMES
    listed = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    is_one = len(names) == 1
    return f"{listed} {'was' if is_one else 'were'} replaced; {'it was' if is_one else 'they were'} put back"


def _functions(owner: Any) -> dict[str, Any]:
    """Return the functions, classes, modules and constants of a module or class by their names."""
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("__")
        and name not in _HOOKS
        and (callable(value) or isinstance(value, _KINDS) or (name.isupper() and isinstance(value, int | str)))
    }


def _is_state(value: Any) -> bool:
    """Return whether an attribute of the event loop keeps its value: an object or a function, no flag or number."""
    return value is not None and not isinstance(value, bool | int | float | str)
