"""Replace dead ranks, copy variables to them from a living rank, and form the group again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial

from ddp_notebook.errors import DDPNotebookError, SessionBrokenError, UsageError
from ddp_notebook.launch.cluster import Check, Cluster
from ddp_notebook.messages.ranks import Checked, Pull, Pulled
from ddp_notebook.messages.resize_messages import Inspect
from ddp_notebook.records.words import list_ranks, name_ranks
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.consistency.compared_entries import list_names
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.groups.probe import why_silent
from ddp_notebook.run.groups.recovery import replaced_in_words
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.values.exchange import check_name
from ddp_notebook.run.values.transfers import PushedData, Transfers

_MOST_NAMED = 8
Buffer = bytearray | memoryview
_DIES_S = 1.0  # longest time from a fatal signal to the report of the rank's death
_POLL_S = 0.01


class Healing:
    """Heals a session.

    Args:
        cluster: the ranks.
        cells: cells of the session, with the run queue.
        questions: sends requests to the ranks.
        transfers: transfers large data.
        liveness: liveness checks of the ranks.
    """

    def __init__(
        self, cluster: Cluster, cells: Cells, questions: Questions, transfers: Transfers, liveness: Liveness
    ) -> None:
        self._cluster = cluster
        self._cells = cells
        self._questions = questions
        self._transfers = transfers
        self._liveness = liveness

    def reform(self, timeout_s: float) -> list[str]:
        """Form the group again, see `SessionRanks.reform`."""
        with self._cells.run_queue:
            self._liveness.check()
            self._cells.check_idle()
            if trouble := self._cluster.trouble():
                raise SessionBrokenError(trouble)
            notes: list[str] | None = None
            with Interrupts(lambda: None) as interrupts:
                try:
                    notes = self._cells.recovery.form(timeout_s, interrupts.check)
                except KeyboardInterrupt:
                    pass  # raised below, so that the traceback has no frames of this package
        if notes is not None:
            interrupts.raise_late("the group was formed again")
            return notes
        raise keyboard_interrupt("interrupted while the group was formed: the next cell forms it first")

    def heal(self, from_rank: int | None, names: Sequence[str]) -> list[str]:
        """Replace dead ranks, see `SessionRanks.heal`."""
        for name in names:
            check_name(name)
        with self._cells.run_queue:
            return self._heal(from_rank, names)

    def before_cell(self) -> list[str]:
        """Replace dead ranks before a cell at the head of the run queue. Return sentences that report it."""
        return self._heal(None, ()) if self._liveness.check_host().gone and not self._cells.busy else []

    def _heal(self, from_rank: int | None, names: Sequence[str]) -> list[str]:
        self._liveness.check_host()
        self._cluster.give_up("%ddp_heal did not wait for it")
        self._cells.check_idle()
        if trouble := self._cluster.trouble():
            raise SessionBrokenError(trouble)
        self._ask_all()
        gone = self._cluster.gone
        new = gone or self._cells.recovery.replaced
        self._check_source(from_rank, names, new)
        done = "nothing was changed"

        def note(text: str) -> None:
            nonlocal done
            done = text

        lines: list[str] | None = None
        with Interrupts(lambda: None) as interrupts:
            try:
                lines = self._replace_and_copy(from_rank, names, gone, new, interrupts.check, note)
            except KeyboardInterrupt:
                pass  # raised below, so that the traceback has no frames of this package
        if lines is not None:
            interrupts.raise_late(f"the healing is complete: {'; '.join(lines)}")
            return lines
        raise keyboard_interrupt(f"the healing was interrupted: {done}")

    def _replace_and_copy(
        self,
        from_rank: int | None,
        names: Sequence[str],
        gone: list[int],
        new: Sequence[int],
        check: Check,
        note: Callable[[str], None],
    ) -> list[str]:
        """Replace dead ranks and a stopped store, and copy the variables. Return sentences about it.

        Args:
            new: ranks that get the variables.
            note: called with the state in words after each step, for the message of an interrupt.
        """
        read = None if from_rank is None else self._read(from_rank, names, check)
        if gone:
            note(f"{list_ranks(gone)} got no new process; %ddp_heal tries again")
        stores = self._cells.recovery.stopped_stores()
        notes: list[str] = []
        if gone:
            notes = [*self._cells.recovery.heal(check), *stores]
        elif stores:
            note("the store is not replaced; %ddp_heal tries again")
            notes = self._cells.recovery.form(check=check)
        if from_rank is None or read is None:
            if not gone:
                return [*notes, "no rank has died"]
            return [replaced_in_words(gone, len(self._cluster.ranks)), *notes]
        replaced = [f"{list_ranks(gone)} {'was' if len(gone) == 1 else 'were'} replaced"] if gone else []
        not_all = f"not everything was copied, and %ddp_heal --from {from_rank} copies it again"
        note(", ".join([*replaced, not_all]))
        copied = self._copy(from_rank, read, new, check, asked_for=bool(names))
        self._cluster.note_supplied()
        return [*replaced, *notes, *copied]

    def _ask_all(self) -> None:
        """Check that every rank answers.

        The death of a rank is reported with a delay, and a stopped rank would block every group.

        Raises:
            SessionBrokenError: a rank is stopped or does not answer.
        """
        cluster = self._cluster
        answers = self._cells.probe.vitals(cluster.alive)
        until = time.monotonic() + _DIES_S
        while (silent := [rank for rank in cluster.alive if rank not in answers]) and time.monotonic() < until:
            time.sleep(_POLL_S)
        silent = [rank for rank in silent if rank not in self._cells.probe.vitals(silent)]
        if silent:
            gone = cluster.gone
            died = f"{list_ranks(gone)} died, but no group can be formed with" if gone else "no rank has died, but"
            why = "; ".join(f"rank {rank}: {how or 'no answer'}" for rank, how in why_silent(cluster, silent).items())
            raise SessionBrokenError(
                f"{died} {why}. All variables are kept if it continues; {_kill(cluster, silent)} and %ddp_heal replace "
                f"{'it' if len(silent) == 1 else 'them'} without variables"
            )

    def _check_source(self, from_rank: int | None, names: Sequence[str], new: Sequence[int]) -> None:
        if from_rank is None:
            if names:
                raise UsageError(f"--from RANK must come before the names of variables, got only {' '.join(names)}")
            return
        if from_rank not in self._cluster.ranks:
            raise UsageError(f"rank {from_rank} does not exist; the ranks are 0 to {len(self._cluster.ranks) - 1}")
        if from_rank in new:
            why = (
                "died, and its variables are lost" if from_rank in self._cluster.gone else "is new and has no variables"
            )
            raise UsageError(f"rank {from_rank} {why}; choose another rank with --from")
        if not new:
            raise UsageError("no rank died or was replaced, so no rank needs the variables of another")

    def _read(self, from_rank: int, names: Sequence[str], check: Check) -> tuple[Pulled, Buffer]:
        """Read all variables in one pickle, so that an optimizer keeps the parameters of its model."""
        pull = partial(Pull, name="", names=list(names), memory=self._transfers.memory_name)
        asked = self._questions.ask(from_rank, lambda n: pull(request=n))
        try:
            answer: Pulled = self._questions.wait_for(from_rank, asked, check)
        except KeyboardInterrupt:
            asked.add_done_callback(partial(self._transfers.drop_answer, from_rank))
            raise
        if answer.error:
            raise DDPNotebookError(f"rank {from_rank}: {answer.error}")
        data = self._transfers.fetch(from_rank, answer)
        check()
        return answer, data

    def _copy(
        self, from_rank: int, read: tuple[Pulled, Buffer], to: Sequence[int], check: Check, *, asked_for: bool
    ) -> list[str]:
        answer, data = read
        check()
        outgoing = PushedData([data])
        try:
            answers = self._transfers.push(dict.fromkeys(to, outgoing), of_rank=from_rank, check=check)
        finally:
            outgoing.close()
        for rank, said in answers.items():
            if said.error:
                raise DDPNotebookError(f"rank {rank} could not take the variables of rank {from_rank}: {said.error}")
        about = json.loads(answer.about)
        copied, left = about["names"], about["left"]
        shown = ", ".join(copied[:_MOST_NAMED]) + (", ..." if len(copied) > _MOST_NAMED else "")
        variables = "1 variable" if len(copied) == 1 else f"{len(copied)} variables"
        lines = [f"{variables} of rank {from_rank} copied to {list_ranks(list(to))}: {shown}"]
        lines += [f"{name} was not copied: {why}" for name, why in left.items()]
        if not asked_for and (own := self._own(copied, [rank for rank in self._cluster.alive if rank not in to])):
            there = name_ranks(to)
            lines.append(
                f"{list_names(own)} differed between ranks, and {there} has the value of rank {from_rank} now: set it "
                f"again on {there}"
            )
        return lines

    def _own(self, names: Sequence[str], ranks: Sequence[int]) -> list[str]:
        """Return the names of variables that differ between the ranks that were not replaced."""
        if len(ranks) < 2:  # there is nothing to compare
            return []
        answers: dict[int, Checked] = self._questions.ask_all(ranks, lambda n: Inspect(request=n, compares=True))
        digests = [answer.facts.get("digests", {}) for answer in answers.values()]
        return [name for name in names if len({of_rank[name] for of_rank in digests if name in of_rank}) > 1]


def _kill(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Return the commands that kill the processes of these ranks, one per host.

    The pids of a remote host are those of other processes here.
    """
    pids: dict[str, list[str]] = {}
    for process in map(cluster.process, ranks):
        pids.setdefault("" if process.host.is_here else f" on {process.host.label}", []).append(str(process.pid))
    return ", ".join(f"kill -9 {' '.join(of_host)}{where}" for where, of_host in pids.items())
