"""Waiting calls of `session.client`: a message names the cause of a wait, and calls to dead ranks get an error."""

from __future__ import annotations

import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.launch import processes
from ddp_notebook.records.words import group_by_value, name_ranks

if TYPE_CHECKING:
    import ipyparallel

_log = logging.getLogger(__name__)
_FAIL_S = 2.0
_WATCH_S = 1.0  # between two checks of processes while a call waits
_DIED = re.compile(r"Engine .* died while running task")  # text of an ipyparallel error
_LATE_S = 0.2  # replies that a rank sent before its end get this time to arrive


class ClientRanks(Protocol):
    """The ranks of a session, as seen by a client."""

    @property
    def alive(self) -> Sequence[int]: ...
    @property
    def ended(self) -> Mapping[int, str]:
        """Exit causes of dead ranks."""

    def why_silent(self, ranks: Collection[int]) -> Mapping[int, str]:
        """Return the reason for each rank that does not answer, where known."""


class CallWatch:
    """Reports the process that calls wait for, if it is stopped, held by a debugger, or has ended.

    ipyparallel waits for replies without a message and without a limit. A thread prints a message under the running
    cell, and gives errors to the calls of dead ranks.

    Args:
        client: the client with the calls.
        controller: its process id, on this machine.
        ranks: of the session.
    """

    def __init__(self, client: ipyparallel.Client, controller: int, ranks: ClientRanks) -> None:
        self._client = client
        self._controller = controller
        self._ranks = ranks
        self._pids = [process.pid for process in processes.descendants(controller)]
        self._ended: queue.SimpleQueue[tuple[int, str, str] | None] = queue.SimpleQueue()  # rank, its engine, how
        self._dead: dict[str, str] = {}  # the error of calls to dead engines, by engine
        self._name_the_dead()
        threading.Thread(target=self._run, name="ddp-client-watch", daemon=True).start()

    def halted(self) -> str:
        """Describe the processes of the controller that do not run, and the remedy; "" if all run."""
        return halted(self._controller, self._pids)

    def on_ended(self, rank: int, how: str) -> None:
        """Handle the end of a rank's process. From an I/O thread."""
        if engine := self._client._engines.get(rank, ""):
            self._dead[engine] = _lost_with({rank: how})
        self._ended.put((rank, engine, how))

    def close(self) -> None:
        self._ended.put(None)

    def _name_the_dead(self) -> None:
        """Make ipyparallel errors about dead engines name the rank and the remedy.

        The original errors are "Engine b'2dbc0fe3' died while running task" for a load-balanced view, and "No such
        engine" for `client[1]`.
        """
        client: Any = self._client
        take, build = client._handle_apply_reply, client._build_targets

        def handle_apply_reply(message: Any) -> None:
            content = message["content"]
            why = self._dead.get(message["metadata"].get("engine", ""))
            if why and content["status"] == "error" and _DIED.match(content["evalue"]):
                content |= {"evalue": why, "traceback": [f"{content['ename']}: {why}"]}
            take(message)

        def build_targets(targets: Any) -> Any:
            try:
                return build(targets)
            except LookupError:
                named = [targets] if isinstance(targets, int) else targets if isinstance(targets, list | tuple) else []
                dead = {rank: how for rank, how in self._ranks.ended.items() if rank in named}
                if not dead:
                    raise
            raise IndexError(f"{_died(dead)}; %ddp_heal replaces {_them(dead)}")

        client._handle_apply_reply = client._queue_handlers["apply_reply"] = handle_apply_reply
        client._build_targets = build_targets

    def _run(self) -> None:
        said, calls = "", set[str]()  # the last message, and the calls at that time
        while True:
            try:
                ended = self._ended.get(timeout=_WATCH_S)
            except queue.Empty:
                said, calls = self._print_waits(said, calls)
                continue
            if ended is None:
                return
            found = [ended]
            time.sleep(_LATE_S)
            while not self._ended.empty():  # several ranks may end at once
                if (more := self._ended.get()) is None:
                    return
                found.append(more)
            try:
                self._on_ended(found)
            except Exception:  # another version of ipyparallel, or a closed client
                _log.exception("the calls of session.client to a dead rank could not be ended")

    def _print_waits(self, said: str, calls: set[str]) -> tuple[str, set[str]]:
        """Print the cause of waiting calls, unless that was printed for the same calls.

        Args:
            said: the last message, without its numbers of seconds.
            calls: ids of the calls that waited at that time.
        """
        try:
            now = set(self._client.outstanding)
            why = self._why() if now else ""
        except Exception:  # the session is changing: check again later
            _log.info("the processes that a call of session.client waits for could not be looked at", exc_info=True)
            return said, calls
        lasting = re.sub(r"[0-9.]+ s\b", "", why)
        if why and (lasting != said or calls.isdisjoint(now)):
            _print(f"a call of session.client waits: {why}")
        return lasting, now

    def _why(self) -> str:
        """Return the reason why calls wait, if a process does not run, else ""."""
        why = self._ranks.why_silent(self._asked())
        return self.halted() or reasons(why)

    def _asked(self) -> set[int]:
        """Return the ranks whose replies are missing."""
        if self._unassigned():  # any rank may have the call
            return set(self._ranks.alive)
        sent, engines = self._client._outstanding_dict, list(self._client._engines.items())
        return {rank for rank, engine in engines if sent.get(engine)}

    def _unassigned(self) -> set[str]:
        """Return the calls of load-balanced views: the client does not know their ranks."""
        client = self._client
        return set(client.outstanding).difference(*list(client._outstanding_dict.values()))

    def _on_ended(self, ended: Sequence[tuple[int, str, str]]) -> None:
        """Give errors to the calls of dead ranks, and report their end to the controller.

        Args:
            ended: the rank, its engine, and its exit cause.
        """
        client, are_gone = self._client, not self._ranks.alive
        dead, engines = {rank: how for rank, _, how in ended}, {engine for _, engine, _ in ended if engine}
        died, them, why = _died(dead), _them(dead), _lost_with(dead)

        def calls() -> Collection[str]:
            waiting = list(client._outstanding_dict.items())
            return (
                list(client.outstanding) if are_gone else [one for by, sent in waiting if by in engines for one in sent]
            )

        def of_dead(by: object) -> bool:
            return are_gone or by in engines

        may_have_more = bool(self._unassigned())
        if fail(client, calls, of_dead, why):
            ends = "ends with an error" if are_gone else "ends with an error when the other ranks have replied"
        else:  # a load-balanced view: the controller knows the calls of this rank, and fails them after 5 s
            ends = "ends with an error in 5 s if it was sent there" if may_have_more else ""
        if ends:
            _print(f"{died} during a call of session.client, which {ends}; %ddp_heal replaces {them}")
        for rank, engine, _ in ended:
            if engine and rank not in self._ranks.alive:
                client._io_loop.add_callback(_unregister, client, rank)


