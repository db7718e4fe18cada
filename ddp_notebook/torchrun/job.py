"""A torchrun job in the notebook: `%ddp_attach`, or `ddp_notebook.attach_job("train")`."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path

from ddp_notebook.errors import SessionBrokenError, UsageError
from ddp_notebook.launch.elastic import log_folder
from ddp_notebook.launch.rank_log import RankLog
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import CellDone, ClockProbe, ClockReply, Hello, Recorded, Vitals
from ddp_notebook.messages.script_abort import WasCut
from ddp_notebook.observe.observer import Observer
from ddp_notebook.observe.report.report import Report
from ddp_notebook.observe.steps.run import TrainingRun, run_of
from ddp_notebook.records.words import called_of, list_ranks
from ddp_notebook.registry import entries
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.identities import Identity
from ddp_notebook.registry.lookup import TORCHRUN
from ddp_notebook.registry.torchrun import RankEntry
from ddp_notebook.run.cells.interrupt import uninterrupted
from ddp_notebook.run.groups.diagnosis import verdict
from ddp_notebook.run.groups.rank_view import RankView, Views
from ddp_notebook.run.interrupted import OF_TORCHRUN_JOB, tells_interrupts
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.record import chrome_trace
from ddp_notebook.run.record.notebook_recording import Recording
from ddp_notebook.run.session_parts import NOT_STARTED
from ddp_notebook.status import as_table
from ddp_notebook.torchrun.member import Member, RefusedError, come_in, place_of, why_closed
from ddp_notebook.torchrun.monitor_source import JobProbe, JobSource, missing
from ddp_notebook.torchrun.rounds import Events, Round
from ddp_notebook.widgets.ended_session import EndedSession
from ddp_notebook.widgets.view_placement import ViewPlacement
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring

_WAITS_S = 3.0  # a rank that waits longer in an operation is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRankRow:
    """One row of the table of ranks."""

    rank: int
    host: str
    pid: int | None  # None if the rank was not seen
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The status of a job, as `%ddp_attach` and `%ddp_status` show it."""

    name: str
    attempt: int  # counted by this notebook
    restarts: int  # number of restarts after failures, from torchrun
    rows: tuple[JobRankRow, ...]
    waits_s: float  # the longest wait of a rank
    why: str  # a sentence about ranks that wait for others; "" if nothing is certain
    notes: tuple[str, ...]
    events: tuple[str, ...]

    def __repr__(self) -> str:
        header = ("rank", "host", "pid", "state")
        rows = [(str(row.rank), row.host, "?" if row.pid is None else str(row.pid), row.state) for row in self.rows]
        restarts = f", {self.restarts} restart{'s' * (self.restarts != 1)}" if self.restarts else ""
        head = f"job {self.name}, attempt {self.attempt} seen by this notebook{restarts}"
        hang = [f"no progress for {self.waits_s:.0f} s: {self.why}"] if self.waits_s > _WAITS_S and self.why else []
        return "\n".join([head, *as_table([header, *rows]), *hang, *self.notes, *self.events])


def status_of(
    name: str, run: Round, views: Views, events: Sequence[str], training: TrainingRun | None = None
) -> JobStatus:
    """Return the status of an attempt.

    Args:
        name: of the job.
        run: the attempt.
        views: activity of its ranks.
        events: the last ones.
        training: the last training run; None if no step was recorded.
    """
    rows = []
    for rank in range(run.world_size):
        member = run.members.get(rank)
        host, pid = ("?", None) if member is None else (member.place.host, member.entry.pid)
        rows.append(JobRankRow(rank=rank, host=host, pid=pid, state=views[rank].doing))
    place = next((one.place for one in run.members.values()), None)
    return JobStatus(
        name=name,
        attempt=run.number,
        restarts=0 if place is None else place.restarts,
        rows=tuple(rows),
        waits_s=max((view.since_s for view in views.values()), default=0.0),
        why=verdict(views),
        notes=tuple(filter(None, [f"training in {training}" if training else "", missing(run), _about_store(place)])),
        events=tuple(events),
    )


