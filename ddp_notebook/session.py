"""The session: a running group of ranks as the notebook sees it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, SessionBrokenError, SessionExistsError, StartError, UsageError
from ddp_notebook.launch.cluster import Cluster, Startup
from ddp_notebook.launch.membership.startup import DirectStartup
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.records.words import list_ranks, name_ranks
from ddp_notebook.run import ended_recording
from ddp_notebook.run.call_arguments import short
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, uninterrupted
from ddp_notebook.run.cells.options import check_timeout
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.watch import NOTEBOOK, SideView
from ddp_notebook.run.consistency.agreement import Agreement
from ddp_notebook.run.consistency.sentences import list_names
from ddp_notebook.run.groups import rank_states
from ddp_notebook.run.groups.ranks import SessionRanks
from ddp_notebook.run.interrupted import OF_SESSION, tells_interrupts
from ddp_notebook.run.lint.warnings import foresee
from ddp_notebook.run.message_handlers import Dispatch
from ddp_notebook.run.notebook_kernel import cell_number, is_run_by_program, is_users_thread
from ddp_notebook.run.output.display_target import DisplayTarget, ThreadTarget, of_this_cell
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.session_parts import NOT_STARTED, SessionParts
from ddp_notebook.run.values.values import RankValues
from ddp_notebook.status import Status

if TYPE_CHECKING:
    import ipyparallel

    from ddp_notebook.launch.keep.remote import KeeperClient
    from ddp_notebook.launch.sync.sync import Synced
    from ddp_notebook.observe.report.report import Report
    from ddp_notebook.run.files.files import SessionFiles
    from ddp_notebook.run.jobs.job import Job
    from ddp_notebook.run.jobs.jobs import Jobs
    from ddp_notebook.run.kept.recovered_cells import RecoveredCells
    from ddp_notebook.run.record.notebook_recording import Recording
    from ddp_notebook.run.record.recordings import Recordings
    from ddp_notebook.run.sharding.memory import Memory
    from ddp_notebook.run.sharding.placements import Placements
    from ddp_notebook.widgets.view_placement import ViewPlacement

Progress = Callable[[str], None]
_SHARDING = "ddp_notebook.rank.sharding"
_NOTHING = RecordOptions(level="off")  # the copies of the recording must not be measured
_log = logging.getLogger(__name__)
_current: Session | None = None
_current_lock = threading.Lock()


def current() -> Session | None:
    """Return the running session, or None."""
    return _current


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Checked arguments of `Session.run` and `Session.submit`.

    Attributes:
        told: the message for the ranks, without the number of the cell.
        asked: the ranks as the caller has written them.
        ranks: their numbers now.
        timeout_s: limit in seconds; None: no limit.
        warnings: lines to show above the output.
    """

    told: RunCell
    asked: RankSet
    ranks: list[int]
    timeout_s: float | None
    warnings: list[str]


