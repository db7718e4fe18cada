"""Ending whatever a cell is in: the half of an interrupt that Python's own cannot do.

`INTERRUPT` ends Python code, but the main thread never sees it inside an operation that waits. So a separate thread
waits for a second signal and cuts the connections that the operation waits on. Until the cell has ended, further
operations raise KeyboardInterrupt, which an `except Exception` around them does not catch.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from dataclasses import dataclass
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
_MOST_PUT_OFF = 2  # of an interrupt and those that are sent again
_PATIENCE_S = 0.1  # then everything else is tried too: the recorder does not see a wait at a store
_HELD_S = 0.25  # then a wait that was entered after the interrupt is interrupted too
_MAKERS_S = 1.0  # given to threads that make groups, after the cell
CUT = "the connections of this group were cut to free a cell; ddp_notebook.current().ranks.reform() makes them again"


class RankLostError(RuntimeError):
    """An operation cannot begin, since a rank that it may need has died."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank was in when its cell was ended."""

    place: str  # "cell line 7, in all_reduce"
    operation: Operation | None = None
    thread: str = ""  # where another thread waits in `operation`, while the main thread goes on at `place`


class Release:
    """Frees the main thread from whatever it waits in.

    Args:
        recorder, connections, where: this rank's.
        running: tells the number of the cell that runs, or None.
    """

    def __init__(
        self, recorder: Recorder, connections: Connections, where: CurrentLine, running: Callable[[], int | None]
    ) -> None:
        self.doing: Doing | None = None  # of the cell that is being ended
        self.was_cut = False  # the connections of the present groups
        self._cut_at_s = -_JUST_NOW_S
        self._lost: Callable[[Group | None], BaseException] | None = None
        self._recorder = recorder
        self._connections = connections
        self._where = where
        self._running = running
        self._has_interrupted = False  # the main thread has noticed
        self._resent = 0
        self._held: tuple[Any, float] = None, 0.0  # the main thread's wait, and since when
        self._taken_s = 0.0  # by a handler of the user's
        self._looking = threading.Lock()
        self._has_ended = True  # the cell
        self._frees: int | None = None  # the cell that a thread frees
        self._wakes = threading.Event()  # the thread that frees it, since it has ended
        self._main = threading.main_thread().ident or 0

    def start(self) -> None:
        """Wait for the signal, in a thread."""
        if RELEASE is not None:
            own_signals.handle(RELEASE, lambda *_: None)  # for threads that C code has unblock it
            threading.Thread(target=self._wait_for_signals, name="ddp-release", daemon=True).start()

    # ---- the main thread

    def begin(self) -> None:
        """A cell begins."""
        self.doing = None
        self._has_interrupted = False
        self._resent = 0
        self._taken_s = 0.0
        self._held = None, 0.0
        self._recorder.forget_failure()
        self._has_ended = False

    def end(self) -> None:
        """The cell has ended: operations may begin again, if there are connections for them."""
        with self._looking:  # from here on nothing may be cut: it may be needed
            if self._has_interrupted:
                self._free_threads()
            self._has_ended = True
            if self._recorder.refusal is _stop:
                self._wakes.set()
                self._recorder.refusal = self._lost or (_cut if self.was_cut else None)

    def _free_threads(self) -> None:
        """Free the user's other threads: they would wait for ever, and one that makes a group blocks all later ones."""
        if self._of_threads() is not None:
            self._cut_off(self._connections.cut_groups)
        until = time.monotonic() + _MAKERS_S
        while self._connections.is_making and time.monotonic() < until:
            self._recorder.refusal = _stop  # for the threads behind it
            self._cut_off(self._connections.cut_groups)
            self._cut_off(self._connections.cut_stores)
            time.sleep(_LOOK_S)

    def note_interrupt(self, frame: FrameType | None, is_again: bool) -> bool:
        """An interrupt has reached the main thread in this frame. Returns whether to raise there.

        Args:
            is_again: a thread of the rank has sent it, which did not see that the first one was noticed.
        """
        if self._has_interrupted and is_again:
            return self._where.waits(frame) is not None  # else it has gone on to the user's own clean-up
        is_lost = is_in_finalizer(frame)
        if self._resent < _MOST_PUT_OFF and (is_lost or may_hold_a_lock(frame)):
            return False  # `go` sends it again
        self._has_interrupted = not is_lost
        if self.doing is None:
            call = self._recorder.waits_in(self._main)
            failed = self._recorder.failed
            # A failure of a moment ago: because a peer was freed.
            if failed is not None and time.monotonic_ns() - failed.at_ns < _JUST_NOW_S * 1e9:
                place, call = self._where.of_traceback(failed.error.__traceback__), failed.call
            else:
                # In a backward: the operation that failed because a peer was freed.
                if call is None and self._where.is_in_torch(frame):
                    call = self._recorder.first_failed()
                place, call = self._place_of(call, frame)
            self.doing = Doing(place or self._where.describe(), None if call is None else call.describe())
        return True

    def note_taken(self) -> bool:
        """A handler of the user's gets the interrupt, which is not sent again then, but for a wait. Returns whether it
        is a new one: what was sent again just before comes once more."""
        before_s, self._taken_s = self._taken_s, time.monotonic()
        was_noticed, self._has_interrupted = self._has_interrupted, True
        return not was_noticed or self._taken_s - before_s > _JUST_NOW_S

    def note_lost(self) -> None:
        """An interrupt was raised in the main thread where Python drops exceptions: `go` sends it again."""
        self._has_interrupted = False

    @property
    def was_noticed(self) -> bool:
        """Whether the main thread, or a handler of the user's, has got an interrupt of this cell."""
        return self._has_interrupted

    def _place_of(self, call: Call | None, frame: FrameType | None) -> tuple[str, Call | None]:
        """Where the main thread is, or the thread that it waits for, and the operation there."""
        if call is None and self._where.waits(frame) and (other := self._of_threads()) is not None:
            return self._where.of_thread(other.thread), other
        return "" if frame is None else self._where.with_words(self._where.of_frame(frame)), call

    def forms(self) -> None:
        """The connections are being made anew: no operation may begin until all of them are there."""
        self._recorder.refusal = _cut

    def renewed(self) -> None:
        """The connections were made anew."""
        self.was_cut = False
        self._lost = self._recorder.refusal = None

    def lose(self, why: str) -> None:
        """Ranks have died: operations raise this text until the connections are made anew."""
        self._lost = lambda _: RankLostError(why)
        if self._recorder.refusal is not _stop:
            self._recorder.refusal = self._lost
        self._recorder.cut_boards()  # who waits there waits in vain; gloo tells by itself

    @property
    def has_lost(self) -> bool:
        """Whether ranks have died since the connections were made."""
        return self._lost is not None

    @property
    def loss(self) -> BaseException | None:
        """What operations raise since ranks have died; None: all are there."""
        return None if self._lost is None else self._lost(None)

    @property
    def is_under_way(self) -> bool:
        return self._recorder.refusal is _stop

    @property
    def was_just_now(self) -> bool:
        """Whether errors of operations in these moments are our doing."""
        return self.is_under_way or time.monotonic() - self._cut_at_s < _JUST_NOW_S

    # ---- any thread

    def waits_in(self) -> Call | None:
        """The operation that the main thread waits in, as far as Python sees it; or the oldest one under way while the
        main thread is inside torch, or on a GPU, which a call of any tensor's may wait for."""
        call = self._recorder.waits_in(self._main)
        if call is None and ((is_in_torch := self._where.is_in_torch()) or gpu.is_in_use()):
            # not sends and receives: perhaps nobody waits for those yet
            unwaited = [call for call in self._recorder.operations() if call.kernel.spec.kind == "collective"]
            call = next((call for call in unwaited if is_in_torch or call.is_on_gpu), None)
        return call

    def now(self) -> Doing:
        """What the main thread is in, or another thread of the user's."""
        call = self.waits_in()
        if call is not None:
            return Doing(self._where.describe(), call.describe())
        is_held = self._where.waits() is not None
        # While the main thread goes on, a thread may wait for a message for ever: a parameter server does.
        other = self._of_threads() if is_held else self._of_threads("collective")
        if other is None:
            return Doing(self._where.describe())
        place = self._where.of_thread(other.thread)
        if is_held:
            return Doing(place, other.describe())
        return Doing(self._where.describe(), other.describe(), thread=place)

    def _of_threads(self, kind: str = "") -> Call | None:
        """The operation in which a thread other than the main one has waited longest."""
        calls = [call for thread, call in list(self._recorder.waiting.items()) if thread != self._main]
        calls = [call for call in calls if not kind or call.kernel.spec.kind == kind]
        return min(calls, key=lambda call: call.since_ns, default=None)

    def go(self, cell: int) -> None:
        """Free this cell from whatever it waits in, again and again until it has ended. It may have ended already."""
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
            waits = True  # perhaps for a message of a batch over NCCL, which nobody sees
        if self.doing is None and (waits or for_s > _PATIENCE_S):
            doing = self.now()
            if self.doing is None:  # else the main thread has noticed meanwhile, and knows best
                self.doing = doing
        if waits or self._connections.is_connecting:
            self._cut_off(self._connections.cut_groups)
        if for_s > _PATIENCE_S:
            if not self._has_interrupted and self._resent < _MOST_RESENT and for_s > _PATIENCE_S * 2**self._resent:
                self._resent += 1  # another thread took the signal and did not wake the main one
                own_signals.send_to_main(AGAIN)
                if self._where.children is not None:
                    self._where.children.end(self._resent)
            self._cut_off(self._connections.cut_stores)
        if self._has_interrupted and self._is_held_again():
            own_signals.send_to_main(AGAIN)

    def _cut_off(self, cut: Callable[[], int]) -> None:
        self.was_cut = True
        self._cut_at_s = time.monotonic()
        cut()

    def _is_held_again(self) -> bool:
        """Whether the main thread, after its interrupt, has long been in one wait: leaving the `with` of an executor
        joins its threads, for example. Code that computes is left alone: it may save a checkpoint."""
        now, wait = time.monotonic(), self._where.waits()
        if wait is None or wait != self._held[0]:
            self._held = wait, now
            return False
        if now - self._held[1] < _HELD_S:
            return False
        self._held = None, now
        return True

    def ask(self, cell: int) -> None:
        """End this cell: both signals came before it began. From another thread than the main one.

        `AGAIN` alone could be lost: Python checks for signals before a call, but not between that check and a
        sleep, and while this thread holds the GIL the main one can be just there. `go` repeats it until it has had an
        effect.
        """
        own_signals.send_to_main(AGAIN)  # it may be noticed just now, after all
        start_new_thread(self.go, (cell,))  # the thread of the signal may not get one that C code has unblocked

    def _wait_for_signals(self) -> None:
        assert RELEASE is not None
        # A signal to the process goes to any thread that does not block it, and only the main thread's own signal ends
        # its sleep. This thread, just woken, would take it in most of our tries.
        own_signals.block(signal.valid_signals())
        while True:
            cell = wait_for_release()
            try:
                self.go(cell)
            except Exception:  # this thread has to free later cells too
                try:
                    _log.exception("a cell could not be freed")
                except Exception:  # a cell has replaced a function that logging needs
                    pass


def may_hold_a_lock(frame: FrameType | None) -> bool:
    """Whether this is the code by which a `with` takes a lock or gives it back. What is raised after the one and before
    the other leaves the lock taken for ever: seen once in some thousand stops, in the queue of a DataLoader, which the
    next cell then waited for. Code that waits there for a lock is there for long, and is interrupted in the end."""
    return frame is not None and frame.f_code.co_name in ("__enter__", "__exit__")


def is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether this is code whose exceptions go no further, since Python prints them or torch keeps them.

    Such code is a `__del__`, as that of a DataLoader, which joins its workers, our callback of a GPU's future, and the
    code by which a weak dictionary or set removes a dead entry.
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