def _about_store(place: RankEntry | None) -> str:
    """Return a warning before a restart that cannot succeed because of a fault of torch.

    See `launch.elastic.elastic_agent`.
    """
    if place is None or not place.shares_store or not (place.restarts or place.most_restarts):
        return ""
    return (
        "torchrun shares one store between its attempts, which gloo cannot use after a restart: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started (%ddp_torchrun does)"
    )


_FREE_S = 6.0  # for ranks to leave an aborted operation
_FORM = ("init_process_group", "new_group")  # calls that form a group


def cut(run: Round, probe: JobProbe) -> list[str]:
    """Make each waiting rank abort its operation, and wait until it has left it.

    A rank that has continued in the meantime aborts nothing: its next operation may be healthy.

    Args:
        run: the running attempt.
        probe: of its ranks.

    Returns:
        Sentences that describe the result.
    """
    views = probe.inspect(run)
    waiting = {rank: view for rank, view in views.items() if rank in run.there and _waits(view)}
    asked = {rank: probe.cut(rank, view.operation) for rank, view in waiting.items()}
    until = time.monotonic() + _FREE_S
    said, free = [], []
    for rank, future in asked.items():
        what = _answer(future, until)
        if what:
            said.append(f"rank {rank}: {what} was aborted and raised an error, as if a peer had ended")
        elif what is None:
            said.append(f"rank {rank}: {waiting[rank].operation or 'the forming of a group'} is not left yet")
        else:
            free.append(rank)
    if free:
        said.append(f"{list_ranks(free)}: had left it before, by {_self(free)} or because a peer was aborted")
    if others := [rank for rank in run.living if rank not in waiting]:
        said.append(f"{list_ranks(others)}: in no operation, so nothing was aborted")
    return said or ["the job has no rank now"]


def _waits(view: RankView) -> bool:
    return view.operation is not None or called_of(view.place) in _FORM


def _self(ranks: Sequence[int]) -> str:
    return "itself" if len(ranks) == 1 else "themselves"


def _answer(future: Future[WasCut], until_s: float) -> str | None:
    try:
        return future.result(max(0.0, until_s - time.monotonic())).what
    except FutureTimeoutError:
        return None


_LOOK_S = 0.5  # interval of checks for new processes
_ANSWER_S = 1.0  # time for ranks to send their recordings
_log = logging.getLogger(__name__)


