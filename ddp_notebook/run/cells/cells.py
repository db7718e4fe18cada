"""Cells of a session: send each to its ranks, one after the other."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.errors import HostError, SessionBrokenError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.process import RANK
from ddp_notebook.messages.ranks import Display, InputReply, Interrupt, Probe, RunCell, Vitals
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.records.words import format_ranks, group_by_value, list_ranks, name_ranks, train_apart
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.cell_messages import CellMessages
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, press_for_all
from ddp_notebook.run.cells.result import CellResult, has_mismatch, of_mismatch, raise_if_bad
from ddp_notebook.run.cells.run_queue import QueueSlot, RunQueue
from ddp_notebook.run.cells.watch import NOTEBOOK, Halt, Prompts, Reached, SideView, Waiter, Watch
from ddp_notebook.run.groups.probe import RankProbe
from ddp_notebook.run.groups.rank_view import Views
from ddp_notebook.run.groups.recovery import Recovery
from ddp_notebook.run.groups.rpc_waits import OpenRemoteCalls, still_running
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.wire.signals import INTERRUPT, RELEASE

if TYPE_CHECKING:
    from ddp_notebook.run.kept.foreign_cells import ForeignCell, ForeignCells

_SILENT_S = 2.2  # silence after which a rank is listed; its agent sends a message each second
_CODES = 400  # cells whose code is kept; a question to the ranks, such as `%ddp_verify`, runs a few cells itself
_QUIET_S = 2.0  # silence after which a host may be disconnected; text and marks arrive later in that case
_UNHEARD_S = 1.0  # time for ranks to end a cell while the host server does not answer
_ANSWER_S = 0.3  # time for an answer
_POLL_S = 0.02
_SERVED_S = 0.3  # time to end RPC calls of a stopped cell


class CellHooks(Protocol):
    """Hooks of features for cells, see `run.session_hooks.SessionFeature`."""

    cell_begins: list[Callable[..., Any]]
    cell_ended: list[Callable[..., Any]]
    cause: list[Callable[..., Any]]
    cell_named: list[Callable[..., Any]]
    survives: list[Callable[..., Any]]
    notices: list[Callable[..., Any]]
    cell_prompts: list[Callable[..., Any]]
    cell_is_stopped: list[Callable[..., Any]]

    def may_stop(self, code: str) -> bool:
        """Return whether a debugger may stop ranks in a cell."""


class Cells:
    """Runs cells on ranks.

    Args:
        cluster: the ranks, which need not have been started.
        arrivals: receives the messages of cells.
        questions: sends requests to the ranks.
        check: raises an error if these ranks cannot run a cell.
        notices: returns new messages about the hosts of the ranks.
        hooks: hooks of features.
        grace_s, hang_after_s, heals, folds: see `StartOptions`.
    """

    def __init__(
        self,
        cluster: Cluster,
        arrivals: CellMessages,
        questions: Questions,
        check: Callable[[Sequence[int]], object],
        notices: Callable[[], list[str]],
        hooks: CellHooks,
        *,
        grace_s: float | None,
        hang_after_s: float | None,
        heals: bool,
        folds: bool = True,
    ) -> None:
        self.run_queue = RunQueue()
        self._cluster = cluster
        self._questions = questions
        self.probe = RankProbe(cluster, questions)
        self.recovery = Recovery(cluster, questions, arrivals.on_replaced, heals=heals)
        self._hooks = hooks
        self._check = check
        self._notices_of_hosts = notices
        self._grace_s = grace_s
        self._hang_after_s = hang_after_s
        self._folds = folds
        self._numbers = itertools.count(1)
        self._arrivals = arrivals
        self._runs = arrivals.runs  # by cell number
        self._codes: dict[int, tuple[int, str]] = {}  # number in `In [n]` and code of the last cells, by number
        self._watched: tuple[CellRun, Interrupts] | None = None
        self.before_turn: Callable[[], list[str]] = lambda: []  # returns messages to show above the next cell
        self.on_shown: Callable[[int], object] = lambda _: None  # called with the number of each shown cell
        self.elsewhere: ForeignCells | None = None  # cells of the driver; None: this notebook is the driver
        self._closed = False
        self._groups_made = 0  # largest number of groups that a rank has counted

    def notices(self) -> list[str]:
        """Return new messages about the hosts of the ranks and from features, while a cell runs."""
        return [*self._notices_of_hosts(), *(text for look in self._hooks.notices for text in look())]

    # ---- running one

    def run(
        self,
        code: str,
        choose: Callable[[], tuple[list[int], list[str]]],
        *,
        timeout_s: float | None = None,
        target: DisplayTarget | None = None,
        execution_count: int = 1,
        file: str = "",
        record: RecordOptions,
        folds: bool | None = None,
        beside: SideView | None = None,
        place: AbstractContextManager[object] | None = None,
        waiter: Waiter = NOTEBOOK,
        on_begin: Callable[[CellRun, Interrupts], object] | None = None,
    ) -> CellResult:
        """Run a cell when the run queue reaches it. See `Session.run`.

        Args:
            choose: returns the ranks that run the cell, and notes to show before it; called at the head of the queue.
            target: shows the output; None: the output is not shown.
            folds: merge equal lines of several ranks; None: as the session does.
            beside: view below the output.
            place: slot in the run queue; None: a new one at its end. Pass a context that does nothing if the caller
                already has the ranks.
            waiter: description of the waiting caller.
            on_begin: called before the cell is sent, with the cell and the object that interrupts it.
        """
        earlier = self.before_turn() if place is None else []
        with place or QueueSlot(self.run_queue):
            ranks, notes = choose()
            notes = [*earlier, *notes]
            self._check(ranks)
            self.check_idle(ranks)
            run = CellRun(next(self._numbers), ranks, self._cluster.hold_text)
            run.took = self.took
            run.name = waiter.name
            with Interrupts(run.wake) as interrupts, self._watching(run, interrupts):
                if on_begin is not None:
                    on_begin(run, interrupts)
                notes = [*notes, *self._form_what_was_left(interrupts)]
                screen = None
                if target is not None:
                    screen = self.screen(ranks, target, waiter, interrupts, beside, folds)
                    self._arrivals.show_text_between_cells(screen)
                    for note in [*notes, *self._notices_of_hosts()]:
                        screen.note(note)
                    run.note = screen.note
                self._codes[run.number] = execution_count, code
                self._codes.pop(run.number - _CODES, None)
                if file:  # without a file name, readers do not know the cell by its prompt
                    self.name(run.number, f"In [{execution_count}]")
                cell = RunCell(
                    cell=run.number,
                    code=code,
                    execution_count=execution_count,
                    file=file,
                    record=record,
                    folds=folds,
                    missing=sorted({*self._cluster.ranks} - {*ranks}),
                    groups_made=self._groups_made,
                    may_stop=self._hooks.may_stop(code),
                )
                beside = beside if screen is not None else None
                watch = self.watch(run, interrupts, screen, beside, waiter, timeout_s)
                self._runs[run.number] = run
                for begins in self._hooks.cell_begins:
                    begins(cell)
                if self._closed:
                    self.close()
                self._cluster.put_in_inboxes(cell, ranks)
                for rank in self._cluster.gone:  # ranks that died after `choose` were not reported to this cell
                    process = self._cluster.process(rank)
                    run.on_died(rank, process.how, process.last_words)
                pending, notes = self.see_through(run, watch, interrupts, beside)
            return self.tell_end(run, watch, interrupts, screen, pending, notes, timeout_s)

    def screen(
        self,
        ranks: Sequence[int],
        target: DisplayTarget,
        waiter: Waiter,
        interrupts: Interrupts,
        beside: SideView | None,
        folds: bool | None = None,
    ) -> Screen:
        """Return the screen for the output of a cell. Ranks cannot clear the output of a job or a view."""
        return Screen(
            ranks,
            target,
            waiter.ends,
            is_stopped=lambda: bool(interrupts.count),
            may_clear=lambda: waiter is NOTEBOOK and not (beside and beside.is_shown),
            holds=lambda waits_s, quiet_s: beside is not None and beside.holds(waits_s, quiet_s),
            folds=self._folds if folds is None else folds,
        )

    def watch(
        self,
        run: CellRun,
        interrupts: Interrupts,
        screen: Screen | None,
        beside: SideView | None,
        waiter: Waiter,
        timeout_s: float | None = None,
    ) -> Watch:
        """Return the object that follows a cell to its end."""
        return Watch(run, self, interrupts, screen, timeout_s, self._grace_s, self._hang_after_s, beside, waiter)

    def see_through(
        self, run: CellRun, watch: Watch, interrupts: Interrupts, beside: SideView | None = None
    ) -> tuple[list[int], list[str]]:
        """Follow a cell to its end, then recover from failures. Return the ranks on which it has not ended, and notes
        to show.
        """
        try:
            with self._watching(run, interrupts):
                watch.follow()
        finally:
            run.leave()
            if beside is not None:
                beside.end(run.number)
        made = [one.groups_made for one in run.result.by_rank.values() if one.groups_made]
        self._groups_made = max(self._groups_made, *made) if made else self._groups_made
        pending = run.pending
        if not self._cluster.is_running or self._closed:
            return pending, []
        busy = self._cluster.ranks if run.is_cut_off else self.busy
        epoch = self._cluster.epoch
        notes = self.recovery.after(run.result, pending, watch.killed, busy, interrupts.after_this())
        if self._cluster.epoch == epoch:  # otherwise the group was formed again
            notes = [*self._lost_groups(run.result), *notes]
        return pending, notes

    def tell_end(
        self,
        run: CellRun,
        watch: Watch,
        interrupts: Interrupts,
        screen: Screen | None,
        pending: list[int],
        notes: list[str],
        timeout_s: float | None = None,
    ) -> CellResult:
        """Show the notes of an ended or abandoned cell, and raise its error if it did not succeed."""
        code = self.code_of(run.number) or ""
        found = [line for ended in self._hooks.cell_ended for line in ended(run, code)]
        if screen is not None:
            apart = {rank: one.trains_apart for rank, one in run.result.by_rank.items() if one.trains_apart}
            if len(apart) > 1:
                for how, ranks in group_by_value(apart).items():
                    screen.note(train_apart(ranks, how))
            for note in [*found, *notes]:
                screen.note(note)
        self.on_shown(run.number)
        if not self._cluster.is_running:
            self._check(run.result.ranks)
        if run.was_quit and not pending and not watch.killed and not run.failed_by_itself:
            return run.result
        raise_if_bad(
            run.result,
            pending,
            bool(interrupts.count),
            watch.killed,
            timeout_s if watch.timed_out else None,
            watch.views,
            watch.why,
            self._still_served(run.number, pending) if watch.has_released else [],
            was_left=watch.was_left,
            cause=self.cause(run, of_mismatch(run.result)) if has_mismatch(run.result) else "",
        )
        return run.result

    def _still_served(self, cell: int, pending: Sequence[int]) -> list[str]:
        """Return sentences about RPC calls that still run on other ranks for a stopped cell, after a short wait for
        their end.
        """
        ranks = [rank for rank in self._cluster.alive if rank not in pending]
        until = time.monotonic() + _SERVED_S
        while True:
            seen = {rank: OpenRemoteCalls.of_vitals(vitals.remote) for rank, vitals in self.probe.vitals(ranks).items()}
            ranks = [rank for rank, remote in seen.items() if any(of == cell for _, of in remote.going_on)]
            if not ranks or time.monotonic() > until:
                return still_running(seen, cell)
            time.sleep(_POLL_S)

    def name(self, cell: int, prompt: str) -> None:
        """Set the prompt of a cell, such as "In [6]"."""
        for named in self._hooks.cell_named:
            named(cell, prompt)

    # ---- those of an earlier notebook (`run/kept`)

    def begin_behind(self, cell: int) -> None:
        """Set the number of the last cell that the ranks have received."""
        self._numbers = itertools.count(cell + 1)

    @property
    def took(self) -> Callable[[int, Display], None]:
        """Return the callback for each display taken from a cell's queue."""
        return self._arrivals.took

    def add_recovered(self, run: CellRun, told: RunCell) -> None:
        """Add a running cell of an earlier notebook."""
        self._codes[told.cell] = told.execution_count, told.code
        self._runs[told.cell] = run
        for begins in self._hooks.cell_begins:
            begins(told)

    @contextmanager
    def _watching(self, run: CellRun, interrupts: Interrupts) -> Iterator[None]:
        """Allow other threads to interrupt the cell while the block runs, even before it is sent."""
        self._watched = run, interrupts
        try:
            yield
        finally:
            self._watched = None
            if run.number not in self._runs:  # it was not sent
                run.close_all()

    def _form_what_was_left(self, interrupts: Interrupts) -> list[str]:
        try:
            return self.recovery.what_was_left(self.busy, interrupts.check)
        except KeyboardInterrupt:
            pass  # raised below, so that the traceback has no frames of this package
        raise keyboard_interrupt("interrupted while the group was formed again: the cell was not run")

    def _lost_groups(self, result: CellResult) -> list[str]:
        lost = [rank for rank, one in result.by_rank.items() if not one.has_group]
        if not lost:
            return []
        reform = "ddp_notebook.current().ranks.reform()"
        if set(self._cluster.alive) - set(lost):  # the other ranks have a group and would not join a new one
            return [f"{name_ranks(lost)}: no default process group after this cell; {reform} forms it again"]
        return [
            f"{name_ranks(lost)}: no default process group after this cell; dist.init_process_group() on all ranks "
            f"forms it again, and so does {reform}"
        ]

    @property
    def under_way(self) -> CellRun | ForeignCell | None:
        """Return the cell that has not ended on all ranks: the one that a thread waits for, or else the last one.

        In a notebook that only observes, return the cell of the driver.
        """
        if self.elsewhere is not None:
            return self.elsewhere.under_way
        return next(reversed(self.unended()), None)

    @property
    def watched(self) -> tuple[CellRun, Interrupts] | None:
        """Return the cell that a thread waits for, and the object that interrupts it."""
        return self._watched

    def press_stop(self) -> str:
        """Act on the stop button of a view. Return a description of what was done."""
        if self.elsewhere is not None:
            return "this notebook is read-only: stop the cell in the notebook that drives the session"
        return press_for_all(self._watched and self._watched[1])

    def unended(self) -> list[CellRun]:
        """Return the cells that have not ended on all ranks, the oldest first."""
        if not self._runs:  # the usual case before a cell
            return []
        for run in list(self._runs.values()):
            if run.is_over:
                self._runs.pop(run.number, None)
        return list(self._runs.values())

    def to_end(self) -> list[CellRun]:
        """Return `unended`, and the cell that is about to be sent."""
        runs = self.unended()
        watched = self._watched
        return runs if watched is None or watched[0] in runs or watched[0].is_over else [*runs, watched[0]]

    @property
    def busy(self) -> list[int]:
        """Return the ranks on which a cell has not ended."""
        return sorted({rank for run in self.unended() for rank in run.pending})

    def check_idle(self, ranks: Sequence[int] | None = None) -> None:
        """Check that no earlier cell is running on these ranks.

        Args:
            ranks: rank numbers; None: all ranks.

        Raises:
            SessionBrokenError: a cell is running; the message lists remedies.
        """
        all_busy = self.busy
        busy = all_busy if ranks is None else [rank for rank in all_busy if rank in ranks]
        if not busy:
            return
        idle = [rank for rank in self._cluster.alive if rank not in all_busy]
        others = ""
        if ranks is not None and idle:
            others = (
                f". Until then, use the other ranks: %%on_ranks {format_ranks(idle)}, or --ranks {format_ranks(idle)}"
            )
        stopped = "".join(f"{one.stopped}. " for one in self._cluster.stopped(busy) if one.kind == RANK)
        raise SessionBrokenError(
            f"{stopped}an earlier cell has not ended on {list_ranks(busy)} (%ddp_status shows its line): wait, or "
            "end it with %ddp_interrupt, which keeps all variables. A long call of C code ends only when it returns; "
            f"%ddp_interrupt --replace replaces such ranks, without their variables{others}"
        )

    def code_of(self, cell: int) -> str | None:
        """Return the code of one of the last cells."""
        return self._codes.get(cell, (0, None))[1]

    def last_codes(self) -> list[tuple[int, str]]:
        """Return the numbers and the code of the last cells, the newest first."""
        return [(cell, code) for cell, (_, code) in sorted(self._codes.items(), reverse=True)]

    def numbered_codes(self) -> list[tuple[int, int, str]]:
        """Return the numbers in `In [n]`, the numbers and the code of the last cells, the oldest first."""
        return [(prompt, cell, code) for cell, (prompt, code) in sorted(self._codes.items())]

    def close(self) -> None:
        """End all waits, because the session ends."""
        self._closed = True
        self._arrivals.end_all("the session was stopped")

    # ---- what can be done about one under way (`watch.Controls`)

    @property
    def is_running(self) -> bool:
        return self._cluster.is_running and not self._closed  # an idle host server may wait for the next session

    def hosts(self) -> Sequence[Reached]:
        """Return the hosts of the ranks, except lost ones."""
        return self._cluster.hosts

    def halts(self, run: CellRun, *, has_card: bool) -> list[Halt]:
        """Return a sentence for each process that is stopped or does not answer, and for each stopped child process of
        the cell's ranks.

        A cell on some ranks may call the other ranks by RPC.

        Args:
            has_card: leave out the ranks of the cell, because its card shows them.
        """
        cluster = self._cluster
        shown = run.result.ranks if has_card else ()
        others = [rank for rank in cluster.ranks if rank not in shown]
        halts = [Halt(process.name, process.stopped) for process in cluster.stopped(others)]
        if trouble := cluster.pulse():
            halts.insert(0, Halt("the host server", trouble))
        for rank in run.pending:
            if words := run.stopped_children.get(rank):
                host = cluster.process(rank).host
                on = "" if host.is_here else f" on {host.label}"
                halts.append(Halt(f"child process of rank {rank}", f"rank {rank}{on}: {words}"))
        return halts

    def halted_s(self, run: CellRun) -> float:
        """Return the seconds for which a rank in the cell has been stopped or silent; 0.0 if none is."""
        pending = run.pending
        stopped = [process.stopped_s for process in self._cluster.stopped(pending) if process.kind == RANK]
        silent = [self._cluster.silent_s(rank) for rank in pending if rank not in self._cluster.unheard]
        return max([*stopped, *(seconds for seconds in silent if _SILENT_S < seconds < float("inf"))], default=0.0)

    def survive(self, run: CellRun, check: Callable[[], None]) -> bool:
        """Return whether the cell continues although ranks died, because they are replaced."""
        return any([look(run, check) for look in self._hooks.survives])

    def interrupt(self, run: CellRun) -> None:
        """Interrupt the cell on every rank that has not ended it, and its RPC calls on other ranks.

        The host server sends the signals, or this process if the host server does not answer. So they reach a rank even
        if its agent is stuck. Ranks have received them when `signal` returns, so they cannot hit a later cell. The
        message stops a cell that has not started.
        """
        pending = run.pending
        signals = (INTERRUPT,) if RELEASE is None else (INTERRUPT, RELEASE)
        with suppress(HostError):  # the watch detects a dead host server
            answers = self._cluster.signal(pending, *signals, value=run.number)
            for rank in self._cluster.alive:  # any rank may serve an RPC call of the cell
                self._cluster.send(rank, Interrupt(cell=run.number))
            self._cluster.replace_stopped_store()  # a rank that waits for a stopped store would never end the cell
            trouble = "" if answers else self._cluster.trouble()
            if trouble and not any(host.silent_s > _QUIET_S for host in self._cluster.hosts):
                run.note(trouble)
                self._end_unheard(run)

    def _end_unheard(self, run: CellRun) -> None:
        """Request the state of the cell from the ranks: without the host server no text and no mark of a cell's end
        arrives.
        """
        run.cut_off()
        until = time.monotonic() + _UNHEARD_S
        while run.pending and time.monotonic() < until:
            answers: dict[int, Vitals] = self._questions.ask_for(run.pending, lambda n: Probe(request=n), _ANSWER_S)
            for rank, vitals in answers.items():
                if vitals.running_cell != run.number:
                    run.on_unheard_end(rank)
            time.sleep(_POLL_S)

    def inspect(self, run: CellRun) -> Views:
        """Return the activity of every rank of the session, with respect to the cell."""
        return self.probe.inspect(run)

    def cause(self, run: CellRun, views: Views) -> str:
        """Return what features know about the cause of a hang or of different operations."""
        return "; ".join(filter(None, [cause(run, views) for cause in self._hooks.cause]))

    def kill(self, ranks: list[int]) -> None:
        """Kill ranks that do not answer. Mark the unreachable hosts of these ranks as lost."""
        self._cluster.give_up("the stop button was pressed again", ranks)
        with suppress(HostError):
            self._cluster.signal([rank for rank in ranks if rank in self._cluster.alive], signal.SIGKILL)

    def answer(self, rank: int, answer: InputReply) -> None:
        """Send the answer to a rank's `input()` or debugger."""
        self._cluster.send(rank, answer)

    def is_stopped(self, run: CellRun) -> bool:
        """Return whether a rank of the cell has stopped in the debugger of the front end."""
        return any(is_stopped(run) for is_stopped in self._hooks.cell_is_stopped)

    def prompts(self, run: CellRun, screen: Screen | None, interrupts: Interrupts, may_ask: bool) -> Prompts | None:
        """Return the prompts of a cell whose ranks stop in a debugger; None without the feature."""

        def quit() -> None:
            run.was_quit = True
            interrupts.press()

        for prompts in self._hooks.cell_prompts:
            return prompts(run, screen, quit, may_ask)
        return None
