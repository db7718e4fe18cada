"""Execution of calls on the callee. An error prints one line on the callee; the caller gets the traceback.

torch's version also prints the traceback on the callee, and uses the agent name instead of the cell's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

from torch._C import Future
from torch.distributed.rpc.internal import RemoteException

from ddp_notebook.rank.cell.exceptions import representation
from ddp_notebook.rank.remote_calls import Ran
from ddp_notebook.rank.rpc.open_calls import name_of
from ddp_notebook.rank.rpc.serving import Serving, Travelling
from ddp_notebook.stdlib import traceback

_NOTHING: Any = object()
_IS_ASYNC = "_wrapped_async_rpc_function"  # torch checks this function attribute
_MOST_TOLD = 300  # characters of an error printed on the callee; the caller gets all
_STOPPED = "the cell that made this call was stopped"


def runner(me: Callable[[], str], serving: Serving) -> Callable[[Any], Any]:
    """Return the replacement of `_run_function` of torch, which runs a call.

    Args:
        me: returns the name of this worker in the cell.
        serving: calls that this rank executes.
    """

    def run_function(call: Travelling | RemoteException) -> Any:
        if isinstance(call, RemoteException):  # the call could not be unpickled
            print(f"a call failed, and its caller gets the error: {_cut(call.msg.splitlines()[1])}", file=sys.stderr)
            return call
        name, _ = name_of(call.func, call.args)
        ran = Ran(name, call.cell, call.number, call.context, get_ident(), monotonic_ns())
        recorder, result = serving.recorder, _NOTHING
        if ran.context and recorder is not None:
            recorder.came(ran.context)
        try:  # a stop may raise once at any line of this block
            serving.begin(ran)
            result = run(call, name)
            ran.ended_ns = monotonic_ns()
            serving.end(ran)
        except KeyboardInterrupt:
            serving.end(ran)
        if result is _NOTHING:
            result = RemoteException(f"On {me()}:\n{_STOPPED}\n", RuntimeError)
        if ran.number and recorder is not None:
            recorder.ran(ran, result)
        return result

    def run(call: Travelling, name: str) -> Any:
        try:
            result = call.func(*call.args, **call.kwargs)
            # torch crashes on None, and raises in C++ for other values. If `to_here` is already waiting on this worker,
            # an assertion about the type of the value fails first, and the caller of `rpc.remote` gets no answer.
            if hasattr(call.func, _IS_ASYNC) and not isinstance(result, Future):
                raise (TypeError if result is None else RuntimeError)(
                    f"{name} is decorated with async_execution and must return a torch.futures.Future, "
                    f"but returned {'None' if result is None else type(result).__name__}"
                )
            return result
        except (Exception, SystemExit) as error:
            theirs = error.__traceback__.tb_next if error.__traceback__ is not None else None
            lines = "".join(traceback.format_exception(type(error), error, theirs))
            if not _is_torchs(call):
                print(f"{name} failed, and its caller gets the error: {_cut(representation(error))}", file=sys.stderr)
            # A SystemExit in the caller would end its cell without an error.
            kind = RuntimeError if isinstance(error, SystemExit) else type(error)
            return RemoteException(f"On {me()}:\n{representation(error)}\n{lines}", kind)

    return run_function


def reader(deserialize: Callable[..., Any], me: Callable[[], str]) -> Callable[..., Any]:
    """Return the replacement of `deserialize` of torch, which reads calls and answers.

    torch's version only forwards an `AttributeError`. After any other error, torch's answer does not reach the future
    of `rpc.remote`, so `to_here` and `shutdown` would wait forever.

    Args:
        deserialize: torch's function.
        me: returns the name of this worker in the cell.
    """

    def read(*what: Any) -> Any:
        try:
            found = deserialize(*what)
            is_unknown = isinstance(found, AttributeError) and found.__cause__ is not None  # an error, not a value
            error = found if is_unknown else None
        except Exception as failed:
            found, error = None, failed
        return found if error is None else RemoteException(f"On {me()}:\n{representation(error)}\n", type(error))

    return read


def _is_torchs(call: Travelling) -> bool:
    """Return whether this is a torch function that fetches the value of a reference. Its error was already reported."""
    return str(getattr(call.func, "__module__", "")).startswith("torch.")


def _cut(text: str) -> str:
    """Truncate an error text for printing. It may contain the traceback of a third worker."""
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."
