"""Faults that `%ddp_fault` injects into a rank.

A rank injects its faults itself, so their timing does not depend on the notebook. A fault of the main thread strikes in
the code of a cell, where a stop can end it. It never strikes in this package's code, nor while a lock is held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.faults import OFF, Fault
from ddp_notebook.messages.ranks import Pushed, RunCell
from ddp_notebook.rank import own_signals
from ddp_notebook.rank.cell.current_line import OURS, CurrentLine
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.release import is_in_finalizer, may_hold_a_lock
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, signal, threading, time
from ddp_notebook.wire.signals import FAULT

_LOOK_S = 0.02


class InjectedFaultError(RuntimeError):
    """Error that `%ddp_fault raise` injects."""


class Faults:
    """Faults of one rank. Made in its main thread.

    Args:
        recorder: calls a function before each operation.
        where: recognizes the code of cells.
    """

    def __init__(self, recorder: Recorder, where: CurrentLine) -> None:
        self._recorder = recorder
        self._where = where
        self._lock = threading.Lock()
        self._waiting: list[Fault] = []  # until a cell starts
        self._clocks: dict[Fault, threading.Timer] = {}  # timers of the running cell
        self._runs = False  # a cell is running
        self._due: Fault | None = None  # strikes the main thread as soon as it runs cell code
        self._by_s = 0.0  # delay of each step, in seconds
        self._main = threading.main_thread().ident or 0
        own_signals.handle(FAULT, self._on_signal)
        register_optimizer_step_pre_hook(lambda *_: self._sleep())

    # ---- the agent's thread

    def add(self, fault: Fault) -> None:
        """Inject this fault into the running cell, or into the next one."""
        with self._lock:
            if fault.kind == OFF:
                self._forget()
            elif self._runs:
                self._start_clock(fault)
            else:
                self._waiting.append(fault)

    def _forget(self) -> None:
        self._end_clocks()
        self._waiting.clear()
        self._by_s, self._recorder.pause = 0.0, None

    def _end_clocks(self) -> None:
        for clock in self._clocks.values():
            clock.cancel()
        self._clocks.clear()
        self._due = None

    def _start_clock(self, fault: Fault) -> None:
        self._clocks[fault] = clock = threading.Timer(fault.after_s, self._strike, [fault])
        clock.daemon = True
        clock.start()

    # ---- the main thread

    def begin(self) -> None:
        """Prepare the faults of a starting cell."""
        self._runs = True
        if self._waiting:
            with self._lock:
                waiting, self._waiting = self._waiting, []
                for fault in waiting:
                    if fault.after_s:
                        self._start_clock(fault)
                    else:
                        self._strike_at_once(fault)

    def end(self) -> None:
        """Cancel the faults that have not struck when the cell ends, and print a message about each."""
        with self._lock:
            self._runs = False
            missed = [*self._clocks, *([] if self._due is None else [self._due])]
            if not missed:
                return
            self._end_clocks()
        sys.settrace(None)
        for fault in missed:
            when = f" {fault.after_s:g} s into it" if fault.after_s else ""
            with contextlib.suppress(Exception):  # the cell may have closed stderr
                print(
                    f"%ddp_fault {fault.kind}{when}: the cell ended first, and the fault did not happen",
                    file=sys.stderr,
                )

    def _strike_at_once(self, fault: Fault) -> None:
        """Inject a fault at the start of the cell, even if the cell is very short."""
        if fault.kind in ("kill", "slow"):
            self._happen_to_process(fault)
        else:
            self._due = fault
            sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, *_: object) -> Callable[..., Any] | None:
        """Trace the lines of a new frame if it runs code of a cell."""
        return self._on_line if frame.f_code.co_filename in self._where.cells else None

    def _on_line(self, *_: object) -> None:
        sys.settrace(None)
        self._happen()

    def _sleep(self) -> None:
        if self._by_s and threading.get_ident() == self._main:
            time.sleep(self._by_s)

    def _before_operation(self) -> None:
        """Delay an operation. A backward pass is not delayed again for each of its operations, which are not steps."""
        if torch._C._current_graph_task_id() == -1:  # else this thread runs a backward, maybe for autograd
            self._sleep()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if self._is_in_cell(frame):  # otherwise the signal is sent again
            self._happen()

    def _happen(self) -> None:
        fault, self._due = self._due, None
        if fault is None:
            return
        if fault.kind == "raise":
            raise InjectedFaultError(f"rank {os.environ.get('RANK', '?')} fails: %ddp_fault injected this error")
        while True:  # until a stop raises here or a grace period ends
            time.sleep(_LOOK_S)

    def _is_in_cell(self, innermost: FrameType | None) -> bool:
        if innermost is None or innermost.f_code.co_filename.startswith(OURS):
            return False
        if may_hold_a_lock(innermost) or is_in_finalizer(innermost):
            return False
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_filename not in self._where.cells:
            frame = frame.f_back
        return frame is not None

    # ---- a thread of each fault

    def _strike(self, fault: Fault) -> None:
        with self._lock:
            if self._clocks.pop(fault, None) is None:
                return  # its cell has ended
            if fault.kind in ("kill", "slow"):
                self._happen_to_process(fault)
                return
            self._due = fault
        while self._due is fault:
            own_signals.send_to_main(FAULT)
            time.sleep(_LOOK_S)

    def _happen_to_process(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._by_s, self._recorder.pause = fault.by_s, self._before_operation


class FaultFeature(Feature):
    """Rank side of `%ddp_fault`."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._faults = Faults(core.network.recorder, core.network.where)

    def cell_begins(self, cell: RunCell) -> None:
        self._faults.begin()

    def cell_ends(self) -> None:
        self._faults.end()

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {Fault: self._add}

    def _add(self, fault: Fault) -> bool:
        self._faults.add(fault)
        self.core.send(Pushed(request=fault.request))
        return True


FEATURE = FaultFeature
