"""Find out the activity of ranks: from their answers, or for unresponsive ranks from their host."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddp_notebook.errors import HostError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.process import Process
from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.records.operation import Operation
from ddp_notebook.records.phases import WORDS, phase_in
from ddp_notebook.records.words import in_function, is_whole_stack
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.groups.rank_view import LoopFacts, RankView, State, StoreWaitView, Views
from ddp_notebook.run.groups.rpc_waits import OpenRemoteCalls
from ddp_notebook.run.rank_requests import Questions

if TYPE_CHECKING:
    from ddp_notebook.run.kept.foreign_cells import ForeignCell

_CUT_OFF_S = 1.5  # seconds without an answer of the keeper
_ANSWER_S = 0.3  # time for an answer; a rank's agent answers within milliseconds
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)')
_AGENT = re.compile(r'wire/endpoint\.py", line \d+ in _loop\b')
_WAITS = {"poll", "_loop"}  # functions in which an idle agent waits
_NOT_THE_USERS = ("site-packages", "/lib/python", str(Path(__file__).parents[2]))
_OWN_FILE = re.compile(r"/ddp_notebook/(?:(?:launch|messages|rank|records|registry|wire)/|\w+\.py$)")
_CELL_FILE = re.compile(r"ipykernel_\d+|ipython-input-")


class RankProbe:
    """Finds out the activity of ranks.

    Args:
        cluster: the ranks.
        questions: sends requests to the ranks.
    """

    def __init__(self, cluster: Cluster, questions: Questions) -> None:
        self._cluster = cluster
        self._questions = questions

    def inspect(self, run: CellRun | ForeignCell) -> Views:
        """Return the activity of every rank of the session: in the cell, done with the cell, or dead."""
        pending = self._pending(run)
        answers = self.vitals(self._cluster.alive)  # ranks that have ended the cell may serve RPC calls
        return self.views(run, answers, why_silent(self._cluster, [rank for rank in pending if rank not in answers]))

    def vitals(self, ranks: Sequence[int]) -> dict[int, Vitals]:
        """Return the answers of these ranks about their state. Ranks that do not answer in time are left out."""
        return self._questions.ask_for(ranks, lambda n: Probe(request=n), _ANSWER_S)

    def ask(self, run: CellRun | ForeignCell) -> dict[int, Future[Vitals]]:
        """Send requests to the ranks in the cell, without waiting. Pass the answers to `views`."""
        return {rank: self._questions.ask(rank, lambda n: Probe(request=n), lapses=True) for rank in self._pending(run)}

    def views(self, run: CellRun | ForeignCell, answers: Mapping[int, Vitals], silent: Mapping[int, str]) -> Views:
        """Return the activity of all ranks, based on answers.

        Args:
            silent: reasons of the ranks that do not answer.
        """
        views = {}
        for rank in self._cluster.ranks:
            process = self._cluster.process(rank)
            remote = OpenRemoteCalls.of_vitals(answers[rank].remote if rank in answers else {})
            if not process.is_alive:
                views[rank] = RankView(rank=rank, state="died", place=process.how_it_ended().partition("\n")[0])
            elif rank in answers and answers[rank].running_cell == run.number:
                views[rank] = of_vitals(rank, answers[rank])
            elif rank in silent:
                state: State = "internal" if silent[rank] in WORDS else "silent"
                views[rank] = RankView(rank=rank, state=state, place=silent[rank] or process.host.unheard)
            elif rank not in run.ranks:
                views[rank] = RankView(rank=rank, state="outside", remote=remote)
            elif rank in answers and rank in run.pending:
                views[rank] = _before_the_cell(rank, answers[rank])
            else:
                views[rank] = _after_the_cell(rank, run.number, answers.get(rank), remote)
        on = {rank: self._cluster.process(rank).host.label for rank in views}
        return views if len(set(on.values())) < 2 else {rank: replace(views[rank], host=on[rank]) for rank in views}

    def gone(self) -> dict[int, str]:
        """Return the dead ranks, with the cause of death."""
        processes = {rank: self._cluster.process(rank) for rank in self._cluster.gone}
        return {rank: process.how_it_ended().partition("\n")[0] for rank, process in processes.items()}

    def _pending(self, run: CellRun | ForeignCell) -> list[int]:
        return [rank for rank in run.pending if self._cluster.process(rank).is_alive]


def _before_the_cell(rank: int, vitals: Vitals) -> RankView:
    """Return the activity of a rank on which the cell has not begun, or has just ended."""
    if vitals.phase:
        return RankView(rank=rank, state="internal", place=vitals.phase)
    comes_first = "a call of session.client, which comes before the cell"
    place = comes_first if vitals.client_call_s else "the start of the cell"
    return RankView(rank=rank, state="running", place=place)


def _after_the_cell(rank: int, cell: int, vitals: Vitals | None, remote: OpenRemoteCalls) -> RankView:
    """Return the activity of a rank that has ended the cell."""
    if vitals is None or vitals.unread:
        return RankView(rank=rank, state="ended", remote=remote, is_heard=False)
    return RankView(
        rank=rank,
        state="ended",
        remote=remote,
        background="another cell" if vitals.running_cell else vitals.background,
        may_serve=vitals.may_serve,
        counts=vitals.group.get("counts", {}),
        loop=_loop_of(vitals) if vitals.last_cell == cell else None,
    )


def _loop_of(vitals: Vitals) -> LoopFacts:
    steps = vitals.group.get("steps", 0)
    return LoopFacts(steps=steps, **vitals.training) if vitals.training else LoopFacts(steps=steps)


def why_silent(cluster: Cluster, ranks: Sequence[int]) -> dict[int, str]:
    """Return the reasons why ranks do not answer, as text that follows "no answer: "; "" if unknown.

    A rank's agent cannot answer while the process is stopped, or while its main thread holds the GIL in one long call.
    Its host can detect both, and reads its stack.
    """
    if cut_off := cluster.cut_off(_CUT_OFF_S):
        return dict.fromkeys(ranks, cut_off)
    why = {rank: cluster.process(rank).host.unheard for rank in ranks}
    for rank in ranks:
        if cluster.process(rank).is_stopped:
            why[rank] = _stopped(cluster.process(rank))
    ranks = [rank for rank in ranks if not why[rank]]
    if ranks:
        with contextlib.suppress(HostError):
            for rank, seen in cluster.inspect(ranks).items():
                if seen.is_stopped:
                    why[rank] = _stopped(cluster.process(rank))
                elif seen.held:
                    why[rank] = seen.held
                elif seen.stack:
                    why[rank] = describe_silence(seen.stack)
    return why


def _stopped(process: Process) -> str:
    where = "" if process.host.is_here else f" on {process.host.label}"
    return f"its process {process.pid} is stopped; kill -CONT {process.pid}{where} resumes it"


def describe_silence(stack: str) -> str:
    """Explain from a `faulthandler` stack why a running rank does not answer; "" if unknown.

    An incomplete stack may lack the agent's thread.

    Example:
        >>> describe_silence('Thread 0x1:\\n  File "/usr/lib/python3.11/threading.py", line 3 in wait')
        ''
        >>> describe_silence('Thread 0x1:\\n  File "/tmp/ipykernel_7/1.py", line 3 in <module>')
        'cell line 3, in one long call during which no other thread can run'
    """
    *others, main = stack.strip().split("\n\n")
    if not is_in_users_code(main) and (phase := phase_in(main)):
        return phase
    if place := describe_stack(main):
        return f"{place}, in one long call during which no other thread can run"
    agents = [thread for thread in others if _AGENT.search(thread)]
    if not agents and not is_whole_stack(stack):
        return ""
    if not agents:
        return "its thread ddp-agent, which answers, has ended; kill the process, and %ddp_heal replaces it"
    innermost = _FRAME.search(agents[0])
    if innermost is None or innermost["function"] in _WAITS:
        return ""
    return "its thread ddp-agent, which answers, is blocked" + _at_foreign_line(agents[0])


def _at_foreign_line(stack: str) -> str:
    """Return the innermost frame outside this package; "" if that is only the start of the thread."""
    for frame in _FRAME.finditer(stack):
        if not is_own_file(frame["file"]):
            is_start = Path(frame["file"]).name == "threading.py"
            return "" if is_start else f" at {Path(frame['file']).name}:{frame['line']}"
    return ""


def is_own_file(file: str) -> bool:
    """Return whether a file belongs to this package, also on another host."""
    return _OWN_FILE.search(file) is not None


def is_in_users_code(stack: str) -> bool:
    """Return whether a `faulthandler` stack of one thread has a line of the user."""
    return bool(describe_stack(stack))


def describe_stack(text: str) -> str:
    """Return the cell line in a `faulthandler` stack of one thread, or else the innermost frame in user code.

    Example:
        >>> describe_stack('  File "/tmp/ipykernel_7/123.py", line 3 in <module>')
        'cell line 3'
    """
    frames = list(_FRAME.finditer(text))
    if frames and frames[-1]["file"] == "<string>":  # code of `python -c`, which started the process
        frames.pop()
    for frame in frames:
        if _CELL_FILE.search(frame["file"]):
            return f"cell line {frame['line']}{in_function(frame['function'])}"
        if not (is_own_file(frame["file"]) or any(part in frame["file"] for part in _NOT_THE_USERS)):
            return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}"
    return ""


def of_vitals(rank: int, vitals: Vitals, runs: Literal["cell", "script"] = "cell") -> RankView:
    """Return the activity of a rank, based on its answer.

    Args:
        runs: whether the rank runs a cell or a script.
    """
    if vitals.unread:
        return RankView(rank=rank, state="running", place=f"its state cannot be read: {vitals.unread}", runs=runs)
    if vitals.failed:
        return RankView(rank=rank, state="failed", place=vitals.failed, runs=runs)
    remote = OpenRemoteCalls.of_vitals(vitals.remote)
    counts, loop = vitals.group.get("counts", {}), _loop_of(vitals)
    if vitals.operation is None:
        store = StoreWaitView.of_vitals(vitals.store, vitals.where)
        child, child_s = vitals.child.get("command", ""), vitals.child.get("since_s", 0.0)
        return RankView(
            rank=rank,
            state="internal" if vitals.phase and not vitals.where else "running",
            place=vitals.where or vitals.phase,
            runs=runs,
            remote=remote,
            child=child,
            child_s=child_s,
            store=store,
            counts=counts,
            loop=loop,
        )
    state: State = "running" if vitals.thread else "waiting"
    operation = Operation.from_json(vitals.operation)
    return RankView(
        rank=rank,
        state=state,
        place=vitals.where,
        operation=operation,
        thread=vitals.thread,
        runs=runs,
        remote=remote,
        counts=counts,
        loop=loop,
    )
