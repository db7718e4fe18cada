"""Remote calls as rows: what the caller sees of each, and what its callee.

The number of a call travels with its function, so that both sides tell the same one. Calls of operators and of
TorchScript never reach Python on the callee: of these the caller alone tells. All of this runs in the user's calls;
`tests/benchmarks/rpc.py` measures what it costs.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import Future
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import api, internal
from torch.distributed.rpc.internal import RemoteException

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.record.remote import Ran, Sent
from ddp_notebook.rank.record.tape import OFF, Tape, noting_time
from ddp_notebook.rank.rpc.calls import INVOKES, name_of
from ddp_notebook.rank.rpc.contexts import Contexts
from ddp_notebook.rank.rpc.here import Here, numbered
from ddp_notebook.rank.rpc.references import References
from ddp_notebook.rank.rpc.serving import Sent as Travelling
from ddp_notebook.records.schema import RPC_KINDS

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.stretches import Training
    from ddp_notebook.rank.rpc.face import Face

_UDF, _MOST_ERROR = "PythonUDF", 300
_KIND = {name: code for code, name in enumerate(RPC_KINDS)}
_ASYNC, _TORCH, _TO_HERE, _REMOTE = _KIND["rpc_async"], _KIND["torch"], _KIND["to_here"], _KIND["remote"]
_OPERATORS = "aten::"
_now_ns, _thread = time.monotonic_ns, threading.get_ident
_to_here = "to_here"


class Recorder:
    """Records the remote calls of this rank.

    Args:
        face: whose workers they go to.
        training: of the rank's recording.
    """

    def __init__(self, face: Face, training: Training) -> None:
        self._face = face
        self._tape: Tape = training.tape
        self._counted = itertools.count(1)
        self._ended: deque[tuple[Sent, int]] = deque()  # calls whose answers are there, and since when
        self._here = Here()
        self._references = References(self._tape, face, self._here)
        self._contexts = Contexts(training, face, self._here)

    def install(self) -> None:
        """Begin to look, behind what the face has put in place of torch's."""
        setattr(api, _UDF, self._around_udf(getattr(api, _UDF)))
        for name in INVOKES:
            setattr(api, name, self._around_invoke(name, getattr(api, name)))
        internal._run_function = self._around_run(internal._run_function)
        setattr(PyRRef, _to_here, self._around_to_here(getattr(PyRRef, _to_here)))
        self._tape.collectors.append(self._collect)
        waiting.on_waited.append(self._collect)
        self._references.install()
        self._contexts.install()

    # ---- the caller

    def _next(self) -> int:
        return numbered(self._face.number, next(self._counted))

    def _around_udf(self, make: Callable[..., Any]) -> Callable[..., Any]:
        here, tape = self._here, self._tape

        @functools.wraps(make)
        def udf(function: Any, args: Any, kwargs: Any) -> Any:
            made = make(function, args, kwargs)
            if tape.level == OFF:
                here.made()  # that an error has kept from being sent
                return made
            made.number, made.context = self._next(), here.context
            here.make(made.number, function, args)
            return made

        return udf

    def _around_invoke(self, name: str, invoke: Callable[..., Any]) -> Callable[..., Any]:
        here, tape, is_python, is_rpc = self._here, self._tape, name.endswith("python_udf"), "_rpc_" in name

        @functools.wraps(invoke)
        def invoked(to: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
            making = here.made() if is_python else None
            if tape.level == OFF or (is_python and making is None):
                return invoke(to, what, *args, **kwargs)
            sent = Sent()
            if making is not None:
                sent.number, function, its_args = making
                sent.function, is_torchs = name_of(function, its_args)
                sent.nbytes = len(what) + (sum(one.nbytes for one in args[0]) if args[0] else 0)
            else:
                sent.number, is_torchs = self._next(), False
                sent.function = (
                    str(what).rpartition(".")[2]
                    if name.endswith("torchscript")
                    else str(what).replace(_OPERATORS, "torch.")
                )
                sent.nbytes = _nbytes(args)
            frame, depth = sys._getframe(1), 2  # torch's `_invoke_rpc`, below `rpc_sync` and `rpc_async`; or `remote`
            if frame.f_code.co_name == "_invoke_rpc" and frame.f_back is not None:
                frame, depth = frame.f_back, 3
            sent.kind = _TORCH if is_torchs else _KIND.get(frame.f_code.co_name, _ASYNC)
            sent.site = tape.site(depth)
            self._begin(sent, to)
            context = here.context
            before = self._contexts.before() if context else None
            try:
                made = invoke(to, what, *args, **kwargs)
            except BaseException as error:
                self._returned(sent, error)
                raise
            if not is_rpc:
                sent.reference = self._references.made(made, sent)
            if before is not None:
                self._contexts.sent(sent, before)
            future = made if is_rpc else made._get_future()
            if context:
                future.add_done_callback(functools.partial(self._on_answer, sent, context))
            else:
                sent.future = future
                future.add_done_callback(noting_time(self._ended, sent))
            if self._ended:
                self._collect()
            return made

        return invoked

    def _begin(self, sent: Sent, to: Any) -> None:
        face = self._face
        sent.src, sent.dst = face.rank, face.rank_of(to)
        sent.parent, sent.moment, sent.thread = self._here.inside, self._tape.moment, _thread()
        sent.nbytes_back, sent.reference, sent.error, sent.returned_ns = -1, 0, "", -1
        sent.future = None
        sent.sent_ns = _now_ns()

    def _collect(self) -> None:
        """Leave the calls whose answers have come: their waiting caller does, or the next one, or the tape's reader."""
        ended = self._ended
        while ended:
            try:
                sent, ended_ns = ended.popleft()
            except IndexError:  # another thread was faster
                return
            self._look_at(sent, ended_ns)
            self._tape.put(sent)

    def _on_answer(self, sent: Sent, context: int, future: Any) -> None:
        """The answer to a call in a context is there, and the next one is not. Called in a thread of the agent's."""
        sent.future = future
        self._look_at(sent, _now_ns())
        self._contexts.returned(sent, context)
        self._tape.put(sent)

    def _look_at(self, sent: Sent, ended_ns: int) -> None:
        """Keep what its answer says, and let go that."""
        future, sent.future, sent.returned_ns = sent.future, None, ended_ns
        try:
            value = future.value()
        except Exception as error:  # the user's call raises it
            value = error
        if isinstance(value, RemoteException | Exception):
            sent.error = _in_a_line(value)
        elif sent.kind != _REMOTE:
            sent.nbytes_back = _nbytes((value,))

    def _returned(self, sent: Sent, error: BaseException | None = None) -> None:
        sent.returned_ns = _now_ns()
        if error is not None:
            sent.error = _in_a_line(error)
        self._tape.put(sent)

    def _around_to_here(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def to_here(reference: PyRRef[Any], *args: Any, **kwargs: Any) -> Any:
            if self._tape.level == OFF or reference.is_owner():
                return fetch(reference, *args, **kwargs)
            sent = Sent()
            sent.number, sent.kind, sent.function, sent.nbytes = self._next(), _TO_HERE, _to_here, -1
            sent.site = self._tape.site(2)
            self._begin(sent, reference.owner())
            sent.reference = self._references.number(reference)
            here = self._here
            inside, context = here.inside, here.context
            here.enter(sent.number, context)  # what torch asks for it
            try:
                value = fetch(reference, *args, **kwargs)
            except BaseException as error:
                self._returned(sent, error)
                raise
            finally:
                here.enter(inside, context)
            sent.nbytes_back = _nbytes((value,))
            self._returned(sent)
            if context:
                self._contexts.returned(sent, context)
            return value

        return to_here

    # ---- the callee

    def _around_run(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        here, tape = self._here, self._tape

        @functools.wraps(run)
        def run_function(call: Any) -> Any:
            if not isinstance(call, Travelling) or not call.number:
                return run(call)
            before = here.inside, here.context
            here.enter(call.number, call.context)
            if call.context:
                self._contexts.came(call.context)
            begun_ns, result = _now_ns(), None
            try:
                result = run(call)
                return result
            finally:
                ended_ns = _now_ns()
                here.enter(*before)
                if tape.level != OFF:
                    error = _in_a_line(result) if isinstance(result, RemoteException) else ""
                    ran = Ran(call.number, tape.moment, begun_ns, ended_ns, -1, error, _thread())
                    if isinstance(result, Future) and not result.done():
                        result.add_done_callback(functools.partial(self._set, ran))
                    else:
                        tape.put(ran)

        return run_function

    def _set(self, ran: Ran, future: Any) -> None:
        """The future is set that a function of `async_execution` has returned."""
        self._tape.put(ran._replace(done_ns=_now_ns()))


def _nbytes(values: Any) -> int:
    """Of the tensors among some values, and in lists of them; -1: there is none."""
    found = -1
    for value in values:
        if isinstance(value, torch.Tensor):
            found = max(found, 0) + value.nbytes
        elif isinstance(value, list | tuple):
            found = max(found, _nbytes(value)) if found < 0 else found + max(0, _nbytes(value))
    return found


def _in_a_line(error: Any) -> str:
    """What has failed, as the callee has it, without its name and the traceback."""
    lines = str(error.msg if isinstance(error, RemoteException) else error).strip().splitlines() or [""]
    if len(lines) > 1 and lines[0].startswith("On "):
        return lines[1][:_MOST_ERROR]
    return (lines[0] if isinstance(error, RemoteException) else f"{type(error).__name__}: {lines[0]}")[:_MOST_ERROR]
