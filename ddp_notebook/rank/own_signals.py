"""The session's own signals in a rank: handlers that a cell cannot replace, block or consume.

The default action of these signals ends the process. Some programs reset signals that they do not know: Lightning's
Trainer restores all handlers after each fit. So there are three layers.

1. `protect` wraps the functions of Python's `_signal` and `faulthandler` that change handlers and masks. They skip our
   signals. All Python code uses these functions, also through the module `signal`.
2. C code can still change a signal's action. `put_back` restores handlers, actions and masks before the next cell.
   `put_back_actions` restores the actions from any thread, before a rank sends itself a signal.
3. `wire.signals.send` sends no signal whose default action would end the process.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, faulthandler, functools, os, threading
from ddp_notebook.wire.signals import OURS, RELEASE, STACK

Handler = Callable[[int, FrameType | None], object]

_set_handler: Callable[[int, Any], Any] = _signal.signal
_get_handler: Callable[[int], Any] = _signal.getsignal
_change_mask: Callable[[int, Iterable[int]], set[int]] = _signal.pthread_sigmask
_send_to_thread: Callable[[Any, int], None] = _signal.pthread_kill
_signals = frozenset(OURS)
_ACTION_BYTES = 512  # larger than `struct sigaction` on any system
_libc = ctypes.CDLL(None)
_handlers: dict[int, Handler] = {}  # Python handlers, by signal
_actions: dict[int, Any] = {}  # actions of the system, by signal: one `struct sigaction` each
_stack_fd = -1  # file to which `STACK` writes the stacks of all threads


def set_handler(number: int, handler: Any) -> None:
    """Set the Python handler of any signal, even if a cell has replaced `signal.signal`."""
    _set_handler(number, int(handler) if isinstance(handler, int) else handler)  # it compares SIG_DFL by identity


def handler_of(number: int) -> Any:
    """Return the Python handler of any signal. SIG_DFL and SIG_IGN are returned as numbers, not as enumerations."""
    return _get_handler(number)


def handle(number: int, handler: Handler) -> None:
    """Set the handler of one of our signals. Call it in the main thread."""
    _handlers[number] = handler
    _set_handler(number, handler)
    _note_action(number)


def write_stacks_to(path: str) -> None:
    """Append the stacks of all threads to this file at `STACK`. The handler is in C, so it works without the GIL."""
    global _stack_fd
    if STACK is None:
        return
    _stack_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(_stack_fd, 0o600)  # a umask may have removed bits
    faulthandler.register(STACK, file=_stack_fd, all_threads=True)
    _note_action(STACK)


def _note_action(number: int) -> None:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    if _libc.sigaction(number, None, action) == 0:
        _actions[number] = action


def put_back() -> None:
    """Restore the Python handlers and the actions. Call it in the main thread, between cells."""
    for number, handler in _handlers.items():
        if _get_handler(number) is not handler:
            _set_handler(number, handler)
    _set_actions()


def _set_actions() -> None:
    for number, action in _actions.items():
        _libc.sigaction(number, action, None)


def put_back_actions() -> None:
    """Restore the actions of our signals. Callable from any thread."""
    _set_actions()
    if any(_get_handler(number) is not handler for number, handler in _handlers.items()):
        # only the main thread may set a Python handler: it does so before its next line
        ctypes.pythonapi.Py_AddPendingCall(_put_back_later, None)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _put_back_later(_: int | None) -> int:
    if threading.get_ident() == threading.main_thread().ident:
        for number, handler in _handlers.items():
            _set_handler(number, handler)
        _change_mask(_signal.SIG_UNBLOCK, _handlers.keys() - {RELEASE})  # the release thread waits for RELEASE
    return 0


def send_to_main(number: int) -> None:
    """Restore the handlers, then send a signal of the session to the main thread. Callable from any thread."""
    put_back_actions()
    ctypes.pythonapi.Py_AddPendingCall(_put_back_later, None)  # the main thread may block our signals
    _send_to_thread(threading.main_thread().ident, number)


def block(numbers: Iterable[int]) -> None:
    """Block signals in this thread, including ours."""
    _change_mask(_signal.SIG_BLOCK, numbers)


def mask() -> set[int]:
    """Return the signals that this thread blocks.

    It is called for each cell. Python's `signal` makes enumerations, which takes ten times as long.
    """
    return _change_mask(_signal.SIG_BLOCK, ())


def set_mask(numbers: Iterable[int]) -> None:
    """Block exactly these signals in this thread."""
    _change_mask(_signal.SIG_SETMASK, numbers)


def protect() -> None:
    """Make the functions of `signal` and `faulthandler` skip the signals of the session."""
    if not _signals:
        return
    _signal.signal = _without_ours(_set_handler, _refuse_handler)
    _signal.siginterrupt = _without_ours(_signal.siginterrupt, lambda *_: None)
    _signal.pthread_sigmask = _pthread_sigmask
    for name in ("sigwait", "sigwaitinfo", "sigtimedwait"):
        setattr(_signal, name, _waits_for_others(getattr(_signal, name)))
    real = sys.modules["faulthandler"]
    for name in ("register", "unregister"):
        setattr(real, name, _without_ours(getattr(real, name), lambda *_, **__: False))
    for name in ("siginterrupt", "sigwaitinfo", "sigtimedwait"):  # `signal` wraps the others itself
        setattr(sys.modules["signal"], name, getattr(_signal, name))


def _without_ours(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, but call `instead` if the first argument is one of our signals."""

    @functools.wraps(function)
    def for_others(signalnum: Any, *args: Any, **kwargs: Any) -> Any:
        return (instead if signalnum in _signals else function)(signalnum, *args, **kwargs)

    return for_others


def _refuse_handler(signalnum: int, handler: Any) -> Any:
    """Keep and return our handler. A program that restores handlers later will set it again."""
    kept = _get_handler(signalnum)
    if callable(handler) and handler is not kept and signalnum not in _refused:
        _refused.add(signalnum)
        ours = sorted(_signals)
        os.write(
            2,
            f"ddp_notebook: the session uses signal {int(signalnum)}, so this handler is never called. Free real-time "
            f"signals are SIGRTMIN to {ours[0] - 1} and {ours[-1] + 1} to SIGRTMAX\n".encode(),
        )
    return kept


_refused: set[int] = set()  # signals for which a message about a refused handler was printed


@functools.wraps(_change_mask)
def _pthread_sigmask(how: int, mask: Iterable[int]) -> set[int]:
    numbers = set(mask) - _signals
    if how == _signal.SIG_SETMASK:
        numbers |= _change_mask(_signal.SIG_BLOCK, ()) & _signals
    return _change_mask(how, numbers)


def _waits_for_others(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits for a set of signals without ours, which it would consume."""

    @functools.wraps(function)
    def wait(sigset: Iterable[int], *args: Any) -> Any:
        return function(set(sigset) - _signals, *args)

    return wait
