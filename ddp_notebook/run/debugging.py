"""Handle `%debug` and `%pdb on` in the notebook after an error that this package has raised.

The frames of such an error belong to this package, not to the user's code. After a failed cell of ranks, `%debug` opens
a debugger on them, if that feature is on. Otherwise a message is shown, and no debugger opens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ddp_notebook.errors import CellFailedHereError, CellTimeoutError, DDPNotebookError, RankError
from ddp_notebook.run.notebook_kernel import is_run_by_program

_ATTRIBUTE = "_ddp_notebook_debugger"
# packages whose frames are between a cell and this package
_LIBRARIES = {"IPython", "ipykernel", "decorator", "contextlib"}
FROM_RANKS = (
    "ddp_notebook: no debugger opens, since the cell failed on ranks, and a rank keeps no frames of a failed cell. "
    "Print what you want to know before the line that fails, or look at variables with %on_all_ranks x. Code that "
    "fails without other ranks too can be debugged in the notebook: run it with %%local"
)
ON_RANKS = (
    "ddp_notebook: the cell failed on ranks, and no debugger opens, since a program runs this notebook. At a front end "
    "that accepts input, %ddp_debug opens the failed lines"
)
FROM_HERE = (
    "ddp_notebook: no debugger opens, since the error comes from ddp_notebook and not from your code. Its message "
    "names the remedy"
)


def watch(shell: Any, on_ranks: Callable[[], Callable[[], None] | None]) -> None:
    """From now on, open no debugger in frames of this package.

    Args:
        shell: the IPython shell.
        on_ranks: returns the function that opens a debugger on ranks; None if there is none.
    """
    unwatch(shell)
    original = shell.debugger

    def debugger(force: bool = False) -> None:
        if (sentence := instead()) and (force or shell.call_pdb):
            opens = on_ranks() if sentence == FROM_RANKS else None
            if opens is not None and not is_run_by_program():
                opens()
            else:
                print(sentence if opens is None else ON_RANKS, file=sys.stderr)
        else:
            original(force=force)

    shell.debugger = debugger
    setattr(shell, _ATTRIBUTE, True)


def unwatch(shell: Any) -> None:
    """Restore the debugger of the shell."""
    if hasattr(shell, _ATTRIBUTE):
        del shell.debugger  # the class has it
        delattr(shell, _ATTRIBUTE)


def instead() -> str:
    """Return the message in place of a debugger for the last error; "": the debugger is useful."""
    error = getattr(sys, "last_value", None)
    was_stopped = isinstance(error, KeyboardInterrupt) and hasattr(error, "_render_traceback_")
    if not (was_stopped or isinstance(error, DDPNotebookError)) or isinstance(error, CellFailedHereError):
        return ""
    if _is_through_functions(getattr(sys, "last_traceback", None)):
        return ""
    return FROM_RANKS if was_stopped or isinstance(error, RankError | CellTimeoutError) else FROM_HERE


def _is_through_functions(traceback: TracebackType | None) -> bool:
    """Return whether a user function made the failed call, so that a debugger in its frame is useful."""
    users = 0
    while traceback is not None:
        frame = traceback.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "ddp_notebook":
            break
        users += package not in _LIBRARIES and not frame.f_code.co_filename.startswith("<decorator-gen-")
        traceback = traceback.tb_next
    return users > 1  # the first one is the cell
