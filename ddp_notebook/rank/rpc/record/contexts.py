"""Distributed autograd as recorded rows.

The rows are contexts, pairs of send and recv, backward passes, and steps of the distributed optimizer.

A call with tensors that require gradients creates one pair for the request and one for the answer. The caller sees its
end of both: the send of the arguments and the recv of the result. In a backward pass, gradients go through both in the
opposite direction.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed.autograd as dist_autograd

from ddp_notebook.rank.group.call_site import REDUCER
from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.record.event_buffer import OFF
from ddp_notebook.rank.remote_calls import ContextEvent, Sent
from ddp_notebook.rank.rpc.context_ids import WORKER_BITS, context_id, originals, recv_functions, send_functions
from ddp_notebook.rank.rpc.record.call_stack import RpcThread, numbered
from ddp_notebook.records.schema import CONTEXT_EVENTS
from ddp_notebook.stdlib import contextlib, functools, time

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.spans import TrainingSpans
    from ddp_notebook.rank.rpc.rpc_functions import RpcFunctions

_CONTEXT, _PAIR, _GRADIENT, _BACKWARD, _STEP = range(len(CONTEXT_EVENTS))
_OPTIMIZERS, _OPTIMIZER = "torch.distributed.optim.optimizer", "DistributedOptimizer"
_MOST_KNOWN = 64  # maximum number of contexts with known messages
_RUN = "backward"  # not exported


class Contexts:
    """Records distributed autograd on this rank.

    Args:
        training: training spans of the rank's recording.
        face: RPC functions of the rank, which know the workers.
        here: current context of each thread: the context number of torch plus 1.
    """

    def __init__(self, training: TrainingSpans, face: RpcFunctions, here: RpcThread) -> None:
        self._training, self._event_buffer, self._face, self._here = training, training.event_buffer, face, here
        self._known: OrderedDict[int, set[int]] = OrderedDict()  # context -> recvs that were already recorded

    def install(self) -> None:
        """Replace the functions of torch in this process."""
        context = dist_autograd.context
        enter, leave, backward = context.__enter__, context.__exit__, getattr(dist_autograd, _RUN)
        of_torch = self._face.context_ids.of_torch
        began: dict[int, int] = {}

        @functools.wraps(enter)
        def __enter__(its: Any) -> int:
            if self._face.number < 0:  # the error of torch names an internal function
                raise RuntimeError(
                    "RPC has not been initialized, which distributed autograd needs: call rpc.init_rpc first"
                )
            shown = enter(its)
            number = context_id(its.autograd_context)
            self._here.context = number + 1
            began[number] = time.monotonic_ns()
            return shown

        @functools.wraps(leave)
        def __exit__(its: Any, *error: Any) -> None:
            number, self._here.context = self._here.context - 1, 0
            leave(its, *error)
            if (began_ns := began.pop(number, None)) is not None:
                self._known.pop(number, None)
                self._put(_CONTEXT, number + 1, start_ns=began_ns)

        @functools.wraps(backward)
        def run_backward(context_id: Any, *args: Any, **kwargs: Any) -> None:
            number = of_torch(context_id)
            if self._event_buffer.level == OFF or not isinstance(number, int):
                return backward(context_id, *args, **kwargs)
            site = self._event_buffer.site(2)
            began_ns = time.monotonic_ns()
            run = functools.partial(backward, context_id, *args, **kwargs)
            try:
                return self._training.run_backward(run, (REDUCER, *site[1:]))
            finally:
                self._put(_BACKWARD, number + 1, start_ns=began_ns)

        context.__enter__, context.__exit__ = __enter__, __exit__  # type: ignore[method-assign]
        setattr(dist_autograd, _RUN, run_backward)
        after_import(_OPTIMIZERS, self._look_at_optimizers)

    # ---- messages

    def before(self, context: int) -> set[int]:
        """Return the sends of a context before a call is made in it."""
        return set(_functions(context, send_functions))

    def sent(self, sent: Sent, before: set[int]) -> None:
        """Record the pairs of a call that was sent in a context."""
        for message, function in _functions(self._here.context, send_functions).items():
            if message not in before:
                self._pair(self._here.context, message, function, sent, sent.src, sent.dst, sent.nbytes, sent.sent_ns)

    def returned(self, sent: Sent, context: int) -> None:
        """Record the pairs of a call whose answer has arrived. Called in an agent thread."""
        known = self._known_of(context)
        for message, function in _functions(context, recv_functions).items():
            if message not in known and self._face.rank_of(message >> WORKER_BITS) == sent.dst:
                known.add(message)
                self._pair(context, message, function, sent, sent.dst, sent.src, sent.nbytes_back, sent.returned_ns)

    def came(self, context: int) -> None:
        """Register the message of an incoming call in a context, which is not an answer."""
        self._known_of(context).update(_functions(context, recv_functions))

    def _known_of(self, context: int) -> set[int]:
        known = self._known.setdefault(context - 1, set())
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return known

    def _pair(
        self, context: int, message: int, function: Any, sent: Sent, src: int, dst: int, nbytes: int, time_ns: int
    ) -> None:
        its = _numbered(message)
        put = functools.partial(self._put, context=context, message=its, src=src, dst=dst, call=sent.number)
        put(_PAIR, nbytes=nbytes, start_ns=time_ns, end_ns=time_ns)

        def passed(*_: Any) -> None:
            now_ns = time.monotonic_ns()
            put(_GRADIENT, start_ns=now_ns, end_ns=now_ns)

        with contextlib.suppress(AttributeError):  # in torch versions without prehooks the time is unknown
            function.register_prehook(passed)

    # ---- the distributed optimizer

    def _look_at_optimizers(self) -> None:
        """Replace the step function when the optimizer module is imported. Importing it here would take 0.4 s."""
        kind = getattr(sys.modules[_OPTIMIZERS], _OPTIMIZER)
        kind.step = self._around_step(kind.step)

    def _around_step(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def step(optimizer: Any, context_id: int) -> None:
            if self._event_buffer.level == OFF:
                return original(optimizer, context_id)
            began_ns = time.monotonic_ns()
            original(optimizer, context_id)
            name = self._training.stepped(optimizer, began_ns)
            number = self._face.context_ids.of_torch(context_id)
            return self._put(_STEP, number + 1, name=name, start_ns=began_ns)

        return step

    def _put(
        self,
        event: int,
        context: int,
        *,
        message: int = 0,
        src: int = -1,
        dst: int = -1,
        call: int = 0,
        nbytes: int = -1,
        name: str = "",
        start_ns: int,
        end_ns: int = 0,
    ) -> None:
        if self._event_buffer.level != OFF:
            number, end_ns = _numbered(context - 1), end_ns or time.monotonic_ns()
            moment = self._event_buffer.moment
            self._event_buffer.put(
                ContextEvent(event, number, message, src, dst, call, nbytes, name, moment, start_ns, end_ns)
            )


def _functions(context: int, which: Callable[[Any], dict[int, Any]]) -> dict[int, Any]:
    """Return the sends or recvs of a context on this rank, by message number; empty if the context was released."""
    try:
        found = which(originals["_retrieve_context"](context - 1))
    except RuntimeError:
        return {}
    return found


def _numbered(number: int) -> int:
    """Convert the torch number of a context or a message to a number for the recording."""
    return numbered(number >> WORKER_BITS, number & (1 << WORKER_BITS) - 1)
