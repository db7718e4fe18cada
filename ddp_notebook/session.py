"""One running group of ranks as the notebook sees it: runs cells on them, moves values, and owns what it started."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ddp_notebook.errors import (
    ClientError,
    DDPNotebookError,
    RankError,
    SessionBrokenError,
    SessionExistsError,
    StartTimeoutError,
    UsageError,
)
from ddp_notebook.launch import warm
from ddp_notebook.launch.client import connect, give_up
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import Placement, place
from ddp_notebook.observe.observer import Observer
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.report import Report
from ddp_notebook.observe.steps.alone import alone
from ddp_notebook.observe.trace.profiles import read as read_profile
from ddp_notebook.observe.trace.trace import save
from ddp_notebook.records.words import group_by_value, list_ranks, name_ranks
from ddp_notebook.run.agree.agreement import Agreement, compare
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, uninterrupted
from ddp_notebook.run.cells.options import check_timeout
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.cells.unended import Unended
from ddp_notebook.run.foresee.warnings import foresee
from ddp_notebook.run.groups.healing import Healing
from ddp_notebook.run.output.comms import Comms
from ddp_notebook.run.questions import Questions
from ddp_notebook.run.rank_sets import RankSet, parse_ranks
from ddp_notebook.run.values.exchange import Exchange, check_name
from ddp_notebook.run.values.transfers import Transfers
from ddp_notebook.run.values.values import RankValues
from ddp_notebook.status import RankStatus, Status
from ddp_notebook.widgets.placing import Live
from ddp_notebook.wire.endpoint import SILENT_S
from ddp_notebook.wire.events import (
    Ask,
    CellDone,
    Check,
    Checked,
    Comm,
    Display,
    Message,
    Probe,
    Pulled,
    Pushed,
    Recorded,
    Tell,
    Told,
    Vitals,
)

if TYPE_CHECKING:
    import ipyparallel

_STATUS_S = 1.0  # what ranks get to answer a question for the table

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)
_current: Session | None = None
_current_lock = threading.Lock()


def current() -> Session | None:
    """The running session, or None."""
    return _current


def start(world_size: int | None = None, *, report: Progress = lambda _: None, **options: Any) -> Session:
    """Start ranks: one process per GPU, or CPU ranks, in an initialised process group.

    Args:
        world_size: number of ranks; None: one per GPU, or on a machine without any min(4, cores), at least 2.
        report: told a line about each stage that is done.
        options: further fields of `StartOptions`: backend, gpus, share_gpus, env, timeout_s, grace_s, hang_after_s,
            guard, heal, live.

    Raises:
        UsageError: an option that cannot be, or does not fit this machine.
        SessionExistsError: ranks are running already.
        StartError: the ranks did not come up; nothing of them is left.

    Example:
        >>> with ddp_notebook.start(2) as session:
        ...     session.run("print(rank)")[1].stdout
        '1\\n'
    """
    return Session(StartOptions(world_size=world_size, **options), report=report)


class Session:
    """A group of ranks. `start` makes one; `stop`, or leaving a `with` block, ends it."""

    def __init__(self, options: StartOptions, *, report: Progress = lambda _: None) -> None:
        global _current
        self._cluster: Cluster | None = None
        self.options = options
        self._ready = False
        self._host_ended = False  # closed, or given back
        self._level = "values"  # how much ranks record
        self._has_news = False  # a cell has run since the recording was brought up to date
        self._when_stopped: list[Callable[[], object]] = []
        self._client: tuple[ipyparallel.Client, int] | None = None  # and the pid of its controller
        with _current_lock:
            if _current is not None:
                raise SessionExistsError(
                    f"{_current!r} is there already; use it, start afresh with %ddp_restart, or end it with %ddp_stop"
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
                self._host, self._give_back = warm.take({**os.environ, **self.options.env})
                try:
                    self._start_ranks(report, interrupts)
                except BaseException:
                    self._end_processes()
                    raise
                return
            except KeyboardInterrupt:
                pass  # told below, without our frames behind it
        raise keyboard_interrupt("the start was interrupted: nothing of it is left")

    def _start_ranks(self, report: Progress, interrupts: Interrupts) -> None:
        began = time.monotonic()

        def stage(name: str) -> None:
            report(f"{name} {time.monotonic() - began:.1f} s")

        deadline = began + self.options.timeout_s
        env = {**os.environ, **self.options.env}
        try:
            facts = self._host.facts(self.options.timeout_s, interrupts.check)
        except StartTimeoutError as error:
            raise StartTimeoutError(f"the start took too long: the fork server was importing torch ({error})") from None
        self.placement: Placement = place(self.options, facts, env)
        stage(self._host.stage)
        self._hostname: str = facts["host"]
        guard = self.backend == "gloo" if self.options.guard is None else self.options.guard
        cluster = Cluster(self._host, self.placement, env, self, guard=guard)
        self._questions = Questions(cluster.send, self._check_rank)
        self._cells = Cells(
            cluster,
            self.world_size,
            self._questions,
            self._check_cells_arrive,
            grace_s=self.options.grace_s,
            hang_after_s=self.options.hang_after_s,
            heals=self.options.heal,
        )
        transfers = Transfers(cluster, self._check_rank)
        self._exchange = Exchange(self._cells, self._questions, transfers, self._check)
        self._healing = Healing(cluster, self._cells, self._questions, transfers, self._check_host)
        self._unended = Unended(cluster, self._cells, self._check_host)
        self._comms = Comms(self._tell_widget)
        self._observer = Observer(self.world_size, cluster.send, lambda: cluster.alive)
        self._observer.recording.catch_up = self._catch_up
        self._live = Live(
            self._observer.recording,
            lambda: self.recording,
            self._cells,
            f"{self.world_size} rank{'s' * (self.world_size != 1)}, {self.backend}",
            self.options.live,
        )
        self._cluster = cluster
        cluster.start(deadline, stage, interrupts.check)
        self._cells.forget_text()
        self._observer.start()
        self._live.prepare()
        self.when_stopped(self._live.close)
        interrupts.check()
        self._ready = True

    # ---- what the user does

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def backend(self) -> str:
        return self.placement.backend

    @property
    def epoch(self) -> int:
        """Number of the group: raised each time it is formed again."""
        return self._living.epoch

    @property
    def is_running(self) -> bool:
        """Whether the ranks were started and not stopped, and their fork server lives."""
        return self._cluster is not None and self._host.is_alive

    @overload
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        wait: Literal[True] = True,
        *,
        quiet: bool = False,
        execution_count: int = 1,
        file: str = "",
        record: Mapping[str, Any] | None = None,
    ) -> CellResult: ...
    @overload
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        *,
        wait: Literal[False],
        quiet: bool = False,
        execution_count: int = 1,
        file: str = "",
        record: Mapping[str, Any] | None = None,
    ) -> Future[CellResult]: ...
    def run(
        self,
        code: str,
        ranks: RankSet = None,
        timeout: float | None = None,
        wait: bool = True,
        *,
        quiet: bool = False,
        execution_count: int = 1,
        file: str = "",
        record: Mapping[str, Any] | None = None,
    ) -> CellResult | Future[CellResult]:
        """Run code on ranks, as a cell of a notebook would.

        In the main thread the output appears live, `input()` can be answered and the kernel's interrupt is passed on;
        in another thread nothing is shown. A second call waits its turn.

        Args:
            code: what an IPython cell may hold, magics and top-level `await` included.
            ranks: which of them: "all", "0,2-3", "-1", "::2", a rank or several; None: all.
            timeout: seconds after which the cell is stopped as by the stop button; None: no limit.
            wait: False returns a future of the result at once.
            quiet: show nothing.
            execution_count: the number in `In [n]` that tracebacks show.
            file: the name of the cell's file that warnings show; "": one made from the code.
            record: what to record beside, see `run.cells.options.what_to_record`; None: nothing.

        Raises:
            UsageError: no such rank, or no such time.
            RankError: it failed on at least one rank; holds the results of all.
            RankDiedError: a rank's process ended.
            CellTimeoutError: it took too long; says where each rank was.
            KeyboardInterrupt: it was interrupted.
            SessionBrokenError: a rank is gone, or still busy with an earlier cell.

        Example:
            >>> session.run("x = torch.ones(1) * rank; dist.all_reduce(x); x")[0].result
            'tensor([6.])'
        """
        if not isinstance(code, str):
            raise UsageError(f"code is text, not {type(code).__name__}: session.run('print(rank)')")
        is_healing = self.options.heal and self._check_host().gone and not self._cells.busy
        healed = self.heal() if is_healing else []
        chosen, notes = self._living_of(ranks)
        if not quiet:
            notes += foresee(code, chosen, self.world_size, self._living.gone)
        if timeout is not None:
            check_timeout(timeout)

        asked = dict(record or {})
        if self._level != "values":
            asked.setdefault("level", self._level)
        if asked.get("profile"):
            asked["profile"] = str(Path(self._living.directory) / "profile")

        def run() -> CellResult:
            self._has_news = True
            return self._cells.run(
                code,
                chosen,
                timeout_s=timeout,
                quiet=quiet,
                execution_count=execution_count,
                file=file,
                notes=[*healed, *notes],
                record=asked,
                beside=None if quiet else self._live.beside(),
            )

        if wait:
            return run()
        self._check_host()  # now, not in a thread of its own
        return self._cells.run_later(run)

    def pull(self, name: str, ranks: RankSet = None, force: bool = False) -> RankValues:
        """The value of a variable on ranks, by rank. Tensors of a GPU arrive on the CPU. `session["x"]` is the same.

        Args:
            name: the variable.
            ranks: which of them, as for `run`; None: all.
            force: pull it even if it has more than 1 GB on a rank.

        Raises:
            UsageError: no such rank, or no name of a variable.
            DDPNotebookError: a rank has no such variable, it is too large, or it cannot be pickled; names the rank
                and the type.
            KeyboardInterrupt: it was interrupted; nothing of it is kept.

        Example:
            >>> session.pull("rank")
            [0] 0
            [1] 1
        """
        return self._exchange.pull(name, parse_ranks(ranks, self.world_size), force=force)

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
        self._exchange.push({**(variables or {}), **values}, parse_ranks(ranks, self.world_size), force=force)

    def __getitem__(self, name: str) -> RankValues:
        """`session["x"]`: see `pull`."""
        return self.pull(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """`session["x"] = value`: see `push`."""
        self.push({name: value})

    def log(self, rank: int) -> str:
        """What a rank has written, as it came: the last 64 MB.

        Raises:
            UsageError: there is no such rank.

        Example:
            >>> session.log(0).splitlines()[-1]
            'epoch 3 done'
        """
        self._check_host()
        [one] = parse_ranks([rank], self.world_size)
        return self._cells.log(one)

    @property
    def client(self) -> ipyparallel.Client:
        """A plain `ipp.Client` of the same engines, for `%%px`, views and ipyparallel's own tools.

        A controller that is gone is started again at the next use.

        Raises:
            ClientError: it cannot be reached.
        """
        cluster = self._check()
        file, pid = cluster.client_file()
        if self._client is not None and self._client[1] == pid:
            self._client[0].wait_for_engines(self.world_size, timeout=20, interactive=False)  # one may be new
            return self._client[0]
        self._close_client()
        try:
            client = connect(file, self.world_size)
        except Exception as error:
            raise ClientError(
                f"ipyparallel's controller (pid {pid}) does not answer: {error}. Cells go on without it; "
                "%ddp_restart brings it back"
            ) from error
        self._client = (client, pid)
        return client

    def reform(self, timeout_s: float = 60.0) -> None:
        """Form the process group anew: same ranks, every variable kept. A store that is gone is replaced.

        What holds a group (a model in DDP or FSDP, a device mesh, a variable) goes on with it. After an interrupt or a
        failed cell this happens by itself.

        Raises:
            SessionBrokenError: a rank is gone; `heal` replaces it.
            StartError: it did not form.
        """
        with self._cells.turn:
            self._check()
            self._cells.check_idle()
            with Interrupts(lambda: None) as interrupts:
                try:
                    self._cells.mend.form(timeout_s, interrupts.check)
                    return
                except KeyboardInterrupt:
                    pass  # told below, without our frames behind it
        raise keyboard_interrupt("the forming of the group was interrupted: the next cell begins with it")

    def interrupt(self, *, replace: bool = False) -> list[str]:
        """End the cells that have not ended, as the stop button ends the one that the notebook waits for: those that
        were given up and still run on some ranks, and those of `wait=False`. Variables are kept.

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
        return self._unended.end(replace=replace)

    def heal(self, from_rank: int | None = None, names: Sequence[str] = ()) -> list[str]:
        """Replace ranks that have died: a new process takes the number, the device and the environment, and the group
        forms again. The other ranks keep what they have.

        Args:
            from_rank: a living rank whose variables the new ranks get; None: they begin empty. Where no rank has died,
                the ranks that were replaced last get them.
            names: which variables; none: all that can be pickled.

        Returns:
            What was done, in sentences.

        Raises:
            UsageError: `from_rank` is no living rank, or has no such variable.
            StartError: a process or the group did not come up.

        Example:
            >>> session.heal(from_rank=0)
            ['rank 1 was replaced', '12 variables of rank 0 copied to rank 1: model, optimizer, ...']
        """
        return self._healing.heal(from_rank, names)

    def check(self, *names: str) -> Agreement:
        """Whether ranks agree: in parameters, buffers, optimizer state, data length, random state and versions, or in
        these variables. By checksums, so no data moves while they agree.

        Args:
            names: variables; none: all models, optimizers, loaders and what else has to be the same.

        Raises:
            SessionBrokenError: less than two ranks are there and have nothing else to do.

        Example:
            >>> session.check("model")
            2 ranks agree: 62 parameters, 4 buffers (11.2 M elements)
        """
        for name in names:
            check_name(name)
        with self._cells.turn:
            cluster = self._check_host()
            busy, gone = self._cells.busy, cluster.gone
            ranks = [rank for rank in cluster.ranks if rank not in {*busy, *gone}]
            if len(ranks) < 2:  # nobody to compare with
                self._check()
                self._cells.check_idle()

            def ask(entries: Sequence[str]) -> dict[int, dict[str, Any]]:
                def make(request: int) -> Check:
                    return Check(request=request, names=list(names), entries=list(entries))

                answers: dict[int, Checked] = self._questions.ask_all(ranks, make)
                for rank, answer in answers.items():
                    if answer.error:
                        raise DDPNotebookError(f"rank {rank} could not look at its variables: {answer.error}")
                return {rank: answer.facts for rank, answer in answers.items()}

            found = compare(ask(()))
            if found.differing_entries:
                found = found.with_samples(ask(found.differing_entries))
            return found.without(busy, gone)

    @property
    def recording(self) -> Recording:
        """What the ranks have recorded: metrics, collectives, steps. All of it up to now, or to the end of the session.

        Example:
            >>> session.recording.collectives(op="all_reduce")[-1].site
            'cell line 7'
        """
        if (cluster := self._cluster) is not None and self._host.is_alive:

            def tell(request: int) -> Tell:
                return Tell(request=request, sent_ns=time.monotonic_ns(), flush=True)

            self._has_news = self._cells.watched is not None
            self._questions.ask_for(cluster.alive, tell, _STATUS_S)
        self._observer.flush()
        return self._observer.recording

    def _catch_up(self) -> None:
        """A recording that is kept in a variable is asked again after a cell."""
        is_users = threading.current_thread() is threading.main_thread()
        if is_users and self._has_news and self._cells.watched is None:
            _ = self.recording

    @property
    def recorded(self) -> str:
        """How much the ranks record: "off", "meta" or "values"."""
        return self._level

    def record(self, level: str) -> None:
        """Set how much the ranks record in the cells to come: "off", "meta" (no values of tensors) or "values".

        Raises:
            UsageError: there is no such level.

        Example:
            >>> session.record("meta")
        """
        if level not in ("off", "meta", "values"):
            raise UsageError(f"ranks record off, meta or values, not {level!r}")
        self._level = level

    def report(self, cell: int | None = None) -> Report:
        """What the time of a training cell's steps went into, in words.

        Args:
            cell: its number; None: the last one that trained.

        Example:
            >>> print(session.report())  # doctest: +SKIP
        """
        return self.recording.report(cell)

    def monitor(self, cell: int | None = None) -> None:
        """Show what the ranks do, live: losses, gradient synchronisation, a timeline, tensors and ranks.

        Args:
            cell: only this one; None: all, those to come among them.

        Raises:
            UsageError: nothing was recorded of this cell.
        """
        self._live.show(cell)

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
        return len(self.write_trace(path, cell)[0])

    def write_trace(self, path: str | os.PathLike[str], cell: int | None = None) -> tuple[list[int], list[int]]:
        """The same. Returns the ranks whose profiles it holds, and those whose profiles are lost."""
        last: dict[int, tuple[int, Path]] = {}  # the last profile of each rank
        if self._cluster is not None:
            for file in Path(self._cluster.directory).glob("profile-*-*.json"):
                of_cell, of_rank = (int(word) for word in file.stem.split("-")[1:])
                if cell in (None, of_cell):
                    last[of_rank] = max(last.get(of_rank, (0, file)), (of_cell, file))
        profiles, lost = {}, []
        for rank, (_, file) in sorted(last.items()):
            try:
                profiles[rank] = read_profile(rank, file)
            except UsageError:  # the disk was full, or the rank has died: the rest is worth its file
                lost.append(rank)
        save(self.recording, path, cell, profiles)
        return list(profiles), lost

    def baseline(self, steps: int = 30, seconds: float = 20.0) -> None:
        """Let rank 0 run the last training cell alone for some steps, which `%ddp_report` then compares with. Its
        models, optimizers, random state and variables are afterwards what they were.

        Args:
            steps: after so many the cell is ended ...
            seconds: ... or at the first one after so long.

        Raises:
            UsageError: no cell has trained.
            RankError: the cell cannot run alone.
        """
        trained = max((step.cell for step in self.recording.steps(rank=0)), default=0)
        code = self._cells.code_of(trained)
        if code is None:
            raise UsageError("no cell has taken an optimizer step on rank 0: run the one that trains first")
        try:
            self.run(code, 0, quiet=True, record={"solo": [steps, seconds], "level": "meta"}, timeout=2 * seconds + 20)
        except RankError as error:
            if error.result is None or error.result[0].ename != "EnoughStepsError":
                raise
        finally:
            recording = self.recording
            taken = [step for step in recording.steps(rank=0) if step.cell > trained]
            if taken:
                recording.set_aside(taken[0].cell)
        if not taken:
            raise UsageError("the cell took no optimizer step on rank 0 alone")
        recording.baseline = {"cell": trained, **alone(taken)}

    def status(self) -> Status:
        """Every rank's host, process, device, memory and state."""
        cluster, trouble = self._living, self.trouble
        answers: dict[int, Vitals] = {}
        if self._host.is_alive:
            answers = self._questions.ask_for(cluster.alive, lambda n: Probe(request=n), _STATUS_S)
        rows = []
        for rank in cluster.ranks:
            process = cluster.process(rank)
            vitals = answers.get(rank)
            rows.append(
                RankStatus(
                    rank=rank,
                    host=self._hostname,
                    pid=process.pid,
                    device=self.placement.devices[rank],
                    device_name=self.placement.names[rank],
                    state=self._state(rank, vitals),
                    rss_bytes=vitals.rss_bytes if vitals else None,
                    device_bytes=vitals.device_bytes if vitals else None,
                )
            )
        return Status(backend=self.backend, epoch=cluster.epoch, rows=tuple(rows), trouble=trouble)

    @property
    def trouble(self) -> str:
        """What is wrong with the fork server, by which the ranks get their cells, and what helps; "": nothing."""
        return self._living.trouble()

    def pids(self, kind: str = "rank") -> list[int]:
        """Process ids of the living "rank", "store" or "controller" processes, or of the "host server"."""
        return [self._host.pid] if kind == "host server" else self._living.pids(kind)

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

    def stop(self) -> None:
        """End every process of the session and all below them. Doing it twice is no error."""
        global _current
        with uninterrupted("interrupted, but all ranks were ended"):
            with _current_lock:
                if _current is self:
                    _current = None
            try:
                self._tell_of_the_end()
                if self._cluster is not None:
                    self._comms.close()
                self._close_client()
            finally:
                self._end_processes()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self._cluster is None or not self._ready:
            return f"<Session: {'stopped' if self._host_ended else 'starting'}>"
        gone = sorted(set(self._cluster.ranks) - set(self._cluster.alive))
        dead = f", {name_ranks(gone)} died" if gone else ""
        return f"<Session: {self.world_size} ranks on {self._hostname}, {self.backend}{dead}>"

    # ---- checks

    def _check(self, ranks: Sequence[int] | None = None) -> Cluster:
        """The cluster, if every one of these ranks lives; None: all."""
        cluster = self._check_host()
        if gone := [rank for rank in cluster.gone if ranks is None or rank in ranks]:
            raise SessionBrokenError(f"{_how_they_died(cluster, gone)}\n{_HEAL}")
        return cluster

    def _living_of(self, ranks: RankSet) -> tuple[list[int], list[str]]:
        """The ranks that a cell is for, without those that are gone if it is for all, and what to say about that."""
        cluster = self._check_host()
        chosen = parse_ranks(ranks, self.world_size)
        gone = [rank for rank in cluster.gone if rank in chosen]
        if not gone:
            return chosen, []
        left = [rank for rank in chosen if rank not in gone]
        if ranks is not None or not left:
            raise SessionBrokenError(f"{_how_they_died(cluster, gone)}\n{_HEAL}")
        return left, [f"{list_ranks(gone)} died: this cell runs on {list_ranks(left)}. {_HEAL}"]

    def _check_host(self) -> Cluster:
        cluster = self._living
        if not self._host.is_alive:
            raise SessionBrokenError(cluster.trouble())
        return cluster

    def _check_cells_arrive(self) -> None:
        """Values travel without the fork server, and cells by it."""
        if (cluster := self._check_host()).is_stopped:
            raise SessionBrokenError(cluster.trouble())

    def _check_rank(self, rank: int) -> None:
        process = self._check_host().process(rank)
        if not process.is_alive:
            raise SessionBrokenError(f"rank {rank} died: {process.tell_end()}")

    def _tell_widget(self, rank: int, message: Comm) -> None:
        """By the rank's inbox, as its cells, so that the next cell sees what the user has moved."""
        if (cluster := self._cluster) is not None:
            cluster.tell(message, [rank])

    def _state(self, rank: int, vitals: Vitals | None) -> str:
        if not self._living.process(rank).is_alive or not self._host.is_alive:
            return "died"
        if vitals is None:
            silent_s = self._living.silent_s(rank)
            return f"silent for {silent_s:.0f} s" if silent_s > SILENT_S else "too busy to answer"
        if not vitals.running_cell:
            return "idle"
        doing = f"has failed ({vitals.failed})" if vitals.failed else vitals.where
        return f"in a cell for {vitals.running_s:.1f} s" + (f": {doing}" if doing else "")

    # ---- what ranks say (I/O threads)

    def on_message(self, rank: int, message: Message) -> None:
        """A message of a rank. Part of `Listener`."""
        if isinstance(message, Recorded):
            self._observer.on_recorded(rank, message)
        elif isinstance(message, Told):
            self._observer.on_told(rank, message)
            if message.request:
                self._questions.on_answer(message.request, message)
        elif isinstance(message, CellDone | Display | Ask):
            self._cells.on_message(rank, message)
        elif isinstance(message, Checked | Pulled | Pushed | Vitals):
            self._questions.on_answer(message.request, message)
        elif isinstance(message, Comm):
            self._comms.on_message(rank, message)

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        """Text of a rank. Part of `Listener`."""
        self._cells.on_text(rank, fd, data)

    def on_ended(self, rank: int, status: int) -> None:
        """A rank's process ended. Part of `Listener`."""
        if (cluster := self._cluster) is not None:
            process = cluster.process(rank)
            if self._cells.on_ended(rank, status, process.last_words):
                process.forget_words()

    def on_controller_ended(self) -> None:
        """ipyparallel's controller ended. Part of `Listener`."""
        if self._client is not None:
            client, self._client = self._client[0], None
            threading.Thread(target=give_up, args=(client,), name="ddp-client", daemon=True).start()

    def on_gone(self) -> None:
        """The host server ended, and all with it. Part of `Listener`."""
        self._cells.on_gone()

    # ---- ending

    @property
    def _living(self) -> Cluster:
        if self._cluster is None:
            raise SessionBrokenError("this session was stopped; start another with %ddp_start")
        return self._cluster

    def _close_client(self) -> None:
        if self._client is not None:
            client, self._client = self._client[0], None
            try:
                client.close(linger=0)
            except Exception as error:
                print(f"closing ipyparallel's client failed: {error}", file=sys.stderr)

    def _end_processes(self) -> None:
        (cluster, self._cluster), (done, self._host_ended) = (self._cluster, None), (self._host_ended, True)
        if cluster is not None:
            self._cells.close()
            self._observer.close()
        elif done:
            return
        ended = cluster is None or cluster.stop()
        if self._give_back:
            warm.give_back(self._host, healthy=ended)
        else:
            self._host.close()


_HEAL = "%ddp_heal replaces what has died; %ddp_restart starts all ranks afresh"


def _how_they_died(cluster: Cluster, ranks: list[int]) -> str:
    hows = group_by_value({rank: cluster.process(rank).tell_end() for rank in ranks})
    return "; ".join(f"{list_ranks(those)} died: {how}" for how, those in hows.items())
