"""Hooks around the torch functions that send calls. They track open calls and record them.

The call of a Python function passes through two torch functions in one thread: `PythonUDF`, which gets the function,
and one of `INVOKES`, which gets its bytes. Other calls only pass through the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from time import monotonic_ns
from typing import Any

from torch._C._distributed_rpc import WorkerInfo

from ddp_notebook.rank.remote_calls import TORCH, Sent
from ddp_notebook.rank.rpc.open_calls import RpcCalls, name_of
from ddp_notebook.rank.rpc.serving import CallRecorder, Serving, Travelling
from ddp_notebook.stdlib import functools, traceback

_OPERATORS = "aten::"


class RpcSender:
    """Replaces the torch functions that send calls.

    Args:
        calls: open calls.
        serving: knows the cell for which a thread makes calls.
        target: returns the number of a worker, its description, its rank, and its `WorkerInfo` in the agent.
        with_ids: translates context ids in the arguments of an operator or a script.
        explain: returns the exception to raise instead of an error of torch; None to keep that error.
    """

    def __init__(
        self,
        calls: RpcCalls,
        serving: Serving,
        target: Callable[[WorkerInfo | str], tuple[int, str, int, Any]],
        with_ids: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]],
        explain: Callable[[Sent, BaseException], BaseException | None],
    ) -> None:
        self.recorder: CallRecorder | None = None
        self.on_remote: Callable[[Any], None] = lambda reference: None  # called with each new reference
        self._calls, self._serving, self._target, self._explain = calls, serving, target, explain
        self._with_ids = with_ids
        # Thread -> calls about to be sent, with the id of the torch frame that sends each. Several if an argument makes
        # calls while it is pickled, which may fail.
        self._making: dict[int, list[tuple[int, Sent]]] = {}

    def making(self) -> int:
        """Return the number of the call that this thread is about to send; 0 if it is not recorded."""
        making = self._making.get(get_ident())
        return making[-1][1].number if making and making[-1][1].is_recorded else 0

    def udf(self, function: Any, args: Any, kwargs: Any) -> Travelling:
        """Create the message of a call. Replaces torch's `PythonUDF`.

        Raises:
            TypeError: `args` is not iterable. Without this check the callee would raise a less clear error.
        """
        if type(args) is not tuple and not isinstance(args, Iterable):
            raise TypeError(f"args must be a tuple of arguments, such as args=({args!r},), got {args!r}")
        name, is_torchs = name_of(function, args)
        call = self._calls.new(name, self._serving.cell())
        frame, making = sys._getframe(1), self._making.setdefault(call.thread, [])
        if making:
            outer = {id(above) for above, _ in traceback.walk_stack(frame.f_back)}
            making[:] = [one for one in making if one[0] in outer]
        making.append((id(frame), call))
        recorder = self.recorder
        if recorder is None or not recorder.is_on:
            return Travelling(function, args, kwargs, call.cell)
        call.is_recorded, call.kind = True, TORCH if is_torchs else -1
        call.parent, call.context = recorder.here.of(call.thread)
        return Travelling(function, args, kwargs, call.cell, call.number, call.context)

    def _made(self, thread: int, frame: int) -> Sent:
        """Return the call that this frame created and now sends."""
        making = self._making[thread]
        while (made := making.pop())[0] != frame:
            pass
        if not making:
            del self._making[thread]
        return made[1]

    def around(self, name: str, invoke: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the torch function with this name."""
        calls, is_python, is_rpc = self._calls, name.endswith("python_udf"), "_rpc_" in name

        @functools.wraps(invoke)
        def invoked(to: WorkerInfo | str, what: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if is_python:
                call = self._made(get_ident(), id(sys._getframe(1)))
            else:
                call = calls.new(_name_of_operator(name, what), self._serving.cell())
                if recorder is not None and recorder.is_on:
                    call.is_recorded, call.kind = True, -1
                    call.parent, call.context = recorder.here.of(call.thread)
                args = self._with_ids(what, args)
            call.worker, call.to, call.callee, info = self._target(to)
            if call.is_recorded:
                assert recorder is not None
                recorder.sends(call, what if is_python else None, args)
                before = recorder.before(call) if call.context else None
            call.sent_ns = monotonic_ns()
            calls.begin(call)
            if isinstance(to, str) and isinstance(info, WorkerInfo):  # scripts are sent to a name
                info = info.name
            try:
                made = invoke(info, what, *args, **kwargs)
            except BaseException as error:
                calls.drop(call)
                if call.is_recorded:
                    assert recorder is not None
                    recorder.failed(call, error)
                if (better := self._explain(call, error)) is not None:
                    raise better from None
                raise
            if is_rpc:
                future = made
            else:
                future = call.reference_future = made._get_future()
                self.on_remote(made)
            if call.is_recorded:
                assert recorder is not None
                if not is_rpc:
                    recorder.made(call, made)
                if before is not None:
                    recorder.sent_in_context(call, before, future)
            calls.follow(call, future)
            return made

        return invoked


def _name_of_operator(invoke: str, what: Any) -> str:
    return str(what).rpartition(".")[2] if invoke.endswith("torchscript") else str(what).replace(_OPERATORS, "torch.")
