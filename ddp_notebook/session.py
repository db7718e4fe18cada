"""One running group of ranks as the notebook sees it: runs cells on them, pulls values, and owns what it started."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from ddp_notebook.channel.endpoint import SILENT_S
from ddp_notebook.errors import (
    ClientError,
    DDPNotebookError,
    RankDiedError,
    RankError,
    SessionBrokenError,
    SessionExistsError,
    StartError,
    StartTimeoutError,
    name_ranks,
)
from ddp_notebook.events import CellDone, Display, Interrupt, Message, Probe, Pull, Pulled, RunCell, Vitals
from ddp_notebook.launch import warm
from ddp_notebook.launch.cluster import Cluster, describe_status
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import Placement, place
from ddp_notebook.run.cell import CellRun, Shown
from ddp_notebook.run.interrupt import Interrupts, keyboard_interrupt, uninterrupted
from ddp_notebook.run.result import CellResult
from ddp_notebook.run.screen import Screen
from ddp_notebook.run.text import CellEnd, TextSplitter
from ddp_notebook.status import RankStatus, Status

if TYPE_CHECKING:
    import ipyparallel

_AFTER_DEATH_S = 2.0  # what the others get to end when a rank has died
_MOST_ANSWERS = 1000
# A signal that comes between the interpreter's last look and the wait in `SimpleQueue.get` does not end the wait: its
# handler runs at the timeout.
_LOOK_S = 0.2
_ONE_PRESS_S = 1.0  # presses of the stop button within so long count as one
_BETWEEN_CELLS_CHARS = 1 << 16  # text between cells that is kept for the head of the next one, per rank and stream

Report = Callable[[str], None]
_current: Session | None = None
_current_lock = threading.Lock()


def current() -> Session | None:
    """The running session, or None."""
    return _current


def start(world_size: int | None = None, *, report: Report = lambda _: None, **options: Any) -> Session:
    """Start ranks: one process per GPU, or CPU ranks, in an initialised process group.

    Args:
        world_size: number of ranks; None: one per GPU, or on a machine without any min(4, cores), at least 2.
        report: told a line about each stage that is done.
        options: further fields of `StartOptions`: backend, gpus, share_gpus, env, timeout_s.

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

    def __init__(self, options: StartOptions, *, report: Report = lambda _: None) -> None:
        global _current
        self._cluster: Cluster | None = None
        self.options = options
        self._requests = itertools.count(1)
        self._cells = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._turn = threading.Lock()
        self._runs: dict[int, CellRun] = {}  # cells that have not ended everywhere, by number
        self._splitters: dict[tuple[int, int], TextSplitter] = {}
        self._between: dict[tuple[int, int], str] = {}  # text written between cells
        self._ready = False
        self._host_ended = False  # closed, or given back
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

    def _start(self, report: Report) -> None:
        began = time.monotonic()

        def stage(name: str) -> None:
            report(f"{name} {time.monotonic() - began:.1f} s")

        deadline = began + self.options.timeout_s
        env = {**os.environ, **self.options.env}
        with uninterrupted():
            self._host, self._give_back = warm.take(env)
        try:
            try:
                facts = self._host.facts(self.options.timeout_s)
            except StartTimeoutError as error:
                raise StartTimeoutError(
                    f"the start took too long: the fork server was importing torch ({error})"
                ) from None
            self.placement: Placement = place(self.options, facts, env)
            stage("fork server" if facts["start_method"] == "fork" else f"ranks are spawned ({facts['start_reason']})")
            self._hostname: str = facts["host"]
            self._cluster = Cluster(self._host, self.placement, env, self)
            self._splitters = {
                (rank, fd): TextSplitter(self._cluster.mark_token)
                for rank in range(self.placement.world_size)
                for fd in (1, 2)
            }
            self._cluster.start(deadline, stage)
            self._ready = True
        except BaseException:
            with uninterrupted():
                self._end_processes()
            raise

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

    def run(self, code: str, *, execution_count: int = 1) -> CellResult:
        """Run code on every rank, as a cell of a notebook would.

        In the main thread the output appears live and the kernel's interrupt is passed on. A second call waits its
        turn.

        Args:
            code: what an IPython cell may hold, magics and top-level `await` included.
            execution_count: the number in `In [n]` that tracebacks show.

        Raises:
            RankError: it failed on at least one rank; holds the results of all.
            RankDiedError: a rank's process ended.
            KeyboardInterrupt: it was interrupted.
            SessionBrokenError: a rank is gone, or still busy with an earlier cell.

        Example:
            >>> session.run("x = torch.ones(1) * rank; dist.all_reduce(x); x")[0].result
            'tensor([6.])'
        """
        with self._turn:
            cluster = self._check()
            run = CellRun(next(self._cells), cluster.ranks, cluster.hold_text)
            screen = Screen() if threading.current_thread() is threading.main_thread() else None
            self._show_text_between_cells(screen)
            message = RunCell(cell=run.number, code=code, execution_count=execution_count)
            with Interrupts(run.wake) as interrupts:
                self._runs[run.number] = run
                cluster.run_cell(message, cluster.ranks)
                try:
                    self._wait(run, interrupts, screen)
                finally:
                    run.leave()
            return self._conclude(run, interrupts)

    def pull(self, name: str) -> dict[int, Any]:
        """The value of a variable on every rank, by rank. Tensors of a GPU arrive on the CPU.

        Raises:
            DDPNotebookError: a rank has no such variable, or it cannot be pickled; names the rank and the type.

        Example:
            >>> session.pull("rank")
            {0: 0, 1: 1}
        """
        with self._turn:
            cluster = self._check()
            asked = {rank: self._ask(rank, lambda n: Pull(request=n, name=name)) for rank in cluster.ranks}
            answers = {rank: self._answer(rank, future) for rank, future in asked.items()}
            errors = [f"rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error]
            try:
                if errors:
                    raise DDPNotebookError("; ".join(errors))
                return {rank: pickle.loads(self._data(rank, answer)) for rank, answer in answers.items()}
            finally:  # what was not fetched must not stay in the ranks' memory
                for rank, answer in answers.items():
                    if answer.transfer:
                        cluster.drop(rank, answer.transfer)

    @property
    def client(self) -> ipyparallel.Client:
        """A plain `ipp.Client` of the same engines, for `%%px`, views and ipyparallel's own tools.

        A controller that is gone is started again at the next use.

        Raises:
            ClientError: it cannot be reached.
        """
        import ipyparallel

        cluster = self._check()
        file, pid = cluster.client_file()
        if self._client is not None and self._client[1] == pid:
            return self._client[0]
        self._close_client()
        client = None
        try:
            client = ipyparallel.Client(connection_info=file, timeout=20)
            client.wait_for_engines(self.world_size, timeout=20, interactive=False)
            _wait_for_answers(client, timeout_s=20)
        except Exception as error:
            if client is not None:
                client.close(linger=0)
            raise ClientError(
                f"ipyparallel's controller (pid {pid}) does not answer: {error}. Cells go on without it; "
                "%ddp_restart brings it back"
            ) from error
        self._client = (client, pid)
        return client

    def reform(self, timeout_s: float = 60.0) -> None:
        """Form the process group anew: same ranks, every variable kept. A store that is gone is replaced.

        Objects that hold the old group (a `DistributedDataParallel` model, a device mesh) are to be made again.

        Raises:
            StartError: it did not form.
        """
        with self._turn:
            self._check().form(time.monotonic() + timeout_s)

    def status(self) -> Status:
        """Every rank's host, process, device, memory and state."""
        cluster = self._living
        asked = {rank: self._ask(rank, lambda n: Probe(request=n)) for rank in cluster.alive}
        rows = []
        deadline = time.monotonic() + 1.0
        for rank in cluster.ranks:
            process = cluster.process(rank)
            vitals: Vitals | None = None
            if rank in asked:
                try:
                    vitals = asked[rank].result(max(0.0, deadline - time.monotonic()))
                except FutureTimeoutError:
                    vitals = None
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
        return Status(backend=self.backend, epoch=cluster.epoch, rows=tuple(rows))

    def pids(self, kind: str = "rank") -> list[int]:
        """Process ids of the living "rank", "store" or "controller" processes, or of the "host server"."""
        return [self._host.pid] if kind == "host server" else self._living.pids(kind)

    def stop(self) -> None:
        """End every process of the session and all below them. Doing it twice is no error."""
        global _current
        with uninterrupted():
            with _current_lock:
                if _current is self:
                    _current = None
            for run in list(self._runs.values()):
                for rank in run.pending:
                    run.on_died(rank, "the session was stopped")
            self._close_client()
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

    # ---- a cell

    def _wait(self, run: CellRun, interrupts: Interrupts, screen: Screen | None) -> None:
        """Show what comes until the cell is over, or until nothing more can be done about it."""
        handled, interrupted_at, told = 0, 0.0, False
        give_up_at = float("inf")
        pause: float | None = None
        while True:
            left = give_up_at - time.monotonic()
            item = run.take(max(0.0, min(left, _LOOK_S if pause is None else pause)))
            if screen is not None:
                if item is not None:
                    screen.show(item)
                if run.shown.empty():
                    pause = screen.refresh()
            if run.is_over and run.shown.empty():
                break
            if time.monotonic() > give_up_at or not self.is_running:
                break
            if interrupts.count > handled:
                now = time.monotonic()
                if handled and now - interrupted_at > _ONE_PRESS_S:
                    break  # pressed again, and some rank has still not answered
                if not handled:
                    interrupted_at = now
                    self._interrupt(run)
                handled = interrupts.count
            if handled and not told and time.monotonic() - interrupted_at > _ONE_PRESS_S and run.pending:
                told = True
                if screen is not None:
                    screen.note(
                        f"no answer yet to the interrupt: {name_ranks(run.pending)}, perhaps inside a collective; "
                        "press stop again to get the notebook back"
                    )
            if give_up_at == float("inf") and any(one.status == "died" for one in run.result.by_rank.values()):
                self._interrupt(run)
                give_up_at = time.monotonic() + _AFTER_DEATH_S
        if screen is not None:
            screen.finish()

    def _interrupt(self, run: CellRun) -> None:
        """Interrupt the cell on every rank that has not ended it.

        The signal comes from the host server, so it reaches a rank whose agent cannot run; ranks have it when
        `signal` returns, so it cannot hit a later cell. The message stops a cell that has not begun.
        """
        cluster, pending = self._living, run.pending
        with contextlib.suppress(StartError):  # the host server is gone: `_wait` sees that
            cluster.signal(pending, signal.SIGINT)
            for rank in pending:
                cluster.send(rank, Interrupt(cell=run.number))

    def _conclude(self, run: CellRun, interrupts: Interrupts) -> CellResult:
        pending = run.pending
        if not pending:
            self._runs.pop(run.number, None)
        by_rank = run.result.by_rank
        self._check_host()
        died = {rank: one.error for rank, one in by_rank.items() if one.status == "died"}
        failed = {rank: one.error for rank, one in by_rank.items() if one.status in ("error", "interrupted")}
        if died:
            raise RankDiedError({rank: by_rank[rank].traceback for rank in died}, died, run.result)
        if interrupts.count:
            answered = [rank for rank, one in by_rank.items() if one.status == "interrupted"]
            ended = [rank for rank, one in by_rank.items() if one.status in ("ok", "error")]
            parts = [
                f"interrupted: {name_ranks(answered)}" if answered else "",
                f"had ended: {name_ranks(ended)}" if ended else "",
                f"not answered yet: {name_ranks(pending)}; the cell goes on there until %ddp_restart"
                if pending
                else "",
            ]
            raise keyboard_interrupt("; ".join(part for part in parts if part))
        if failed:
            raise RankError({rank: by_rank[rank].traceback for rank in failed}, failed, run.result)
        return run.result

    def _show_text_between_cells(self, screen: Screen | None) -> None:
        if screen is None:
            return
        between, self._between = self._between, {}
        for (rank, fd), text in sorted(between.items()):
            stream = "stdout" if fd == 1 else "stderr"
            screen.show(Shown(rank, f"(between cells) {text}", stream))
        screen.finish()

    def _check(self) -> Cluster:
        """The cluster, if every rank can take a cell."""
        cluster = self._check_host()
        gone = sorted(set(cluster.ranks) - set(cluster.alive))
        if gone:
            why = "; ".join(f"rank {rank} died: {cluster.process(rank).how_it_ended()}" for rank in gone)
            raise SessionBrokenError(f"{why}\nThe ranks cannot run a cell together; start afresh with %ddp_restart")
        for run in list(self._runs.values()):
            if run.is_over:
                del self._runs[run.number]
            else:
                raise SessionBrokenError(
                    f"{name_ranks(run.pending)} still in an earlier cell: wait, or end it with %ddp_restart"
                )
        return cluster

    def _check_host(self) -> Cluster:
        cluster = self._living
        if not self._host.is_alive:
            raise SessionBrokenError("the fork server ended, and all ranks with it; start afresh with %ddp_restart")
        return cluster

    # ---- questions to ranks

    def _ask(self, rank: int, make: Callable[[int], Message]) -> Future[Any]:
        number = next(self._requests)
        future: Future[Any] = Future()
        self._answers[number] = future
        while len(self._answers) > _MOST_ANSWERS:  # of ranks that never answered
            self._answers.pop(next(iter(self._answers)))
        self._living.send(rank, make(number))
        return future

    def _answer(self, rank: int, future: Future[Any]) -> Any:
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeoutError:
                self._check_rank(rank)

    def _check_rank(self, rank: int) -> None:
        process = self._check_host().process(rank)
        if not process.is_alive:
            raise SessionBrokenError(f"rank {rank} died: {process.how_it_ended()}")

    def _data(self, rank: int, answer: Pulled) -> bytes | bytearray:
        if answer.pickle or not answer.transfer:
            return answer.pickle
        return self._living.fetch(rank, answer.transfer, answer.nbytes, lambda: self._check_rank(rank))

    def _state(self, rank: int, vitals: Vitals | None) -> str:
        if not self._living.process(rank).is_alive:
            return "died"
        if vitals is None:
            silent_s = self._living.silent_s(rank)
            return f"silent for {silent_s:.0f} s" if silent_s > SILENT_S else "too busy to answer"
        return f"in a cell for {vitals.running_s:.1f} s" if vitals.running_cell else "idle"

    # ---- what ranks say (I/O threads)

    def on_message(self, rank: int, message: Message) -> None:
        """A message of a rank. Part of `Listener`."""
        if isinstance(message, CellDone):
            if (run := self._runs.get(message.cell)) is not None:
                run.on_done(rank, message)
        elif isinstance(message, Display):
            if (run := self._runs.get(message.cell)) is not None:
                run.on_display(rank, message)
        elif isinstance(message, Pulled | Vitals):
            future = self._answers.pop(message.request, None)
            if future is not None:
                future.set_result(message)

    def on_text(self, rank: int, fd: int, data: bytes) -> None:
        """Text of a rank. Part of `Listener`."""
        for piece in self._splitters[rank, fd].feed(data):
            if isinstance(piece, CellEnd):
                if (ended := self._runs.get(piece.cell)) is not None:
                    ended.on_text_end(rank, piece.duration_s)
            elif (run := self._cell_of(rank)) is not None:
                run.on_text(rank, fd, piece)
            elif self._ready:
                kept = self._between.get((rank, fd), "") + piece
                self._between[rank, fd] = kept[-_BETWEEN_CELLS_CHARS:]

    def _cell_of(self, rank: int) -> CellRun | None:
        """The cell that a rank's text belongs to now: the oldest whose text has not ended there."""
        return next((run for run in list(self._runs.values()) if run.reads(rank)), None)

    def on_ended(self, rank: int, status: int) -> None:
        """A rank's process ended. Part of `Listener`."""
        if self._cluster is None:
            return
        process = self._cluster.process(rank)
        for run in list(self._runs.values()):
            run.on_died(rank, describe_status(status), process.last_words)

    def on_gone(self) -> None:
        """The host server ended, and all with it. Part of `Listener`."""
        for run in list(self._runs.values()):
            for rank in run.pending:
                run.on_died(rank, "the fork server ended")

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
        cluster, self._cluster = self._cluster, None
        if cluster is None and self._host_ended:
            return
        self._host_ended = True
        ended = cluster is None or cluster.stop()
        if self._give_back:
            warm.give_back(self._host, healthy=ended)
        else:
            self._host.close()


def _wait_for_answers(client: ipyparallel.Client, timeout_s: float) -> None:
    """Wait until every engine answers. A controller that was started again knows them from its file before their
    connections are back, and drops what is sent to them until then."""
    until = time.monotonic() + timeout_s
    while True:
        answers = client[:].apply_async(int)
        answers.wait(0.5)
        if answers.ready():
            return
        if time.monotonic() > until:
            raise TimeoutError(f"its engines did not answer in {timeout_s:g} s")
