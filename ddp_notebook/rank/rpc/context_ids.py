"""Ids of distributed autograd as programs see them.

As in plain torch, their upper bits are the RPC rank of the worker.

torch derives ids of contexts and messages from the process's agent number, which `_init` sets once. Here that is the
number of the process in the session (see `agent`). With a rank instead, a replacement process would reuse the ids of
contexts that other workers still hold, and add its gradients to them. So torch gets process numbers, and the functions
that programs call accept and return ranks. Both are equal as long as no process was replaced.

TorchScript calls torch operators without Python. For the step of a functional `DistributedOptimizer`, ids are
translated when the call is sent (`of_call`). Another script that takes a context id does not find the context if the
process that created it is a replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.autograd as dist_autograd
from torch._C._distributed_autograd import DistAutogradContext
from torch._C._distributed_rpc import PyRRef
from torch.jit import _builtins

from ddp_notebook.rank.patching import replace
from ddp_notebook.rank.rpc.workers import WorkerNames
from ddp_notebook.stdlib import functools

WORKER_BITS = 48  # in ids of torch, the bits above these are the worker
TAKING = {"get_gradients": "aten::get_gradients", "backward": "aten::dist_backward"}  # function -> operator
_OTHERS = "_is_valid_context", "_release_context", "_retrieve_context"
_OPTIMIZER_STEP = "._script_local_optimizer_step"

originals: dict[str, Callable[..., Any]] = {
    name: getattr(dist_autograd, name) for name in (*TAKING, *_OTHERS, "_get_max_id")
}
context_id = DistAutogradContext._context_id
send_functions, recv_functions = DistAutogradContext._send_functions, DistAutogradContext._recv_functions
_known_worker_ids = DistAutogradContext._known_worker_ids
_backward_of_reference = PyRRef.backward  # type: ignore[attr-defined]


class ContextIds:
    """Translates ids between torch and programs.

    Args:
        names: returns the workers of the current `init_rpc`; None if there is none.
    """

    def __init__(self, names: Callable[[], WorkerNames | None]) -> None:
        self._names = names

    def shown(self, number: int) -> int:
        """Convert an id of torch to the id that programs see."""
        names, count = self._names(), number & (1 << WORKER_BITS) - 1
        found = None if names is None else names.by_number.get(number >> WORKER_BITS)
        return number if found is None else found.rank << WORKER_BITS | count

    def of_torch(self, shown: Any) -> Any:
        """Convert an id passed by a program to the id of torch.

        Other values are returned unchanged, so that torch raises its error.
        """
        names = self._names()
        if names is None or not isinstance(shown, int):
            return shown
        found = names.by_rank.get(shown >> WORKER_BITS)
        return shown if found is None else found.number << WORKER_BITS | shown & (1 << WORKER_BITS) - 1

    def of_call(self, what: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a remote call of an operator or a script, with ids of torch.

        Args:
            what: name of the operator or script.
            args: further arguments of the torch function that sends the call.
        """
        if what in TAKING.values() and len(args) > 1:  # timeout, id, ...
            return (args[0], self.of_torch(args[1]), *args[2:])
        if str(what).endswith(_OPTIMIZER_STEP):  # (optimizer, id), ... or timeout, is_async, optimizer, id
            at = 0 if isinstance(args[0], tuple) else len(args) - 1
            given = args[at]
            new = (given[0], self.of_torch(given[1])) if isinstance(given, tuple) else self.of_torch(given)
            return (*args[:at], new, *args[at + 1 :])
        return args

    def install(self, around_backward: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the functions of torch in this process.

        Args:
            around_backward: wraps torch's `backward`.
        """
        for name in (*TAKING, *_OTHERS):
            original = originals[name]
            ours = self._taking(around_backward(original) if name == "backward" else original)
            replace(original, ours)
            if name in TAKING:
                _builtins._register_builtin(ours, TAKING[name])  # scripts compile calls of it to this operator
        get_max_id, shown, of_torch = originals["_get_max_id"], self.shown, self.of_torch
        replace(get_max_id, functools.wraps(get_max_id)(lambda: shown(get_max_id())))

        def _context_id(context: DistAutogradContext) -> int:
            return shown(context_id(context))

        def workers(context: DistAutogradContext) -> set[int]:
            return {shown(one << WORKER_BITS) >> WORKER_BITS for one in _known_worker_ids(context)}

        def sends(context: DistAutogradContext) -> dict[int, Any]:
            return {shown(number): function for number, function in send_functions(context).items()}

        def recvs(context: DistAutogradContext) -> dict[int, Any]:
            return {shown(number): function for number, function in recv_functions(context).items()}

        def backward(reference: PyRRef[Any], dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
            _backward_of_reference(reference, of_torch(dist_autograd_ctx_id), retain_graph)

        for kind, name, method in (
            (DistAutogradContext, "_context_id", _context_id),
            (DistAutogradContext, "_known_worker_ids", workers),
            (DistAutogradContext, "_send_functions", sends),
            (DistAutogradContext, "_recv_functions", recvs),
            (PyRRef, "backward", backward),
        ):
            setattr(kind, name, functools.wraps(getattr(kind, name))(method))

    def _taking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to translate the id in its first argument and in its errors."""

        @functools.wraps(function)
        def take(context_id: Any, *args: Any, **kwargs: Any) -> Any:
            number = self.of_torch(context_id)
            try:
                return function(number, *args, **kwargs)
            except RuntimeError as error:
                if number == context_id or str(number) not in str(error):
                    raise
                raise RuntimeError(str(error).replace(str(number), str(context_id))) from None

        return take
