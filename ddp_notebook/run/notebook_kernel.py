"""What this process is: a notebook's kernel, with somebody at its front end or run by a program, or neither; which of
its threads is the user's; and when the next cell begins."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


def ipython() -> Any:
    """IPython's shell, or None. Does not import IPython."""
    # Another thread may be importing IPython at this moment.
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def kernel() -> Any:
    """The kernel, if this process is one; None in a terminal or a script."""
    return getattr(ipython(), "kernel", None)


def cell_number() -> int:
    """The number in the `In [n]` of the cell that runs, or has run last; 1 where there is none, as in a script."""
    if (shell := ipython()) is None or shell.history_manager is None:
        return 1
    running = getattr(shell.displayhook, "exec_result", None)  # `exit` is in no history
    if running is not None and running.execution_count and running.info.store_history:
        return int(running.execution_count)
    # That of a cell that runs another one, as %%local does, or of an older version, which counts up behind a cell.
    return max(1, len(shell.history_manager.input_hist_parsed) - 1)


def has_front_end() -> bool:
    """Whether somebody is at the front end. Programs that run notebooks (nbclient, papermill, nbconvert) say that
    nobody can type; there is no other sign of them."""
    if (running := kernel()) is None:
        return False
    content = (running.get_parent() or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))


def is_marimo() -> bool:
    """Whether this process runs a notebook or an app of marimo's."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and marimo.running_in_notebook()


def is_run_by_program() -> bool:
    """Whether a program runs the notebook, which takes what a cell shows until the cell ends, and nothing later."""
    return kernel() is not None and not has_front_end()


def thread_of_this_cell(work: Callable[[], object], name: str) -> threading.Thread:
    """A thread whose output belongs to the cell that makes it, as far as the front end sees to that: marimo does."""
    if is_marimo():
        thread: threading.Thread = sys.modules["marimo"].Thread(target=work, name=name, daemon=True)
        return thread
    return threading.Thread(target=work, name=name, daemon=True)


def before_next_cell(act: Callable[[], object]) -> None:
    """Do something once, in the main thread, before IPython runs the next cell; at once where there is no IPython."""
    if (shell := ipython()) is None:
        act()
        return

    def do() -> None:
        shell.events.unregister("pre_execute", do)
        act()

    shell.events.register("pre_execute", do)


def is_users_thread() -> bool:
    """Whether this thread runs the cells of a notebook or a script, so that what it writes is shown: the main one. In
    an app of marimo (`marimo run`) the cells of each viewer run in a thread of their own."""
    here = threading.current_thread()
    if here is threading.main_thread():
        return True
    return is_marimo() and not isinstance(here, sys.modules["marimo"].Thread)
