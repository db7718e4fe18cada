"""Change the number of ranks: check for blockers, select the ranks that stay, copy variables to new ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, RankError, SessionBrokenError, StartError, UsageError
from ddp_notebook.launch.cluster import Check, Cluster
from ddp_notebook.launch.options import MOST_RANKS
from ddp_notebook.launch.placement import Placement
from ddp_notebook.messages.ranks import Checked, Pulled
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.messages.resize_messages import Inspect, Resized, SamplerChange
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.session_hooks import SessionFeature
from ddp_notebook.run.values.exchange import check_name

if TYPE_CHECKING:
    from ddp_notebook.run.session_parts import SessionParts

_MODULE = "__import__('ddp_notebook.rank.resize.sharded', fromlist=['gather'])"
_NOTHING = RecordOptions(level="off")


class Sharded:
    """Moves sharded state when the number of ranks changes.

    Cells do this, so an error or a hang is handled like that of any other cell. The caller is at the head of the run
    queue.

    Args:
        cells: runs the cells.
        cluster: the ranks.
    """

    def __init__(self, cells: Cells, cluster: Cluster) -> None:
        self.is_left = False  # gathered state was not restored into a model yet
        self._cells = cells
        self._cluster = cluster

    def gather(self, build: str, names: Sequence[str]) -> None:
        """Gather these variables in rank 0's memory.

        Raises:
            RankError: this failed, or the function does not exist; nothing was changed.
        """
        self._run(f"{_MODULE}.gather(globals(), {build!r}, {list(names)!r})")
        self.is_left = True

    def build(self, build: str) -> list[str]:
        """Rebuild the models. Return sentences about it.

        Raises:
            RankError: this failed and can be repeated: rank 0 has the gathered state.
        """
        try:
            self._run(f"{_MODULE}.build(globals(), {build!r})")
        except RankError as error:
            count = len(self._cluster.ranks)
            hint = (
                f"the session has {'1 rank' if count == 1 else f'{count} ranks'}, and rank 0 holds the gathered state: "
            )
            hint += f"correct {build}() and repeat this line"
            kind = type(error)
            raise kind(error.tracebacks, error.summaries, error.result, hint=hint, others=error.others) from None
        self.is_left = False
        return [f"{build}() has rebuilt the sharded objects, with the state that they had"]

    def _run(self, code: str) -> None:
        self._cells.run(code, lambda: (self._cluster.ranks, []), record=_NOTHING, place=nullcontext())


_MOST_NAMED = 8
_OF_RANDOM = "random state of "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Plan of a resize."""

    before: int  # number of ranks
    stay: list[int]  # old ranks in the order of their new numbers
    placement: Placement
    same: list[str]  # variables and random states that new ranks get
    own: list[str]  # variables that differ between ranks, which new ranks do not get
    sharded: list[str]  # sharded variables, which are rebuilt

    @property
    def new(self) -> list[int]:
        return list(range(len(self.stay), self.placement.world_size))


