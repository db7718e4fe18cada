"""Signal handlers of a rank: the session's interrupt, and SIGINT and SIGTERM from other processes.

`INTERRUPT` does the same as SIGINT in a plain notebook: it calls the handler of SIGINT, which may be a handler of the
user. SIGINT itself is ignored by the kernel in the rank and its child processes, as in background jobs of a shell. It
does not come from the session: VS Code's stop button sends it to each process below the Jupyter kernel. So at a stop, a
loader worker or a shell command is only affected by the actions of its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _current_frames
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank import own_signals
from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, os, signal, threading, time
from ddp_notebook.wire.signals import AGAIN, END, FAULT, INTERRUPT

_AFTER_A_HOOK_S = 0.005
IGNORED_S = 1.5  # an interrupt has no effect for this long in a cell that set SIG_IGN for SIGINT
_PUT_BACK = (signal.SIGINT, signal.SIGTERM)
_ASKED_TO_END = (
    b"ddp_notebook: this rank goes on after SIGTERM: it ends with its notebook, or at %ddp_stop; "
    b"kill -KILL ends it alone\n"
)
# A batch system sends SIGTERM to all processes of a job. The job then ends, and the notebook shows the reason.
_OF_A_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]


class SignalHandlers:
    """Signal handlers of a rank and signal mask of its main thread.

    Interrupts need them, so they are restored after a cell that changed them.

    Args:
        on_interrupt: interrupts the main thread in this frame. The second argument is True for `AGAIN`.
        on_taken: called before an interrupt goes to a handler of the user. Returns False if this interrupt was already
            delivered.
    """

    def __init__(self, on_interrupt: Callable[[FrameType | None, bool], None], on_taken: Callable[[], bool]) -> None:
        self._interrupt = on_interrupt
        self._on_taken = on_taken
        self._sets = False  # a handler is being set
        self._set(signal.SIGINT, self._on_sigint)
        own_signals.handle(AGAIN, self._on_interrupt)
        if INTERRUPT != signal.SIGINT:
            own_signals.handle(INTERRUPT, self._on_interrupt)
        self._ours = {number: own_signals.handler_of(number) for number in _PUT_BACK}
        self._mask = own_signals.mask()  # signals that the main thread blocks
        self._ignored_since_s: float | None = None  # first interrupt of a cell that has set SIG_IGN
        self._forks = False
        self._missed = 0  # signal that arrived while this process forked
        self._mask_of_forker: set[int] = set()  # signal mask of the forking thread
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_rank,
            after_in_child=self._after_fork_in_child,
        )

    def put_back(self) -> None:
        """Restore handlers and signal mask."""
        own_signals.put_back()  # before the mask: a signal may be pending
        if own_signals.mask() != self._mask:
            own_signals.set_mask(self._mask)
        for number, handler in self._ours.items():
            if own_signals.handler_of(number) is not handler:
                self._set(number, handler)
        self._ignored_since_s = None
        _ignore_sigint()

    def _set(self, number: int, handler: Any) -> None:
        """Set a handler. A SIGINT that arrives before the kernel ignores it again has no effect."""
        self._sets = True
        try:
            own_signals.set_handler(number, handler)
            _ignore_sigint()
            own_signals.mask()  # Python runs the handlers of pending signals here
        finally:
            self._sets = False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._forks:  # an exception in a fork hook is printed and lost
            self._missed = number if self._missed != INTERRUPT else INTERRUPT
            return
        handler = own_signals.handler_of(signal.SIGINT)
        if callable(handler) and handler not in (self._ours[signal.SIGINT], signal.default_int_handler):
            if not self._on_taken():
                return
            is_blocked = signal.SIGINT in own_signals.mask()
            if is_blocked or getattr(handler, "__module__", "") == "asyncio.unix_events":  # it reads a pipe
                signal.raise_signal(signal.SIGINT)
            else:
                handler(int(signal.SIGINT), _interrupted(frame))
        elif handler != signal.SIG_IGN or self._is_ignored_long():
            self._interrupt(frame, number == AGAIN)

    def _is_ignored_long(self) -> bool:
        """Return whether the cell has ignored interrupts for a long time.

        Programs ignore them while they write a checkpoint. If a cell ignored them forever, the second interrupt would
        end the process.
        """
        now_s = time.monotonic()
        self._ignored_since_s = self._ignored_since_s or now_s
        return now_s - self._ignored_since_s > IGNORED_S

    def _on_sigint(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT.

        The kernel ignores SIGINT, so normally this is a call of `_thread.interrupt_main`, which programs use for
        timeouts. Otherwise the program has restored this handler itself and received SIGINT from another process. Such
        a signal is ignored, and the kernel ignores further ones.
        """
        if not self._sets and _ignore_sigint():
            self._interrupt(frame, False)

    def _before_fork(self) -> None:
        self._forks = True
        # a SIGTERM between the fork and `_after_fork_in_child` would be lost
        self._mask_of_forker = own_signals.mask()
        own_signals.block({signal.SIGTERM})

    def _after_fork_in_rank(self) -> None:
        own_signals.set_mask(self._mask_of_forker)
        self._forks = False
        missed, self._missed = self._missed, 0
        if missed:
            threading.Thread(target=self._send_after_hook, args=(missed,), daemon=True).start()

    def _send_after_hook(self, number: int) -> None:
        """Send a signal to the main thread when it has left `_after_fork_in_rank`, where an exception would be lost."""
        main = threading.main_thread().ident or 0
        time.sleep(_AFTER_A_HOOK_S)  # fork hooks of libraries run after this one
        while _is_running(SignalHandlers._after_fork_in_rank.__code__, main):
            time.sleep(_AFTER_A_HOOK_S)
        signal.pthread_kill(main, number)

    def _after_fork_in_child(self) -> None:
        """Let SIGTERM end a forked child, as `Process.terminate` expects."""
        if own_signals.handler_of(signal.SIGTERM) is self._ours[signal.SIGTERM]:
            own_signals.set_handler(signal.SIGTERM, signal.SIG_DFL)
        own_signals.set_mask(self._mask_of_forker)
        self._forks, self._missed = False, 0


