"""What a callee runs, and what it says of an error: one line where it runs, and the traceback to the caller.

Torch prints the traceback on the callee too, and names its agent, which no cell has named so.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed.rpc.internal import PythonUDF, RemoteException


def runner(me: Callable[[], str]) -> Callable[[Any], Any]:
    """What runs a call, in place of torch's `_run_function`.

    Args:
        me: tells what cells call this worker.
    """

    def run_function(call: PythonUDF | AttributeError) -> Any:
        name = ""
        try:
            if isinstance(call, AttributeError):  # its function was not found
                raise call
            name = getattr(call.func, "__qualname__", type(call.func).__name__)
            return call.func(*call.args, **call.kwargs)
        except Exception as error:
            theirs = error.__traceback__.tb_next if error.__traceback__ is not None else None
            lines = "".join(traceback.format_exception(type(error), error, theirs))
            if not _is_torchs(call):
                print(f"{name or 'a call'} failed, and its caller is told: {error!r}", file=sys.stderr)
            return RemoteException(f"On {me()}:\n{error!r}\n{lines}", type(error))

    return run_function


def _is_torchs(call: PythonUDF | AttributeError) -> bool:
    """Whether it is a function by which torch asks for what a reference holds: its error was told already."""
    return isinstance(call, PythonUDF) and str(getattr(call.func, "__module__", "")).startswith("torch.")
