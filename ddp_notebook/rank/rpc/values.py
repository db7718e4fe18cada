"""Values behind remote references: waiting for them where a stop reaches the wait, and errors for those that are lost.

Torch waits for a value in C++, in `to_here` for its copy and in `local_value` for the function that makes it. A thread
that can be stopped waits in Python until the value is made, and calls torch only then:

| the value | the wait |
|---|---|
| of this process | a thread waits in torch's place, and ends with it |
| of another process, made by an `rpc.remote` of this one, at first | the future of that call |
| of an operator or a script in another process | `to_here` in a thread of its own |
| of another process | a call to the owner, where a thread waits in torch's place |

In the third row no reference may be sent to the owner before the value is made. It would set the value's type in torch
there. If the operator then fails, torch finds a different type and raises an internal assertion, and neither
`rpc.remote` nor `to_here` gets an answer.

The future of an `rpc.remote` is not set when the call fails, such as at the death of the owner: torch's own callback
raises before. So it is waited for only as long as the call of a short function takes, which spares it a second call.

No wait takes one of the agent's threads, which the function that makes the value may need. All of them together with
the copy get the time that `to_here` was given.
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

_MOST_KNOWN = 10_000  # values
_LEAST_S = 0.001  # smallest timeout of the copy, after the wait
_AT_FIRST_S = 0.01
_SLACK_S = 5.0  # added to the timeout of the call to the owner, beyond the local wait
_TIMED_OUT = (
    "RPCErr:1:RPC ran for more than set timeout ({:.0f} ms) and will now be marked with an error"  # torch's words
)
_UNTYPED = "RRef[PyObject]"
_inferred = getattr(torch._C, "_jit_try_infer_type", None)  # without it such a `to_here` may hang
_owner, _text = PyRRef.owner, PyRRef.__str__
_to_here, _local_value, _get_type = PyRRef.to_here, PyRRef.local_value, PyRRef._get_type


class Values:
    """Replaces the methods of references that wait for values.

    Args:
        calls: that have not returned.
        losses: knows workers that have ended.
        callee: returns a worker in words and its rank, by its number.
        me: returns this worker in words, and its rank.
        cell: returns the cell that this thread makes calls for.
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
        self._made: set[str] = set()  # texts of references whose values are made
        self._created: dict[int, weakref.ref[Any]] = {}  # references that `rpc.remote` has created here, by id

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
        """Remember that an `rpc.remote` of this process has created this reference."""
        key = id(reference)
        self._created[key] = weakref.ref(reference, functools.partial(self._forget, key))

    def _forget(self, key: int, which: weakref.ref[Any]) -> None:
        if self._created.get(key) is which:  # else another object has this id already
            del self._created[key]

    def _copy(self, reference: PyRRef[Any], timeout_s: float) -> Any:
        self.check(reference)
        if reference.is_owner():
            return self._value_here(_to_here, reference)
        number = _owner(reference).id
        with self._calls.during("to_here", *self._callee(number)):
            try:
                if waiting.can_end():
                    limit_s = get_rpc_timeout() if timeout_s == _UNSET_RPC_TIMEOUT else timeout_s
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
        """Return True if the value exists. Waits a moment for it where this process has called its function."""
        if _text_of(reference) in self._made:
            return True
        known = self._created.get(id(reference))
        at_first_s = min(_AT_FIRST_S, limit_s or _AT_FIRST_S)
        if known is None or known() is not reference or not waiting.wait_in_time(reference._get_future(), at_first_s):
            return False
        self._note(_text_of(reference))
        return True

    def _copy_in_thread(self, reference: PyRRef[Any], timeout_s: float, number: int) -> Any:
        """Copy the value in a thread, unless this thread has state of torch that matters for it. After a stop the copy
        goes on, as a call of a stopped cell: `shutdown` does not wait for it.

        Args:
            number: of the owner's agent.
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
            limit_s: of the program's call, in seconds; 0 means no limit.
            left_s: what is left of it.

        Raises:
            RuntimeError: it was not made in time, in torch's words.
        """
        if api._get_should_profile():  # the profile would show a call that the program has not made
            return
        its_limit_s = left_s and left_s + _SLACK_S
        made = rpc.rpc_async(reference.owner(), when_made, args=(reference,), timeout=its_limit_s)
        if not waiting.wait_in_time(made, left_s):
            raise RuntimeError(_TIMED_OUT.format(limit_s * 1000))
        self._note(_text_of(reference))

    def _value_here(self, fetch: Callable[..., Any], reference: PyRRef[Any]) -> Any:
        """A value of this process. Until it is made torch waits for it in C++."""
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
    """The same for all references to one value."""
    return _text(reference).partition(", ForkId")[0]


def _left_of(limit_s: float) -> Callable[[], float]:
    """Return a function that returns the seconds left of a limit that starts now; 0 means no limit."""
    until_s = time.monotonic() + limit_s
    return lambda: max(_LEAST_S, until_s - time.monotonic()) if limit_s else limit_s


def _has_type(reference: PyRRef[Any]) -> bool:
    """Return True if the value has a type of TorchScript: an operator or a script makes it."""
    return _inferred is not None and str(_inferred(reference).type()) != _UNTYPED


def _is_in_context() -> bool:
    """Return True if this thread is in a context of distributed autograd, which belongs to its thread."""
    try:
        dist_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


@rpc.functions.async_execution
def when_made(reference: PyRRef[Any]) -> Future[Any]:
    """Run on the owner: return a future that is set when the value exists, or its creation has failed. The wait holds
    no thread of the agent."""
    future: Future[Any] = Future([])

    def wait() -> None:
        with contextlib.suppress(Exception):  # `to_here` raises the error
            _local_value(reference)
        future.set_result(None)

    threading.Thread(target=wait, name="ddp-rpc-value", daemon=True).start()
    return future
