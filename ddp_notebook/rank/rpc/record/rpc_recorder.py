"""Remote calls as rows, on the caller's and the callee's side.

The number of a call is sent with its function, so that both sides record the same number. Calls of operators and of
TorchScript never reach Python on the callee, so only the caller records them. A call whose answer is late has an
additional earlier row without the answer. This code runs in the user's calls; `tests/benchmarks/rpc.py` measures its
cost.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import Future
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc.internal import RemoteException

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.group.operators import nbytes_of
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer
from ddp_notebook.rank.remote_calls import TORCH, Ran, Sent
from ddp_notebook.rank.rpc.record.call_stack import RpcThread
from ddp_notebook.rank.rpc.record.contexts import Contexts
from ddp_notebook.rank.rpc.record.references import References
from ddp_notebook.records.schema import RPC_KINDS, SPANS
from ddp_notebook.stdlib import functools, time

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.spans import TrainingSpans
    from ddp_notebook.rank.rpc.rpc_functions import RpcFunctions

_MOST_ERROR = 300
_DEPTH = 4  # nesting depth of lists whose tensors are counted
_LONG_NS = 100_000_000  # a longer call is also recorded while it is open
_KIND = {name: code for code, name in enumerate(RPC_KINDS)}
_ASYNC, _TO_HERE, _REMOTE = (_KIND[kind] for kind in ("rpc_async", "to_here", "remote"))
_FUTURE = SPANS.index("future")
_now_ns = time.monotonic_ns
_to_here = "to_here"


class RpcRecorder:
    """Records the remote calls of this rank.

    Args:
        face: RPC functions of the rank.
        training: training spans of the rank's recording.
    """

    def __init__(self, face: RpcFunctions, training: TrainingSpans) -> None:
        self._face = face
        self._training = training
        self.event_buffer: EventBuffer = training.event_buffer
        self.here = RpcThread(face.serving.running)
        self._references = References(self.event_buffer, face, self.here)
        self._contexts = Contexts(training, face, self.here)
        self._fetching: dict[int, Sent] = {}  # open `to_here` calls

    @property
    def is_on(self) -> bool:
        """Return whether calls are recorded now."""
        return self.event_buffer.level != OFF

    def install(self) -> None:
        """Replace the functions of torch in this process."""
        face = self._face
        setattr(PyRRef, _to_here, self._around_to_here(getattr(PyRRef, _to_here)))
        self._references.install()
        self._contexts.install()
        self.event_buffer.collectors.append(self._tell_those_under_way)
        waiting.record = self._waited
        face.calls.on_answer = self._on_answer
        face.sending.recorder = face.serving.recorder = self

    # ---- the caller

    def sends(self, call: Sent, what: bytes | None, args: Any) -> None:
        """Fill in the fields of a call that is about to be sent by the caller of this function's caller.

        Args:
            call: the call.
            what: pickled Python function and arguments; None for an operator or a script.
            args: with `what`, the tensors come first; otherwise the arguments of the call.
        """
        event_buffer, frame, depth = (
            self.event_buffer,
            sys._getframe(2),
            3,
        )  # `_invoke_rpc`, called by `rpc_sync` and `rpc_async`; or `remote`
        if frame.f_code.co_name == "_invoke_rpc" and frame.f_back is not None:
            frame, depth = frame.f_back, 4
        if call.kind != TORCH:
            call.kind = _KIND.get(frame.f_code.co_name, _ASYNC)
        call.site, call.moment, call.is_told = event_buffer.site(depth), event_buffer.moment, False
        call.nbytes_back, call.returned_ns, call.reference, call.error = -1, -1, 0, ""
        face, names = self._face, self._face.names
        call.src, call.dst = (-1, -1) if names is None else (names.mine.here, face.rank_of(call.worker))
        if what is None:
            call.nbytes = _nbytes(args)
        else:
            call.nbytes = len(what)
            for tensor in args[0] or ():
                call.nbytes += nbytes_of(tensor)

    def before(self, call: Sent) -> set[int]:
        """Return the state that `sent_in_context` needs."""
        return self._contexts.before(call.context)

    def failed(self, call: Sent, error: BaseException) -> None:
        """Record a call that could not be sent."""
        call.returned_ns, call.error = _now_ns(), _in_a_line(error)
        self.event_buffer.put(call)

    def made(self, call: Sent, reference: PyRRef[Any]) -> None:
        """Record the reference that `remote` has created."""
        call.reference = self._references.made(reference, call)

    def sent_in_context(self, call: Sent, before: set[int], future: Any) -> None:
        """Record a call in a context of distributed autograd."""
        self._contexts.sent(call, before)
        # Immediately in an agent thread, before the answer of the next call arrives.
        future.add_done_callback(functools.partial(self._in_context, call, call.context))

    def _in_context(self, call: Sent, context: int, future: Any) -> None:
        call.returned_ns = _now_ns()
        self._look_at(call, None, None, future)
        self._contexts.returned(call, context)

    def _on_answer(self, call: Sent, time_ns: int, value: Any, error: Exception | None, future: Any = None) -> None:
        if call.returned_ns < 0:
            call.returned_ns = time_ns
            if value is not None or error is not None or future is not None:
                self._look_at(call, value, error, future)
        self.event_buffer.put(call)

    def _look_at(self, call: Sent, value: Any, error: Any, future: Any) -> None:
        """Store size or error of the answer.

        Args:
            call: the call.
            value: answer, if there is no future. It may be an exception returned by the callee.
            error: or the raised exception.
            future: future with the answer or the exception.
        """
        if future is not None:
            try:
                value = future.value()
            except Exception as raised:  # raised by the user's call
                error = raised
        if isinstance(value, RemoteException):
            error = value
        if error is not None:
            call.error = _in_a_line(error)
        elif call.kind != _REMOTE:
            call.nbytes_back = _nbytes((value,))

    def _around_to_here(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def to_here(reference: PyRRef[Any], *args: Any, **kwargs: Any) -> Any:
            event_buffer, face, here = self.event_buffer, self._face, self.here
            if event_buffer.level == OFF or reference.is_owner():
                return fetch(reference, *args, **kwargs)
            call = face.calls.new(_to_here)
            call.is_recorded, call.is_told, call.kind = True, False, _TO_HERE
            call.site, call.moment = event_buffer.site(2), event_buffer.moment
            call.parent, call.context = here.of(call.thread)
            call.src, call.dst = face.rank, face.rank_of(face.owner_of(reference))
            call.nbytes = call.nbytes_back = call.returned_ns = -1
            call.reference, call.error = self._references.number(reference), ""
            call.sent_ns = _now_ns()
            self._fetching[call.number] = call
            try:
                with here.fetching(call.number):  # covers the internal calls of torch
                    value = fetch(reference, *args, **kwargs)
                call.returned_ns = _now_ns()
                call.nbytes_back = _nbytes((value,))
            except BaseException as error:
                self.failed(call, error)
                raise
            finally:
                del self._fetching[call.number]
            self.event_buffer.put(call)
            if call.context:
                self._contexts.returned(call, call.context)
            return value

        return to_here

    def _waited(self, began_ns: int) -> None:
        """Record a thread's wait for a future.

        Not for `rpc_sync`, because the row of the call has the same duration.
        """
        if self.event_buffer.level == OFF or sys._getframe(2).f_code.co_name == "rpc_sync":
            return
        self._training.put(_FUTURE, "", began_ns)

    # ---- the callee

    def came(self, context: int) -> None:
        """Register an incoming call in a context of distributed autograd, before it is executed."""
        self._contexts.came(context)

    def ran(self, ran: Ran, result: Any) -> None:
        """Record an executed call."""
        if self.event_buffer.level == OFF:
            return
        ran.moment = self.event_buffer.moment
        if ran.ended_ns < 0:  # it was stopped
            ran.ended_ns = _now_ns()
        if isinstance(result, RemoteException):
            ran.error = _in_a_line(result)
        elif isinstance(result, Future) and not result.done():
            result.add_done_callback(functools.partial(self._set, ran))
            return
        self.event_buffer.put(ran)

    def _set(self, ran: Ran, future: Any) -> None:
        """Record the completion of the future returned by an `async_execution` function."""
        ran.done_ns = _now_ns()
        self.event_buffer.put(ran)

    # ---- any thread

    def _tell_those_under_way(self) -> None:
        """Record once each open call without an early answer, and each call that has been executed for long."""
        calls, since_ns = self._face.calls.under_way(), _now_ns() - _LONG_NS
        if self.event_buffer.level == OFF:
            return
        for call in (*calls, *list(self._fetching.values())):
            if call.is_recorded and call.sent_ns < since_ns and not call.is_told:
                call.is_told = True
                now = copy.copy(call)  # a copy, because the answer may arrive before the row is created
                now.returned_ns = now.nbytes_back = -1
                self.event_buffer.put(now)
        for ran in self._face.serving.going():
            if ran.number and ran.begun_ns < since_ns and not ran.is_told:
                ran.is_told = True
                self.event_buffer.put(dataclasses.replace(ran, moment=self.event_buffer.moment, ended_ns=-1))


def _nbytes(values: Any, depth: int = _DEPTH) -> int:
    """Return the size of the tensors among values and in nested lists; -1 without tensors.

    A list may contain itself.
    """
    found = -1
    for value in values:
        if isinstance(value, torch.Tensor):
            found = max(found, 0) + nbytes_of(value)
        elif depth and isinstance(value, list | tuple) and (inside := _nbytes(value, depth - 1)) >= 0:
            found = max(found, 0) + inside
    return found


def _in_a_line(error: Any) -> str:
    """Return one line about an error, as on the callee, without the worker's name and the traceback."""
    text = (error.msg if isinstance(error, RemoteException) else words(error)).strip()
    lines = text.removeprefix(f"{type(error).__name__}: ").splitlines() or [""]
    if len(lines) > 1 and lines[0].startswith("On "):
        return lines[1][:_MOST_ERROR]
    return (lines[0] if isinstance(error, RemoteException) else f"{type(error).__name__}: {lines[0]}")[:_MOST_ERROR]
