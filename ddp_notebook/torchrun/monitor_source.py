"""State of a job for monitors and the hang card: the current attempt, and the activity of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import psutil

from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.messages.script_abort import Cut, WasCut
from ddp_notebook.records.operation import Operation
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.groups.probe import of_vitals
from ddp_notebook.run.groups.rank_view import RankView, Views
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.torchrun.rounds import Round

_ANSWER_S = 0.3  # time limit for ranks to answer; an agent takes some milliseconds


class JobProbe:
    """Inspects the ranks of an attempt, as `run.groups.probe.RankProbe` inspects those of a cell."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._last: Round | None = None

    def inspect(self, run: Round) -> Views:
        """Return the view of every rank of the job."""
        answers = self._questions.ask_for(run.there, lambda n: Probe(request=n), _ANSWER_S)
        return self.views(run, answers, {rank: "" for rank in run.there if rank not in answers})

    def ask(self, run: Round) -> dict[int, Future[Vitals]]:
        """Send a probe to the connected ranks, without a wait. `views` takes the answers."""
        self._last = run
        return {rank: self._questions.ask(rank, lambda n: Probe(request=n), lapses=True) for rank in run.there}

    def views(self, run: Round, answers: Mapping[int, Vitals], silent: Mapping[int, str]) -> Views:
        """Return the views for these answers.

        Args:
            run: the attempt.
            answers: by rank.
            silent: ranks that do not answer.
        """
        return {rank: _view(run, rank, answers.get(rank), rank in silent) for rank in range(run.world_size)}

    def cut(self, rank: int, operation: Operation | None) -> Future[WasCut]:
        """Request that a rank aborts the operation that it waits in; None: the forming of a group."""
        if operation is None:
            return self._questions.ask(rank, lambda n: Cut(request=n), lapses=True)
        name, group, number = operation.name, operation.group, operation.number
        return self._questions.ask(rank, lambda n: Cut(request=n, name=name, group=group, number=number), lapses=True)

    def gone(self) -> dict[int, str]:
        """Return the ranks whose scripts have failed, with the reason."""
        run = self._last
        ended = {} if run is None else {rank: one for rank, one in run.members.items() if not one.is_there}
        return {rank: one.how_it_went for rank, one in ended.items() if one.done is None or one.done.status != "ok"}


class JobSource:
    """A `widgets.live_status.MonitorSource` for one job, as long as its number of ranks is the same.

    Args:
        probe: of its ranks.
        round: returns the running attempt with this number of ranks, if there is one.
        is_open: returns whether the notebook is still attached to the job, with this number of ranks.
        interrupt: aborts waiting operations of its ranks, and describes the result in sentences.
    """

    def __init__(
        self,
        probe: JobProbe,
        round: Callable[[], Round | None],
        is_open: Callable[[], bool],
        interrupt: Callable[[], list[str]],
    ) -> None:
        self.probe = probe
        self._round = round
        self._is_open = is_open
        self._interrupt = interrupt

    @property
    def is_running(self) -> bool:
        return self._is_open()

    @property
    def under_way(self) -> Round | None:
        return self._round()

    def press_stop(self) -> str:
        """Abort the waiting operations of its ranks."""
        return "; ".join(self._interrupt())


def _view(run: Round, rank: int, vitals: Vitals | None, is_silent: bool) -> RankView:
    member = run.members.get(rank)
    if member is None:
        return RankView(rank=rank, state="outside", runs="script")
    if not member.is_there or member.done is not None:
        if member.done is not None and member.done.status == "ok":
            return RankView(rank=rank, state="ended", runs="script")
        if member.is_there:  # it has sent its result, and its process is ending
            return RankView(rank=rank, state="died", place=member.done.ename if member.done else "", runs="script")
        return RankView(rank=rank, state="died", place=member.how_it_went, runs="script")
    if vitals is not None:
        return of_vitals(rank, vitals, "script")
    if not member.has_joined:
        return RankView(rank=rank, state="running", place="its start, without torch so far", runs="script")
    place = _why_silent(member.entry.pid) if is_silent else ""
    return RankView(rank=rank, state="silent" if is_silent else "running", place=place, runs="script")


def _why_silent(pid: int) -> str:
    try:
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return f"its process {pid} is stopped; kill -CONT {pid} resumes it"
    except psutil.Error:
        return "its process has just ended"
    return "no other thread can run during one long call"


def missing(run: Round, after_s: float = 3.0) -> str:
    """Return a sentence about ranks that were not seen; "" if all were seen, or it is too early to say."""
    absent = [rank for rank in range(run.world_size) if rank not in run.members]
    if not absent or time.monotonic() - run.began_s < after_s:
        return ""
    return (
        f"{list_ranks(absent)} of {run.world_size} cannot be seen from here: on another machine, of another user, or "
        "without -m ddp_notebook.attach"
    )
