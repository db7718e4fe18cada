"""Exit handlers in a rank: functions of `atexit` that a cell calls reach only the handlers that cells registered.

IPython, ipykernel and zmq register handlers too: IPython's deletes all variables, and ipykernel's ends the thread that
sends messages. `atexit._run_exitfuncs()` and `atexit._clear()` in a cell leave those alone.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, cast

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, traceback

_of_cells: list[tuple[Callable[..., Any], Callable[[], Any]]] = []  # function, and its call
_unregister: Callable[[Any], None] = atexit.unregister


def protect() -> None:
    """Keep the handlers that are registered now from cells. They run at the end of the process, after those of cells.
    Call it before the first cell."""
    atexit.register(_run_those_of_cells)
    atexit.register = _register
    atexit.unregister = _unregister_of_cells
    atexit._run_exitfuncs = _run_those_of_cells
    atexit._clear = _of_cells.clear
    atexit._ncallbacks = lambda: len(_of_cells)


@functools.wraps(cast(Any, atexit.register))
def _register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError("the first argument must be callable")
    _of_cells.append((func, functools.partial(func, *args, **kwargs)))
    return func


@functools.wraps(atexit.unregister)
def _unregister_of_cells(func: Any, /) -> None:
    _of_cells[:] = [one for one in _of_cells if one[0] != func]
    _unregister(func)  # a library that was imported before the first cell may have registered it


def _run_those_of_cells() -> None:
    """Run the handlers of cells, the last one first, and print what they raise."""
    while _of_cells:
        _, call = _of_cells.pop()
        try:
            call()
        except BaseException:  # the next handlers run as well: `atexit` does the same
            traceback.print_exc()
