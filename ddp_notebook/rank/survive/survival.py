"""Recovery of a rank in a survivable loop.

After the death of other ranks, the rank waits until the notebook has formed the group again with replacement processes.
Then it returns to the step that all ranks repeat.

A replacement process has no results of earlier cells. The next rank sends it the variables that its rank had at the
start of the loop. Then it runs the cell from the statement with the loop on. In the loop it gets the remaining state.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Form
from ddp_notebook.messages.resize_messages import SamplerChange
from ddp_notebook.messages.survive_messages import Resume, Save, Stalls, Survives
from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.local_collectives import LocalCollectives
from ddp_notebook.rank.group.release import RankLostError
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Core
from ddp_notebook.rank.survive.ring import RingConnections
from ddp_notebook.rank.variables import copying, samplers
from ddp_notebook.records.words import name_ranks
from ddp_notebook.stdlib import os, pickle, queue, re, threading, time

_LOOK_S = 0.1
_FREE_S = 0.02
_LOST_OTHERS = 1  # exit status of a new process that lost other ranks before it had its state; it is replaced again
_here: RankSurvival | None = None


def current() -> RankSurvival | None:
    """Return the object of this process; None if it is not a rank of a notebook."""
    return _here


class RankSurvival:
    """Recovery of this rank. Created in the main thread; one per process.

    Args:
        core: process groups, place and shell of the rank.
    """

    def __init__(self, core: Core) -> None:
        global _here
        _here = self
        self._core = core
        self._network = core.network
        self._send = core.send
        self._code = ""  # code of the cell
        self._is_in_loop = False
        self._waits = False
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._rings = (0, 0)  # epoch, and number of rings created in it
        self._loops: dict[int, int] = {}  # line of a statement in the cell -> number of its loops so far
        self.save_to = ""  # folder in which loops must save their state before they end; "": none
        self.resized: list[SamplerChange] = []  # changes of samplers after the number of ranks decreased
        self._resume: Resume | None = None  # set in a new process: the loop in which the next cell starts
        self.missing: list[int] = []  # ranks of the group that do not run the cell
        self.rejoining: tuple[Resume, RingConnections, bytes] | None = None  # in a new process until it is in its loop

    @property
    def _place(self) -> Form:
        place = self._core.place()
        assert place is not None  # no cell runs before the rank has a place
        return place

    @property
    def _cell(self) -> int:
        return (self._core.running() or (0, 0.0))[0]

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    # ---- the agent's thread

    def save(self, message: Save) -> bool:
        """Make loops save their state and end. Return True: the message is handled completely."""
        self.save_to = message.folder
        return True

    def resume(self, message: Resume) -> bool:
        """Continue the loop that this rank waits in. Return True, like `save`."""
        self._came.put(message)
        return True

    def reform(self, message: Form) -> bool:
        """Take a new place in the group if this rank waits in a loop. Return whether it waits."""
        if self._waits:
            self._came.put(message)
        return self._waits

    def on_lost(self) -> None:
        """Abort waits after ranks have died, because this rank may wait for another one that waits for them."""
        if self._is_to_notice():
            threading.Thread(target=self._free, name="ddp-survival", daemon=True).start()

    def _is_to_notice(self) -> bool:
        is_here = self._is_in_loop or self._resume is not None
        return is_here and not self._waits and self._network.release.has_lost

    def _free(self) -> None:
        """Abort connections repeatedly, since an operation may be about to start."""
        connections, recorder = self._network.connections, self._network.recorder
        with quiet():
            while self._is_to_notice():
                if recorder.waiting or recorder.operations() or connections.is_connecting:
                    connections.cut_groups()
                if connections.is_connecting:  # it may wait for the address of a dead rank
                    connections.cut_stores()
                time.sleep(_FREE_S)

    # ---- a cell

    def rejoin(self, resume: Resume) -> None:
        """Prepare a new process: the next cell starts in its loop."""
        self._resume = resume

    def prepare(self, code: str) -> str:
        """Return the code to run for a cell.

        A new process runs only the statement with the loop and all code after it; other processes run all code.

        A new process first receives its variables. It answers collectives before its loop locally.
        """
        self._code, self._loops = code, {}
        self._speak()
        if (resume := self._resume) is None:
            return code
        try:
            ring = self.make_ring()
            behind = (self.rank + 1) % self.world_size
            names, own = ring.receive(behind), ring.receive(behind)
        except RuntimeError as error:
            self.end_if_lost(error)
            raise
        self._core.shell.user_ns.update(unseen(pickle.loads, names))
        self.rejoining = resume, ring, own
        self._network.recorder.instead = self._alone = LocalCollectives().run
        return _from_statement(self._core.shell.transform_cell(code), resume.line)

    _alone: Callable[..., Any] | None = None

    def _speak(self) -> None:
        """Stop answering collectives locally."""
        if self._alone is not None and self._network.recorder.instead is self._alone:
            self._network.recorder.instead = None
        self._alone = None

    # ---- a loop

    def enter(self) -> bool:
        """Enter a loop in the main thread. Return False for a loop that a new process must skip."""
        line = self._line_of_statement()
        loop = self._loops[line] = self._loops.get(line, -1) + 1
        if self.rejoining is not None and loop < self.rejoining[0].loop:
            return False
        if self.missing:  # they may be dead, and connecting to them would never end
            raise RuntimeError(
                f"survive() needs all {self.world_size} ranks, but this cell does not run on "
                f"{name_ranks(self.missing)}; %ddp_heal replaces dead ranks, and %%on_all_ranks runs a cell on all"
            )
        self._speak()
        self._is_in_loop = True
        self._at = Survives(cell=self._cell, line=line, loop=loop)
        return True

    def is_whole(self) -> None:
        """Mark that this new process has the complete state of its rank."""
        self._resume, self.rejoining = None, None

    def begins(self, *, shrinks: bool) -> None:
        """Report that all ranks have started a first step and can repeat it: from now on this rank may die.

        Args:
            shrinks: whether the other ranks then continue without it.
        """
        self._at = replace(self._at, shrinks=shrinks)
        self._send(self._at)

    def leave(self) -> None:
        """Leave the loop."""
        self._is_in_loop, self._resume, self.rejoining = False, None, None
        self._send(Survives(cell=self._cell, line=0))

    def obstacles(self) -> list[str]:
        """Return obstacles to continuing with fewer ranks."""
        from ddp_notebook.rank.resize.blockers import ResizeBlockers  # the only use of another feature

        found = ResizeBlockers(self._core.shell.user_ns)
        return [*(f"{name} is {what}" for name, what in found.sharded.items()), *found.others]

    def is_loss(self, error: BaseException, *, in_body: bool = False) -> bool:
        """Return whether an error was raised because other ranks died, and not by a stop.

        Args:
            error: the error.
            in_body: whether user code raised it.
        """
        return self._network.is_broken_off(error, in_our_own_wait=not in_body)

    def wait_for_gpu(self) -> None:
        """Wait until the GPU has finished the step.

        With NCCL, this thread continues before the GPU does. A step that was aborted by a death leaves undefined
        parameters.

        Raises:
            RankLostError: other ranks have died.
        """
        if gpu.is_in_use():
            torch.cuda.synchronize()
            if self._network.release.has_lost:
                raise RankLostError("a rank died in the previous step")

    def end_if_lost(self, error: BaseException) -> None:
        """End this new process if other ranks have died before it had its state. It is then replaced again."""
        if self.is_loss(error):
            os._exit(_LOST_OTHERS)

    def wait(self, step: int, holds: bool) -> Resume:
        """Wait until all ranks (or the remaining ones) are available, and join the new group in the meantime.

        Args:
            step: last step that all ranks have started, as far as this rank knows.
            holds: whether it holds the copy of the previous rank.
        """
        with quiet():
            self._network.connections.cut_groups()  # other ranks would wait for this one in vain
        self._waits = True
        try:
            self._send(Stalls(cell=self._cell, step=step, holds=holds))
            while True:
                if self._network.release.is_under_way:  # an interrupt may have been lost while a loss was checked
                    raise KeyboardInterrupt
                try:
                    message = self._came.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(message, Resume):
                    return message
                assert isinstance(message, Form)
                before = self.rank, self.world_size
                self._core.take_place(message)
                if before != (now := (self.rank, self.world_size)):
                    self.resized = samplers.resize(before, now, self._core.shell.user_ns)
        finally:
            self._waits = False
            while not self._came.empty():
                self._core.hand_on(self._came.get())

    def make_ring(self) -> RingConnections:
        """Create connections between all ranks for a loop."""
        place = self._place
        epoch, count = self._rings
        self._rings = place.epoch, count + 1 if epoch == place.epoch else 1
        return RingConnections(place, self._rings[1], self._network.connections)

    def names(self) -> bytes:
        """Return the user's variables for a replacement process. Print those that cannot be included."""
        data, _, left = unseen(copying.read, self._core.shell.user_ns, (), self._core.shell.user_ns_hidden)
        words = set(re.findall(r"\w+", self._code)) if left else ()
        for name, why in left.items():
            if name in words:
                print(f"survive: a replaced rank will not have {name!r}: {why}", file=sys.stderr)
        return data

    def _line_of_statement(self) -> int:
        """Return the line of the cell's statement with the loop."""
        line = 1
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._network.where.cells and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        return line


def _from_statement(code: str, line: int) -> str:
    """Return the statement that includes this line and all code after it, with unchanged line numbers.

    Example:
        >>> _from_statement("x = 1\\nfor _ in x:\\n    pass\\ny = 2", 3)
        '\\nfor _ in x:\\n    pass\\ny = 2'
    """
    for node in ast.parse(code).body:
        if (node.end_lineno or node.lineno) >= line:
            rest = code.splitlines(keepends=True)[node.lineno - 1 :]
            return "\n" * (node.lineno - 1) + "".join(rest).encode()[node.col_offset :].decode()
    return code