def _is_running(code: CodeType, thread: int) -> bool:
    frame = _current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _interrupted(frame: FrameType | None) -> FrameType | None:
    """Return the frame that a user's handler interrupts, without frames of our handler.

    A repeated interrupt may arrive while our handler of the first one looks up the user's handler.
    """
    outer = frame
    while outer is not None and outer.f_code.co_filename.startswith(OURS):
        if outer.f_code is SignalHandlers._on_interrupt.__code__:
            frame = outer.f_back
        outer = outer.f_back
    return frame


def begin() -> None:
    """Install provisional handlers in a new rank process, which has nothing to clean up yet."""
    end_by(lambda *_: os._exit(0))
    if INTERRUPT != signal.SIGINT:
        for number in (INTERRUPT, AGAIN, FAULT):
            own_signals.handle(number, lambda *_: None)  # the default action would end the process
    own_signals.protect()


def end_by(handler: Callable[[int, FrameType | None], object]) -> None:
    """Call this handler when the host server ends the rank. SIGTERM does not come from the host server."""
    if END != signal.SIGTERM:
        words = b"" if any(name in os.environ for name in _OF_A_JOB) else _ASKED_TO_END
        signal.signal(signal.SIGTERM, lambda *_: os.write(2, words))
    own_signals.handle(END, handler)


def _ignore_sigint() -> bool:
    """Make the kernel ignore SIGINT without changing the Python handler, which `INTERRUPT` calls.

    Return whether SIGINT was already ignored.
    """
    if INTERRUPT == signal.SIGINT:
        return True
    return bool(_libc.signal(signal.SIGINT, signal.SIG_IGN) == signal.SIG_IGN)