def _died(dead: Mapping[int, str]) -> str:
    """Name dead ranks, with their exit cause if it is the same for all.

    Example:
        >>> _died({0: "killed by SIGKILL", 1: "killed by SIGKILL"}), _died({0: "killed by SIGKILL", 2: "lost"})
        ('ranks 0-1 died (killed by SIGKILL)', 'ranks 0,2 died')
    """
    causes = set(dead.values())
    return f"{name_ranks(sorted(dead))} died" + (f" ({causes.pop()})" if len(causes) == 1 else "")


def _them(dead: Mapping[int, str]) -> str:
    return "it" if len(dead) == 1 else "them"


def _lost_with(dead: Mapping[int, str]) -> str:
    return f"{_died(dead)}, and the reply to this call with {_them(dead)}; %ddp_heal replaces {_them(dead)}"


def reasons(why: Mapping[int, str]) -> str:
    """Join the reasons of ranks that do not answer into one sentence; "" if no reason is known.

    Example:
        >>> reasons({0: "it is stopped", 1: "", 2: "it is stopped"})
        'ranks 0,2: it is stopped'
    """
    groups = group_by_value({rank: words for rank, words in why.items() if words})
    return "; ".join(f"{name_ranks(ranks)}: {words}" for words, ranks in groups.items())


def _unregister(client: ipyparallel.Client, rank: int) -> None:
    """Report the end of an engine to the controller, whose heartbeat check would take half a minute."""
    client.session.send(client._query_socket, "unregistration_request", content={"id": rank})


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def halted(controller: int, pids: Sequence[int] = ()) -> str:
    """Describe the processes of a controller that do not run, and the remedy; "" if all run.

    Args:
        controller: its process id, on this machine.
        pids: of all its processes, if they are known.
    """
    pids = pids or [process.pid for process in processes.descendants(controller)]
    stopped = [pid for pid in pids if processes.is_stopped_anywhere(pid)]
    whose = f"ipyparallel's controller (process {controller})"
    if stopped:
        resume = f"kill -CONT {' '.join(map(str, stopped))}"
        which = (
            "is stopped"
            if stopped == [controller]
            else f"has processes that are stopped ({', '.join(map(str, stopped))})"
        )
        return f"{whose} {which}: {resume} resumes it, and nothing is lost. Cells run without it"
    held = next(filter(None, map(processes.held, pids)), "")
    return f"{whose} does not answer: {held}. Cells run without it" if held else ""


def fail(
    client: ipyparallel.Client, calls: Callable[[], Collection[str]], of_engine: Callable[[object], bool], why: str
) -> int:
    """Give errors to calls that wait for a reply, and end waits for output.

    The client does the same after its controller reports a dead engine.

    Args:
        client: with the calls.
        calls: returns the ids of the calls, in the client's thread.
        of_engine: whether to end the waits for output of this engine.
        why: the error.

    Returns:
        The number of failed calls; 0 if the client's thread does not answer.
    """
    from ipyparallel import error

    failed: list[str] = []
    has_failed = threading.Event()

    def act() -> None:
        for msg_id in calls():
            if msg_id not in client.outstanding:
                continue
            # the fields of `error.wrap_exception`, without frames of this package
            content = {"status": "error", "ename": error.EngineError.__name__, "evalue": why, "engine_info": {}}
            content["traceback"] = [f"{content['ename']}: {why}"]
            reply = client.session.msg("apply_reply", content=content)
            reply["parent_header"]["msg_id"] = msg_id
            client._handle_apply_reply(reply)
            # else the client fails the call again when the controller reports the engine
            for sent in client._outstanding_dict.values():
                sent.discard(msg_id)
            failed.append(msg_id)
        for output in list(client._output_futures.values()):  # the reply has arrived, and its output never will
            if not output.done() and of_engine(output.metadata["engine_uuid"]):
                output.set_result(None)
        has_failed.set()

    client._io_loop.add_callback(act)
    return len(failed) if has_failed.wait(_FAIL_S) else 0


def give_up(client: ipyparallel.Client, why: str) -> None:
    """Give errors to all calls that wait for a reply, and close the client.

    Without its controller every call would wait forever.

    Args:
        client: to close.
        why: the error.
    """
    try:
        fail(client, lambda: list(client.outstanding), lambda _: True, why)
        client.close(linger=0)
    except Exception:  # another ipyparallel version, or a closed client: the stop button ends a wait
        _log.exception("the calls of session.client could not be ended")