class Resizing(SessionFeature):
    """Resizes a session."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._cluster = parts.cluster
        self._cells = parts.cells
        self._questions = parts.questions
        self._liveness = parts.liveness
        self._may_share = parts.options.share_gpus
        self._sharded = Sharded(parts.cells, parts.cluster)
        self._meetings = itertools.count(1)
        self._own: set[str] = set()  # variables that differed at the last comparison of several ranks

    def resize(self, world_size: int, build: str | None, without: RankSet) -> list[str]:
        """Change the number of ranks, see `SessionRanks.resize`."""
        if isinstance(world_size, bool) or not isinstance(world_size, int):
            raise UsageError(
                "world_size must be a positive integer, as in %ddp_resize 4 (session.ranks.resize(4)), got "
                f"{world_size!r}"
            )
        if world_size < 1:
            raise UsageError(f"world_size must be at least 1, got {world_size}; %ddp_stop ends all ranks")
        if world_size > MOST_RANKS:
            raise UsageError(f"a session has at most {MOST_RANKS:,} ranks, got N = {world_size}")
        if build is not None:
            check_name(build)
        earlier = self._cells.before_turn()
        with self._turn():  # one slot for all steps, so that no cell runs between the plan and its execution
            plan = self._plan(world_size, without, build)
            if plan is None:
                if build is not None and self._sharded.is_left:
                    return self._sharded.build(build)
                return [*earlier, f"there {'is 1 rank' if world_size == 1 else f'are {world_size} ranks'} already"]
            if plan.sharded:
                assert build is not None
                self._sharded.gather(build, plan.sharded)
            notes = [*earlier, *self._carry_out(plan)]
            for resized in self.parts.hooks.resized:
                resized()
            if plan.sharded:
                assert build is not None
                notes += self._sharded.build(build)
            return notes

    @contextmanager
    def _turn(self) -> Any:
        with self._cells.run_queue.if_free() as is_ours:
            if not is_ours:
                raise SessionBrokenError(
                    "a cell is running, and the number of ranks cannot change until it ends: wait for it, or end it "
                    "with %ddp_interrupt"
                )
            self._liveness.check_host()
            self._cells.check_idle()
            self._liveness.check_cells_arrive()
            if trouble := self._cluster.trouble():
                raise SessionBrokenError(trouble)
            self._cells.recovery.check_calls()
            yield

    # ---- before anything changes

    def _plan(self, world_size: int, without: RankSet, build: str | None) -> _Plan | None:
        """Return the plan, or None if nothing changes.

        Raises:
            UsageError: the change is not possible.
        """
        ranks = self._cluster.ranks
        leave = {*self._cluster.gone, *([] if without is None else self._liveness.parse(without))}
        stay = [rank for rank in ranks if rank not in leave][:world_size]
        if not stay:
            raise UsageError("at least one rank must stay, or all variables are lost: list fewer ranks in --without")
        if len(stay) == len(ranks) == world_size:
            return None
        placement = self._cluster.place(stay, world_size, may_share=self._may_share)
        found = self._inspect(compares=world_size > len(stay) or len(stay) == 1)
        sharded = {name: what for answer in found.values() for name, what in answer["sharded"].items()}
        _refuse([one for answer in found.values() for one in answer["others"]], sharded, build)
        if sharded and 0 not in stay:
            raise UsageError("rank 0 gathers the sharded variables, so it must stay: leave it out of --without")
        same, own = self._compare({rank: answer["digests"] for rank, answer in found.items()}, stay[0])
        return _Plan(before=len(ranks), stay=stay, placement=placement, same=same, own=own, sharded=sorted(sharded))

    def _inspect(self, *, compares: bool) -> dict[int, dict[str, Any]]:
        answers: dict[int, Checked] = self._questions.ask_all(
            self._cluster.alive, lambda n: Inspect(request=n, compares=compares)
        )
        for rank, answer in answers.items():
            if answer.error:
                raise DDPNotebookError(f"rank {rank} could not inspect its variables: {answer.error}")
        return {rank: answer.facts for rank, answer in answers.items()}

    def _compare(self, digests: Mapping[int, Mapping[str, str]], giver: int) -> tuple[list[str], list[str]]:
        """Return the names of variables that are equal on all ranks, and of those that differ.

        With one rank, those differ that differed when the session had more ranks.
        """
        everywhere = digests[giver]
        names = sorted({name for of_rank in digests.values() for name in of_rank})
        if len(digests) > 1:
            self._own = {n for n in names if any(of.get(n) != everywhere.get(n) for of in digests.values())}
        return [n for n in everywhere if n not in self._own], [n for n in names if n in self._own]

    # ---- doing it

    def _carry_out(self, plan: _Plan) -> list[str]:
        done = ""

        def renumbered(stayed: Mapping[int, int]) -> None:
            nonlocal done
            done = f"{_now(plan)}, and the next cell forms their group" + _copy_later(plan)
            self.parts.on_renumbered(stayed)

        with Interrupts(lambda: None) as interrupts:
            try:
                for before in self.parts.hooks.before_renumbering:
                    before()
                notes = self._cells.recovery.resize(plan.stay, plan.placement, interrupts.check, renumbered)
                done = _now(plan) + _copy_later(plan)
                settled = self._settle(plan, interrupts.check)
                self._cluster.note_supplied()
                lines: list[str] | None = [_now(plan), *notes, *settled]
            except StartError as error:
                raise StartError(f"{error}. {done[0].upper()}{done[1:]}" if done else str(error)) from error
            except KeyboardInterrupt:
                lines = None  # raised below, so that the traceback has no frames of this package
        if lines is not None:
            interrupts.raise_late(f"the resize is complete: {'; '.join(lines)}")
            return lines
        raise keyboard_interrupt(f"resizing was interrupted: {done or 'nothing was changed'}")

    def _settle(self, plan: _Plan, check: Check) -> list[str]:
        """Send new ranks their variables, and adapt samplers to the number of ranks."""
        meeting = f"handover-{next(self._meetings)}"
        new = plan.new

        def message(rank: int, request: int) -> Resized:
            was = plan.stay[rank] if rank < len(plan.stay) else plan.stay[0]
            asked = Resized(request=request, was_rank=was, was_world_size=plan.before)
            if not new or 0 < rank < len(plan.stay):
                return asked
            random = [name for name in plan.same if name.startswith(_OF_RANDOM)]
            return replace(
                asked,
                number=max(0, rank - len(plan.stay) + 1),
                size=len(new) + 1,
                meeting=meeting,
                names=[name for name in plan.same if name not in random] if rank == 0 else [],
                random=random,
            )

        asked = {r: self._questions.ask(r, lambda n, r=r: message(r, n)) for r in self._cluster.ranks}  # type: ignore[misc]
        answers: dict[int, Pulled] = {rank: self._questions.wait_for(rank, one, check) for rank, one in asked.items()}
        for rank, answer in answers.items():
            if answer.error:
                raise DDPNotebookError(f"{_now(plan)}. But rank {rank} failed: {answer.error}{_copy_later(plan)}")
        abouts = {rank: json.loads(answer.about) for rank, answer in answers.items()}
        copied = _copied(plan, abouts[0]) if new else []
        return [*copied, *_of_samplers(plan, {rank: about["samplers"] for rank, about in abouts.items()})]


def _refuse(others: Sequence[str], sharded: Mapping[str, str], build: str | None) -> None:
    """Raise UsageError if something blocks the change."""
    if others:
        raise UsageError(f"the number of ranks cannot change now: {'; '.join(dict.fromkeys(others))}")
    if sharded and build is None:
        what = ", ".join(f"{name} is {of}" for name, of in sharded.items())
        raise UsageError(
            f"the number of ranks cannot change: {what}, and the shards of leaving ranks would be lost. Pass a "
            "function that builds these variables again and returns them in a dict: %ddp_resize N --build make. Or "
            "save them with torch.distributed.checkpoint, del them, and load them afterwards"
        )


def _now(plan: _Plan) -> str:
    """Return a sentence with the number of ranks, and the new, removed and renumbered ones."""
    count = plan.placement.world_size
    parts = []
    if left := [rank for rank in range(plan.before) if rank not in plan.stay]:
        parts.append(f"{list_ranks(left)} {'has' if len(left) == 1 else 'have'} left")
    if moved := [(was, now) for now, was in enumerate(plan.stay) if was != now]:
        parts.append(", ".join(f"rank {was} is rank {now}" for was, now in moved))
    if plan.new:
        parts.append(f"{list_ranks(plan.new)} {'is' if len(plan.new) == 1 else 'are'} new")
    return f"{count} rank{'s' * (count != 1)} now: {'; '.join(parts)}"


def _copy_later(plan: _Plan) -> str:
    if not plan.new:
        return ""
    return f". {list_ranks(plan.new).capitalize()} may lack variables: %ddp_heal --from 0 copies those of rank 0"


def _copied(plan: _Plan, about: Mapping[str, Any]) -> list[str]:
    """Return sentences about the variables that new ranks got, and those that they did not get."""
    names, to = about["names"], list_ranks(plan.new)
    variables = "1 variable" if len(names) == 1 else f"{len(names)} variables"
    lines = [f"{variables} of rank 0 copied to {to}: {_few(names)}"] if names else []
    lines += [f"{name} was not copied: {why}" for name, why in about["left"].items()]
    own = [name for name in plan.own if not name.startswith(_OF_RANDOM)]
    if own:
        lines.append(f"not copied, because each rank has its own: {_few(own)}; define what you need on {to}")
    if drawn := [name.removeprefix(_OF_RANDOM) for name in plan.own if name.startswith(_OF_RANDOM)]:
        lines.append(f"each rank has its own random state of {', '.join(drawn)}, and so {to}")
    return lines


def _of_samplers(plan: _Plan, by_rank: Mapping[int, Sequence[dict[str, Any]]]) -> list[str]:
    """Return sentences about changed samplers. A new rank may lack the sampler of other ranks."""
    changes = {rank: [SamplerChange.of_json(one) for one in told] for rank, told in by_rank.items()}
    said = []
    for change in dict.fromkeys(one for of_rank in changes.values() for one in of_rank):
        lacking = [rank for rank in plan.new if change not in changes[rank]]
        if lacking and not change.is_left and change.count == 1:
            verb = "lacks" if len(lacking) == 1 else "lack"
            said.append(f"{change.what}, but {list_ranks(lacking)} {verb} it: define it on these ranks too")
        else:
            said.append(str(change))
    return said


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + ", ..." * (len(names) > _MOST_NAMED)