@tells_interrupts(OF_TORCHRUN_JOB)
class TorchrunJob:
    """One job, from its first known rank to `close`, over restarts and changes of its members.

    The notebook only watches: the ranks continue if the notebook leaves.

    Args:
        key: of the job, see `registry.torchrun.RankEntry`.
        name: of the job.
        take_over: take over from another attached notebook.

    Raises:
        UsageError: another notebook is attached to it.
    """

    def __init__(self, key: str, name: str, *, take_over: bool = False) -> None:
        self.key = key
        self.name = name
        self.events = Events()
        self.recordings: list[Recording] = []  # one for each change of the number of ranks
        self.changed = threading.Condition()  # notified when a rank joins, leaves or ends
        self._takes = take_over
        self._rounds: list[Round] = []
        self._known: set[Identity] = set()  # processes that have accepted or rejected this notebook
        self._silent: set[Identity] = set()  # processes that have not answered so far
        self._members: dict[str, tuple[Round, Member]] = {}  # key: identity on the wire
        self._refused: RefusedError | None = None
        self._logs: dict[int, RankLog] = {}
        self._log_folder = ""
        self._live: ViewPlacement | None = None
        self._closing = threading.Event()
        self._stale: list[ViewPlacement] = []  # views of ended recordings, to be closed by the main thread
        self._keyring = Keyring()
        self._endpoint = Endpoint.listen(self._keyring, self._on_message)
        self._bulk = BulkFetcher(self._endpoint.context, self._keyring)
        self._questions = Questions(self._send, lambda _: None)
        self._looks = JobProbe(self._questions)
        self._lines = selectors.DefaultSelector()
        self._endpoint.start()
        try:
            self._look_for_ranks()
            if self._refused is not None:
                raise self._refused
        except BaseException:
            self._close_wire()
            raise
        self._thread = threading.Thread(target=self._follow, name="ddp-job", daemon=True)
        self._thread.start()

    # ---- what the user does

    @property
    def round(self) -> Round | None:
        """The last attempt; None if there is none."""
        return self._rounds[-1] if self._rounds else None

    @property
    def world_size(self) -> int:
        """Number of ranks of the last attempt."""
        return 0 if self.round is None else self.round.world_size

    def waits_for_end(self, timeout_s: float) -> bool:
        """Wait until the job is closed. Returns whether it is."""
        return self._closing.wait(timeout_s)

    def wait_for_ranks(self, timeout_s: float = 1.0) -> None:
        """Wait until all living ranks send messages. A rank whose script has not imported torch sends none."""
        with self.changed:
            self.changed.wait_for(lambda: self.round is None or self.round.there == self.round.living, timeout_s)

    @property
    def is_running(self) -> bool:
        """True if a rank of the job is alive."""
        return self.round is not None and self.round.is_under_way

    @property
    def recording(self) -> Recording:
        """The recording of the ranks since this notebook attached, for the last attempts with the same number of ranks.

        Earlier recordings are in `recordings`. Attempts are numbered like cells.

        Raises:
            UsageError: no rank has joined yet.
        """
        run = self._some_round()

        def ask(request: int) -> ClockProbe:
            return ClockProbe(request=request, sent_ns=time.monotonic_ns(), flush=True)

        self._questions.ask_for(run.there, ask, _ANSWER_S)
        run.observer.flush()
        recording = run.observer.recording
        recording.prompts[run.number] = f"attempt {run.number}"
        return recording

    def report(self, cell: int | None = None) -> Report:
        """Return a report on the time of its training steps, in words.

        Args:
            cell: number of an attempt; None: the last one with a training run.
        """
        return self.recording.report(cell)

    def _write_trace(self, path: str) -> tuple[list[int], list[int]]:
        """Write the recording as a Chrome trace. See `Session.trace`; there are no torch profiles."""
        return chrome_trace.write(self.recording, path, None, iter(()))

    def inspect(self) -> Views:
        """Return the current activity of each rank."""
        run = self._some_round()
        return self._looks.inspect(run)

    def status(self) -> JobStatus:
        """Return its ranks and last events."""
        self._close_stale()
        run = self._some_round()
        return status_of(self.name, run, self._looks.inspect(run), self.events.last(5), run_of(self.recording))

    def log(self, rank: int) -> str:
        """Return the output of a rank: its last 64 MB, over all attempts. It is kept until the job is closed.

        Raises:
            UsageError: the job was started elsewhere or is closed, or the rank has written nothing.
        """
        if rank not in self._logs:
            raise UsageError(
                f"rank {rank} has no log. The notebook keeps logs only of a job that it started with %ddp_torchrun, "
                "until it attaches to another job or %ddp_stop"
            )
        return self._logs[rank].read()

    def keep_logs(self, folder: str) -> None:
        """Keep the output of ranks in this folder, which `close` removes."""
        self._log_folder = folder

    def log_of(self, rank: int) -> RankLog:
        """Return the log for the text of a rank."""
        if rank not in self._logs:
            self._logs[rank] = RankLog(Path(self._log_folder), rank)
        return self._logs[rank]

    def interrupt(self) -> list[str]:
        """Abort the operations that its ranks wait in.

        The script gets the error of a dead peer, such as a RuntimeError of gloo. Ranks that compute are not affected.

        Returns:
            Sentences that describe the result.

        Raises:
            UsageError: no rank has joined yet.
        """
        return cut(self._some_round(), self._looks)

    def settle(self, timeout_s: float = 2.0) -> None:
        """Wait for the last messages of its processes, which have ended."""
        with self.changed:
            self.changed.wait_for(lambda: not self.is_running, timeout_s)
        if self.round is not None:
            self.round.observer.flush()

    def left(self) -> EndedSession | None:
        """Return the data for magics after detaching; None if no rank has joined."""
        if self.round is None:
            return None
        whose, title = f"this notebook is detached from {self.name}", _title(self.name, self.world_size)
        return EndedSession(self.recording, whose, title, [], draws_html=self._views.draws_html)

    def stop(self) -> str:
        """Detach from the job, which continues. Returns a description."""
        went_on = self.is_running
        self.close()
        return f"detached from {self.name}" + (", which goes on" if went_on else ", which has ended")

    def close(self) -> None:
        """Detach from the job. Its recordings are kept. Further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(2 * _LOOK_S)
        self._close_stale()
        if self._live is not None:
            self._live.close()
        for run in self._rounds:
            for member in run.members.values():
                member.line.close()
        self._close_wire()
        for log in self._logs.values():
            log.close()
        self._logs.clear()
        if self._log_folder:
            log_folder.remove(self._log_folder)
        for observer in {run.observer for run in self._rounds}:
            observer.close()

    def monitor(self, cell: int | None = None) -> None:
        """Show the activity of the ranks, live: losses, gradient synchronisation, a timeline, tensors and ranks.

        Args:
            cell: only this one; None: all, and later ones.

        Raises:
            UsageError: nothing was recorded of this cell.
        """
        with uninterrupted("interrupted, but the monitor is shown"):  # NumPy would replace an interrupt by an error
            self._views.show(cell)

    @property
    def _views(self) -> ViewPlacement:
        """The monitors of the job."""
        self._close_stale()
        self._some_round()
        if self._live is None:
            raise SessionBrokenError(NOT_STARTED)
        return self._live

    def __repr__(self) -> str:
        size = self.world_size
        state = "closed" if self._closing.is_set() else "" if self.is_running else "ended"
        return f"<TorchrunJob {self.name}: {size} rank{'s' * (size != 1)}{', ' * bool(state)}{state}>"

    def _some_round(self) -> Round:
        if self.round is None:
            if not self.is_running:
                raise UsageError(f"job {self.name!r} has ended, and none of its ranks connected to this notebook")
            raise UsageError(
                f"no rank of job {self.name!r} has connected so far; ranks connect if they run on this machine and "
                "their script was started with torchrun ... -m ddp_notebook.attach"
            )
        return self.round

    def _close_stale(self) -> None:
        while self._stale:
            self._stale.pop().close()

    def _close_wire(self) -> None:
        self._lines.close()
        self._bulk.close()
        self._endpoint.close()

    # ---- who comes and goes: the thread of the job

    def _follow(self) -> None:
        stamp = 0
        while not self._closing.is_set():
            try:
                if (now := entries.stamp()) != stamp:
                    stamp = now if self._look_for_ranks() else 0
                self._look_at_lines()
            except Exception:  # the next check may succeed
                if not self._closing.wait(_LOOK_S):
                    _log.info("a look at the ranks of a job has failed", exc_info=True)

    def _look_for_ranks(self) -> bool:
        """Connect to new ranks. Returns whether all have answered; a rank in a long C call may answer later."""
        silent = []
        for entry in entries.entries(TORCHRUN):
            if entry.about.get("key") == self.key and entry.who not in self._known:
                self._known.add(entry.who)
                try:
                    self._join(entry, place_of(entry))
                except RefusedError as error:
                    self._refused = error
                    self.events.add(str(error))
                except OSError as error:
                    silent.append(entry.who)
                    if entry.who not in self._silent:
                        self.events.add(f"process {entry.pid} of the job does not answer on its socket: {error}")
        self._silent = set(silent)
        self._known -= self._silent
        return not silent

    def _join(self, entry: Entry, place: RankEntry) -> None:
        before = run = self.round
        if run is None or not run.takes(place):
            is_as_large = run is not None and run.world_size == place.world_size
            observer = run.observer if run is not None and is_as_large else self._new_observer(place.world_size)
            run = Round(number=len(self._rounds) + 1, world_size=place.world_size, observer=observer)
        member = Member(entry=entry, place=place)
        identity = member.identity
        self._members[identity] = run, member  # before its first message can arrive
        self._endpoint.expect(identity)
        try:
            address = self._keyring.invite(identity, control=self._endpoint.url, bulk=self._bulk.url)
            come_in(member, address, run.number, takes=self._takes)
        except BaseException:
            self._forget(identity)
            raise
        if run is not before:
            self._begin(run, before)
        run.members[place.rank] = member
        self._lines.register(member.line, selectors.EVENT_READ, member)
        run.observer.on_moved(place.rank)  # request the clock of a replaced process at once
        self._notify()

    def _begin(self, run: Round, before: Round | None) -> None:
        if before is not None:
            self.events.add(f"attempt {before.number} is over: {before.how_it_ended or 'its ranks are replaced'}")
        if before is None or run.observer is not before.observer:
            run.observer.start()
            self.recordings.append(run.observer.recording)
            if self._live is not None:
                self._stale.append(self._live)
            self._live = self._new_placing(run.observer)
        self._rounds.append(run)  # last, because readers of `round` may use its recording and monitor
        if before is not None:  # the table of ranks shows the first attempt
            self.events.add(f"attempt {run.number} has {run.world_size} rank{'s' * (run.world_size != 1)}")

    def _new_observer(self, world_size: int) -> Observer:
        return Observer(world_size, self._send, lambda: self.round.there if self.round else [], lambda: ())

    def _forget(self, identity: str) -> None:
        self._endpoint.forget(identity)
        self._keyring.revoke(identity)
        self._members.pop(identity, None)

    def _new_placing(self, observer: Observer) -> ViewPlacement:
        def is_current() -> bool:
            return self.round is not None and self.round.observer is observer and not self._closing.is_set()

        def run() -> Round | None:
            return self.round if is_current() and self.is_running else None

        title = _title(self.name, observer.recording.world_size)
        shown = JobSource(self._looks, run, is_current, self.interrupt)
        return ViewPlacement(observer.recording, lambda: self.recording, shown, lambda: title, "auto")

    def _look_at_lines(self) -> None:
        if not self._lines.get_map():
            self._closing.wait(_LOOK_S)
            return
        for key, _ in self._lines.select(_LOOK_S):
            member: Member = key.data
            self._lines.unregister(member.line)
            taken = why_closed(member.line)
            member.go(taken)
            if taken:
                self.events.add(f"rank {member.rank}: {taken}")
            elif member.done is None or member.done.status != "ok":
                self.events.add(f"rank {member.rank}: {member.how_it_went}")
            self._forget(member.identity)
            self._notify()

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # ---- what ranks say: the thread of the wire

    def _send(self, rank: int, message: Message) -> None:
        run = self.round
        member = None if run is None else run.members.get(rank)
        if member is not None and member.is_there:
            self._endpoint.send(message, member.identity)

    def _on_message(self, identity: str, _: int, message: Message) -> None:
        if (found := self._members.get(identity)) is None:
            return
        run, member = found
        match message:
            case Hello():
                member.has_joined = True
                self._notify()
            case CellDone():
                member.done = message
                self._notify()
            case Recorded():
                run.observer.on_recorded(member.rank, message)
            case ClockReply():
                run.observer.on_clock(member.rank, message)
                self._questions.on_answer(member.rank, message)
            case Vitals() | WasCut():
                self._questions.on_answer(member.rank, message)


def _title(name: str, world_size: int) -> str:
    return f"{name}, {world_size} rank{'s' * (world_size != 1)}"
