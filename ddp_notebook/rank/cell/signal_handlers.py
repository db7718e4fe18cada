"""The signals of a rank: the session's interrupt, and SIGINT and SIGTERM, which are none of the session's.

`INTERRUPT` does what SIGINT does in a notebook of its own: it calls the handler of SIGINT, which is the user's if the
cell has set one. SIGINT itself is ignored by the system, here and in what a cell starts, as a shell has it for jobs in
the background: whoever sends it (VS Code's stop button, to each process below the kernel) has not asked the session. A
loader's worker or a `!command` so sees of a stop no more than what its rank does about it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ddp_notebook.rank import own_signals
from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import ctypes, os, signal, threading, time
from ddp_notebook.wire.signals import AGAIN, END, FAULT, INTERRUPT

_AFTER_A_HOOK_S = 0.005
IGNORED_S = 1.5  # for so long a cell that has set SIG_IGN for SIGINT goes on after the stop button
_PUT_BACK = (signal.SIGINT, signal.SIGTERM)
_ASKED_TO_END = (
    b"ddp_notebook: this rank goes on after SIGTERM: it ends with its notebook, or at %ddp_stop; "
    b"kill -KILL ends it alone\n"
)
# In a job of a batch system SIGTERM comes to all of its processes: the job ends, and the notebook says why.
_OF_A_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]


class SignalHandlers:
    """The signal handlers of a rank and the signal mask of its main thread. The stop button needs them, so they are put
    back after a cell that has changed them.

    Args:
        on_interrupt: interrupts what the main thread does in this frame; told whether it is `AGAIN`.
        on_taken: told that a handler of the user's gets the interrupt. Returns whether it has not got this one yet.
    """

    def __init__(self, on_interrupt: Callable[[FrameType | None, bool], None], on_taken: Callable[[], bool]) -> None:
        self._interrupt = on_interrupt
        self._on_taken = on_taken
        self._sets = False  # a handler, just now
        self._set(signal.SIGINT, self._on_sigint)
        own_signals.handle(AGAIN, self._on_interrupt)
        if INTERRUPT != signal.SIGINT:
            own_signals.handle(INTERRUPT, self._on_interrupt)
        self._ours = {number: own_signals.handler_of(number) for number in _PUT_BACK}
        self._mask = own_signals.mask()  # signals that the main thread does not take
        self._ignored_since_s: float | None = None  # interrupts, by a cell that has set SIG_IGN
        self._forks = False
        self._missed = 0  # signal, while this process forked
        self._mask_of_forker: set[int] = set()  # of the thread that forks
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_rank,
            after_in_child=self._after_fork_in_child,
        )

    def put_back(self) -> None:
        """Put back what is no longer ours."""
        own_signals.put_back()  # before the mask: a signal may wait
        if own_signals.mask() != self._mask:
            own_signals.set_mask(self._mask)
        for number, handler in self._ours.items():
            if own_signals.handler_of(number) is not handler:
                self._set(number, handler)
        self._ignored_since_s = None
        _ignore_sigint()

    def _set(self, number: int, handler: Any) -> None:
        """Set a handler. A SIGINT that comes until the system ignores it again, to whichever thread, does nothing."""
        self._sets = True
        try:
            own_signals.set_handler(number, handler)
            _ignore_sigint()
            own_signals.mask()  # Python calls the handlers of pending signals here
        finally:
            self._sets = False

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._forks:  # what a hook of a fork raises is printed and lost
            self._missed = number if self._missed != INTERRUPT else INTERRUPT
            return
        handler = own_signals.handler_of(signal.SIGINT)
        if callable(handler) and handler not in (self._ours[signal.SIGINT], signal.default_int_handler):
            if not self._on_taken():
                return
            is_blocked = signal.SIGINT in own_signals.mask()
            if is_blocked or getattr(handler, "__module__", "") == "asyncio.unix_events":  # which hears it by a pipe
                signal.raise_signal(signal.SIGINT)
            else:
                handler(int(signal.SIGINT), _interrupted(frame))
        elif handler != signal.SIG_IGN or self._is_ignored_long():
            self._interrupt(frame, number == AGAIN)

    def _is_ignored_long(self) -> bool:
        """Return whether the cell has ignored interrupts for long. Programs do so while they write a checkpoint; of
        one that ignores them for ever the second press would end the process."""
        now_s = time.monotonic()
        self._ignored_since_s = self._ignored_since_s or now_s
        return now_s - self._ignored_since_s > IGNORED_S

    def _on_sigint(self, _: int, frame: FrameType | None) -> None:
        """The system ignores SIGINT, so this is Python's own `_thread.interrupt_main`, which programs use to limit how
        long something takes. Or a program has put this handler back by itself, and SIGINT has come: then it is not
        ours, and no further one comes."""
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
        """Send the main thread a signal when it has left `_after_fork_in_rank`, where an exception would be lost."""
        main = threading.main_thread().ident or 0
        time.sleep(_AFTER_A_HOOK_S)  # hooks of libraries run after ours
        while _is_running(SignalHandlers._after_fork_in_rank.__code__, main):
            time.sleep(_AFTER_A_HOOK_S)
        signal.pthread_kill(main, number)

    def _after_fork_in_child(self) -> None:
        """A forked child is no rank: SIGTERM ends it, as `Process.terminate` has it."""
        if own_signals.handler_of(signal.SIGTERM) is self._ours[signal.SIGTERM]:
            own_signals.set_handler(signal.SIGTERM, signal.SIG_DFL)
        own_signals.set_mask(self._mask_of_forker)
        self._forks, self._missed = False, 0


def _is_running(code: CodeType, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _interrupted(frame: FrameType | None) -> FrameType | None:
    """What a handler of the user's has interrupted. An interrupt that is sent again may come while our handler of the
    first one asks which handler that is."""
    outer = frame
    while outer is not None and outer.f_code.co_filename.startswith(OURS):
        if outer.f_code is SignalHandlers._on_interrupt.__code__:
            frame = outer.f_back
        outer = outer.f_back
    return frame


def begin() -> None:
    """The first step of a rank, which has nothing yet that would have to be ended in order."""
    end_by(lambda *_: os._exit(0))
    if INTERRUPT != signal.SIGINT:
        for number in (INTERRUPT, AGAIN, FAULT):
            own_signals.handle(number, lambda *_: None)  # its default action ends the process
    own_signals.protect()


def end_by(handler: Callable[[int, FrameType | None], object]) -> None:
    """End by this handler when the host server asks for it. SIGTERM does not come from there."""
    if END != signal.SIGTERM:
        words = b"" if any(name in os.environ for name in _OF_A_JOB) else _ASKED_TO_END
        signal.signal(signal.SIGTERM, lambda *_: os.write(2, words))
    own_signals.handle(END, handler)


def _ignore_sigint() -> bool:
    """Have the system ignore SIGINT, and leave Python's handler as it is: programs find it, and it is called by
    `INTERRUPT`. Returns whether that was so."""
    if INTERRUPT == signal.SIGINT:
        return True
    return bool(_libc.signal(signal.SIGINT, signal.SIG_IGN) == signal.SIG_IGN)
