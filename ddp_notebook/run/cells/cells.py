"""The cells of a session: sends each to its ranks, one after the other."""

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
from ddp_notebook.records.words import format_ranks, list_ranks, name_ranks, train_apart
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.cell_messages import CellMessages
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, press_for_all
from ddp_notebook.run.cells.result import CellResult, raise_if_bad
from ddp_notebook.run.cells.run_queue import QueueSlot, RunQueue
from ddp_notebook.run.cells.watch import NOTEBOOK, Halt, Reached, SideView, Waiter, Watch
from ddp_notebook.run.groups.diagnosis import Views
from ddp_notebook.run.groups.probe import RankProbe
from ddp_notebook.run.groups.recovery import Recovery
from ddp_notebook.run.groups.rpc_waits import OpenRemoteCalls, still_running
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.wire.signals import INTERRUPT, RELEASE

if TYPE_CHECKING:
    from ddp_notebook.run.kept.foreign_cells import ForeignCell, ForeignCells

_SILENT_S = 2.2  # without a word, until a rank is named: its agent speaks each second
_CODES = 50  # cells whose code is kept
_QUIET_S = 2.0  # without a word, until a host may be cut off: its text and marks come later, then
_UNHEARD_S = 1.0  # what ranks get to end a cell while the host server does not answer
_ANSWER_S = 0.3  # to answer a question
_POLL_S = 0.02
_SERVED_S = 0.3  # to end what a stopped cell has called by RPC


class CellHooks(Protocol):
    """Features that add to cells, see `run.session_hooks.SessionFeature`."""

    cell_begins: list[Callable[..., Any]]
    cell_named: list[Callable[..., Any]]
    survives: list[Callable[..., Any]]


