"""Wait for the values of remote references such that a stop can interrupt the wait, and raise errors for lost values.

torch waits for a value in C++: in `to_here` for its copy, and in `local_value` for the function that computes it. An
interruptible thread waits in Python until the value exists, and then calls torch:

| value | wait |
|---|---|
| in this process | a separate thread waits in torch and ends with the wait |
| in another process, created by `rpc.remote` in this process | first on the future of that call |
| of an operator or script in another process | `to_here` in a separate thread |
| in another process | a call to the owner, where a separate thread waits in torch |

For the third row, no reference may be sent to the owner before the value exists, because that would set the type of the
value in torch. If the operator then fails, torch finds a different type and raises an internal assertion, and neither
`rpc.remote` nor `to_here` gets an answer.

The future of an `rpc.remote` is not set if the call fails, for example at the death of the owner, because torch's own
callback raises first. So this wait is limited to the duration of a short function, for which it saves a second call.

No wait occupies a thread of the agent, because the function that computes the value may need it. The timeout of
`to_here` covers all waits and the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch._C import Future
from torch._C._distributed_rpc import _UNSET_RPC_TIMEOUT, PyRRef, get_rpc_timeout
from torch.distributed import rpc
from torch.distributed.rpc import api

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.rpc.failed_calls import LostWorkers
from ddp_notebook.rank.rpc.interruptible import elsewhere, elsewhere_if_unseen
from ddp_notebook.rank.rpc.open_calls import RpcCalls
from ddp_notebook.stdlib import contextlib, functools, threading, time, weakref

_MOST_KNOWN = 10_000  # maximum number of remembered values
_TOO_LONG_S = 9.2e15  # 2**63 milliseconds
_LEAST_S = 0.001  # minimum timeout of the copy, after the wait
_AT_FIRST_S = 0.01
_SLACK_S = 5.0  # added to the timeout of the call to the owner, beyond the local wait
_TIMED_OUT = (
    "RPCErr:1:RPC ran for more than set timeout ({:.0f} ms) and will now be marked with an error"  # text of torch
)
_UNTYPED = "RRef[PyObject]"
_inferred = getattr(torch._C, "_jit_try_infer_type", None)  # without this function, `to_here` for operators may hang
_owner, _text = PyRRef.owner, PyRRef.__str__
_to_here, _local_value, _get_type = PyRRef.to_here, PyRRef.local_value, PyRRef._get_type


class Values:
    """Replaces the methods of references that wait for values.

    Args:
        calls: open calls of this rank.
        losses: workers that have ended.
        callee: returns the description and the rank of a worker, by its number.
        me: returns the description and the rank of this worker.
        cell: returns the cell for which this thread makes calls.
    """

    def __init__(
        self,
        calls: RpcCalls,
        losses: LostWorkers,
        callee: Callable[[int], tuple[str, int]],
        me: Callable[[], tuple[str, int]],
        cell: Callable[[], int],
    ) -> None:
        self._calls, self._losses, self._callee, self._me, self._cell = calls, losses, callee, me, cell
        self._made: set[str] = set()  # texts of references whose values exist
        self._created: dict[int, weakref.ref[Any]] = {}  # id -> reference created by `rpc.remote` in this process

    def install(self) -> None:
        """Replace the methods of `PyRRef` in this process."""
        values = self

        def to_here(reference: PyRRef[Any], timeout: float = _UNSET_RPC_TIMEOUT) -> Any:
            return values._copy(reference, timeout)

        def local_value(reference: PyRRef[Any]) -> Any:
            values.check(reference)
            if not reference.is_owner():
                where, _ = values._callee(_owner(reference).id)
                raise RuntimeError(f"the value of this reference is on {where}: copy it with to_here()")
            return values._value_here(_local_value, reference)

        def get_type(reference: PyRRef[Any], timeout: float = _UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
            values.check(reference)
            return _get_type(reference, timeout, blocking)  # type: ignore[call-arg]

        for name, ours in ("to_here", to_here), ("local_value", local_value), ("_get_type", get_type):
            ours.__name__, ours.__doc__ = name, getattr(PyRRef, name).__doc__
            setattr(PyRRef, name, ours)

    def check(self, reference: PyRRef[Any]) -> None:
        """Raise an error if the value is lost."""
        if self._losses.is_lost(number := _owner(reference).id):
            raise RuntimeError(self._losses.of_reference(number))

    def follow(self, reference: PyRRef[Any]) -> None:
        """Register a reference created by an `rpc.remote` of this process."""
        key = id(reference)
        self._created[key] = weakref.ref(reference, functools.partial(self._forget, key))

    def _forget(self, key: int, which: weakref.ref[Any]) -> None:
        if self._created.get(key) is which:  # otherwise another object has reused this id
            del self._created[key]

    def _copy(self, reference: PyRRef[Any], timeout_s: float) -> Any:
        self.check(reference)
        if not _is_number(timeout_s):
            return _to_here(reference, timeout_s)  # raises torch's TypeError
        if reference.is_owner():
            return self._value_here(_to_here, reference)
        number = _owner(reference).id
        with self._calls.during("to_here", *self._callee(number)):
            try:
                if waiting.can_end():
                    limit_s = _limit_of(get_rpc_timeout() if timeout_s == _UNSET_RPC_TIMEOUT else timeout_s)
                    if limit_s is None:
                        return _to_here(reference, timeout_s)
                    left = _left_of(limit_s)
                    if not self._is_made_soon(reference, limit_s):
                        if _has_type(reference):
                            return self._copy_in_thread(reference, timeout_s, number)
                        self._wait(reference, limit_s, left())
                    timeout_s = left()
                return _to_here(reference, timeout_s)
            except RuntimeError as error:
                if self._losses.is_cut(error, number):
                    raise RuntimeError(self._losses.of_reference(number)) from None
                raise

    def _is_made_soon(self, reference: PyRRef[Any], limit_s: float) -> bool:
        """Return whether the value exists. Waits briefly if this process has made the `rpc.remote` call."""
        if _text_of(reference) in self._made:
            return True
        known = self._created.get(id(reference))
        at_first_s = min(_AT_FIRST_S, limit_s or _AT_FIRST_S)
        if known is None or known() is not reference or not waiting.wait_in_time(reference._get_future(), at_first_s):
            return False
        self._note(_text_of(reference))
        return True

    def _copy_in_thread(self, reference: PyRRef[Any], timeout_s: float, number: int) -> Any:
        """Copy the value in a separate thread, unless this thread has relevant torch state.

        After a stop the copy continues as a call of a stopped cell, so `shutdown` does not wait for it.

        Args:
            reference: the reference.
            timeout_s: timeout of the copy in seconds.
            number: agent number of the owner.
        """
        call = self._calls.new("to_here", self._cell(), is_call=False)
        call.worker, call.sent_ns = number, time.monotonic_ns()
        call.to, call.callee = self._callee(number)
        self._calls.begin(call)

        @functools.wraps(_to_here)
        def to_here() -> Any:
            try:
                return _to_here(reference, timeout_s)
            finally:
                self._calls.drop(call)

        if _is_in_context():
            return to_here()
        return elsewhere_if_unseen(to_here, self._calls, *self._callee(number))()

    def _wait(self, reference: PyRRef[Any], limit_s: float, left_s: float) -> None:
        """Wait until the value in another process exists, or its creation has failed.

        Args:
            reference: the reference.
            limit_s: timeout of the program's call in seconds; 0 means no limit.
            left_s: remaining seconds.

        Raises:
            RuntimeError: timeout, with torch's message.
        """
        if api._get_should_profile():  # the profile would show a call that the program has not made
            return
        its_limit_s = left_s and left_s + _SLACK_S
        made = rpc.rpc_async(reference.owner(), when_made, args=(reference,), timeout=its_limit_s)
        if not waiting.wait_in_time(made, left_s):
            raise RuntimeError(_TIMED_OUT.format(limit_s * 1000))
        self._note(_text_of(reference))

    def _value_here(self, fetch: Callable[..., Any], reference: PyRRef[Any]) -> Any:
        """Return a value of this process. torch waits in C++ until the value exists."""
        text = _text(reference)
        if text in self._made or not waiting.can_end():
            return fetch(reference)
        value = elsewhere(fetch, self._calls, *self._me())(reference)
        self._note(text)
        return value

    def _note(self, text: str) -> None:
        if len(self._made) > _MOST_KNOWN:
            self._made.clear()
        self._made.add(text)


def _text_of(reference: PyRRef[Any]) -> str:
    """Return a text that is equal for all references to one value."""
    return _text(reference).partition(", ForkId")[0]


def _is_number(timeout_s: Any) -> bool:
    return any(hasattr(type(timeout_s), name) for name in ("__float__", "__index__"))


def _limit_of(timeout_s: float) -> float | None:
    """Return the timeout as torch uses it, in seconds; 0 means no limit.

    torch converts it to whole milliseconds. Returns None if the timeout is negative, not a number, or too large: then
    torch raises the error of a timeout immediately.
    """
    if not 0 <= timeout_s < _TOO_LONG_S:
        return None
    return float(timeout_s) if timeout_s >= 1e-3 else 0.0


def _left_of(limit_s: float) -> Callable[[], float]:
    """Return a function that returns the remaining seconds of a timeout that starts now; 0 means no limit."""
    until_s = time.monotonic() + limit_s
    return lambda: max(_LEAST_S, until_s - time.monotonic()) if limit_s else limit_s


def _has_type(reference: PyRRef[Any]) -> bool:
    """Return whether the value has a TorchScript type, because an operator or a script computes it."""
    return _inferred is not None and str(_inferred(reference).type()) != _UNTYPED


def _is_in_context() -> bool:
    """Return whether this thread is in a context of distributed autograd. Contexts are per thread."""
    try:
        dist_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


@rpc.functions.async_execution
def when_made(reference: PyRRef[Any]) -> Future[Any]:
    """Return a future that is set when the value exists or its creation has failed. Runs on the owner.

    The wait occupies no thread of the agent.
    """
    future: Future[Any] = Future([])

    def wait() -> None:
        with contextlib.suppress(Exception):  # `to_here` raises the error
            _local_value(reference)
        future.set_result(None)

    threading.Thread(target=wait, name="ddp-rpc-value", daemon=True).start()
    return future
