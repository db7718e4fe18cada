"""Run blocking C++ functions of RPC in a separate thread.

So the calling thread waits in Python and can be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.hide_from_profiler import function_modes, operator_modes
from ddp_notebook.rank.remote_calls import NO_RANK
from ddp_notebook.rank.rpc.open_calls import RpcCalls
from ddp_notebook.stdlib import functools, threading

_keys_in, _keys_out = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks


def elsewhere(function: Callable[..., Any], calls: RpcCalls, on: str, callee: int = NO_RANK) -> Callable[..., Any]:
    """Wrap a function so that an interruptible thread runs it in a separate thread.

    After an interrupt the separate thread continues until the function returns.

    Args:
        function: for example `backward` of distributed autograd.
        calls: open calls of the rank, for messages.
        on: description of the worker that it waits for.
        callee: rank of that worker.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not waiting.can_end():
            return function(*args, **kwargs)
        outcome: list[Any] = []
        threads: list[threading.Thread] = []

        def run(done: Callable[[], None]) -> None:
            try:
                outcome.append((True, function(*args, **kwargs)))
            except BaseException as error:
                outcome.append((False, error))
            finally:
                done()

        def begin(done: Callable[[], None]) -> None:
            thread = threading.Thread(target=run, args=(done,), name=f"ddp-rpc-{function.__name__}", daemon=True)
            threads.append(thread)
            thread.start()

        with calls.during(function.__name__, on, callee):
            waiting.wait_until(begin)
        threads.pop().join()  # no other reference to the thread remains
        ended_well, value = outcome.pop()
        if not ended_well:
            raise value
        return value

    return call


def elsewhere_if_unseen(
    function: Callable[..., Any], calls: RpcCalls, on: str, callee: int = NO_RANK
) -> Callable[..., Any]:
    """Wrap the `backward` of distributed autograd like `elsewhere`, except in threads with torch state.

    torch passes the state of the calling thread to the threads of its engine: profilers, modes, autocast, saved tensor
    hooks. A thread with such state runs the function itself. A stop then ends it only when the callees have stopped.

    Args:
        function: the `backward`.
        calls: as in `elsewhere`.
        on: as in `elsewhere`.
        callee: as in `elsewhere`.
    """
    in_a_thread = elsewhere(function, calls, on, callee)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_state():
            return in_a_thread(*args, **kwargs)
        with calls.during(function.__name__, on, callee):
            return function(*args, **kwargs)

    return call


def _has_state() -> bool:
    """Return whether this thread has torch state that a new thread lacks."""
    return (
        torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        or bool(function_modes() or operator_modes())
        or not torch.is_grad_enabled()
        or _of_saved_tensors(True) is not None
        or (_keys_in(), _keys_out()) != _keys_of_a_new_thread()
    )


@functools.cache
def _keys_of_a_new_thread() -> tuple[Any, Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend((_keys_in(), _keys_out())))
    thread.start()
    thread.join()
    return found[0], found[1]
