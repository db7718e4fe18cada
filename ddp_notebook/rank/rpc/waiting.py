"""Waits of RPC in C++, where no stop reaches them: a thread of their own has them, and who called waits in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_notebook.rank.group import waiting
from ddp_notebook.rank.rpc.calls import Calls
from ddp_notebook.stdlib import functools, threading


def elsewhere(function: Callable[..., Any], calls: Calls, on: str) -> Callable[..., Any]:
    """The function, which a thread that can be stopped runs in another one. A stop leaves it there, where it ends with
    what it waits for.

    Args:
        function: such as distributed autograd's `backward`.
        calls: that a rank waits for, in words.
        on: whom it waits for, in words.
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

        with calls.during(function.__name__, on):
            waiting.wait_until(begin)
        threads.pop().join()  # it has no reference any more
        ended_well, value = outcome.pop()
        if not ended_well:
            raise value
        return value

    return call