# `run` shows an interrupt itself: a wrapper would be a second frame of this package in the tracebacks of scripts.
@tells_interrupts({name: sentence for name, sentence in OF_SESSION.items() if name != "run"})
class Session:
    """A group of ranks. `start` makes one; `stop`, or leaving a `with` block, ends it.

    Attributes:
        options: of the start.
        ranks: replace ranks, change their number, form their group again.
    """

    def __init__(
        self, options: StartOptions, *, report: Progress = lambda _: None, remote: KeeperClient | None = None
    ) -> None:
        global _current
        refuse_on_rank("ranks start no ranks: call start")
        self.ranks = SessionRanks(lambda: self._parts)
        self._synced_first: Synced | None = None
        self._remote = remote  # the keeper of a kept session
        self._assembled: SessionParts | None = None
        self._memory: Memory | None = None  # the last measurement
        self._cluster: Cluster | None = None
        self.options = options
        self._ready = False
        self._host_ended = False  # closed, or given back
        self._when_stopped: list[Callable[[], object]] = []
        with _current_lock:
            if _current is not None:
                if _current._outlives_stop:
                    raise SessionExistsError(
                        f"{_current!r} is driven by another notebook; %ddp_stop detaches this notebook from it"
                    )
                other = _current._ready and options.world_size not in (None, _current.world_size)
                resize = f", have {options.world_size} ranks with %ddp_resize {options.world_size}" if other else ""
                raise SessionExistsError(
                    f"{_current!r} is already running; use it{resize}, restart it with %ddp_restart, or end it with "
                    "%ddp_stop"
                )
            _current = self
        try:
            self._start(report)
        except BaseException:
            _current = None
            raise

    def _start(self, report: Progress) -> None:
        with Interrupts(lambda: None) as interrupts:  # which raise where nothing is left half done
            try:
                beginning = self._begin(interrupts.check, report)
                self._hosts = beginning.hosts
                try:
                    self._start_ranks(beginning, interrupts)
                except BaseException:
                    self._end_processes()
                    raise
                return
            except KeyboardInterrupt:
                pass  # told below, without our frames behind it
        raise keyboard_interrupt("the start was interrupted: nothing of it is left")

    def _begin(self, check: Callable[[], None], report: Progress) -> Startup:
        if self._remote is None and self.options.keep is not None:
            from ddp_notebook.launch.keep import connect

            self._remote = connect.start(self.options, check, report)
        if self._remote is None:
            return DirectStartup(self.options, check, report)
        from ddp_notebook.launch.keep.proxy import KeptStartup

        return KeptStartup(self._remote)

    def _start_ranks(self, beginning: Startup, interrupts: Interrupts) -> None:
        dispatch = Dispatch()
        cluster = beginning.make(dispatch)
        self._synced_first = beginning.synced
        self._assembled = parts = SessionParts(
            cluster, dispatch, cluster.placement.world_size, self.options, self._hosts
        )
        self._cells = parts.cells
        self._cluster = cluster
        if self._remote is not None:
            parts.attach(self._remote)
        beginning.start(cluster)
        parts.on_started()
        interrupts.check()
        self._ready = True
        ended_recording.keep(None)

    @property
    def _parts(self) -> SessionParts:
        if self._assembled is None:
            raise SessionBrokenError(NOT_STARTED)
        return self._assembled

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._parts.cluster.placement.world_size

    @property
    def backend(self) -> str:
        """The backend of the default group, such as "gloo"."""
        return self._parts.cluster.placement.backend

    @property
    def is_running(self) -> bool:
        """Whether the ranks were started and not stopped, and their host server lives."""
        return self._cluster is not None and self._hosts.are_alive

    def __repr__(self) -> str:
        if self._cluster is None or not self._ready:
            return f"<Session: {'stopped' if self._host_ended else 'starting'}>"
        dead = f", {name_ranks(self._dead)} died" if self._dead else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        return f"<Session: {ranks} on {self._hosts.words}, {self.backend}{dead}>"

    @property
    def _dead(self) -> list[int]:
        return [] if self._cluster is None else sorted(set(self._cluster.ranks) - set(self._cluster.alive))

    # ---- cells

    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout_s: float | None = None,
        *,
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> CellResult:
        """Run code on ranks, as a cell of a notebook would, and wait for its end.

        In the main thread the output appears live, `input()` can be answered, and the kernel's interrupt stops the
        cell. In another thread nothing is shown. A second call waits in the queue.

        Args:
            code: an IPython cell, which may contain magics and top-level `await`.
            ranks: "all", "0,2-3", "-1", "::2", a rank or several; None: all.
            timeout_s: seconds after which the cell is stopped as by the stop button; None: no limit.
            quiet: show no output.
            execution_count: the number in `In [n]` that tracebacks show; None: that of the calling cell.
            file: name of the cell's file that warnings show; "": one made from the code.
            record: what to record of the cell; None: the level of the session.
            fold: merge lines that are equal on several ranks or differ only in a few numbers. False: show each line of
                each rank. None: the option of the start.

        Raises:
            UsageError: there is no such rank, or `timeout_s` is not a positive number.
            RankError: the cell failed on at least one rank; the error has the results of all.
            RankDiedError: the process of a rank ended.
            CellTimeoutError: the limit was reached; the message says where each rank was.
            KeyboardInterrupt: the cell was interrupted.
            SessionBrokenError: a rank is dead, or still in an earlier cell.

        Example:
            >>> session.run("total = torch.ones(1) * rank; dist.all_reduce(total); total")[0].result
            [0-1] tensor([1.])
            'tensor([1.])'
        """
        cell = self._prepare(code, ranks, timeout_s, quiet, execution_count, file, record, fold)
        target = ThreadTarget() if not quiet and is_users_thread() else None
        try:
            return self._run(cell, target, self._beside(target, code))
        except (DDPNotebookError, KeyboardInterrupt) as error:
            # In a script our frames would stand before what the ranks say.
            raise error.with_traceback(None)  # noqa: B904 - the same error, whose context is the script's

    def submit(
        self,
        code: str,
        ranks: RankSet = None,
        timeout_s: float | None = None,
        *,
        quiet: bool = False,
        execution_count: int | None = None,
        file: str = "",
        record: RecordOptions | None = None,
        fold: bool | None = None,
    ) -> Job:
        """Run code on ranks in the background.

        The output appears in the cell that calls this. Interrupting the notebook does not end the job.

        Args:
            code, ranks, timeout_s, quiet, execution_count, file, record, fold: see `run`.

        Returns:
            A future of the result of `run`.

        Raises:
            UsageError: there is no such rank, or `timeout_s` is not a positive number.
            SessionBrokenError: a host server does not answer.

        Example:
            >>> session.submit("rank + 1", quiet=True).result()[1].result
            '2'
        """
        cell = self._prepare(code, ranks, timeout_s, quiet, execution_count, file, record, fold)
        target = None if quiet else of_this_cell()
        beside = self._beside(target, code)
        self._parts.liveness.check_host()  # before the thread of the job starts

        def run(job: Job) -> CellResult:
            return self._run(cell, target, beside, job)

        told = cell.told
        waiting = None
        if self._remote is not None:
            from ddp_notebook.messages.keeper import Waiting

            of_all = len(cell.ranks) == self.world_size
            waiting = Waiting(told=told, ranks=None if of_all else cell.ranks, timeout_s=timeout_s)
        return self.jobs.start(cell.ranks, code, told.execution_count, target, run, waiting)

    def _prepare(
        self,
        code: str,
        ranks: RankSet,
        timeout_s: float | None,
        quiet: bool,
        execution_count: int | None,
        file: str,
        record: RecordOptions | None,
        fold: bool | None,
    ) -> _Cell:
        """Check the arguments of `run` and `submit`, and find mistakes in the code that would end in a hang."""
        if not isinstance(code, str):
            raise UsageError(f"code is text, not {type(code).__name__}: session.run('print(rank)')")
        parts = self._parts
        liveness = parts.liveness
        dead = [] if self.options.heal else liveness.check_host().gone
        chosen = liveness.parse(ranks)
        warnings: list[str] = []
        if not quiet:
            left = [rank for rank in chosen if rank not in dead]
            with uninterrupted():  # a garbage collection calls callbacks, which swallow a KeyboardInterrupt
                warnings = foresee(code, left, self.world_size, dead, parts.cluster.placement.local_rank)
        if timeout_s is not None:
            check_timeout(timeout_s)
        # A message with a value of another type would not be read by the ranks, and the cell would never end.
        if not isinstance(execution_count, int | None):
            raise UsageError(f"execution_count must be a whole number or None, got {short(execution_count)}")
        if not isinstance(file, str):
            raise UsageError(f"file must be text, got {short(file)}")
        if not isinstance(fold, bool | None):
            raise UsageError(f"fold must be True, False or None, got {short(fold)}")
        told = RunCell(
            cell=0,
            code=code,
            execution_count=cell_number() if execution_count is None else execution_count,
            file=file,
            record=self._record_options(record),
            folds=fold,
        )
        return _Cell(told=told, asked=ranks, ranks=chosen, timeout_s=timeout_s, warnings=warnings)

    def _run(
        self, cell: _Cell, target: DisplayTarget | None, beside: SideView | None, job: Job | None = None
    ) -> CellResult:
        """Run a prepared cell and wait for its end, in the queue of the cells.

        Args:
            cell: from `_prepare`.
            target: shows the output; None: nothing does.
            beside: shows a view below the output.
            job: which runs it; None: the notebook waits.
        """
        parts = self._parts

        def choose() -> tuple[list[int], list[str]]:
            healed = parts.healing.before_cell() if self.options.heal else []
            chosen, notes = parts.liveness.for_cell(cell.asked)
            return chosen, [*healed, *notes, *cell.warnings]

        told = cell.told
        return parts.cells.run(
            told.code,
            choose,
            timeout_s=cell.timeout_s,
            target=target,
            execution_count=told.execution_count,
            file=told.file,
            record=told.record,
            folds=told.folds,
            beside=beside,
            place=None if job is None else job.place,
            waiter=NOTEBOOK if job is None else job.waiter,
            on_begin=None if job is None else job._on_begin,
        )

    @property
    def jobs(self) -> Jobs:
        """The cells in the background: those of `submit` and of `%%on_all_ranks --background`.

        Example:
            >>> job = session.submit("1", quiet=True)
            >>> session.jobs.wait(job.number)[0].state
            'done'
        """
        jobs: Jobs = self._parts.hooks.need("jobs").jobs
        return jobs

    def interrupt(self, *, replace: bool = False) -> list[str]:
        """End the cells that have not ended, as the stop button ends the one that the notebook waits for: those that
        were given up and still run on some ranks, and those of `submit`. If there is none, end calls of
        `session.client` on the ranks. Variables are kept.

        Args:
            replace: give a new process, which begins without variables, to each rank that has not ended its cell after
                2 s.

        Returns:
            What was done, in sentences; where it did not help, what the ranks are in.

        Raises:
            StartError: a new process or the group did not come up.

        Example:
            >>> session.interrupt()
            ['the cell was ended on rank 1; all variables are kept']
        """
        return self._parts.unended.end(replace=replace)

    @functools.cached_property
    def files(self) -> SessionFiles:
        """Send files to the ranks' hosts, and fetch files of the ranks."""
        from ddp_notebook.run.files.files import SessionFiles

        return SessionFiles(lambda: self._parts, self._synced_first)

    # ---- variables

    def pull(
        self,
        name: str,
        ranks: RankSet = None,
        force: bool = False,
        safe: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> RankValues:
        """Return the value of a variable on ranks, by rank. Tensors of a GPU arrive on the CPU. `session["x"]` is the
        same.

        The notebook unpickles the value. A pickle can run any program, so a rank on a host that was broken into can run
        one in the notebook. With `safe=True` nothing is unpickled.

        While a job runs in the background, numbers, text, tensors, arrays and containers of them are copied between two
        of its optimizer steps. Other values are read when the job has ended, and a line says so. If further jobs wait,
        values are read behind them.

        Args:
            name: the variable.
            ranks: which of them, as for `run`; None: all.
            force: pull it even if it has more than 1 GB on a rank.
            safe: receive only numbers, text, bytes, None, tensors, NumPy arrays of numbers, and lists, tuples, sets and
                dicts of them. Everything else is refused.
            report: told the size and the progress of large values, see `run.progress.ProgressLine`.

        Raises:
            UsageError: no such rank, or no name of a variable.
            DDPNotebookError: a rank has no such variable, it is too large, or it cannot be sent; names the rank and
                the type. With `safe`, also if a rank sends anything else than such a value.
            KeyboardInterrupt: it was interrupted; nothing of it is kept.

        Example:
            >>> session.pull("rank")
            [0] 0
            [1] 1
            >>> session.pull("world_size", ranks=0, safe=True)
            [0] 2
        """
        return self._parts.exchange.pull(name, ranks, force=force, safe=safe, report=report)

    def push(
        self,
        variables: Mapping[str, Any] | None = None,
        /,
        *,
        ranks: RankSet = None,
        force: bool = False,
        **values: Any,
    ) -> None:
        """Set variables on ranks. Functions and classes of the notebook's cells travel by value, and tensors of a GPU
        arrive on the CPU. `session["x"] = 1` is the same for all ranks.

        Args:
            variables: names and values. A `RankValues` gives each rank its own.
            ranks: which of them, as for `run`; None: all.
            force: push them even if a rank gets more than 1 GB.
            values: more names and values.

        Raises:
            UsageError: no such rank, no name of a variable, more than 1 GB, or a `RankValues` that lacks a rank.
            DDPNotebookError: a value cannot be pickled, or a rank cannot unpickle it.
            KeyboardInterrupt: it was interrupted; a rank may have them or not.

        Example:
            >>> session.push(lr=0.1, words=["a", "b"])
            >>> session.push({"ranks": 4}, ranks="0")
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise UsageError(f"push takes names and values, not {variables!r:.60}: push(x=1) or push({{'x': 1}})")
        self._parts.exchange.push({**(variables or {}), **values}, ranks, force=force)

    def __getitem__(self, name: str) -> RankValues:
        """`session["x"]`: see `pull`."""
        return self.pull(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """`session["x"] = value`: see `push`."""
        self.push({name: value})

    def peek(self, expression: str, ranks: RankSet = None) -> RankValues:
        """Evaluate an expression on ranks, and return its value as text, by rank. While a job runs in the background,
        that is done between two of its optimizer steps, where variables of the function that trains are found too.

        Args:
            expression: of Python. It must not call a collective: ranks are not at the same step.
            ranks: which of them, as for `run`; None: all.

        Raises:
            UsageError: no such rank, or no expression.
            DDPNotebookError: the expression raised something; names the rank and the error.
            KeyboardInterrupt: the wait for a step was interrupted.

        Example:
            >>> session.peek("rank + 10")
            [0] 10
            [1] 11
        """
        return self._parts.exchange.peek(expression, ranks)

    # ---- models

    def placement(self, name: str | object) -> Placements:
        """Which rank holds which part of which parameter of a model, or of a tensor.

        Args:
            name: of a variable on the ranks, or of a part of one: "model", "model.blocks.0", "x".

        Raises:
            UsageError: a rank has no such model or tensor; or the model itself was given, not its name.

        Example:
            >>> session.placement("model").is_sharded
            False
        """
        from ddp_notebook.run.sharding.placements import placements_of

        if not isinstance(name, str):
            kind = type(name).__name__
            raise UsageError(f'placement takes the name of what ranks have, placement("model"), not a {kind}')
        return placements_of(name, self._ask(f"shards.parts_or_error(globals(), {name!r})", "shards"))

    def memory(self, code: str = "") -> Memory:
        """The memory of parameters, gradients, optimizer state, activations and temporary tensors on each rank. The
        result has what was measured before beside it.

        The first three are counted where the optimizer steps, the others are the most that there were. All models and
        optimizers that are variables count. Torch's trackers see every operation: the code runs some times slower.

        Args:
            code: runs on all ranks meanwhile, such as "step()"; empty: what is held now.

        Raises:
            RankError: the code has failed, or torch's tracker cannot follow it.

        Source: torch.distributed._tools (`MemTracker`, `FSDPMemTracker`).

        Example:
            >>> session.memory()[0].activations
            0
        """
        from ddp_notebook.run.sharding.memory import Memory, RankMemory

        told = self._ask(f"memory.measure(globals(), {code!r}, {cell_number()})", "memory")
        by_rank = {rank: RankMemory(**of) for rank, of in told.items()}
        before = None if self._memory is None else replace(self._memory, before=None)
        self._memory = found = Memory(code=code, by_rank=by_rank, before=before)
        return found

    def _ask(self, expression: str, module: str) -> dict[int, Any]:
        """Evaluate an expression with a module of the ranks' own, and return its value by rank."""
        load = f"__import__('importlib').import_module('{_SHARDING}.{module}')"
        call = expression.replace(f"{module}.", f"{load}.", 1)
        self.run(f"_ddp_told = {call}", quiet=True, record=_NOTHING)
        told = dict(self.pull("_ddp_told"))
        self.run("del _ddp_told", quiet=True, record=_NOTHING)
        return told

    def check(self, *names: str) -> Agreement:
        """Whether ranks agree: in parameters, buffers, optimizer state, data length, random state and versions, or in
        these variables. By checksums, so no data moves while they agree.

        Args:
            names: variables; none: all models, optimizers, loaders and what else has to be the same.

        Raises:
            SessionBrokenError: less than two ranks are there and have nothing else to do.

        Example:
            >>> session.check("model")
            2 ranks agree: 2 parameters (4 elements)
        """
        return self._parts.checking.check(names)

    # ---- recording

    @property
    def recording(self) -> Recording:
        """What the ranks have recorded: metrics, collectives, steps. All of it up to now, or to the end of the session.

        Example:
            >>> result = session.run("dist.barrier()\\ndist.all_reduce(torch.ones(1))", quiet=True)
            >>> session.recording.collectives(op="all_reduce")[-1].site
            'cell line 2'
        """
        return self._recordings.now

    @property
    def _recordings(self) -> Recordings:
        recordings: Recordings = self._parts.hooks.need("recording")
        return recordings

    def _record_options(self, asked: RecordOptions | None) -> RecordOptions:
        recordings: Recordings | None = self._parts.hooks.features.get("recording")
        return (asked or _NOTHING) if recordings is None else recordings.for_cell(asked)

    @property
    def _level(self) -> str:
        """How much the ranks record: "off", "meta", "values" or "all"."""
        return self._recordings.level

    def record(self, level: str) -> None:
        """Set how much the ranks record in the cells to come: "off", "meta" (no values of tensors), "values" (of a fast
        training those of some steps: 20 collectives a second, at least one step) or "all".

        Raises:
            UsageError: there is no such level.

        Example:
            >>> session.record("meta")
        """
        self._recordings.set_level(level)

    def report(self, cell: int | None = None) -> Report:
        """What the time of a training cell's steps went into, in words.

        Args:
            cell: its number; None: the last one that trained.

        Example:
            >>> print(session.report())
            cell ...: ... steps on 2 ranks, ... ms/step (mean of steps 2 to ...
        """
        report = self.recording.report(cell)
        if not report.synchronises or report.times:
            return report
        if loaders := self._parts.checking.whole_loaders():
            count = len(report.ranks)
            note = (
                f"Each rank reads all of {list_names(loaders)}: with a DistributedSampler it reads its share, and an "
                f"epoch has 1/{count} of the steps"
            )
            report = replace(report, notes=(*report.notes, note))
        return report

    def baseline(self, steps: int = 30, limit_s: float = 20.0) -> None:
        """Let rank 0 run the last training cell alone for some steps, which `%ddp_report` then compares with. Its
        models, optimizers, random state and variables are afterwards what they were.

        Args:
            steps: number of steps after which the cell is ended.
            limit_s: seconds after which it is ended at the next step.

        Raises:
            UsageError: no cell has trained.
            RankError: the cell cannot run alone.
        """

        from ddp_notebook.run.record import baseline

        def run(code: str, record: RecordOptions, timeout_s: float) -> None:
            self.run(code, 0, timeout_s, quiet=True, record=record)

        baseline.measure(self._recordings, self._cells, run, steps, limit_s)

    def log(self, rank: int) -> str:
        """What a rank has written, as it came: the last 64 MB.

        Raises:
            UsageError: there is no such rank.

        Example:
            >>> result = session.run("print('epoch 3 done')")
            [0-1] epoch 3 done
            >>> session.log(0).splitlines()[-1]
            'epoch 3 done'
        """
        self._parts.liveness.check_host()
        [one] = self._parts.liveness.parse([rank])
        return self._parts.arrivals.log(one)

    def trace(self, path: str | os.PathLike[str], cell: int | None = None) -> int:
        """Write the recording as one Chrome trace, which https://ui.perfetto.dev opens, with what torch's profiler has
        seen in cells that ran with `--profile`.

        Args:
            path: of the file; compressed if it ends in `.gz`.
            cell: only this one; None: all.

        Returns:
            The number of profiles that it holds.

        Raises:
            UsageError: nothing was recorded, or the file cannot be written.
        """
        return len(self._write_trace(path, cell)[0])

    def _write_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> tuple[list[int], list[int]]:
        """The same. Returns the ranks whose profiles it holds, and those whose profiles are lost."""
        from ddp_notebook.run.record import chrome_trace

        return chrome_trace.write(self.recording, path, cell, self._recordings.profiles())

    def monitor(self, cell: int | None = None) -> None:
        """Show what the ranks do, live: losses, gradient synchronisation, a timeline, tensors and ranks.

        Args:
            cell: only this one; None: all, those to come among them.

        Raises:
            UsageError: nothing was recorded of this cell.
        """
        self._views.show(cell)

    @property
    def _views(self) -> ViewPlacement:
        """Where its monitors stand. `widgets.Monitor(session)` is one more."""
        views: ViewPlacement | None = self._parts.hooks.need("monitor").views
        if views is None:
            raise UsageError("the ranks record nothing that a monitor could show: the feature recording is off")
        return views

    def _beside(self, target: DisplayTarget | None, code: str) -> SideView | None:
        if target is None:
            return None
        views = (side_view(target, code) for side_view in self._parts.hooks.side_view)
        return next((view for view in views if view is not None), None)

    # ---- ranks

    def status(self) -> Status:
        """Return every rank's host, process, device, memory and state; the last training run; how well hosts' clocks
        are known; the time left of a job."""
        parts = self._parts
        cluster = parts.liveness.cluster
        recordings: Recordings | None = parts.hooks.features.get("recording")
        return rank_states.status(
            cluster,
            parts.questions,
            parts.cluster.placement,
            parts.hosts.status(),
            None if recordings is None else recordings.observer.recording,
            lost=self._state_without_hosts,
        )

    @property
    def _state_without_hosts(self) -> str:
        return "goes on elsewhere" if self._outlives_stop else "died"

    @property
    def client(self) -> ipyparallel.Client:
        """A plain `ipp.Client` of the same engines, for `%%px`, views and ipyparallel's own tools.

        Its controller is started at the first use, and one that is gone again at the next.

        Raises:
            ClientError: it cannot be reached.
        """
        self._parts.liveness.check()
        return self._parts.client.get()

    @property
    def _trouble(self) -> str:
        """What is wrong with the host server, by which the ranks get their cells, and what helps; "": nothing."""
        return self._parts.liveness.cluster.trouble()

    # ---- sessions that outlive the notebook

    @property
    def _is_kept(self) -> bool:
        """Whether its ranks outlive the notebook, see `keep_h`."""
        return self._remote is not None

    @property
    def _kept_as(self) -> str:
        """The name of a kept session, which `attach` takes; "" of another."""
        return "" if self._remote is None else self._remote.welcome.name

    @property
    def _drives(self) -> bool:
        """Whether this notebook runs the cells, and does not only look on."""
        return self._remote is None or (self._remote.welcome.drives and not self._remote.gone)

    @property
    def _outlives_stop(self) -> bool:
        """Whether `stop` ends nothing: this notebook only looks on, has left, or another has taken the session over."""
        return self._remote is not None and self._remote.goes_on

    @property
    def _ended_elsewhere(self) -> bool:
        return self._remote is not None and self._remote.ended_elsewhere

    def detach(self) -> None:
        """Let the ranks of a kept session live on without this notebook, whose `stop` then ends nothing any more."""
        if self._remote is not None:
            self._remote.close("this notebook has left the session")

    @property
    def _recovered(self) -> RecoveredCells:
        recovered: RecoveredCells = self._parts.hooks.need("keep").recovered
        return recovered

    def _show_unseen(self, *, wait: bool = False, timeout_s: float = 30.0) -> list[str]:
        """Show what cells have printed and displayed that an earlier notebook has sent and not shown to their end. One
        that still runs goes on in the background: its output comes here, and it is one of `jobs`, as are those behind
        it whose turn has not come.

        Args:
            wait: for the end of one that runs. The stop button ends it then, unless it is in the background already.
            timeout_s: how long what was kept may take to come.

        Returns:
            A line about each that runs or waits, and about ranks that the earlier notebook has left without variables.

        Raises:
            what `run` raises: of the first one that has not ended well.

        Example:
            >>> session._show_unseen(wait=True)
            []
        """
        if self._remote is None or not self._drives:
            return []
        self._remote.told_all.wait(timeout_s)
        self._parts.pump.settle(timeout_s)
        jobs, adopted = self.jobs, self._recovered
        wait = wait or is_run_by_program()  # which takes nothing that comes later
        failed: BaseException | None = None
        try:
            adopted.show_ended(wait=wait)
        except (DDPNotebookError, KeyboardInterrupt) as error:
            failed = error
        said = _lacking_in_words(self._remote.lacking)
        for run, cell in adopted.let_go():
            job = self._in_background(run, cell)
            adopted.jobs.add(job.number)
            said.append(f"cell [{cell.execution_count}] of the earlier notebook goes on as job {job.number}")
        said += self._queue_again()
        if failed is not None:
            print(*said, sep="\n", file=sys.stderr)
            raise failed
        if wait and (numbers := [job.number for job in jobs if job.number in adopted.jobs]):
            jobs.wait(*numbers)
        return said + [
            f"cell [{cell.execution_count}] of the earlier notebook waits at input(): %ddp_attach --wait asks you"
            for cell in adopted.asking
        ]

    def _queue_again(self) -> list[str]:
        """Have the jobs in the queue here that waited in that of the earlier notebook. Returns a line about each."""
        adopted, said = self._recovered, []
        while adopted.waiting and not adopted.asking:  # behind one that asks its user they go on waiting
            one = adopted.waiting.pop(0)
            cell = one.told
            which = f"cell [{cell.execution_count}], which waited in the queue of the earlier notebook,"
            try:
                job = self.submit(
                    cell.code,
                    one.ranks,
                    one.timeout_s,
                    execution_count=cell.execution_count,
                    file=cell.file,
                    record=cell.record,
                    fold=cell.folds,
                )
            except UsageError as error:  # there are fewer ranks now
                said.append(f"{which} cannot run: {error}")
                continue
            adopted.jobs.add(job.number)
            said.append(f"{which} is job {job.number}")
        return said

    def _in_background(self, run: CellRun, cell: RunCell) -> Job:
        target = of_this_cell()
        beside = self._beside(target, cell.code)

        def follow(job: Job) -> CellResult:
            return self._recovered.follow(run, target, job.place, job.waiter, beside, job._on_begin)

        return self.jobs.start(run.result.ranks, cell.code, cell.execution_count, target, follow)

    # ---- end

    def when_stopped(self, call: Callable[[], object]) -> None:
        """Have this called once when the session is stopped, before its ranks end; at once if it is stopped already.
        For what shows ranks.

        Args:
            call: what it raises is logged, and stops nothing.

        Example:
            >>> session.when_stopped(lambda: print("the ranks end"))
        """
        self._when_stopped.append(call)
        if self._host_ended:
            self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        while self._when_stopped:
            try:
                self._when_stopped.pop(0)()
            except Exception:
                _log.exception("what was to be done at the end of the session has failed")

    def _check_restart(self) -> None:
        """Check that the ranks could be started again, before they are ended.

        Raises:
            StartError: they could not; the message says why, and the session is unchanged.
        """
        if not self.is_running:
            return
        try:
            self._hosts.check_startable(self.world_size)
        except DDPNotebookError as error:
            living = len(self.ranks.pids())
            left = f"{living} of {self.world_size} ranks live, with their variables" if living else "no rank is left"
            raise StartError(f"{error}. New ranks could not be started now, so none was ended: {left}") from error

    def stop(self) -> None:
        """End every process of the session and all below them. Doing it twice is no error."""
        global _current
        with uninterrupted("interrupted, but all ranks were ended"):
            with _current_lock:
                if _current is self:
                    _current = None
            try:
                if self._cluster is not None and self._ready:
                    self._parts.hooks.stops()
                self._tell_of_the_end()
                if self._cluster is not None:
                    self._parts.let_go()
            finally:
                self._end_processes()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_processes(self) -> None:
        (cluster, self._cluster), (done, self._host_ended) = (self._cluster, None), (self._host_ended, True)
        if cluster is not None:
            self._parts.close()
        elif done:
            return
        healthy = cluster is None or cluster.stop()
        if cluster is not None:
            for joined in self._parts.hooks.joined:
                joined()
        self._hosts.end(healthy=healthy)


def _lacking_in_words(ranks: list[int]) -> list[str]:
    """The notebook that has resized the session ended before these had what they get."""
    if not ranks:
        return []
    given = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
    new = f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} new"
    return [
        f"{new}, and the earlier notebook ended while it resized the session: variables may be missing there. "
        f"%ddp_heal --from {given} copies those of rank {given}"
    ]
