"""Release the main thread from a blocked operation: the part of an interrupt that Python cannot do.

`INTERRUPT` ends Python code, but the main thread does not notice it inside a blocked operation. So a separate thread
waits for a second signal and closes the connections that the operation waits on. Until the cell has ended, further
operations raise KeyboardInterrupt, which an `except Exception` around them does not catch.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from ddp_notebook.rank import gpu, own_signals
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.group.calls import Call, Group
from ddp_notebook.rank.group.connections.abort import Connections
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.records.operation import Operation
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging, signal, threading, time
from ddp_notebook.wire.signals import AGAIN, RELEASE, wait_for_release

_log = logging.getLogger(__name__)
_LOOK_S = 0.02
_JUST_NOW_S = 0.3
_MOST_RESENT = 5
_MOST_PUT_OFF = 2  # deferrals of an interrupt and its repetitions
_PATIENCE_S = 0.1  # after this time, other waits are aborted too: the recorder does not see a wait at a store
_HELD_S = 0.25  # after this time, a wait that was entered after the interrupt is interrupted too
_MAKERS_S = 1.0  # time limit for threads that are making groups, after the cell
CUT = "this group was aborted to end a cell; ddp_notebook.current().ranks.reform() connects it again"


class RankLostError(RuntimeError):
    """An operation cannot start: a rank that it may need has died."""


@dataclass(frozen=True, slots=True)
class Doing:
    """Activity of a rank when its cell was stopped."""

    place: str  # "cell line 7, in all_reduce"
    operation: Operation | None = None
    thread: str = ""  # place of another thread that waits in `operation`, while the main thread runs on


class Release:
    """Release of the main thread from any blocked wait.

    Args:
        recorder, connections, where: objects of this rank.
        running: returns the number of the running cell, or None.
    """

    def __init__(
        self, recorder: Recorder, connections: Connections, where: CurrentLine, running: Callable[[], int | None]
    ) -> None:
        self.doing: Doing | None = None  # activity of the cell that is being stopped
        self.was_cut = False  # connections of the current groups were closed
        self._cut_at_s = -_JUST_NOW_S
        self._lost: Callable[[Group | None], BaseException] | None = None
        self._recorder = recorder
        self._connections = connections
        self._where = where
        self._running = running
        self._has_interrupted = False  # the main thread has noticed the interrupt
        self._resent = 0
        self._held: tuple[Any, float] = None, 0.0  # the main thread's wait, and its start
        self._taken_s = 0.0  # when a handler of the user took an interrupt
        self._looking = threading.Lock()
        self._has_ended = True  # the cell has ended
        self._frees: int | None = None  # the cell that a thread is releasing
        self._wakes = threading.Event()  # wakes that thread when the cell has ended
        self._main = threading.main_thread().ident or 0
        # Returns whether a debugger raises the interrupt itself: the main thread has stopped in it, in this frame.
        self.is_taken: Callable[[FrameType | None], bool] = lambda _: False

    def start(self) -> None:
        """Start the thread that waits for the signal."""
        if RELEASE is not None:
            own_signals.handle(RELEASE, lambda *_: None)  # for threads that unblock the signal in C code
            threading.Thread(target=self._wait_for_signals, name="ddp-release", daemon=True).start()

    # ---- the main thread

    def begin(self) -> None:
        """Reset the state for a new cell."""
        self.doing = None
        self._has_interrupted = False
        self._resent = 0
        self._taken_s = 0.0
        self._held = None, 0.0
        self._recorder.forget_failure()
        self._has_ended = False

    def end(self) -> None:
        """End the release when the cell has ended. Operations may start again if their connections are open."""
        with self._looking:  # close nothing from here on: the next cell may need it
            if self._has_interrupted:
                self._free_threads()
            self._has_ended = True
            if self._recorder.refusal is _stop:
                self._wakes.set()
                self._recorder.refusal = self._lost or (_cut if self.was_cut else None)

    def _free_threads(self) -> None:
        """Release other threads of the user. They would wait for ever, and a thread that makes a group blocks all later
        groups."""
        if self._of_threads() is not None:
            self._cut_off(self._connections.cut_groups)
        until = time.monotonic() + _MAKERS_S
        while self._connections.is_making and time.monotonic() < until:
            self._recorder.refusal = _stop  # for threads that wait for this one
            self._cut_off(self._connections.cut_groups)
            self._cut_off(self._connections.cut_stores)
            time.sleep(_LOOK_S)

    def note_interrupt(self, frame: FrameType | None, is_again: bool) -> bool:
        """Handle an interrupt that reached the main thread in this frame.

        Args:
            is_again: a thread of the rank sent it again, since the first one did not seem to be noticed.

        Returns:
            Whether to raise there.
        """
        if self._has_interrupted and is_again:
            # otherwise it runs the user's clean-up code
            return not self.is_taken(frame) and self._where.waits(frame) is not None
        is_lost = is_in_finalizer(frame)
        if self._resent < _MOST_PUT_OFF and (is_lost or may_hold_a_lock(frame)):
            return False  # `go` sends it again
        self._has_interrupted = not is_lost
        if self.doing is None:
            call = self._recorder.waits_in(self._main)
            failed = self._recorder.failed
            # The failure is recent: the release of a peer caused it.
            if failed is not None and time.monotonic_ns() - failed.at_ns < _JUST_NOW_S * 1e9:
                place, call = self._where.of_traceback(failed.error.__traceback__), failed.call
            else:
                # In a backward pass: the operation that failed because a peer was released.
                if call is None and self._where.is_in_torch(frame):
                    call = self._recorder.first_failed()
                place, call = self._place_of(call, frame)
            self.doing = Doing(place or self._where.describe(), None if call is None else call.describe())
        if not is_lost and self._where.children is not None:
            self._where.children.interrupt()
        return not self.is_taken(frame)

    def note_taken(self) -> bool:
        """Note that a handler of the user gets the interrupt. It is not sent again then, except to end a wait.

        Returns:
            Whether this is a new interrupt. A repetition sent just before may still arrive.
        """
        before_s, self._taken_s = self._taken_s, time.monotonic()
        was_noticed, self._has_interrupted = self._has_interrupted, True
        return not was_noticed or self._taken_s - before_s > _JUST_NOW_S

    def note_lost(self) -> None:
        """Note that an interrupt was raised where Python drops exceptions. `go` sends it again."""
        self._has_interrupted = False

    @property
    def was_noticed(self) -> bool:
        """Return whether the main thread, or a handler of the user, has received an interrupt of this cell."""
        return self._has_interrupted

    def _place_of(self, call: Call | None, frame: FrameType | None) -> tuple[str, Call | None]:
        """Return the place of the main thread, or of the thread that it waits for, and the operation there."""
        if call is None and self._where.waits(frame) and (other := self._of_threads()) is not None:
            return self._where.of_thread(other.thread), other
        return "" if frame is None else self._where.with_words(self._where.of_frame(frame)), call

    def forms(self) -> None:
        """Refuse operations while the connections are being reopened."""
        self._recorder.refusal = _cut

    def renewed(self) -> None:
        """Allow operations again: the connections were reopened."""
        self.was_cut = False
        self._lost = self._recorder.refusal = None

    def lose(self, why: str) -> None:
        """Let operations raise this text until the connections are reopened, since ranks have died."""
        self._lost = lambda _: RankLostError(why)
        if self._recorder.refusal is not _stop:
            self._recorder.refusal = self._lost
        self._recorder.cut_boards()  # a wait at a board would never end; gloo detects dead peers itself

    @property
    def has_lost(self) -> bool:
        """Return whether ranks have died since the connections were made."""
        return self._lost is not None

    @property
    def loss(self) -> BaseException | None:
        """Return the error that operations raise because of dead ranks; None if all ranks live."""
        return None if self._lost is None else self._lost(None)

    @property
    def is_under_way(self) -> bool:
        return self._recorder.refusal is _stop

    @property
    def was_just_now(self) -> bool:
        """Return whether this package causes the current errors of operations."""
        return self.is_under_way or time.monotonic() - self._cut_at_s < _JUST_NOW_S

    # ---- any thread

    def waits_in(self) -> Call | None:
        """Return the operation that the main thread waits for, as far as Python sees it.

        Otherwise, if the main thread is inside torch, return the oldest operation in progress. If a GPU is in use,
        return the oldest one on a GPU: any tensor call may wait for it.
        """
        call = self._recorder.waits_in(self._main)
        if call is None and ((is_in_torch := self._where.is_in_torch()) or gpu.is_in_use()):
            # not sends and receives: possibly no code waits for them yet
            unwaited = [call for call in self._recorder.operations() if call.kernel.spec.kind == "collective"]
            call = next((call for call in unwaited if is_in_torch or call.is_on_gpu), None)
        return call

    def now(self) -> Doing:
        """Return the activity of the main thread, or that of a waiting thread of the user."""
        call = self.waits_in()
        if call is not None:
            return Doing(self._where.describe(), replace(call.describe(), is_awaited=self._is_awaited(call)))
        is_held = self._where.waits() is not None
        # While the main thread runs, a thread may wait for a message for ever, as in a parameter server.
        other = self._of_threads() if is_held else self._of_threads("collective")
        if other is None:
            return Doing(self._where.describe())
        place = self._where.of_thread(other.thread)
        if is_held:
            return Doing(place, other.describe())
        return Doing(self._where.describe(), other.describe(), thread=place)

    def _is_awaited(self, call: Call) -> bool:
        """Return whether the main thread is known to wait for this operation: in Python, in a backward or on a GPU."""
        is_of_backward = call.is_of_backward or call.bucket is not None or call.backward is not None
        return is_of_backward or call.is_on_gpu or self._recorder.waits_in(self._main) is call

    def _of_threads(self, kind: str = "") -> Call | None:
        """Return the operation in which a thread other than the main thread has waited longest."""
        calls = [call for thread, call in list(self._recorder.waiting.items()) if thread != self._main]
        calls = [call for call in calls if not kind or call.kernel.spec.kind == kind]
        return min(calls, key=lambda call: call.since_ns, default=None)

    def go(self, cell: int) -> None:
        """Release this cell from blocked waits, repeatedly until it has ended. It may have ended already."""
        with self._looking:
            if self._running() != cell or self._has_ended or self._frees == cell:
                return
            self._frees = cell
            self._wakes.clear()
            self._recorder.refusal = _stop
        began = time.monotonic()
        with quiet():
            while not self._wakes.wait(_LOOK_S):
                with self._looking:
                    if self._has_ended or self._running() != cell:
                        break
                    self._look(time.monotonic() - began)

    def _look(self, for_s: float) -> None:
        waits = bool(self._recorder.waiting or self._recorder.operations())
        if for_s > _PATIENCE_S and not self._has_interrupted and gpu.is_in_use():
            waits = True  # perhaps for a batched message over NCCL, which the recorder does not see
        if self.doing is None and (waits or for_s > _PATIENCE_S):
            doing = self.now()
            if self.doing is None:  # otherwise the main thread has noticed the interrupt, and its data is better
                self.doing = doing
        if waits or self._connections.is_connecting:
            self._cut_off(self._connections.cut_groups)
        if for_s > _PATIENCE_S:
            if not self._has_interrupted and self._resent < _MOST_RESENT and for_s > _PATIENCE_S * 2**self._resent:
                self._resent += 1  # another thread took the signal and did not wake the main thread
                own_signals.send_to_main(AGAIN)
                if self._where.children is not None:
                    self._where.children.end(self._resent)
            if self._where.children is not None:
                self._where.children.end_loader_workers()
            self._cut_off(self._connections.cut_stores)
        if self._has_interrupted and self._is_held_again():
            own_signals.send_to_main(AGAIN)

    def _cut_off(self, cut: Callable[[], int]) -> None:
        self.was_cut = True
        self._cut_at_s = time.monotonic()
        cut()

    def cut_groups(self) -> None:
        """End every operation that waits in a group, because one has reached its limit. Callable from any thread."""
        self._cut_off(self._connections.cut_groups)

    def _is_held_again(self) -> bool:
        """Return whether the main thread has been in one wait for long after its interrupt.

        An example is the exit of an executor's `with` block, which joins its threads. Code that computes is not
        interrupted again: it may be saving a checkpoint.
        """
        now, wait = time.monotonic(), self._where.waits()
        if wait is None or wait != self._held[0]:
            self._held = wait, now
            return False
        if now - self._held[1] < _HELD_S:
            return False
        self._held = None, now
        return True

    def ask(self, cell: int) -> None:
        """End this cell when both signals arrived before it started. Called from a thread other than the main thread.

        A single `AGAIN` could be lost: Python checks for signals before a call, but not between that check and a sleep.
        The main thread can be at that point while this thread holds the GIL. `go` repeats the signal until it has an
        effect.
        """
        own_signals.send_to_main(AGAIN)  # the main thread may notice it just now
        start_new_thread(self.go, (cell,))  # the signal may not reach its thread if C code has unblocked it elsewhere

    def _wait_for_signals(self) -> None:
        assert RELEASE is not None
        # A signal to the process goes to any thread that does not block it, but only a signal to the main thread ends
        # its sleep. The release thread, just woken, would take it in most cases.
        own_signals.block(signal.valid_signals())
        while True:
            cell = wait_for_release()
            try:
                self.go(cell)
            except Exception:  # this thread must release later cells too
                try:
                    _log.exception("a cell could not be ended")
                except Exception:  # a cell has replaced a function that logging needs
                    pass


def may_hold_a_lock(frame: FrameType | None) -> bool:
    """Return whether this code acquires or releases the lock of a `with` statement.

    An exception between the acquisition and the release would leave the lock held for ever. This was seen once in
    several thousand stops, in the queue of a DataLoader, which the next cell then waited for. Code that waits for a
    lock stays there for long, so a later signal interrupts it.
    """
    return frame is not None and frame.f_code.co_name in ("__enter__", "__exit__")


def is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether exceptions of this code are dropped, since Python prints them or torch stores them.

    This is true for a `__del__`, for example that of a DataLoader, which joins its workers. It is also true for this
    package's callback of a GPU future, and for the code by which a weak dictionary or set removes a dead entry.
    """
    while frame is not None and frame.f_code.co_name not in ("__del__", "_note_end") and not _removes_dead(frame):
        frame = frame.f_back
    return frame is not None


def _removes_dead(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in ("remove", "_remove") and code.co_filename.endswith(("weakref.py", "_weakrefset.py"))


def _stop(_: Group | None) -> BaseException:
    return KeyboardInterrupt("the cell is being ended")


def _cut(_: Group | None) -> BaseException:
    return RuntimeError(CUT)
