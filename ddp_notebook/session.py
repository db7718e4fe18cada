"""The session: a group of ranks that the notebook controls."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from ddp_notebook.run.cells.cell_options import check_timeout
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, uninterrupted
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.watch import NOTEBOOK, SideView
from ddp_notebook.run.consistency.agreement import Agreement
from ddp_notebook.run.consistency.compared_entries import list_names
from ddp_notebook.run.groups import rank_states
from ddp_notebook.run.groups.ranks import SessionRanks
from ddp_notebook.run.interrupted import OF_SESSION, tells_interrupts
from ddp_notebook.run.lint.warnings import foresee
from ddp_notebook.run.message_handlers import Dispatch
from ddp_notebook.run.notebook_kernel import cell_number, is_run_by_program, is_users_thread
from ddp_notebook.run.output.display_target import DisplayTarget, ThreadTarget, of_this_cell
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.session_parts import NOT_STARTED, SessionParts
from ddp_notebook.run.values.values_by_rank import RankValues
from ddp_notebook.status import Status

if TYPE_CHECKING:
    import ipyparallel

    from ddp_notebook.launch.keep.keeper_client import KeeperClient
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
    from ddp_notebook.run.verify.verification import Verification
    from ddp_notebook.run.whos.variables import Variables
    from ddp_notebook.widgets.view_placement import ViewPlacement

Progress = Callable[[str], None]
_SHARDING = "ddp_notebook.rank.sharding"
_NOTHING = RecordOptions(level="off")  # the cells that copy a result must not be recorded
_DROP_S = 5.0  # after an interrupted command
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
        told: the message that is sent to the ranks; its cell number is not set yet.
        asked: the `ranks` argument as given.
        ranks: the rank numbers that `asked` selects now.
        timeout_s: limit in seconds; None: no limit.
        warnings: lines to show above the output.
        prompt: displayed name of the cell; "": that of its file.
    """

    told: RunCell
    asked: RankSet
    ranks: list[int]
    timeout_s: float | None
    warnings: list[str]
    prompt: str = ""


