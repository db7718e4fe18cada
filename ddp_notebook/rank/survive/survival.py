"""What a rank does in a survivable loop when others are gone: it waits until the notebook has formed the group anew
with new processes for them, and goes back to the step that all do again.

A new process has none of what earlier cells have made. It gets the variables that its rank had when the loop began,
from the rank behind it, runs the cell from the statement with the loop on, and there gets the rest.
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
_LOST_OTHERS = 1  # how a new process ends that has lost the others before it had its state: it is replaced once more
_here: RankSurvival | None = None


def current() -> RankSurvival | None:
    """That of this process; None: it is no rank of a notebook's."""
    return _here


class RankSurvival:
    """The half of a rank in its survival. Made in its main thread; one per process.

    Args:
        core: the rank's groups, place and shell.
    """

    def __init__(self, core: Core) -> None:
        global _here
        _here = self
        self._core = core
        self._network = core.network
        self._send = core.send
        self._code = ""  # of the cell
        self._is_in_loop = False
        self._waits = False
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._rings = (0, 0)  # the epoch, and how many rings were made in it
        self._loops: dict[int, int] = {}  # by line of the cell's statement: loops so far
        self.save_to = ""  # a folder: loops are to write their state there, and to end
        self.resized: list[SamplerChange] = []  # of samplers, when there were fewer ranks
        self._resume: Resume | None = None  # this process is new, and the cell to come is to begin with that
        self.missing: list[int] = []  # ranks of the group that do not run the cell
        self.rejoining: tuple[Resume, RingConnections, bytes] | None = None  # until it is in its loop

    @property
    def _place(self) -> Form:
        place = self._core.place()
        assert place is not None  # no cell runs before the rank has one
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
        """Let loops write their state, and end. Returns True: the message needs nothing else."""
        self.save_to = message.folder
        return True

    def resume(self, message: Resume) -> bool:
        """Go on with the loop that this rank waits in. Returns True, like `save`."""
        self._came.put(message)
        return True

    def reform(self, message: Form) -> bool:
        """Take a new place if this rank waits in a loop. Returns whether it does."""
        if self._waits:
            self._came.put(message)
        return self._waits

    def on_lost(self) -> None:
        """Ranks have died: whoever waits for one that waits for them is to notice too."""
        if self._is_to_notice():
            threading.Thread(target=self._free, name="ddp-survival", daemon=True).start()

    def _is_to_notice(self) -> bool:
        is_here = self._is_in_loop or self._resume is not None
        return is_here and not self._waits and self._network.release.has_lost

    def _free(self) -> None:
        """Again and again, since an operation may be just about to begin."""
        connections, recorder = self._network.connections, self._network.recorder
        with quiet():
            while self._is_to_notice():
                if recorder.waiting or recorder.operations() or connections.is_connecting:
                    connections.cut_groups()
                if connections.is_connecting:  # it may wait for the address of one that is gone
                    connections.cut_stores()
                time.sleep(_FREE_S)

    # ---- a cell

    def rejoin(self, resume: Resume) -> None:
        """This process is new: the next cell begins in the middle."""
        self._resume = resume

    def prepare(self, code: str) -> str:
        """A cell begins. Returns what is to run of it: all, or in a new process the statement with the loop and what
        follows, once it has its variables. What that calls before its loop is answered by the rank itself."""
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
        """Operations go to the others."""
        if self._alone is not None and self._network.recorder.instead is self._alone:
            self._network.recorder.instead = None
        self._alone = None

    # ---- a loop

    def enter(self) -> bool:
        """The main thread has come to a loop. False: one that a new process has to leave out."""
        line = self._line_of_statement()
        loop = self._loops[line] = self._loops.get(line, -1) + 1
        if self.rejoining is not None and loop < self.rejoining[0].loop:
            return False
        if self.missing:  # they may be dead: their connections would be waited for without end
            raise RuntimeError(
                f"survive() needs all {self.world_size} ranks, and this cell does not run on "
                f"{name_ranks(self.missing)}; %ddp_heal replaces dead ranks, and %%on_all_ranks runs a cell on all"
            )
        self._speak()
        self._is_in_loop = True
        self._at = Survives(cell=self._cell, line=line, loop=loop)
        return True

    def is_whole(self) -> None:
        """This process is new, and has now all that its rank had."""
        self._resume, self.rejoining = None, None

    def begins(self, *, shrinks: bool) -> None:
        """All have begun a first step, and can do it again: from now on this rank may die.

        Args:
            shrinks: the others go on without it, then.
        """
        self._at = replace(self._at, shrinks=shrinks)
        self._send(self._at)

    def leave(self) -> None:
        """The loop is over."""
        self._is_in_loop, self._resume, self.rejoining = False, None, None
        self._send(Survives(cell=self._cell, line=0))

    def obstacles(self) -> list[str]:
        """What is in the way of fewer ranks."""
        from ddp_notebook.rank.resize.blockers import ResizeBlockers  # the only use of another feature

        found = ResizeBlockers(self._core.shell.user_ns)
        return [*(f"{name} is {what}" for name, what in found.sharded.items()), *found.others]

    def is_loss(self, error: BaseException, *, in_body: bool = False) -> bool:
        """Whether this was raised because others are gone, and not by a stop.

        Args:
            in_body: by the user's code.
        """
        return self._network.is_broken_off(error, in_our_own_wait=not in_body)

    def wait_for_gpu(self) -> None:
        """Over NCCL this thread goes on while a GPU has still to do the step, and a step that a death has cut leaves
        anything in the parameters.

        Raises:
            RankLostError: others are gone.
        """
        if gpu.is_in_use():
            torch.cuda.synchronize()
            if self._network.release.has_lost:
                raise RankLostError("a rank has died in the step before")

    def end_if_lost(self, error: BaseException) -> None:
        """Others are gone again, and this process, which is new, has not yet all that it needs: it ends, and is
        replaced once more."""
        if self.is_loss(error):
            os._exit(_LOST_OTHERS)

    def wait(self, step: int, holds: bool) -> Resume:
        """Wait until all are there again, or those that are left, and do meanwhile what that needs.

        Args:
            step: the last one that all have begun, as far as this rank knows.
            holds: whether it holds the copy of the rank before it.
        """
        with quiet():
            self._network.connections.cut_groups()  # who waits for this rank waits in vain
        self._waits = True
        try:
            self._send(Stalls(cell=self._cell, step=step, holds=holds))
            while True:
                if self._network.release.is_under_way:  # an interrupt while a loss was looked into may have been lost
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
        """Connections of all ranks, for a loop."""
        place = self._place
        epoch, count = self._rings
        self._rings = place.epoch, count + 1 if epoch == place.epoch else 1
        return RingConnections(place, self._rings[1], self._network.connections)

    def names(self) -> bytes:
        """The user's variables, for the process that may come after this one. Says which are left out."""
        data, _, left = unseen(copying.read, self._core.shell.user_ns, (), self._core.shell.user_ns_hidden)
        words = set(re.findall(r"\w+", self._code)) if left else ()
        for name, why in left.items():
            if name in words:
                print(f"survive: a rank that is replaced will be without {name!r}: {why}", file=sys.stderr)
        return data

    def _line_of_statement(self) -> int:
        """Of the cell's own code, in which the loop is."""
        line = 1
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._network.where.cells and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        return line


def _from_statement(code: str, line: int) -> str:
    """The statement that has this line, and what follows, where they are.

    Example:
        >>> _from_statement("x = 1\\nfor _ in x:\\n    pass\\ny = 2", 3)
        '\\nfor _ in x:\\n    pass\\ny = 2'
    """
    for node in ast.parse(code).body:
        if (node.end_lineno or node.lineno) >= line:
            rest = code.splitlines(keepends=True)[node.lineno - 1 :]
            return "\n" * (node.lineno - 1) + "".join(rest).encode()[node.col_offset :].decode()
    return code
