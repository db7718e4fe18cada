"""Waits of RPC in C++, where no stop reaches them: a thread of their own has them, and the main one waits in Python."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ddp_notebook.rank.rpc.calls import Calls

_main = threading.main_thread().ident


def elsewhere(function: Callable[..., Any], calls: Calls, on: str) -> Callable[..., Any]:
    """The function, which the main thread runs in another thread. A stop leaves it there: it ends with what it waits
    for.

    Args:
        function: such as distributed autograd's `backward`.
        calls: that a rank waits for, in words.
        on: whom it waits for, in words.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != _main:
            return function(*args, **kwargs)
        outcome: list[Any] = []
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                outcome.append((True, function(*args, **kwargs)))
            except BaseException as error:
                outcome.append((False, error))
            finally:
                done.release()

        with calls.during(function.__name__, on):
            threading.Thread(target=run, name=f"ddp-rpc-{function.__name__}", daemon=True).start()
            done.acquire()
        ended_well, value = outcome.pop()
        if not ended_well:
            raise value
        return value

    return call