# `run` handles interrupts itself: a wrapper would add a second frame of this package to the tracebacks of scripts.
@tells_interrupts({name: sentence for name, sentence in OF_SESSION.items() if name != "run"})
class Session:
    """A group of ranks. `start` creates it; `stop`, or leaving a `with` block, ends it.

    Attributes:
        options: the options of the start.
        ranks: operations on the ranks: replace them, change their number, form their group again.
    """

    def __init__(
        self, options: StartOptions, *, report: Progress = lambda _: None, remote: KeeperClient | None = None
    ) -> None:
        global _current
        refuse_on_rank("start()")
        self.ranks = SessionRanks(lambda: self._parts, self._when_the_session_stops)
        self._synced_first: Synced | None = None
        self._remote = remote  # connection to the keeper of a kept session
        self._assembled: SessionParts | None = None
        self._memory: Memory | None = None  # result of the last call of `memory`
        self._cluster: Cluster | None = None
        self.options = options
        self._ready = False
        self._host_ended = False  # its processes were ended, or its ranks were released
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
        # `check` raises an interrupt, at points where nothing is half done
        with Interrupts(lambda: None) as interrupts:
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
                pass  # raised below, so that the traceback has no frames of this package
        raise keyboard_interrupt("the start was interrupted: all processes that it started have ended")

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
        """Number of ranks."""
        return self._parts.cluster.placement.world_size

    @property
    def backend(self) -> str:
        """Backend of the default group, such as "gloo"."""
        return self._parts.cluster.placement.backend

    @property
    def is_running(self) -> bool:
        """Return whether the ranks were started and not stopped, and their host servers are alive."""
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
        """Run code on ranks, as a notebook cell would, and wait until it has ended.

        In the main thread the output appears live, `input()` can be answered, and the stop button stops the cell. In
        other threads nothing is shown. Concurrent calls wait in the run queue.

        Args:
            code: an IPython cell; magics and top-level `await` are allowed.
            ranks: "all", "0,2-3", "-1", "::2", "tp=1", "host=gpu2", one rank or several; None: all.
            timeout_s: seconds after which the cell is interrupted, as by the stop button; None: no limit.
            quiet: show no output.
            execution_count: the number in `In [n]` of tracebacks; None: the number of the calling cell.
            file: file name of the cell, for warnings; "": a name derived from the code.
            record: recording options of the cell; None: the recording level of the session.
            fold: merge lines that are equal on several ranks or differ only in a few numbers. False: show each line of
                each rank. None: as set at the start.

        Raises:
            UsageError: a rank does not exist, or an argument is invalid.
            RankError: the cell failed on at least one rank; the error has the results of all ranks.
            RankDiedError: a rank's process ended.
            CellTimeoutError: `timeout_s` has passed; the message shows the line of each rank.
            KeyboardInterrupt: the cell was interrupted.
            SessionBrokenError: a rank is dead, or still busy with an earlier cell.

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
            # In a script, frames of this package would precede the errors of the ranks.
            raise error.with_traceback(None)  # noqa: B904 - the same error, whose context is the script's

    def _run_in_slot(self, code: str, *, quiet: bool = False, prompt: str = "") -> CellResult:
        """Run code on all ranks while the caller has their slot in the run queue. See `run`.

        Args:
            prompt: displayed name of the cell, such as "In [8], second run"; "": none.
        """
        cell = replace(self._prepare(code, None, None, quiet, None, "", None, None), prompt=prompt)
        target = ThreadTarget() if not quiet and is_users_thread() else None
        return self._run(cell, target, self._beside(target, code), place=nullcontext())

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

        The output appears in the calling cell. Interrupting the notebook does not end the job.

        Args:
            code, ranks, timeout_s, quiet, execution_count, file, record, fold: see `run`.

        Returns:
            The job, a future whose result is that of `run`.

        Raises:
            UsageError: a rank does not exist, or an argument is invalid.
            SessionBrokenError: a host server does not answer.

        Example:
            >>> session.submit("rank + 1", quiet=True).result()[1].result
            '2'
        """
        cell = self._prepare(code, ranks, timeout_s, quiet, execution_count, file, record, fold)
        target = None if quiet else of_this_cell()
        beside = self._beside(target, code)
        self._parts.liveness.check_host()  # fail here, before the job's thread starts

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
        """Check the arguments of `run` and `submit`, and warn about code that would hang."""
        if not isinstance(code, str):
            raise UsageError(f"code must be text, e.g. session.run('print(rank)'), got {type(code).__name__}")
        parts = self._parts
        liveness = parts.liveness
        dead = [] if self.options.heal else liveness.check_host().gone
        chosen = liveness.parse(ranks)
        warnings: list[str] = []
        if not quiet:
            left = [rank for rank in chosen if rank not in dead]
            with uninterrupted():  # callbacks during a garbage collection would swallow a KeyboardInterrupt
                warnings = foresee(code, left, self.world_size, dead, parts.cluster.placement.local_rank)
        if timeout_s is not None:
            check_timeout(timeout_s)
        # Ranks cannot decode a message with a value of another type, so the cell would never end.
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
            may_stop=parts.hooks.may_stop(code),  # for a job that its keeper starts without a notebook
        )
        return _Cell(told=told, asked=ranks, ranks=chosen, timeout_s=timeout_s, warnings=warnings)

    def _run(
        self,
        cell: _Cell,
        target: DisplayTarget | None,
        beside: SideView | None,
        job: Job | None = None,
        place: AbstractContextManager[object] | None = None,
    ) -> CellResult:
        """Run a prepared cell in the run queue, and wait until it has ended.

        Args:
            cell: from `_prepare`.
            target: shows the output; None: the output is not shown.
            beside: shows a view below the output.
            job: the job that runs the cell; None: the notebook waits for the cell.
            place: as for `Cells.run`, without a job.
        """
        parts = self._parts

        def choose() -> tuple[list[int], list[str]]:
            healed = parts.healing.before_cell() if self.options.heal else []
            chosen, notes = parts.liveness.for_cell(cell.asked)
            return chosen, [*healed, *notes, *cell.warnings]

        def name(run: CellRun, _: object) -> None:
            if cell.prompt:
                parts.cells.name(run.number, cell.prompt)

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
            place=place if job is None else job.place,
            waiter=NOTEBOOK if job is None else job.waiter,
            on_begin=name if job is None else job._on_begin,
        )

    @property
    def jobs(self) -> Jobs:
        """Cells in the background, started by `submit` or `%%on_all_ranks --background`.

        Example:
            >>> job = session.submit("1", quiet=True)
            >>> session.jobs.wait(job.number)[0].state
            'done'
        """
        jobs: Jobs = self._parts.hooks.need("jobs").jobs
        return jobs

    def interrupt(self, *, replace: bool = False) -> list[str]:
        """End all cells that have not ended, and keep the variables.

        These are abandoned cells that still run on some ranks, and cells started by `submit`. If there are none, end
        calls of `session.client` on the ranks.

        Args:
            replace: give a new process without variables to each rank that has not ended its cell after 2 s.

        Returns:
            Sentences that describe what was done. For ranks that could not be interrupted, the call in which they are.

        Raises:
            StartError: a new process or the group could not be started.

        Example:
            >>> session.interrupt()
            ['the cell was ended on rank 1; all variables are kept']
        """
        return self._parts.unended.end(replace=replace)

    @functools.cached_property
    def files(self) -> SessionFiles:
        """Send files to the hosts of the ranks, and fetch files from them."""
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
        """Return the value of a variable by rank. GPU tensors arrive on the CPU. `session["x"]` is a short form.

        The notebook unpickles the value. A pickle can run any code, so a compromised host could run code in the
        notebook. With `safe=True` nothing is unpickled.

        While a background job runs, numbers, text, tensors, arrays and containers of them are copied between two of its
        optimizer steps. Other values are read after the job has ended, and a message says so. If more jobs wait, values
        are read after the last of them.

        Args:
            name: name of the variable.
            ranks: selection of ranks, as for `run`; None: all.
            force: pull the value even if it exceeds 1 GB on a rank.
            safe: accept only numbers, text, bytes, None, tensors, NumPy arrays of numbers, and lists, tuples, sets and
                dicts of them.
            report: called with the size and progress of large values, see `run.progress.ProgressLine`.

        Raises:
            UsageError: a rank does not exist, or `name` is not a valid variable name.
            DDPNotebookError: a rank has no such variable, it is too large, or it cannot be sent; the message names the
                rank and the type. With `safe`, also if a rank sends any other value.
            KeyboardInterrupt: the call was interrupted, and nothing was stored.

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
        """Set variables on ranks.

        Functions and classes defined in notebook cells are sent by value. GPU tensors arrive on the CPU. A short form
        for all ranks is `session["x"] = 1`.

        Args:
            variables: names and values. A `RankValues` gives each rank its own value.
            ranks: selection of ranks, as for `run`; None: all.
            force: push the values even if a rank receives more than 1 GB.
            values: more names and values.

        Raises:
            UsageError: a rank does not exist, a name is invalid, the values exceed 1 GB, or a `RankValues` lacks a
                rank.
            DDPNotebookError: a value cannot be pickled, or a rank cannot unpickle it.
            KeyboardInterrupt: the call was interrupted; each rank may or may not have the variables.

        Example:
            >>> session.push(lr=0.1, words=["a", "b"])
            >>> session.push({"ranks": 4}, ranks="0")
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise UsageError(f"push needs names and values, push(x=1) or push({{'x': 1}}), got {variables!r:.60}")
        self._parts.exchange.push({**(variables or {}), **values}, ranks, force=force)

    def __getitem__(self, name: str) -> RankValues:
        """Return the value of a variable by rank, see `pull`."""
        return self.pull(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable on all ranks, see `push`."""
        self.push({name: value})

    def peek(self, expression: str, ranks: RankSet = None) -> RankValues:
        """Evaluate an expression on ranks, and return its value as text, by rank.

        While a background job runs, the expression is evaluated between two of its optimizer steps. It can then use
        local variables of the training function, too.

        Args:
            expression: a Python expression. It must not call a collective, because ranks are at different steps.
            ranks: selection of ranks, as for `run`; None: all.

        Raises:
            UsageError: a rank does not exist, or the expression is invalid.
            DDPNotebookError: the expression raised an error; the message names the rank and the error.
            KeyboardInterrupt: the wait for an optimizer step was interrupted.

        Example:
            >>> session.peek("rank + 10")
            [0] 10
            [1] 11
        """
        return self._parts.exchange.peek(expression, ranks)

    def whos(self, pattern: str = "", *, exact: bool = False) -> Variables:
        """Return all variables of the ranks: type, shape, dtype, device, bytes, and how they differ between ranks.

        Large tensors are sampled. While a cell runs, contents are not compared.

        Args:
            pattern: only names that match this shell pattern, such as "loss*"; "": all variables that hold data.
            exact: compare every byte.

        Raises:
            SessionBrokenError: no rank is alive, or no rank answers.

        Example:
            >>> session.run("weights = torch.ones(4)", quiet=True) and None
            >>> session.whos("weights")["weights"].ranks
            'same'
        """
        from ddp_notebook.run.whos.listing import list_variables

        return list_variables(self._parts, pattern, exact)

    # ---- models

    def placement(self, name: str | object) -> Placements:
        """Return which rank holds which part of each parameter of a model, or of a tensor.

        Args:
            name: name of a variable on the ranks, or of a part of one: "model", "model.blocks.0", "x".

        Raises:
            UsageError: a rank has no such model or tensor, or `name` is not a string.

        Example:
            >>> session.placement("model").is_sharded
            False
        """
        from ddp_notebook.run.sharding.placements import placements_of

        if not isinstance(name, str):
            kind = type(name).__name__
            raise UsageError(f'name must be the name of a variable, e.g. placement("model"), got a {kind}')
        return placements_of(name, self._ask(f"shards.parts_or_error(globals(), {name!r})", "shards"))

    def memory(self, code: str = "") -> Memory:
        """Measure the memory of parameters, gradients, optimizer state, activations and temporary tensors on each rank.

        The first three are counted at the optimizer step; the others are maxima. All models and optimizers in variables
        count. Torch's trackers intercept every operation, so the code runs several times slower. The result also
        contains the previous measurement, for comparison.

        Args:
            code: runs on all ranks during the measurement, such as "step()"; "": measure the memory in use now.

        Raises:
            RankError: the code failed, or torch's tracker does not support it.

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

    def verify(self, loss: str = "", batch: Sequence[str] = (), model: str = "", micro: int = 1) -> Verification:
        """Compare the gradients of one training step of all ranks with those of one process.

        The step is computed by all ranks together, by each rank alone, and by one process with the whole batch.
        Afterwards models, gradients, random states and variables are restored.

        Args:
            loss: expression of the loss, such as "F.cross_entropy(model(x), y)"; "": the step of the last training
                cell, from its text.
            batch: names of the variables with each rank's part of the batch.
            model: name of the variable with the model; "": the first one in the loss.
            micro: number of micro-steps for each optimizer step, at least 1. The batch is split into as many parts.

        Raises:
            UsageError: a name is unknown, the loss is no scalar tensor with a gradient, or the step cannot be compared.
            RankError: the ranks cannot compute the step together.

        Example:
            >>> done = session.run(
            ...     "from torch.nn.parallel import DistributedDataParallel as DDP; "
            ...     "x = torch.randn(4, 3) + rank; model = DDP(torch.nn.Linear(3, 1))",
            ...     quiet=True,
            ... )
            >>> session.verify("model(x).mean()", batch=["x"]).is_right
            True
        """
        from ddp_notebook.run.verify import verifying

        def ask(expression: str) -> dict[int, Any]:
            return self._ask(expression, "feature", "ddp_notebook.rank.verify")

        last = self._cells.last_codes()
        codes = [code for _, code in last]
        return verifying.verify(ask, codes, lambda at: self._findings_of(last[at][0]), loss, batch, model, micro)

    def _findings_of(self, cell: int) -> tuple[str, Sequence[str]]:
        """Return the displayed name of a cell and its findings; none with `--quiet-findings`."""
        from ddp_notebook.observe.tables.matching import label_of

        recordings = self._parts.hooks.features.get("recording")
        if recordings is None or self._parts.options.quiet_findings:
            return "", ()
        recording = recordings.observer.recording
        return label_of(recording, cell), recording.findings.get(cell, ())

    def _ask(self, expression: str, module: str, package: str = _SHARDING) -> dict[int, Any]:
        """Evaluate an expression with a module of a package on the ranks, and return its value by rank."""
        load = f"__import__('importlib').import_module('{package}.{module}')"
        call = expression.replace(f"{module}.", f"{load}.", 1)
        cluster = self._parts.liveness.cluster
        try:
            with self._part_of_a_command():
                self.run(f"_ddp_told = {call}", quiet=True, record=_NOTHING)
                return dict(self.pull("_ddp_told"))
        finally:
            if cluster.alive == cluster.ranks:
                with suppress(DDPNotebookError):
                    self.run("_ddp_told=0;del _ddp_told", None, _DROP_S, quiet=True, record=_NOTHING)

    @contextmanager
    def _part_of_a_command(self) -> Iterator[None]:
        """Run a command's own cells in the block. An interrupt has no message, because the command has a sentence.

        Raises:
            KeyboardInterrupt: stop was pressed. It has the message of the cell if stop has killed a rank.
        """
        cluster = self._parts.liveness.cluster
        before = list(cluster.alive)
        try:
            yield
        except KeyboardInterrupt as error:
            if list(cluster.alive) != before:
                raise
            error.__traceback__ = None  # IPython keeps the last error, with its frames and their data
        else:
            return
        raise KeyboardInterrupt

    def check(self, *names: str) -> Agreement:
        """Compare parameters, buffers, optimizer state, data length, random state and versions, or the given variables,
        between ranks.

        Ranks send checksums, and samples of tensors only if the checksums differ.

        Args:
            names: variables; none: all models, optimizers, loaders and all other state that must be equal.

        Raises:
            SessionBrokenError: fewer than two ranks are alive and idle.

        Example:
            >>> session.check("model")
            2 ranks agree: 2 parameters (4 elements)
        """
        return self._parts.checking.check(names)

    # ---- recording

    @property
    def recording(self) -> Recording:
        """Everything that the ranks have recorded until now, or until the end of the session: metrics, collectives,
        steps.

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
        """Recording level: "off", "meta", "values" or "all"."""
        return self._recordings.level

    def record(self, level: str) -> None:
        """Set the recording level of the cells that follow.

        "off" records nothing. "meta" records no tensor contents. "values" samples tensor contents when training is
        fast: 20 collectives per second, at least one step. "all" records all contents.

        Raises:
            UsageError: the level is unknown.

        Example:
            >>> session.record("meta")
        """
        self._recordings.set_level(level)

    def report(self, cell: int | None = None) -> Report:
        """Return a breakdown of the step time of a training cell.

        Args:
            cell: number of the cell; None: the last cell that trained, or that ran a pipeline, remote calls or
                inference without an optimizer.

        Example:
            >>> print(session.report(session.recording.runs()[-1].cell))
            cell ...: ... steps on ... ms/step (mean of steps 2 to ...
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

    def catch_nan(self, on: bool = True) -> None:
        """Stop the next cells before an optimizer step whose gradients are NaN or infinite, on all ranks together.

        Each gradient is checked before it is averaged. The cell names the rank, the gradients, and for DDP the module
        that made the first bad value: the last forward of the model and its backward are repeated on that rank alone.
        A step that a `GradScaler` skips does not stop the cell.

        Args:
            on: False: check the next cells no longer.

        Raises:
            UsageError: the recording is off.

        Example:
            >>> session.catch_nan()
            >>> session.catch_nan(False)
        """
        if on and self._recordings.level == "off":
            raise UsageError("the steps of cells are not recorded; run %ddp_record values first")
        self._recordings.catches_nan = on

    def baseline(self, steps: int = 30, limit_s: float = 20.0) -> None:
        """Run the last training cell on rank 0 alone for some steps, as a baseline for `%ddp_report`.

        Afterwards its models, optimizers, random state and variables are restored.

        Args:
            steps: number of steps after which the cell is ended.
            limit_s: seconds after which the cell is ended at the next step.

        Raises:
            UsageError: no training cell has run.
            RankError: the cell cannot run on one rank alone.
        """

        from ddp_notebook.run.record import baseline

        def run(code: str, record: RecordOptions, timeout_s: float) -> None:
            with self._part_of_a_command():
                self.run(code, 0, timeout_s, quiet=True, record=record)

        baseline.measure(self._recordings, self._cells, run, steps, limit_s)

    def log(self, rank: int) -> str:
        """Return the raw output of a rank: the last 64 MB.

        Raises:
            UsageError: the rank does not exist.

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
        """Write the recording as a Chrome trace, which https://ui.perfetto.dev opens. It contains the torch profiles of
        cells that ran with `--profile`.

        Args:
            path: path of the file; compressed if it ends in `.gz`.
            cell: number of the cell; None: all cells.

        Returns:
            The number of profiles in the file.

        Raises:
            UsageError: nothing was recorded, or the file cannot be written.
        """
        return len(self._write_trace(path, cell)[0])

    def _write_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> tuple[list[int], list[int]]:
        """Write the trace, and return the ranks whose profiles it contains, and the ranks whose profiles are lost."""
        from ddp_notebook.run.record import chrome_trace

        return chrome_trace.write(self.recording, path, cell, self._recordings.profiles())

    def monitor(self, cell: int | None = None) -> None:
        """Show the live monitor: losses, gradient synchronisation, a timeline, tensors and ranks.

        Args:
            cell: number of the cell; None: all cells, including later ones.

        Raises:
            UsageError: nothing was recorded of this cell.
        """
        with uninterrupted("interrupted, but the monitor is shown"):  # NumPy would replace an interrupt by an error
            self._views.show(cell)

    @property
    def _views(self) -> ViewPlacement:
        """Monitors of this session. `widgets.Monitor(session)` creates another one."""
        views: ViewPlacement | None = self._parts.hooks.need("monitor").views
        if views is None:
            raise UsageError(
                "a monitor needs the feature recording, which is off; restart Jupyter without DDP_NOTEBOOK_TEST_WITHOUT"
            )
        return views

    def _beside(self, target: DisplayTarget | None, code: str) -> SideView | None:
        if target is None:
            return None
        views = (side_view(target, code) for side_view in self._parts.hooks.side_view)
        return next((view for view in views if view is not None), None)

    # ---- ranks

    def status(self) -> Status:
        """Return the host, process, device, memory and state of every rank.

        The result also has the last training run, the clock error of each host, and the time left of a cluster job.
        """
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
        """A plain `ipp.Client` of the same engines, for `%%px`, views and ipyparallel tools.

        The controller is started at the first use, and started again if it has ended.

        Raises:
            ClientError: the controller cannot be reached.
        """
        self._parts.liveness.check()
        return self._parts.client.get()

    @property
    def _trouble(self) -> str:
        """Description of a fault of the host servers, which pass cells to the ranks, with a remedy; "" if there is
        none.
        """
        return self._parts.liveness.cluster.trouble()

    # ---- sessions that outlive the notebook

    @property
    def _is_kept(self) -> bool:
        """Return whether the ranks outlive the notebook, see `keep`."""
        return self._remote is not None

    @property
    def _kept_as(self) -> str:
        """The name of a kept session, for `attach_session`; "" for other sessions."""
        return "" if self._remote is None else self._remote.welcome.name

    @property
    def _drives(self) -> bool:
        """Return whether this notebook runs the cells, and does not only observe."""
        return self._remote is None or (self._remote.welcome.drives and not self._remote.gone)

    @property
    def _outlives_stop(self) -> bool:
        """Return whether `stop` leaves the ranks running.

        This is so if the notebook only observes, has detached, or another one has taken over.
        """
        return self._remote is not None and self._remote.goes_on

    @property
    def _ended_elsewhere(self) -> bool:
        return self._remote is not None and self._remote.ended_elsewhere

    def detach(self) -> None:
        """Detach from a kept session. `stop` then leaves the ranks running."""
        if self._remote is not None:
            self._remote.close("this notebook has left the session")

    @property
    def _recovered(self) -> RecoveredCells:
        recovered: RecoveredCells = self._parts.hooks.need("keep").recovered
        return recovered

    def _show_unseen(self, *, wait: bool = False, timeout_s: float = 30.0) -> list[str]:
        """Show output that an earlier notebook has not shown completely.

        A cell that still runs continues as a background job: its output appears in this notebook, and `jobs` contains
        it. The same holds for cells that wait in the run queue.

        Args:
            wait: wait for the end of a running cell. The stop button ends the cell, unless it already is a background
                job.
            timeout_s: limit for receiving the stored output.

        Returns:
            A line about each running or waiting cell, and about ranks that the earlier notebook left without variables.

        Raises:
            RankError: the first cell that failed; or any other error of `run`.

        Example:
            >>> session._show_unseen(wait=True)
            []
        """
        if self._remote is None or not self._drives:
            return []
        self._remote.told_all.wait(timeout_s)
        self._parts.pump.settle(timeout_s)
        jobs, adopted = self.jobs, self._recovered
        wait = wait or is_run_by_program()  # such a program drops output that arrives after the cell
        failed: BaseException | None = None
        try:
            adopted.show_ended(wait=wait)
        except (DDPNotebookError, KeyboardInterrupt) as error:
            failed = error
        said = _lacking_in_words(self._remote.lacking)
        for run, cell in adopted.let_go():
            job = self._in_background(run, cell)
            adopted.jobs.add(job.number)
            said.append(f"cell [{cell.execution_count}] of the earlier notebook continues as job {job.number}")
        said += self._queue_again()
        if failed is not None:
            print(*said, sep="\n", file=sys.stderr)
            raise failed
        if wait and (numbers := [job.number for job in jobs if job.number in adopted.jobs]):
            jobs.wait(*numbers)
        return said + [
            f"cell [{cell.execution_count}] of the earlier notebook waits at input() or breakpoint(): "
            "%ddp_attach --wait asks you"
            for cell in adopted.asking
        ]

    def _queue_again(self) -> list[str]:
        """Put the jobs that waited in the earlier notebook into the run queue of this one. Return a line about each."""
        adopted, said = self._recovered, []
        while adopted.waiting and not adopted.asking:  # jobs behind a cell that waits for input keep waiting
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
            except UsageError as error:  # the session has fewer ranks now
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

    def _when_the_session_stops(self, call: Callable[[], object]) -> None:
        """Register a callback, see `SessionRanks.when_stopped`."""
        self._when_stopped.append(call)
        if self._host_ended:
            self._tell_of_the_end()

    def _tell_of_the_end(self) -> None:
        while self._when_stopped:
            try:
                self._when_stopped.pop(0)()
            except Exception:
                _log.exception("a function for the end of the session failed")

    def _check_restart(self) -> None:
        """Check that the ranks could be started again, before the session ends them.

        Raises:
            StartError: they could not be started; the message has the reason, and the session is unchanged.
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
        """End all processes of the session and their descendants. Further calls do nothing."""
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
    """Return a message about new ranks that have no variables, because the earlier notebook ended during a resize."""
    if not ranks:
        return []
    given = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
    new = f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} new"
    return [
        f"{new}, and the earlier notebook ended while it resized the session: variables may be missing there. "
        f"%ddp_heal --from {given} copies those of rank {given}"
    ]
