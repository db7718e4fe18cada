"""Properties of this process: a notebook's kernel with a user, one run by a program, or a script.

Also the user's thread and the start of the next cell.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_AGAIN_S = 0.05  # from a press in a hook before a cell until it is repeated in the cell


def ipython() -> Any:
    """Return the IPython shell, or None. Does not import IPython."""
    # Another thread may be importing IPython. `IPython.get_ipython` is slower: it imports twice at each call.
    shell = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    return shell.instance() if shell is not None and shell.initialized() else None


def kernel() -> Any:
    """Return the kernel, if this process is one. None in a terminal or a script."""
    return getattr(ipython(), "kernel", None)


def cell_number() -> int:
    """Return the number in the `In [n]` of the running or last cell; 1 without a shell, as in a script."""
    if (shell := ipython()) is None or shell.history_manager is None:
        return 1
    running = getattr(shell.displayhook, "exec_result", None)  # `exit` is in no history
    if running is not None and running.execution_count and running.info.store_history:
        return int(running.execution_count)
    # The running cell was started by another one, as by %%local, or IPython is older and increments the number after a
    # cell.
    return max(1, len(shell.history_manager.input_hist_parsed) - 1)


def has_front_end() -> bool:
    """Return whether a user may be at the front end.

    Programs that run notebooks (nbclient, papermill, nbconvert) declare that input is not possible. Nothing else
    identifies them.
    """
    if (running := kernel()) is None:
        return False
    content = (running.get_parent() or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))


def is_marimo() -> bool:
    """Return whether this process runs a marimo notebook or app."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and marimo.running_in_notebook()


def is_run_by_program() -> bool:
    """Return whether a program runs the notebook. It drops output that arrives after the end of a cell."""
    return kernel() is not None and not has_front_end()


def thread_of_this_cell(work: Callable[[], object], name: str) -> threading.Thread:
    """Create a thread whose output belongs to the calling cell, if the front end supports that, as marimo does."""
    if is_marimo():
        thread: threading.Thread = sys.modules["marimo"].Thread(target=work, name=name, daemon=True)
        return thread
    return threading.Thread(target=work, name=name, daemon=True)


def before_next_cell(act: Callable[[], object]) -> None:
    """Call a function once in the main thread, before IPython runs the next cell; immediately without IPython."""
    if (shell := ipython()) is None:
        act()
        return

    def do() -> None:
        shell.events.unregister("pre_execute", do)
        try:
            act()
        except KeyboardInterrupt:  # IPython would print it with frames of this package, and run the cell
            _interrupt_in(_AGAIN_S)

    shell.events.register("pre_execute", do)


def _interrupt_in(seconds: float) -> None:
    """Repeat a press of stop when the cell runs."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()


def is_users_thread() -> bool:
    """Return whether this thread runs the cells of a notebook or a script, so that its output is shown.

    This is the main thread. In a marimo app (`marimo run`) each viewer's cells run in their own thread.
    """
    here = threading.current_thread()
    if here is threading.main_thread():
        return True
    return is_marimo() and not isinstance(here, sys.modules["marimo"].Thread)
