"""What a callee runs, and what it says of an error: one line where it runs, and the traceback to the caller.

Torch prints the traceback on the callee too, and names its agent, which no cell has named so.
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
_IS_ASYNC = "_wrapped_async_rpc_function"  # torch looks at this attribute of a function
_MOST_TOLD = 300  # characters of an error where it happened; its caller gets all
_STOPPED = "the cell was stopped that this call was made for"


def runner(me: Callable[[], str], serving: Serving) -> Callable[[Any], Any]:
    """What runs a call, in place of torch's `_run_function`.

    Args:
        me: tells what cells call this worker.
        serving: has the calls that this rank runs.
    """

    def run_function(call: Travelling | RemoteException) -> Any:
        if isinstance(call, RemoteException):  # it could not be read
            print(f"a call failed, and its caller is told: {_cut(call.msg.splitlines()[1])}", file=sys.stderr)
            return call
        name, _ = name_of(call.func, call.args)
        ran = Ran(name, call.cell, call.number, call.context, get_ident(), monotonic_ns())
        recorder, result = serving.recorder, _NOTHING
        if ran.context and recorder is not None:
            recorder.came(ran.context)
        try:  # a stop may be raised here at any line, once
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
            # torch crashes on None. For other values it raises in C++. If `to_here` has reached this worker by then, an
            # assertion about the type of the value fails first, and the caller of `rpc.remote` gets no answer.
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
                print(f"{name} failed, and its caller is told: {_cut(representation(error))}", file=sys.stderr)
            # In the caller `SystemExit` would end its cell without an error.
            kind = RuntimeError if isinstance(error, SystemExit) else type(error)
            return RemoteException(f"On {me()}:\n{representation(error)}\n{lines}", kind)

    return run_function


def reader(deserialize: Callable[..., Any], me: Callable[[], str]) -> Callable[..., Any]:
    """What reads a call and its answer, in place of torch's `deserialize`, which hands on an `AttributeError` alone.
    Of a call that raises anything else torch tells the caller in a way that `rpc.remote` never learns: `to_here` and
    `shutdown` would wait for ever.

    Args:
        deserialize: torch's.
        me: tells what cells call this worker.
    """

    def read(*what: Any) -> Any:
        try:
            found = deserialize(*what)
            is_unknown = isinstance(found, AttributeError) and found.__cause__ is not None  # not a value
            error = found if is_unknown else None
        except Exception as failed:
            found, error = None, failed
        return found if error is None else RemoteException(f"On {me()}:\n{representation(error)}\n", type(error))

    return read


def _is_torchs(call: Travelling) -> bool:
    """Whether it is a function by which torch asks for what a reference holds: its error was told already."""
    return str(getattr(call.func, "__module__", "")).startswith("torch.")


def _cut(text: str) -> str:
    """One line of at most so many characters: an error that came from a third worker has that one's traceback in it."""
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."
