"""The kernel's interrupt as a flag.

Catching KeyboardInterrupt around the read of a queue loses what was being read; a handler that counts and wakes the
reader loses nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from ddp_notebook.run.notebook_kernel import kernel

ONE_PRESS_S = 1.0  # presses of the stop button within so long count as one


class Interrupts:
    """While active, counts interrupts instead of raising. Outside the main thread no signal comes, only `press`.

    Args:
        wake: called at each interrupt, in the signal handler.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self._wake = wake
        self.pressed_s = 0.0  # the last time
        self._previous: Any = None
        self.takes_signals = threading.current_thread() is threading.main_thread()  # else `press` alone

    def __enter__(self) -> Interrupts:
        if self.takes_signals:
            self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.takes_signals:
            signal.signal(signal.SIGINT, self._previous)
            if self.count and self._previous is signal.default_int_handler and kernel() is not None:
                signal.signal(signal.SIGINT, self._on_late_press)

    def _on_late_press(self, _: int, __: FrameType | None) -> None:
        """The second press of two, after the first has ended the cell. If it were raised while the kernel sends the
        cell's reply, the reply would be lost, and the page would show the cell as running for ever. The kernel sets
        its own handler when it is done with the cell."""
        if time.monotonic() - self.pressed_s > ONE_PRESS_S:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if somebody has pressed stop. Call it where nothing is half done."""
        if self.count:
            raise KeyboardInterrupt

    def after_this(self) -> Callable[[], None]:
        """A check that raises at the next press, not counting those that belong to the last one."""
        count, pressed_s = self.count, self.pressed_s

        def check() -> None:
            if self.count > count and self.pressed_s - pressed_s > ONE_PRESS_S:
                raise KeyboardInterrupt

        return check

    def press(self) -> None:
        """Count a press that came without a signal. From any thread."""
        self.count += 1
        self.pressed_s = time.monotonic()
        self._wake()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Let interrupts raise for a while, for a read that nothing else can end."""
        if not self.takes_signals:
            yield
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._on_sigint)

    def _on_sigint(self, _: int, __: FrameType | None) -> None:
        self.press()


def press_for_all(interrupts: Interrupts | None) -> str:
    """Press stop from any thread: by a signal, where signals are taken, so that a wait for an answer of `input()` ends
    too.

    Args:
        interrupts: of what runs; None: nothing does.

    Returns:
        What was done, in words.
    """
    main = threading.main_thread().ident
    if interrupts is None:
        return "no cell runs on the ranks"
    if not interrupts.takes_signals:
        interrupts.press()
    elif main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)
    return "interrupted"


@contextlib.contextmanager
def uninterrupted(message: str = "") -> Iterator[Interrupts]:
    """Run the block to its end, and raise an interrupt that came meanwhile only then: code that ends processes would,
    if it were cut off, leave the rest of them without an owner.

    Args:
        message: what the interrupt says in a notebook, instead of this package's frames.
    """
    with Interrupts(lambda: None) as interrupts:
        yield interrupts
    if interrupts.count:
        raise keyboard_interrupt(message) if message else KeyboardInterrupt


def keyboard_interrupt(message: str) -> KeyboardInterrupt:
    """A KeyboardInterrupt that shows its message in a notebook instead of this package's frames."""
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return error
