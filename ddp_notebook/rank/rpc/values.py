"""Values behind remote references: waiting for them where a stop reaches the wait, and errors for those that are lost.

Torch waits for a value in C++, in `to_here` for its copy and in `local_value` for the function that makes it. A thread
that can be stopped waits in Python until the value is made, and calls torch only then:

| the value | the wait |
|---|---|
| of this process | a thread waits in torch's place, and ends with it |
| of another process, made by an `rpc.remote` of this one | the answer to that call |
| of another process | a call to the owner, where a thread waits in torch's place |

The second kind must not ask the owner. The reference in such a call tells torch there the type of the value. If the
operator fails after that, torch finds another type than the one it was told, raises an internal assertion, and answers
neither the `rpc.remote` nor any `to_here`.

No wait takes one of the agent's threads, which the function that makes the value may need. All of them together with
the copy get the time that `to_here` was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C import Future
from torch._C._distributed_rpc import _UNSET_RPC_TIMEOUT, PyRRef, get_rpc_timeout
from torch.distributed import rpc
from torch.distributed.rpc import api

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.rpc.calls import Calls
from ddp_notebook.rank.rpc.losses import Losses
from ddp_notebook.rank.rpc.waiting import elsewhere
from ddp_notebook.stdlib import contextlib, threading, time, weakref

_MOST_KNOWN = 10_000  # values
_FIRST_LOOK_S = 0.01  # until the first look whether a call has failed
_LOOK_AFTER = 0.05  # later looks: this part of the time that was waited so far
_LEAST_S = 0.001  # smallest timeout of the copy, after the wait
_SLACK_S = 5.0  # added to the timeout of the call to the owner, beyond the local wait
_TIMED_OUT = (
    "RPCErr:1:RPC ran for more than set timeout ({:.0f} ms) and will now be marked with an error"  # torch's words
)
_owner, _text = PyRRef.owner, PyRRef.__str__
_to_here, _local_value, _get_type = PyRRef.to_here, PyRRef.local_value, PyRRef._get_type


class Values:
    """Replaces the methods of references that wait for values.

    Args:
        calls: that have not returned.
        losses: knows workers that have ended.
        described: returns a worker in words, by its number.
        me: returns this worker in words.
    """

    def __init__(self, calls: Calls, losses: Losses, described: Callable[[int], str], me: Callable[[], str]) -> None:
        self._calls, self._losses, self._described, self._me = calls, losses, described, me
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
                where = values._described(_owner(reference).id)
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
        self._created[key] = weakref.ref(reference, partial(self._forget, key))

    def _forget(self, key: int, which: weakref.ref[Any]) -> None:
        if self._created.get(key) is which:  # else another object has this id already
            del self._created[key]

    def _copy(self, reference: PyRRef[Any], timeout_s: float) -> Any:
        self.check(reference)
        if reference.is_owner():
            return self._value_here(_to_here, reference)
        number = _owner(reference).id
        with self._calls.during("to_here", self._described(number)):
            try:
                if waiting.can_end():
                    limit_s = get_rpc_timeout() if timeout_s == _UNSET_RPC_TIMEOUT else timeout_s
                    timeout_s = self._wait(reference, limit_s)
                return _to_here(reference, timeout_s)
            except RuntimeError as error:
                if self._losses.is_cut(error, number):
                    raise RuntimeError(self._losses.of_reference(number)) from None
                raise

    def _wait(self, reference: PyRRef[Any], limit_s: float) -> float:
        """Wait until the value in another process exists, or its creation has failed.

        Args:
            limit_s: seconds that it gets; 0: all that it needs.

        Returns:
            What is left of them for the copy.

        Raises:
            RuntimeError: it was not made in time, in torch's words.
        """
        text = _text(reference).partition(", ForkId")[0]
        if text in self._made:
            return limit_s
        began_s = time.monotonic()
        known = self._created.get(id(reference))
        if known is not None and known() is reference:
            is_over = _wait_for_call(reference, limit_s)
        elif api._get_should_profile():  # the profile would show a call that the program has not made
            return limit_s
        else:
            its_limit_s = limit_s and limit_s + _SLACK_S
            made = rpc.rpc_async(reference.owner(), when_made, args=(reference,), timeout=its_limit_s)
            is_over = waiting.wait_in_time(made, limit_s)
        if not is_over:
            raise RuntimeError(_TIMED_OUT.format(limit_s * 1000))
        self._note(text)
        return max(_LEAST_S, limit_s - (time.monotonic() - began_s)) if limit_s else limit_s

    def _value_here(self, fetch: Callable[..., Any], reference: PyRRef[Any]) -> Any:
        """A value of this process. Until it is made torch waits for it in C++."""
        text = _text(reference)
        if text in self._made or not waiting.can_end():
            return fetch(reference)
        value = elsewhere(fetch, self._calls, self._me())(reference)
        self._note(text)
        return value

    def _note(self, text: str) -> None:
        if len(self._made) > _MOST_KNOWN:
            self._made.clear()
        self._made.add(text)


def _wait_for_call(reference: PyRRef[Any], limit_s: float) -> bool:
    """Wait until the `rpc.remote` that has made this reference is answered, or has failed.

    When it fails, such as at the death of the owner, torch's own callback raises, and the futures that wait behind it
    are never set. A future that is made afterwards is set at once. So the wait makes a new one again and again.

    Args:
        limit_s: seconds; 0: as long as it takes.

    Returns:
        Whether it is over.
    """
    began_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - began_s
        left_s = limit_s - waited_s if limit_s else float("inf")
        if left_s <= 0:
            return False
        look_s = max(_FIRST_LOOK_S, _LOOK_AFTER * waited_s)
        if waiting.wait_in_time(reference._get_future(), min(look_s, left_s)):
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
