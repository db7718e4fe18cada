"""The steps of a survivable loop, as the user sees them.

Before each step every rank keeps what the step changes and gives the next rank a copy of what is its own. When all have
done that, the step begins, and when ranks die it begins again with what was kept. So a rank may be one step ahead of
another, never two, and the step that all do again is the last one that any of them has begun.
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
    """One step: put `with step:` around all that it does.

    Attributes:
        number: from 0 on.
        batch: of the loader or sampler that `survive` got, the same one when the step is done again; None: it got none.
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
    """One loop on one rank.

    Args:
        survival: this rank's.
        members: what steps change.
        steps: how many.
        shrinks: it goes on with fewer ranks when some die, and so no copies are given on.
        resume: a folder; it begins with the last step that was saved there, if any was.
    """

    def __init__(
        self, survival: RankSurvival, members: TrackedObjects, steps: int, *, shrinks: bool, resume: str
    ) -> None:
        self._survival = survival
        self._members = members
        self._steps = steps
        self._shrinks = shrinks
        self._resume = resume
        self._size = survival.world_size  # how many ranks share the data
        self._ring: RingConnections | None = None
        self._is_told = False  # the notebook, that this rank may die
        self._begun = -1  # the last step that all ranks have begun
        self._own: dict[int, bytes] = {}  # by step: what was this rank's own before it
        self._held: dict[int, bytes] = {}  # the same of the rank before this one

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
        """Returns the first step: 0, or in a new process the one that the others do again."""
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
        """Let the next rank hold the variables, from which a new process begins."""
        assert self._ring is not None
        if self._ring.size > 1 and not self._shrinks:
            self._names_held = self._ring.pass_on(self._survival.names())

    def _begin(self, number: int) -> int:
        """All begin a step, or the one that they have gone back to meanwhile. Returns which."""
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
                    raise ValueError(f"ranks are at different steps of survive(): this one at {number}")
                self._members.buckets.settle()
                if saves and number:  # before a first step optimizers have no state
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
        """All have done the steps before this one, and nothing of it has happened: write that down, and end."""
        path = checkpoint.save(self._survival.save_to, number, self._members, self._own[number])
        raise checkpoint.PreemptedError(
            f"the machine is about to be taken away, and all ranks have saved what they had before step {number}: "
            f"{path}. Run the cell again with survive(..., steps={self._steps}, resume={str(Path(path).parent)!r}) to "
            'go on there; torch.distributed.checkpoint.load reads it too ("model" and "optimizer")'
        )

    def _load(self) -> int:
        """Returns the first step: 0, or the one that was saved last."""
        if not self._resume:
            return 0
        if (path := checkpoint.newest(self._resume)) is None:
            self._print(f"nothing was saved in {self._resume}, so it begins with step 0")
            return 0
        ranks, size = checkpoint.load(path, self._members), self._survival.world_size
        self._print(f"it goes on with step {checkpoint.step_of(path)}, saved in {path}")
        if ranks != size:
            own = "random numbers, the position in the data, buffers and other named objects have their initial values"
            self._print(f"it was saved by {ranks} ranks and there are {size} now: {own}")
        return checkpoint.step_of(path)

    def _print(self, what: str) -> None:
        if self._survival.rank == 0:
            print(f"survive: {what}", file=sys.stderr)

    def _is_at(self, number: int) -> None:
        """All have begun this step, and nothing of it has happened."""
        self._begun = number
        unseen(self._members.keep)
        for kept in (self._own, self._held):
            for old in [one for one in kept if one < number - 1]:
                del kept[old]

    def _go_back(self) -> int:
        """Others are gone: be as before the step that all do again. Returns which."""
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
        """All reducers are new where a rank is: let their buckets be what they were."""
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
        """Share the data from this step on, and say what a step is now."""
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
