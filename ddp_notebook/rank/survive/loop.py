"""Iteration over the steps of a survivable loop.

Before each step, every rank saves the state that the step changes and sends a copy of its individual state to the next
rank. The step starts when all ranks have done this. If ranks die, the step starts again with the saved state. So ranks
differ by at most one step, and the step to repeat is the last one that any rank has started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from ddp_notebook.messages.resize_messages import SamplerChange
from ddp_notebook.messages.survive_messages import Resume
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.survive import checkpoint
from ddp_notebook.rank.survive.ring import RingConnections
from ddp_notebook.rank.survive.survival import RankSurvival
from ddp_notebook.rank.survive.tracked import TrackedObjects
from ddp_notebook.stdlib import json


class SurvivingStep:
    """One step. Put `with step:` around its whole body.

    Attributes:
        number: number of the step, from 0.
        batch: batch from the loader or sampler passed to `survive`, the same batch if the step is repeated; None
            without a loader or sampler.
    """

    def __init__(self, number: int, batch: Any = None, survival: RankSurvival | None = None) -> None:
        self.number = number
        self.batch = batch
        self._survival = survival
        self._was_entered = self._is_lost = False

    def __enter__(self) -> SurvivingStep:
        self._was_entered = True
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        survival = self._survival
        self._is_lost = error is not None and survival is not None and survival.is_loss(error, in_body=True)
        return self._is_lost

    def __reduce__(self) -> tuple[Any, ...]:
        return SurvivingStep, (self.number, self.batch)

    def __index__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<step {self.number}>"


class Loop:
    """One survivable loop on one rank.

    Args:
        survival: recovery object of this rank.
        members: objects that steps change.
        steps: number of steps.
        shrinks: whether to continue with fewer ranks when some die. Then no copies are sent.
        resume: folder with a saved state to continue from, if it contains one.
    """

    def __init__(
        self, survival: RankSurvival, members: TrackedObjects, steps: int, *, shrinks: bool, resume: str
    ) -> None:
        self._survival = survival
        self._members = members
        self._steps = steps
        self._shrinks = shrinks
        self._resume = resume
        self._size = survival.world_size  # number of ranks that share the data
        self._ring: RingConnections | None = None
        self._is_told = False  # True if the notebook knows that this rank may die
        self._begun = -1  # last step that all ranks have started
        self._own: dict[int, bytes] = {}  # step -> individual state of this rank before it
        self._held: dict[int, bytes] = {}  # step -> individual state of the previous rank before it

    def __iter__(self) -> Iterator[SurvivingStep]:
        if not self._survival.enter():
            return
        try:
            number = self._enter()
            while (number := self._begin(number)) < self._steps:
                batch = None if self._members.batches is None else self._members.batches.at(number)
                step = SurvivingStep(number, batch, self._survival)
                yield step
                if not step._was_entered:
                    raise RuntimeError("survive() needs `with step:` around the body of its loop")
                number = self._go_back() if step._is_lost else number + 1
        finally:
            self._survival.leave()

    def _enter(self) -> int:
        """Return the first step: 0, or in a new process the step that the other ranks repeat."""
        if (rejoining := self._survival.rejoining) is None:
            self._ring = self._survival.make_ring()
            self._share_names()
            return self._load()
        resume, self._ring, own = rejoining
        try:
            shared = self._ring.receive(resume.source)
            unseen(self._members.take_shared, shared)
            self._members.forget_gradients()
            unseen(self._members.take_own, own, resume.step)
            self._own[resume.step] = own
            self._is_at(resume.step)
            self._share_names()
        except RuntimeError as error:
            self._survival.end_if_lost(error)
            raise
        self._survival.is_whole()
        return resume.step

    def _share_names(self) -> None:
        """Send the variables to the next rank, which keeps them for a replacement process."""
        assert self._ring is not None
        if self._ring.size > 1 and not self._shrinks:
            self._names_held = self._ring.pass_on(self._survival.names())

    def _begin(self, number: int) -> int:
        """Start a step on all ranks, or after a loss the step to repeat. Return its number."""
        members = self._members
        while True:
            ring = self._ring
            assert ring is not None
            try:
                if members.batches is not None and number < self._steps:
                    members.batches.at(number)
                self._survival.wait_for_gpu()
                members.forget_gradients()
                own = self._own[number] = unseen(members.own, number)
                if ring.size > 1 and not self._shrinks:
                    self._held[number] = ring.pass_on(own)
                is_same, saves = ring.agree_on(number, bool(self._survival.save_to))
                if not is_same:
                    raise ValueError(
                        f"all ranks must be at the same step of survive(), but this rank is at step {number}"
                    )
                self._members.buckets.settle()
                if saves and number:  # optimizers have no state before the first step
                    self._save(number)
            except (RuntimeError, CheckpointException) as error:
                if not self._survival.is_loss(error):
                    raise
                number = self._go_back()
                continue
            self._is_at(number)
            if not self._is_told:
                self._survival.begins(shrinks=self._shrinks)
                self._is_told = True
            return number

    def _save(self, number: int) -> None:
        """Save the state from before this step, and end the loop."""
        path = checkpoint.save(self._survival.save_to, number, self._members, self._own[number])
        raise checkpoint.PreemptedError(
            f"the machine will be preempted, so all ranks have saved their state before step {number} to {path}. To "
            f"continue, run the cell again with survive(..., steps={self._steps}, resume={str(Path(path).parent)!r}). "
            'torch.distributed.checkpoint.load also reads it ("model" and "optimizer")'
        )

    def _load(self) -> int:
        """Return the first step: 0, or the last saved one."""
        if not self._resume:
            return 0
        if (path := checkpoint.newest(self._resume)) is None:
            self._print(f"nothing was saved in {self._resume}, so it begins with step 0")
            return 0
        ranks, size = checkpoint.load(path, self._members), self._survival.world_size
        self._print(f"training continues with step {checkpoint.step_of(path)}, saved in {path}")
        if ranks != size:
            own = "random numbers, the position in the data, buffers and other named objects have their initial values"
            self._print(f"it was saved by {ranks} ranks, and {size} are running now: {own}")
        return checkpoint.step_of(path)

    def _print(self, what: str) -> None:
        if self._survival.rank == 0:
            print(f"survive: {what}", file=sys.stderr)

    def _is_at(self, number: int) -> None:
        """Save the state before a step that all ranks have started."""
        self._begun = number
        unseen(self._members.keep)
        for kept in (self._own, self._held):
            for old in [one for one in kept if one < number - 1]:
                del kept[old]

    def _go_back(self) -> int:
        """Recover after ranks have died: wait, and restore the state from before the step to repeat.

        Return its number.
        """
        while True:
            resume = self._survival.wait(self._begun, bool(self._held))
            step = resume.step
            if step == self._begun:
                self._members.forget_gradients()
                unseen(self._members.put_back)
                unseen(self._members.take_own, self._own[step])
            if self._size != self._survival.world_size:
                self._go_on_with_fewer(step)
            try:
                ring = self._ring = self._survival.make_ring()
                for newcomer in resume.newcomers:
                    if (newcomer + 1) % ring.size == ring.rank:
                        ring.send(newcomer, self._names_held)
                        ring.send(newcomer, self._held[step])
                    if resume.source == ring.rank:
                        ring.send(newcomer, unseen(self._members.shared))
                self._share_buckets(resume)
                self._is_at(step)
                self._share_names()
                return step
            except RuntimeError as error:
                if not self._survival.is_loss(error):
                    raise

    def _share_buckets(self, resume: Resume) -> None:
        """Give all reducers their previous buckets. All reducers are new if a rank was replaced."""
        ring, buckets = self._ring, self._members.buckets
        assert ring is not None
        if not resume.newcomers:
            return
        if ring.rank != resume.source:
            buckets.make(json.loads(ring.receive(resume.source)))
            return
        for rank in range(ring.size):
            if rank != ring.rank and rank not in resume.newcomers:
                ring.send(rank, json.dumps(buckets.known).encode())
        buckets.make(buckets.known)

    def _go_on_with_fewer(self, step: int) -> None:
        """Share the data among fewer ranks from this step on, and print the new size of a step."""
        was, now = self._size, self._survival.world_size
        self._size = now
        batches = self._members.batches
        if batches is not None:
            unseen(batches.share_anew, step, was, now)
        own = SamplerChange(batch_size=0 if batches is None else batches.batch_size, was=was, now=now)
        changes = self._survival.resized
        if not any(change.batch_size and change.of_step == own.of_step for change in changes):
            self._print(own.of_step)
        for change in changes:
            self._print(str(change))
