"""Feature of a rank: `breakpoint()` and other debuggers stop in cells, and `%debug` opens the last failure."""

from __future__ import annotations

import pdb
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from ddp_notebook.messages.debug_messages import (
    AdapterMessage,
    AdapterReady,
    AdapterRequest,
    FailureQuestion,
    HoldTimeouts,
    TimeoutsHeld,
    UseAdapter,
)
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked, InputReply, Interrupt, RunCell
from ddp_notebook.rank.cell.exceptions import known_words
from ddp_notebook.rank.cell.stdin import NO_CELL
from ddp_notebook.rank.debug.adapter import Adapter
from ddp_notebook.rank.debug.long_timeouts import LongTimeouts, hold_loaders
from ddp_notebook.rank.debug.post_mortem import PostMortem, innermost_of_user
from ddp_notebook.rank.debug.rank_pdb import RankPdb, forget_breakpoints
from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.variables import meshes
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, re, time, traceback

_OPENS_FAILURE = re.compile(r"^\s*%debug\b|run_line_magic\('debug'", re.MULTILINE)
_NAMED = re.compile(r"breakpoint|set_trace|%debug")
_DEFINES = re.compile(r"\b(def|lambda)\b")
_OF_CHILD = (
    "breakpoint() works on a rank, but not in a process that the rank has started: set num_workers=0 in the "
    "DataLoader, so that the rank itself loads the data"
)
_WAS_CUT = re.compile(r"gloo/|Connection (closed|reset) by peer")
_LONG_S = 1.0  # an operation of this duration waits for a stopped rank
_NO_FAILURE = (
    "no failure is kept: %debug opens the last cell of this rank if a line of your code failed; not a syntax error or "
    "SystemExit"
)


