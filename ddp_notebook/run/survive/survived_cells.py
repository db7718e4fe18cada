"""Handle the death of a rank in a `ddp_notebook.survive` loop: replace it while the cell runs, or continue without it.

The other ranks stop by themselves and report the step that they have started. When all have reported, the dead ranks
get new processes and the group is formed again. The new processes run the cell from its loop on. Then all ranks are
notified which step to repeat. With `on_loss="shrink"`, the session is resized and not healed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.errors import HostError, StartError, UsageError
from ddp_notebook.launch.cluster import Check
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.messages.survive_messages import Resume, Stalls, Survives
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.launch.preemption import Preemption
    from ddp_notebook.run.session_parts import SessionParts

_MOST_TRIES = 10  # attempts in a row, because a new process may be killed too
# time after the last report in which a death may still be noticed; then the group is formed with the same ranks
_SETTLE_S = 0.5


class CellSurvival(SessionFeature):
    """State of the `survive` loops in the running cell, as reported by ranks."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._cluster = parts.cluster
        self._recovery = parts.cells.recovery
        self._preemption: Preemption | None = None
        self._begin: RunCell | None = None  # the running cell
        self._at: Survives | None = None  # the loop in which ranks are
        self._loops: set[int] = set()  # ranks in the loop
        self._stalled: dict[int, Stalls] = {}  # reports by waiting ranks
        self._joining: set[int] = set()  # ranks with new processes that have not reached their loop yet
        self._stalled_s = 0.0
        self._tries = 0
        self._cannot = ""  # reason why the cell must fail
        if (folder := parts.options.on_preempt) is not None:
            from ddp_notebook.launch.preemption import Preemption

            self._preemption = Preemption(folder, self._cluster, lambda: self.is_in_loop)

    def started(self, *, is_attached: bool) -> None:
        if self._preemption is not None and not is_attached:  # otherwise the keeper handles the warnings
            self._preemption.begin()
            self.parts.hosts.tell_of_warnings(self._preemption.hear)

    def close(self) -> None:
        if self._preemption is not None:
            self._preemption.end()

    def cell_begins(self, cell: RunCell) -> None:
        self._begin, self._tries, self._cannot = cell, 0, ""
        self._at, self._loops, self._stalled, self._joining = None, set(), {}, set()

    @property
    def is_in_loop(self) -> bool:
        """Return whether ranks are in a loop now."""
        return bool(self._loops)

    # ---- I/O threads

    def handlers(self) -> Handlers:
        return {Survives: self._on_survives, Stalls: self._on_stalls}

    def _on_survives(self, rank: int, message: Survives) -> None:
        if self._begin is None or message.cell != self._begin.cell:
            return
        if message.line:
            self._at = message
            self._loops.add(rank)
            self._joining.discard(rank)
        else:
            self._loops.discard(rank)

    def _on_stalls(self, rank: int, message: Stalls) -> None:
        if self._begin is not None and message.cell == self._begin.cell:
            self._stalled[rank] = message
            self._stalled_s = time.monotonic()

    # ---- the thread that waits for the cell

    def survives(self, run: CellRun, check: Check) -> bool:
        """Replace dead ranks, or remove them, so that the cell can continue.

        Args:
            check: called often; a KeyboardInterrupt that it raises ends the healing.

        Returns:
            Whether the cell continues although ranks died.
        """
        gone = [rank for rank in self._cluster.gone if rank in run.result.by_rank]
        if not (gone or self._stalled) or self._cannot:
            return False
        living = [rank for rank in run.pending if rank not in gone]
        if not living or any(one.status in ("error", "interrupted") for one in run.result.by_rank.values()):
            return False
        if len(living) + len(gone) < len(run.result.ranks):  # some have ended the cell
            return False
        if not all(rank in self._loops or rank in self._joining for rank in living):
            return False
        stalled = dict(self._stalled)
        if any(rank not in stalled for rank in living):
            return True  # the other ranks will notice the death at their next operation
        if not gone and time.monotonic() - self._stalled_s < _SETTLE_S:
            return True  # the death that they noticed was not reported yet
        self._cannot = self._why_not(gone, living, stalled)
        if not self._cannot:
            self._bring_together(run, gone, living, check)
        if self._cannot:
            run.note(self._cannot)
        return not self._cannot

    def _why_not(self, gone: Sequence[int], living: Sequence[int], stalled: Mapping[int, Stalls]) -> str:
        size = len(self._cluster.ranks)
        if len(gone) + len(living) < size:
            return "the cell cannot continue without the ranks on which it does not run"
        if max(stalled[rank].step for rank in living) < 0:
            return f"{list_ranks(list(gone))} died before the first step of the loop, and the cell ends"
        if self._shrinks:
            return ""
        for rank in gone:
            behind = (rank + 1) % size
            if behind in gone:
                return f"rank {rank} died together with rank {behind}, which held its copy: the cell ends"
            if not stalled[behind].holds:
                return f"rank {rank} died before rank {behind}, which is new itself, had its copy: the cell ends"
        return ""

    @property
    def _shrinks(self) -> bool:
        return self._at is not None and self._at.shrinks

    def _bring_together(self, run: CellRun, gone: list[int], living: list[int], check: Check) -> None:
        assert self._begin is not None and self._at is not None
        began = time.monotonic()
        how = {rank: self._cluster.process(rank).how for rank in gone}
        newcomers = [] if self._shrinks else gone
        try:
            if newcomers:
                notes = self._recovery.heal(check)
            elif gone:
                notes = self._shrink(run, living, check)
            else:
                notes = self._recovery.form(check=check)
        except StartError as error:
            self._tries += 1
            if self._tries >= _MOST_TRIES:
                self._cannot = f"{error}. The cell ends"
            return
        except (HostError, UsageError) as error:
            self._cannot = f"{list_ranks(gone)} died. {error}. The cell ends"
            return
        except KeyboardInterrupt:
            return  # the caller handles the press next
        self._tries = 0
        stalled = {rank: one for rank, one in self._stalled.items() if rank not in newcomers}
        step = max(one.step for one in stalled.values())
        source = min(rank for rank, one in stalled.items() if one.step == step)
        resume = Resume(step=step, source=source, newcomers=newcomers, line=self._at.line, loop=self._at.loop)
        self._stalled.clear()  # all wait, so no new report arrives
        self._loops -= set(newcomers)
        self._joining |= set(newcomers)
        run.revive(newcomers)
        if newcomers:
            self._cluster.put_in_inboxes(resume, newcomers)
            self._cluster.put_in_inboxes(self._begin, newcomers)
        for rank in stalled:
            self._cluster.send(rank, resume)
        died = f"{list_ranks(gone)} died ({'; '.join(dict.fromkeys(how.values()))}) and "
        took = f"{time.monotonic() - began:.1f} s"
        if newcomers:
            run.note(f"{died}{'was' if len(gone) == 1 else 'were'} replaced in {took}: all ranks repeat step {step}")
        elif gone:
            run.note(f"{died}left in {took}: {_fewer(living, len(living) + len(gone))} step {step}")
        else:
            run.note(f"connections between ranks broke and were formed again in {took}: all ranks repeat step {step}")
        for note in notes:
            run.note(note)

    def _shrink(self, run: CellRun, stay: list[int], check: Check) -> list[str]:
        """Continue with the remaining ranks. Return sentences about resources that were not restored."""
        placement = self._cluster.place(stay, len(stay), may_share=True)
        for before in self.parts.hooks.before_renumbering:
            before()

        def renumbered(stayed: Mapping[int, int]) -> None:
            self._stalled = {now: self._stalled[before] for now, before in stayed.items()}
            self._loops, self._joining = set(stayed), set()
            run.on_renumbered(stayed)
            self.parts.on_renumbered(stayed)

        return self._recovery.resize(stay, placement, check, renumbered)


def _fewer(stay: Sequence[int], were: int) -> str:
    """Return a phrase with the number of remaining ranks, and the renumbered ones.

    Example:
        >>> _fewer([0, 2], 3)
        '2 ranks instead of 3 (now rank 2 is rank 1) repeat'
    """
    moved = ", ".join(f"rank {was} is rank {now}" for now, was in enumerate(stay) if was != now)
    count = "1 rank" if len(stay) == 1 else f"{len(stay)} ranks"
    renamed = f" (now {moved})" if moved else ""
    return f"{count} instead of {were}{renamed} {'repeats' if len(stay) == 1 else 'repeat'}"
