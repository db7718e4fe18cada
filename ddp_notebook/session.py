"""One running group of ranks as the notebook sees it: runs cells on them, and owns what it started."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ddp_notebook.errors import DDPNotebookError, SessionExistsError, StartError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.keep import reach
from ddp_notebook.launch.keep.remote import Remote
from ddp_notebook.launch.keep.stand_in import Attached
from ddp_notebook.launch.members.beginning import Beginning
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.assembly import Parts
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt, uninterrupted
from ddp_notebook.run.cells.watch import Beside
from ddp_notebook.run.dispatch import Dispatch
from ddp_notebook.run.files.face import FileFace
from ddp_notebook.run.groups.face import GroupFace
from ddp_notebook.run.interrupted import OF_SESSION, tells_interrupts
from ddp_notebook.run.kept import KeptFace
from ddp_notebook.run.kernel import ipython
from ddp_notebook.run.output.sink import Sink
from ddp_notebook.run.record import baseline
from ddp_notebook.run.record.face import RecordFace
from ddp_notebook.run.sharding.face import ShardingFace
from ddp_notebook.run.values.face import ValueFace
from ddp_notebook.widgets import ended
from ddp_notebook.widgets.ended import Ended
from ddp_notebook.widgets.face import ViewFace
from ddp_notebook.widgets.placing import Placing
from ddp_notebook.wire.record_options import RecordOptions, profile_of

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)
_current: Session | None = None
_current_lock = threading.Lock()


def current() -> Session | None:
    """The running session, or None."""
    return _current


# `run` shows an interrupt itself: a wrapper would be a second frame of this package in the tracebacks of scripts.
@tells_interrupts({name: sentence for name, sentence in OF_SESSION.items() if name != "run"})
class Session(KeptFace, GroupFace, ShardingFace, ValueFace, FileFace, RecordFace, ViewFace):
    """A group of ranks. `start` makes one; `stop`, or leaving a `with` block, ends it."""

    def __init__(
        self, options: StartOptions, *, report: Progress = lambda _: None, remote: Remote | None = None
    ) -> None:
        global _current
        refuse_on_rank("ranks start no ranks: call start")
        self._remote = remote  # the keeper, if it has one
        self._cluster: Cluster | None = None
        self.options = options
        self._ready = False
        self._host_ended = False  # closed, or given back
        self._when_stopped: list[Callable[[], object]] = []
        with _current_lock:
            if _current is not None:
                if _current.outlives_stop:
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

    def _begin(self, check: Callable[[], None], report: Progress) -> Beginning:
        if self._remote is None and self.options.keep is not None:
            self._remote = reach.start(self.options, check, report)
        return Beginning(self.options, check, report) if self._remote is None else Attached(self._remote)

    def _start_ranks(self, beginning: Beginning, interrupts: Interrupts) -> None:
        dispatch = Dispatch()
        cluster = beginning.make(dispatch)
        self.synced = beginning.synced
        self._assembled = parts = Parts(cluster, dispatch, cluster.placement.world_size, self.options, self._hosts)
        self._cells = parts.cells
        self._live = live = Placing(
            parts.observer.recording,
            lambda: self.recording,
            self._cells,
            lambda: f"{self.world_size} rank{'s' * (self.world_size != 1)}, {self.backend}",
            self.options.live,
        )
        parts.resizing.on_resized = live.on_resized
        self._cluster = cluster
        if self._remote is not None:
            parts.attach(self._remote)
        beginning.start(cluster)
        parts.on_started()
        live.prepare()
        self.when_stopped(self._leave_recording)
        self.when_stopped(live.close)
        interrupts.check()
        self._ready = True
        ended.keep(None)

    # ---- what the user does

    @property
    def is_running(self) -> bool:
        """Whether the ranks were started and not stopped, and their host server lives."""
        return self._cluster is not None and self._hosts.are_alive

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

        def run(code: str, record: RecordOptions, timeout_s: float) -> None:
            self.run(code, 0, timeout_s, quiet=True, record=record)

        baseline.measure(self._parts.recordings, self._cells, run, steps, seconds)

    def pids(self, kind: str = "rank") -> list[int]:
        """Process ids of the living "rank", "store" or "controller" processes, or of the "host server"."""
        return self._hosts.pids if kind == "host server" else self._parts.living.cluster.pids(kind)

    def _beside(self, sink: Sink) -> Beside | None:
        return self.views.beside(sink)

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

    def _leave_recording(self) -> None:
        """Let the magics show it when the ranks are gone."""
        if ipython() is None:  # nobody has magics here
            return
        recording = self._parts.observer.recording
        if recording.catch_up is not None and not self._parts.cluster.unheard:
            recording.catch_up()
        whose = f"this notebook has left {self.kept_as}" if self.outlives_stop else "the ranks are gone"
        title = f"{self.world_size} rank{'s' * (self.world_size != 1)}, {self.backend}"
        profiled = sorted({profile_of(file)[1] for file in self._parts.profiles()})
        ended.keep(Ended(recording, whose, title, profiled, draws_html=self.views.draws_html))

    @property
    def _state_without_hosts(self) -> str:
        return "goes on elsewhere" if self.outlives_stop else super()._state_without_hosts

    def check_restart(self) -> None:
        """Check that the ranks could be started again, before they are ended.

        Raises:
            StartError: they could not; the message says why, and the session is unchanged.
        """
        if not self.is_running:
            return
        try:
            self._hosts.check_startable(self.world_size)
        except DDPNotebookError as error:
            living = len(self.pids())
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
                    self._parts.jobs.close("the session was stopped")
                self._tell_of_the_end()
                if self._cluster is not None:
                    self._parts.let_go()
            finally:
                self._end_processes()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _dead(self) -> list[int]:
        return [] if self._cluster is None else sorted(set(self._cluster.ranks) - set(self._cluster.alive))

    def __repr__(self) -> str:
        if self._cluster is None or not self._ready:
            return f"<Session: {'stopped' if self._host_ended else 'starting'}>"
        dead = f", {name_ranks(self._dead)} died" if self._dead else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        return f"<Session: {ranks} on {self._hosts.words}, {self.backend}{dead}>"

    def _end_processes(self) -> None:
        (cluster, self._cluster), (done, self._host_ended) = (self._cluster, None), (self._host_ended, True)
        if cluster is not None:
            self._parts.close()
        elif done:
            return
        healthy = cluster is None or cluster.stop()
        if cluster is not None:
            self._parts.jobs.join()
        self._hosts.end(healthy=healthy)