class DebugFeature(Feature):
    """Debuggers of this rank."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._pid = os.getpid()
        self._skipped: dict[str, int] = {}  # calls of dist.breakpoint to be skipped so far, by their stack
        self._post_mortem = PostMortem(core.network.where)
        self._timeouts = LongTimeouts(core.network, core.place, self._look_for_unheld)
        self._adapter = Adapter(lambda data: core.send(AdapterMessage(data=data)))
        self._may_stop_later = False  # a cell has defined functions that may open a debugger
        self._held_cell = 0  # cell whose time limits are held; 0: none
        self._unheld: dict[str, float] = {}  # limits that run on, and the time of their report; 0: reported
        self._opens_failure = False  # the running cell opens the failure of an earlier one
        self._has_stopped = False  # a debugger has stopped in the running cell
        self.watches_cells = False

    def engine_ready(self) -> None:
        """Replace the functions that open a debugger. `isolation` has made them raise an error."""
        sys.breakpointhook = pdb.set_trace = _function(self._stop)
        if hasattr(pdb, "set_trace_async"):  # Python 3.14; breakpoint() stops after an `await`, too
            pdb.set_trace_async = _refuse
        dist.breakpoint = _function_of_torch(self._stop_rank)
        pdb.Pdb.interaction = _refuse  # type: ignore[method-assign]
        hold_loaders()
        self.core.shell.register_magic_function(self._debug, "line", "debug")
        self.core.shell.register_magic_function(_refuse, "line", "pdb")

    # ---- cells

    def debugged_cell_begins(self, cell: RunCell) -> None:
        self._opens_failure = _OPENS_FAILURE.search(cell.code) is not None
        self._may_stop_later |= bool(_NAMED.search(cell.code) and _DEFINES.search(cell.code))
        self._timeouts.begin_cell(cell)
        self._watch(on=True)

    def cell_begins(self, cell: RunCell) -> None:
        self._has_stopped = False
        if self._held_cell != cell.cell:  # otherwise another rank was faster, and has stopped already
            CLOCK.reset()
        self._opens_failure = _OPENS_FAILURE.search(cell.code) is not None
        if self._post_mortem.error and not self._opens_failure:
            with self.core.network.children.ending_loader_workers(if_=True):
                self._post_mortem.forget()
        if self._may_stop_later or self._adapter.is_on:
            self._timeouts.begin()
        if self._adapter.is_on:
            self._adapter.begin()

    def cell_ends(self) -> None:
        self._adapter.end()
        if self._has_stopped:
            is_stopped = self.core.network.release.was_noticed
            self.core.stdin.answer_threads("quit" if is_stopped else "continue")
            forget_breakpoints()
            self._skipped.clear()
        self._timeouts.end()
        if not (self._may_stop_later or self._adapter.is_on):
            self._watch(on=False)

    def _watch(self, *, on: bool) -> None:
        if self.watches_cells != on:
            self.watches_cells = on
            self.core.update_cell_hooks()

    def keeps_frames(self, error: BaseException) -> bool:
        if self._opens_failure:  # leaving this debugger does not replace the failure
            self._opens_failure = False
            return False
        is_kept = self._post_mortem.note(error)
        if self._post_mortem.error:
            self._watch(on=True)  # the next cell forgets it
        return is_kept

    def cell_failed(self, error: BaseException) -> None:
        """Name the operation in the error of a backward pass that has ended because of its limit."""
        late = self._timeouts.late
        if late and isinstance(error, RuntimeError) and _WAS_CUT.search(known_words(error)):
            error.args = (late,)

    # ---- stopping

    def _stop(self, frame: FrameType, header: str | None = None) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            self._open(frame, header)

    def _open(self, frame: FrameType, header: str | None = None) -> None:
        """Stop in a frame: in the front end's debugger if it is on, or else at a prompt."""
        if self._adapter.is_on:
            self._refuse_in_child()
            self._adapter.stop_at(frame)
            return
        debugger = self._debugger()
        if header is not None:
            debugger.message(header)
        debugger.stop_at(frame)

    def _stop_rank(self, frame: FrameType, rank: int, skip: int) -> None:
        """Stop one rank, while the others wait in a barrier. Unlike torch's function, change no timeout of a group."""
        if skip > 0:
            where = "".join(traceback.format_stack(frame))
            self._skipped[where] = self._skipped.get(where, 0) + 1
            if self._skipped[where] <= skip:
                return
        if dist.get_rank() == rank:
            self._open(frame)
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            dist.barrier()
        finally:
            sys.settrace(tracer)

    def _debugger(self, first: Callable[[list[Any]], int] | None = None) -> RankPdb:
        self._refuse_in_child()
        if self.core.running() is None:
            raise RuntimeError(NO_CELL)
        self._has_stopped = True
        self._watch(on=True)
        return RankPdb(self.core.network.where, self._read, first)

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(_OF_CHILD)

    def _read(self, place: str, frame: FrameType | None) -> InputReply:
        of_frame = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        found = meshes.coordinates({**self.core.shell.user_ns, **of_frame})
        reply: InputReply = self.core.stdin.command(place, found)
        return reply

    def _debug(self, line: str) -> None:
        """Open a debugger in the frames of the last failed cell of this rank."""
        failure = self._post_mortem
        if failure.lines:
            print(failure.error, *failure.lines, sep="\n")
        elif (at := failure.traceback) is None:
            print(_NO_FAILURE)
        else:
            print(failure.error)
            self._debugger(innermost_of_user).look_at(at)

    # ---- messages

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {
            HoldTimeouts: self._hold,
            Interrupt: self._on_interrupt,
            AdapterRequest: self._pass_on,
            UseAdapter: self._stop_adapter,
        }

    def in_main_thread(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {UseAdapter: self._start_adapter}

    def _pass_on(self, message: AdapterRequest) -> bool:
        self._adapter.request(message.data, message.cell_file)
        return True

    def _stop_adapter(self, message: UseAdapter) -> bool:
        if not message.on and self._adapter.stop():
            CLOCK.hold(False)  # the notebook that held the time limits may have ended
        return not message.on

    def _start_adapter(self, message: UseAdapter) -> None:
        error = self._adapter.start()
        if not error:
            self.core.network.release.is_taken = self._adapter.take_interrupt
            self._watch(on=True)
        self.core.send(AdapterReady(error=error))

    def _hold(self, message: HoldTimeouts) -> bool:
        CLOCK.hold(message.on)
        self._held_cell = message.cell if message.on else 0
        if message.on:
            unheld = self._all_unheld()
            self._unheld = dict.fromkeys(unheld, 0.0)
            self._may_stop_later = True
            self._timeouts.begin()  # operations that begin from now on
            self._watch(on=True)
            self.core.send(TimeoutsHeld(cell=message.cell, unheld=unheld))
        return True

    def _all_unheld(self) -> list[str]:
        return [*self._timeouts.unheld(), *self.core.unheld_limits()]

    def _look_for_unheld(self) -> None:
        """Report limits that run on, of operations that have begun since the debugger stopped."""
        if not (cell := self._held_cell):
            return
        now, known = time.monotonic(), self._unheld
        report_s = {limit: known.setdefault(limit, now + _LONG_S) for limit in self._all_unheld()}
        if late := [limit for limit, at in report_s.items() if 0 < at < now]:
            known |= dict.fromkeys(late, 0.0)
            self.core.send(TimeoutsHeld(cell=cell, unheld=late))

    def _on_interrupt(self, message: Interrupt) -> bool:
        if self.core.stdin is not None:
            self.core.stdin.answer_threads("quit")
        self._adapter.quit_threads()
        return False

    def questions(self) -> Mapping[type[Message], Callable[[Any], Any]]:
        return {FailureQuestion: self._tell_failure}

    async def _tell_failure(self, message: FailureQuestion) -> None:
        failure = self._post_mortem
        self.core.send(Checked(request=message.request, facts={"error": failure.error, "lines": failure.lines}))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse other debuggers, such as that of `pdb.run`."""
    raise RuntimeError(
        "this debugger cannot run on a rank, because it does not read its commands from the notebook. Use breakpoint() "
        "or pdb.set_trace() in the cell, or %ddp_debug after it has failed"
    )


def _function(stop: Callable[..., None]) -> Callable[..., None]:
    """Return `breakpoint` and `pdb.set_trace`."""

    def stop_here(*_: Any, header: str | None = None, **__: Any) -> None:
        stop(sys._getframe(1), header)

    return stop_here


def _function_of_torch(stop: Callable[..., None]) -> Callable[..., None]:
    """Return `dist.breakpoint`."""

    def stop_here(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
        stop(sys._getframe(1), rank, skip)  # time limits are held, so that none needs to be changed

    return stop_here


FEATURE = DebugFeature
