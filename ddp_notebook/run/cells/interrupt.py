"""Handle the kernel's interrupt as a flag.

Catching KeyboardInterrupt around the read of a queue loses the item that was being read. A signal handler that counts
and wakes up the reader loses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from ddp_notebook.run.notebook_kernel import kernel

ONE_PRESS_S = 1.0  # presses of the stop button within this time count as one


class Interrupts:
    """Counts interrupts instead of raising them, while active. In other threads than the main thread only `press`
    counts.

    Args:
        wake: called at each interrupt, in the signal handler.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self._wake = wake
        self.pressed_s = 0.0  # time of the last press
        self._previous: Any = None
        self.takes_signals = threading.current_thread() is threading.main_thread()  # False: only `press` counts

    def __enter__(self) -> Interrupts:
        if self.takes_signals:
            self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.takes_signals:
            signal.signal(signal.SIGINT, self._previous)
            if self.count and self._previous in _RAISING and kernel() is not None:
                signal.signal(signal.SIGINT, self._on_late_press)

    def _on_late_press(self, _: int, __: FrameType | None) -> None:
        """Ignore the second of two presses, after the first has ended the cell.

        If it were raised while the kernel sends the cell's reply, the reply would be lost, and the page would show the
        cell as running forever. The kernel sets its own handler when it has finished the cell.
        """
        if time.monotonic() - self.pressed_s > ONE_PRESS_S:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if stop was pressed. Call it only where nothing is half done."""
        if self.count:
            raise KeyboardInterrupt

    def raise_late(self, done: str) -> None:
        """Raise an interrupt for a press after the last check. Call it after the `with` block.

        The work is done, but the rest of the user's cell must not run.

        Args:
            done: text after "interrupted, but ".
        """
        if self.count:
            raise keyboard_interrupt(f"interrupted, but {done}")

    def after_this(self) -> Callable[[], None]:
        """Return a check that raises at the next press, without presses that count as the last one."""
        count, pressed_s = self.count, self.pressed_s

        def check() -> None:
            if self.count > count and self.pressed_s - pressed_s > ONE_PRESS_S:
                raise KeyboardInterrupt

        return check

    def press(self) -> None:
        """Count a press of the stop button that came by a call, not by SIGINT. May be called in any thread."""
        self.count += 1
        self.pressed_s = time.monotonic()
        self._wake()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise interrupts inside the block, for a read that only an interrupt can end."""
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


# Counts its calls. A function in Python would appear in tracebacks, such as those of interrupted destructors.
_noting_handler = functools.lru_cache(maxsize=0)(signal.default_int_handler)
_RAISING = (signal.default_int_handler, _noting_handler)


class NotedPresses:
    """Notes presses of stop inside the block. They raise KeyboardInterrupt, like without it.

    A library can replace the KeyboardInterrupt. NumPy raises IndexError if an interrupt arrives while it reads an
    index.
    """

    def __enter__(self) -> NotedPresses:
        self._before = _noting_handler.cache_info().misses
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _noting_handler)
            self._is_set = True
        else:  # an outer block notes presses, or a handler of the user gets them
            self._is_set = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_set and signal.getsignal(signal.SIGINT) is _noting_handler:  # not `Interrupts._on_late_press`
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def were_any(self) -> bool:
        """Return whether stop was pressed since the block began."""
        return self._is_main and _noting_handler.cache_info().misses > self._before


def press_for_all(interrupts: Interrupts | None) -> str:
    """Press stop from any thread.

    If signals are handled, send one, so that a wait for `input()` ends too.

    Args:
        interrupts: interrupts of the running cell; None: no cell is running.

    Returns:
        A description of what was done.
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
    """Run the block to its end, and raise an interrupt only afterwards.

    Interrupted code that ends processes would leave the rest of them without an owner.

    Args:
        message: message that a notebook shows instead of a traceback.
    """
    with Interrupts(lambda: None) as interrupts:
        yield interrupts
    if interrupts.count:
        raise keyboard_interrupt(message) if message else KeyboardInterrupt


def keyboard_interrupt(message: str) -> KeyboardInterrupt:
    """Return a KeyboardInterrupt for which a notebook shows the message instead of a traceback."""
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return error