class Cells:
    """Runs cells on ranks.

    Args:
        cluster: the ranks, which need not have been started.
        arrivals: what comes back from them.
        questions: to ask them.
        check: raises when these ranks cannot take a cell.
        notices: returns what is to be said of the ranks' hosts and was not said yet.
        hooks: of features.
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
        self.notices = notices
        self._grace_s = grace_s
        self._hang_after_s = hang_after_s
        self._folds = folds
        self._numbers = itertools.count(1)
        self._arrivals = arrivals
        self._runs = arrivals.runs  # by number
        self._codes: dict[int, str] = {}  # of the last cells
        self._watched: tuple[CellRun, Interrupts] | None = None
        self.before_turn: Callable[[], list[str]] = lambda: []  # returns what is to be said above the next cell
        self.on_shown: Callable[[int], object] = lambda _: None  # told of each cell that was shown
        self.elsewhere: ForeignCells | None = None  # cells of the notebook that drives; None: this one does
        self._closed = False

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
        """Run a cell in its turn. See `Session.run`.

        Args:
            choose: returns the ranks that are to run it, and notes to show before; called when its turn has come.
            target: where its output goes; None: nowhere.
            folds: merge equal lines of several ranks; None: as the session does.
            beside: what is shown beside its output, where that is shown.
            place: its place in the queue; None: the last one. One that does nothing: the caller has the turn.
            waiter: who waits for it.
            on_begin: gets the cell, and how to press stop for it, before it is sent.
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
                    for note in [*notes, *self.notices()]:
                        screen.note(note)
                    run.note = screen.note
                self._codes[run.number] = code
                self._codes.pop(run.number - _CODES, None)
                if file:  # else no reader knows it by a prompt
                    self.name(run.number, f"In [{execution_count}]")
                cell = RunCell(
                    cell=run.number,
                    code=code,
                    execution_count=execution_count,
                    file=file,
                    record=record,
                    folds=folds,
                    missing=sorted({*self._cluster.ranks} - {*ranks}),
                )
                beside = beside if screen is not None else None
                watch = self.watch(run, interrupts, screen, beside, waiter, timeout_s)
                self._runs[run.number] = run
                for begins in self._hooks.cell_begins:
                    begins(cell)
                if self._closed:
                    self.close()
                self._cluster.put_in_inboxes(cell, ranks)
                for rank in self._cluster.gone:  # who died since they were chosen has not been told to this cell
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
        """Where the output of a cell of these ranks goes. They clear nothing that a job or a view has shown there."""
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
        """What follows a cell to its end."""
        return Watch(run, self, interrupts, screen, timeout_s, self._grace_s, self._hang_after_s, beside, waiter)

    def see_through(
        self, run: CellRun, watch: Watch, interrupts: Interrupts, beside: SideView | None = None
    ) -> tuple[list[int], list[str]]:
        """Follow a cell to its end, and do what that calls for. Returns the ranks on which it has not ended, and what
        there is to say."""
        try:
            with self._watching(run, interrupts):
                watch.follow()
        finally:
            run.leave()
            if beside is not None:
                beside.end(run.number)
        pending = run.pending
        if not self._cluster.is_running or self._closed:
            return pending, []
        busy = self._cluster.ranks if run.is_cut_off else self.busy
        epoch = self._cluster.epoch
        notes = self.recovery.after(run.result, pending, watch.killed, busy, interrupts.after_this())
        if self._cluster.epoch == epoch:  # else it has formed anew
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
        """Say what there is to say of a cell that is over or left, and raise it where it did not end well."""
        if screen is not None:
            apart = [rank for rank, one in sorted(run.result.by_rank.items()) if one.trains_apart]
            if len(apart) > 1:
                screen.note(train_apart(apart))
            for note in notes:
                screen.note(note)
        self.on_shown(run.number)
        if not self._cluster.is_running:
            self._check(run.result.ranks)
        raise_if_bad(
            run.result,
            pending,
            bool(interrupts.count),
            watch.killed,
            timeout_s if watch.timed_out else None,
            watch.views,
            watch.why,
            self._still_served(run.number, pending) if watch.has_released else [],
        )
        return run.result

    def _still_served(self, cell: int, pending: Sequence[int]) -> list[str]:
        """What ranks still execute for a stopped cell that has called it by RPC, after a moment in which it may end."""
        ranks = [rank for rank in self._cluster.alive if rank not in pending]
        until = time.monotonic() + _SERVED_S
        while True:
            seen = {rank: OpenRemoteCalls.of_vitals(vitals.remote) for rank, vitals in self.probe.vitals(ranks).items()}
            ranks = [rank for rank, remote in seen.items() if any(of == cell for _, of in remote.going_on)]
            if not ranks or time.monotonic() > until:
                return still_running(seen, cell)
            time.sleep(_POLL_S)

    def name(self, cell: int, prompt: str) -> None:
        """A cell has this prompt, such as "In [6]"."""
        for named in self._hooks.cell_named:
            named(cell, prompt)

    # ---- those of an earlier notebook (`run/kept`)

    def begin_behind(self, cell: int) -> None:
        """The ranks have got this one last."""
        self._numbers = itertools.count(cell + 1)

    @property
    def took(self) -> Callable[[int, Display], None]:
        """Told of each display that was taken from a cell's queue."""
        return self._arrivals.took

    def add_recovered(self, run: CellRun, told: RunCell) -> None:
        """Have a cell among those under way that an earlier notebook has sent."""
        self._codes[told.cell] = told.code
        self._runs[told.cell] = run
        for begins in self._hooks.cell_begins:
            begins(told)

    @contextmanager
    def _watching(self, run: CellRun, interrupts: Interrupts) -> Iterator[None]:
        """Let others press stop for the cell while the block runs, also before it is sent."""
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
            pass  # told below, without our frames behind it
        raise keyboard_interrupt("interrupted while the group was formed again: the cell was not run")

    def _lost_groups(self, result: CellResult) -> list[str]:
        lost = [rank for rank, one in result.by_rank.items() if not one.has_group]
        if not lost:
            return []
        reform = "ddp_notebook.current().ranks.reform()"
        if set(self._cluster.alive) - set(lost):  # those say that theirs exists, and do not come to the new one
            return [f"{name_ranks(lost)}: no default process group after this cell; {reform} forms it again"]
        return [
            f"{name_ranks(lost)}: no default process group after this cell; dist.init_process_group() on all ranks "
            f"forms it again, and so does {reform}"
        ]

    @property
    def under_way(self) -> CellRun | ForeignCell | None:
        """The cell that has not ended everywhere: the one that somebody waits for, or else the last one; in a notebook
        that only looks the one of the notebook that drives."""
        if self.elsewhere is not None:
            return self.elsewhere.under_way
        return next(reversed(self.unended()), None)

    @property
    def watched(self) -> tuple[CellRun, Interrupts] | None:
        """The cell that somebody waits for, and how to press stop for it."""
        return self._watched

    def press_stop(self) -> str:
        """What the stop button of a view does. Returns what was done, in words."""
        if self.elsewhere is not None:
            return "this notebook only looks: the notebook that drives the session stops the cell"
        return press_for_all(self._watched and self._watched[1])

    def unended(self) -> list[CellRun]:
        """The cells that have not ended everywhere, the oldest first."""
        if not self._runs:  # before each cell, mostly
            return []
        for run in list(self._runs.values()):
            if run.is_over:
                self._runs.pop(run.number, None)
        return list(self._runs.values())

    def to_end(self) -> list[CellRun]:
        """As `unended`, with the cell that is about to be sent."""
        runs = self.unended()
        watched = self._watched
        return runs if watched is None or watched[0] in runs or watched[0].is_over else [*runs, watched[0]]

    @property
    def busy(self) -> list[int]:
        """Ranks on which a cell has not ended."""
        return sorted({rank for run in self.unended() for rank in run.pending})

    def check_idle(self, ranks: Sequence[int] | None = None) -> None:
        """Check that no earlier cell is under way on these ranks.

        Args:
            ranks: None: all of them.

        Raises:
            SessionBrokenError: one is; says what can be done.
        """
        all_busy = self.busy
        busy = all_busy if ranks is None else [rank for rank in all_busy if rank in ranks]
        if not busy:
            return
        idle = [rank for rank in self._cluster.alive if rank not in all_busy]
        others = ""
        if ranks is not None and idle:
            others = f". Until then name the others: %%on_ranks {format_ranks(idle)}, or --ranks {format_ranks(idle)}"
        stopped = "".join(f"{one.stopped}. " for one in self._cluster.stopped(busy) if one.kind == RANK)
        raise SessionBrokenError(
            f"{stopped}an earlier cell has not ended on {list_ranks(busy)} (%ddp_status says where it is): wait, or "
            "end it there with %ddp_interrupt, which keeps all variables. A long call of C code ends only when it "
            f"returns; %ddp_interrupt --replace replaces such ranks, without their variables{others}"
        )

    def code_of(self, cell: int) -> str | None:
        """The code of one of the last cells."""
        return self._codes.get(cell)

    def close(self) -> None:
        """The session ends: nobody waits for ever."""
        self._closed = True
        self._arrivals.end_all("the session was stopped")

    # ---- what can be done about one under way (`watch.Controls`)

    @property
    def is_running(self) -> bool:
        return self._cluster.is_running and not self._closed  # a host server may wait for the next session

    def hosts(self) -> Sequence[Reached]:
        """Those of the ranks that were not lost."""
        return self._cluster.hosts

    def halts(self, run: CellRun) -> list[Halt]:
        """Return a sentence for each process outside the cell that is stopped or does not answer, and for child
        processes of its ranks. A cell on some ranks may call the others by RPC."""
        cluster = self._cluster
        others = [rank for rank in cluster.ranks if rank not in run.result.ranks]
        halts = [Halt(process.name, process.stopped) for process in cluster.stopped(others)]
        if trouble := cluster.pulse():
            halts.insert(0, Halt("what starts the ranks", trouble))
        for rank in run.pending:
            if words := run.stopped_children.get(rank):
                host = cluster.process(rank).host
                on = "" if host.is_here else f" on {host.label}"
                halts.append(Halt(f"child process of rank {rank}", f"rank {rank}{on}: {words}"))
        return halts

    def halted_s(self, run: CellRun) -> float:
        """Seconds for which a rank that is in the cell has been stopped or silent; 0.0 if none is."""
        pending = run.pending
        stopped = [process.stopped_s for process in self._cluster.stopped(pending) if process.kind == RANK]
        silent = [self._cluster.silent_s(rank) for rank in pending if rank not in self._cluster.unheard]
        return max([*stopped, *(seconds for seconds in silent if _SILENT_S < seconds < float("inf"))], default=0.0)

    def survive(self, run: CellRun, check: Callable[[], None]) -> bool:
        """Whether the cell goes on though ranks of it have died, because they are replaced."""
        return any([look(run, check) for look in self._hooks.survives])

    def interrupt(self, run: CellRun) -> None:
        """Interrupt the cell on every rank that has not ended it, and what ranks execute for it by RPC.

        The signals come from the host server, or where it does not answer from this process, so they reach a rank
        whatever its agent does; ranks have them when `signal` returns, so they cannot hit a later cell. The message
        stops a cell that has not begun.
        """
        pending = run.pending
        signals = (INTERRUPT,) if RELEASE is None else (INTERRUPT, RELEASE)
        with suppress(HostError):  # the host server is gone: the watch sees that
            answers = self._cluster.signal(pending, *signals, value=run.number)
            for rank in self._cluster.alive:  # any may serve the cell by RPC
                self._cluster.send(rank, Interrupt(cell=run.number))
            self._cluster.replace_stopped_store()  # a rank that waits for an answer of it ends only with it
            trouble = "" if answers else self._cluster.trouble()
            if trouble and not any(host.silent_s > _QUIET_S for host in self._cluster.hosts):
                run.note(trouble)
                self._end_unheard(run)

    def _end_unheard(self, run: CellRun) -> None:
        """Without the host server no text comes, and with it no mark of a cell's end: ask the ranks themselves."""
        run.cut_off()
        until = time.monotonic() + _UNHEARD_S
        while run.pending and time.monotonic() < until:
            answers: dict[int, Vitals] = self._questions.ask_for(run.pending, lambda n: Probe(request=n), _ANSWER_S)
            for rank, vitals in answers.items():
                if vitals.running_cell != run.number:
                    run.on_unheard_end(rank)
            time.sleep(_POLL_S)

    def inspect(self, run: CellRun) -> Views:
        """What every rank of the session does, as far as the cell is concerned."""
        return self.probe.inspect(run)

    def kill(self, ranks: list[int]) -> None:
        """End ranks that do not answer. Those of a host that is not heard are given up with it."""
        self._cluster.give_up("the stop button was pressed again", ranks)
        with suppress(HostError):
            self._cluster.signal([rank for rank in ranks if rank in self._cluster.alive], signal.SIGKILL)

    def answer(self, rank: int, answer: InputReply) -> None:
        """What was typed for a rank's `input()`."""
        self._cluster.send(rank, answer)
