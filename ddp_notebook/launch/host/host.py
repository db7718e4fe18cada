"""A host server as its owner sees it: requests with replies, and reports of text and deaths."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from ddp_notebook.errors import HostError, StartError, StartTimeoutError
from ddp_notebook.launch import processes
from ddp_notebook.launch.host.owner.requests import (
    HostGoneError,
    HostSilentError,
    HostTimeoutError,
    Pulse,
    Reply,
    Requests,
)
from ddp_notebook.launch.processes import Identity
from ddp_notebook.launch.transports.base import Transport
from ddp_notebook.messages import framing
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    DoneReply,
    EndReply,
    EndRequest,
    ErrorReply,
    FactsReply,
    FactsRequest,
    HoldTextRequest,
    LookReply,
    LookRequest,
    Notice,
    PingRequest,
    ProcessEnded,
    ProcessStopped,
    Seen,
    SignalRequest,
    StartReply,
    StartRequest,
)
from ddp_notebook.messages.processes import Start

_UNHEARD_S = 3.0  # a host that sends a heartbeat each second is unreachable after this silence
_QUIET_S = 1.25  # silence of a host that sends a heartbeat each second; then the host is blamed, not its server
_LOOKS = 4  # checks per heartbeat interval


class Hearing:
    """Detects an unreachable host by its heartbeat. A transport without a heartbeat (`beat_s` 0) needs no thread.

    Args:
        transport: to the host.
        gone: set once its server has ended.
        speak: sends the host a heartbeat, unless another thread is sending.
        give_up: called with the reason when the host was silent for its lease.
    """

    def __init__(
        self, transport: Transport, gone: threading.Event, speak: Callable[[], None], give_up: Callable[[str], None]
    ) -> None:
        self._unheard_s = 0.0  # at the last check
        self._transport = transport
        self._gone = gone
        self._speak = speak
        self._give_up = give_up
        if transport.beat_s:
            threading.Thread(target=self._beat, name="ddp-host-beat", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since the last data from the host, whatever its server does."""
        return min(self._unheard_s, self._transport.silent_s) if self._unheard_s else 0.0

    @property
    def why(self) -> str:
        """The reason for the silence, if it is known; "" once it has ended, such as after `kill -CONT` for its ssh."""
        return self._transport.why_silent if self.silent_s > _QUIET_S else ""

    @property
    def is_unreachable(self) -> bool:
        """True if the host is silent and may come back. Known causes of the silence are reported earlier."""
        if self._gone.is_set():
            return False
        return self.silent_s > _UNHEARD_S or bool(self.why)

    @property
    def unheard(self) -> str:
        """A sentence that the host is unreachable, with the time left; "" if it is reachable."""
        return self.words if self.is_unreachable else ""

    @property
    def words(self) -> str:
        """A sentence with the seconds since the last message, and the seconds that are left."""
        left_s = max(0.0, self._transport.lease_s - self.silent_s)
        because = f": {self.why}" if self.why else ""
        return (
            f"{self._transport.name} has sent nothing for {self.silent_s:.0f} s{because}. "
            f"Nothing is lost if it sends again within {left_s:.0f} s"
        )

    def _beat(self) -> None:
        tick_s, looked_s = self._transport.beat_s / _LOOKS, time.monotonic()
        for look in itertools.count():
            if self._gone.wait(tick_s):
                return
            # Time in which this thread could not run does not count, because the reader thread could not run either.
            passed_s = min(time.monotonic() - looked_s, 2 * tick_s)
            looked_s = time.monotonic()
            self._unheard_s = min(self._transport.silent_s, self._unheard_s + passed_s)
            if self._unheard_s > self._transport.lease_s:
                self._give_up(f"it has sent nothing for {self._transport.lease_s:g} s")
            elif look % _LOOKS == 0:
                self._speak()


_log = logging.getLogger(__name__)
_ANSWER_S = 1.5  # time limit for requests that take the server a millisecond
_LOOK_S = 0.25  # interval of checks whether the server was stopped
_READS_S = 0.1  # the reader thread takes waiting data within this time
_END_S = 8.0  # time to end processes, after their grace period
TextCallback = Callable[[int, int, bytes], None]  # process, fd, bytes
_R = TypeVar("_R", bound=Message)
EndedCallback = Callable[[int, int, str], None]  # process, exit status (negative: signal), a clause about the cause


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable only on its own machine. Debian maps a machine's own name to 127.0.1.1."""
    return address.startswith("127.") or address == "::1"


class Host:
    """One host as its owner sees it: sends requests to the host server, and cleans up after its end.

    The server starts in the background; `facts()` waits until it has imported torch. Callbacks run in this object's
    reader thread.

    Args:
        transport: to the host.
        numbers: for its processes, if it has had some before.

    Example:
        >>> host = Host(LocalTransport(os.environ))
        >>> host.facts()["cores"] > 0
        True
        >>> host.close()
    """

    def __init__(self, transport: Transport, numbers: Iterator[int] | None = None) -> None:
        self.transport = transport
        self.release()
        self._leaders: dict[int, Identity] = {}  # process -> identity; each leads an OS session
        self._requests = Requests(transport)
        self._taken = 0  # pieces of data that the reader thread has taken
        self._closing = False
        self._given_up = ""  # the reason
        self._numbers = itertools.count() if numbers is None else numbers
        self._owner_pid = os.getpid()
        self._facts: dict[str, Any] | None = None
        self.stopped: dict[int, float] = {}  # stopped processes -> time on the monotonic clock
        self._notices: deque[str] = deque()
        self._pulse = Pulse(lambda: self.ask(PingRequest()))
        self.folder = ""  # working directory of new ranks, if files were sent for them
        self._events: Table[None] = Table(
            {
                ProcessEnded: self._on_process_ended,
                ProcessStopped: lambda message: self._note_stopped(message.process, message.is_stopped),
                Notice: lambda message: self._notices.append(message.text),
            }
        )
        self._reader = threading.Thread(target=self._read, name="ddp-host", daemon=True)
        self._reader.start()
        self._hearing = Hearing(transport, self._requests.gone, self._requests.speak, self.give_up)

    @property
    def name(self) -> str:
        """The name of the host in its session."""
        return self.transport.name

    @property
    def hostname(self) -> str:
        """The host name that the host reports. Call `facts` first."""
        assert self._facts is not None
        return str(self._facts["host"])

    @property
    def label(self) -> str:
        """The name for messages to the user. Call `facts` first."""
        return self.hostname if self.transport.is_here else self.name

    @property
    def is_here(self) -> bool:
        """True if the host is the machine of the notebook."""
        return self.transport.is_here

    @property
    def address(self) -> str:
        """Its address for other hosts. Call `facts` first."""
        assert self._facts is not None
        return str(self._facts["address"])

    def interface(self, address: str) -> str:
        """Return the host's network interface with this address; "" if none is known. Call `facts` first."""
        assert self._facts is not None
        found = str(self._facts["interfaces"].get(address, ""))
        return found or (str(self._facts["loopback"]) if is_loopback(address) else "")

    @property
    def directory(self) -> str:
        """A local directory, removed when the host server exits."""
        return self.transport.directory

    @property
    def pid(self) -> int:
        return self.transport.pid

    @property
    def stage(self) -> str:
        """The name of the first stage of a start, with the start method of processes. Call `facts` first."""
        assert self._facts is not None
        is_forking = self._facts["start_method"] == "fork"
        name = "host server" if is_forking else f"ranks are spawned ({self._facts['start_reason']})"
        return f"{name} ({self.device_trouble})" if self.device_trouble else name

    @property
    def device_trouble(self) -> str:
        """Why ranks use the CPU although torch is built for an accelerator; "" otherwise. Call `facts` first."""
        assert self._facts is not None
        return str(self._facts.get("device_trouble", ""))

    @property
    def is_alive(self) -> bool:
        return not self._requests.gone.is_set()

    @property
    def how_it_ended(self) -> str:
        """The cause of its end, in words."""
        return self._requests.how_it_ended

    def again(self) -> Host | None:
        """Return a new connection to a lost host; None if it cannot be reached from this machine.

        Raises:
            HostError: as for the creation of the transport.
        """
        if (transport := self.transport.again()) is None:
            return None
        host = Host(transport, self._numbers)
        host.folder = self.folder
        return host

    @property
    def silent_s(self) -> float:
        """Seconds since the last data from the host, whatever its server does; 0.0 for a local host."""
        return self._hearing.silent_s

    @property
    def is_unreachable(self) -> bool:
        """True if the host is silent and may come back."""
        return self._hearing.is_unreachable

    @property
    def unheard(self) -> str:
        """A sentence that the host is unreachable, with the time left; "" if it is reachable."""
        return self._hearing.unheard

    @property
    def why_silent(self) -> str:
        """The reason for its silence, with the remedy; "" if it is not known or the host is not silent."""
        return self._hearing.why

    @property
    def is_stopped(self) -> bool:
        """True if the server's process is stopped (SIGSTOP); it then answers no request."""
        return self.is_alive and self.transport.is_stopped

    def trouble(self, timeout_s: float = _ANSWER_S) -> str:
        """Return a sentence about a server that does not answer; "" if it answers.

        Args:
            timeout_s: seconds for its answer.
        """
        if not self.is_alive:
            if self.transport.is_here:
                return "the host server ended, and all ranks with it; %ddp_restart starts new ranks"
            how = f"{self.name} was lost: {self.how_it_ended}"
            return f"{how}; its ranks, their variables and the session are lost; %ddp_restart starts new ranks"
        if self.is_unreachable:
            return self.unheard
        if not self.is_stopped and self._pulse.unanswered_s > timeout_s:
            return self.pulse() or self.trouble(timeout_s)
        try:
            self.request(PingRequest(), DoneReply, timeout_s=timeout_s)
        except HostGoneError:
            return self.trouble()
        except HostError as error:
            return str(error)
        return ""

    def pulse(self) -> str:
        """Return why the server does not answer, without a wait; "" if it answers. Call it repeatedly: each call sends
        a ping unless one is pending.
        """
        if not self.is_alive or self.is_unreachable or self.silent_s > _QUIET_S:
            return ""  # reported elsewhere
        if self.is_stopped:
            return self._is_stopped_in_words
        silent_s = self._pulse.poll()
        return self._silent_in_words(PingRequest(), silent_s) if silent_s > _ANSWER_S else ""

    @property
    def unanswered_s(self) -> float:
        """Seconds without an answer of the server, as of the last `pulse`."""
        return self._pulse.unanswered_s

    @property
    def _answers(self) -> bool:
        """False if the server is stopped or known to hang, so that a request is useless."""
        return not self.is_stopped and self._pulse.unanswered_s < _ANSWER_S

    def add_notice(self, text: str) -> None:
        """Add a line that the next or the running cell shows."""
        self._notices.append(text)

    def notices(self) -> list[str]:
        """Return and forget the messages of the server for the user."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def resume(self) -> None:
        """Continue a stopped server, so that it can end its processes. Also cancels a pending stop signal."""
        if self.is_alive:
            self.transport.resume()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Return whether the server is alive and can fork ranks with this environment."""
        return self.is_alive and self.transport.fits(env)

    def facts(self, timeout_s: float = 120.0, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return facts about the host: cores, GPUs, versions, backends and start method. Waits for the server's
        imports.

        Args:
            timeout_s: time limit in seconds.
            check: called often during the wait; an exception from it ends the wait.

        Raises:
            StartError: the server ended, was stopped, or took too long (StartTimeoutError).
        """
        if self._facts is None:
            try:
                self._facts = self.request(FactsRequest(), FactsReply, timeout_s=timeout_s, check=check).facts
            except HostTimeoutError as error:
                raise StartTimeoutError(str(error)) from error
            except HostError as error:
                raise StartError(str(error)) from error
        return self._facts

    def request(
        self,
        message: Message,
        expected: type[_R],
        *,
        timeout_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
    ) -> _R:
        """Send a request and wait for its reply.

        Args:
            message: the request.
            expected: class of the reply.
            timeout_s: time limit in seconds.
            check: called often during the wait; an exception from it ends the wait.

        Raises:
            HostGoneError: the server ended; the message holds its last words.
            HostSilentError: the server was stopped, or has not answered within `timeout_s`.
            HostError: the server could not do it.
        """
        reply = self.reply(self.ask(message), message, timeout_s, check)
        if not isinstance(reply, expected):
            raise HostError(f"the host server answered {_name(message)!r} with {type(reply).__name__}")
        return reply

    def ask(self, message: Message) -> Reply:
        """Send a request. Pass the result to `reply` to wait for the answer."""
        return self._requests.ask(message)

    def reply(
        self, asked: Reply, message: Message, timeout_s: float = 30.0, check: Callable[[], None] = lambda: None
    ) -> Message:
        """Wait for the reply to a request of `ask`. Raises the errors of `request`."""
        reply = self._wait_for(asked, message, timeout_s, check)
        if isinstance(reply, ErrorReply):
            raise HostError(f"the host server could not {_name(message)!r}: {reply.error}")
        return reply

    def _wait_for(self, reply: Reply, message: Message, timeout_s: float, check: Callable[[], None]) -> Message:
        until = time.monotonic() + timeout_s
        while True:
            try:
                return reply.result(max(0.0, min(_LOOK_S, until - time.monotonic())))
            except FutureTimeoutError:
                check()
            if self.is_stopped:
                raise HostSilentError(self._is_stopped_in_words)
            if time.monotonic() > until:
                raise HostTimeoutError(
                    self._hearing.words if self.silent_s > _QUIET_S else self._silent_in_words(message, timeout_s)
                )

    @property
    def _is_stopped_in_words(self) -> str:
        where = "" if self.is_here else f" on {self.name}"
        return (
            f"the host server (pid {self.pid}), which passes cells to the ranks, is stopped: "
            f"kill -CONT {self.pid}{where} resumes it with all variables, and %ddp_restart starts new ranks"
        )

    def _silent_in_words(self, message: Message, waited_s: float) -> str:
        if not self._reader.is_alive():
            return (
                f"this notebook's thread {self._reader.name}, which reads messages of the host server, has ended; "
                "%ddp_restart starts new ranks"
            )
        where = "" if self.is_here else f" on {self.name}"
        if not self._reads:  # the server answers
            pid = os.getpid()
            held = f" ({why})" if (why := processes.held(pid)) else ""
            return (
                f"the thread {self._reader.name} of process {pid}, which reads messages of the host server{where}, has "
                f"not run for {waited_s:.1f} s{held}; nothing is lost if it continues; %ddp_restart starts new ranks"
            )
        held = f" ({why})" if (why := self.transport.held) else ""
        return (
            f"the host server (pid {self.pid}{where}) did not answer {_name(message)!r} in {waited_s:.3g} s{held}; "
            "nothing is lost if it answers again, and %ddp_restart starts new ranks"
        )

    @property
    def _reads(self) -> bool:
        """False if data of the server have arrived that the reader thread does not take. Waits a moment then."""
        taken = self._taken
        if not self.transport.has_unread:
            return True
        time.sleep(_READS_S)
        return self._taken != taken or not self.transport.has_unread

    def next_number(self) -> int:
        """Return an unused number for a new process."""
        return next(self._numbers)

    def give_up(self, why: str) -> None:
        """Declare the host lost. It is then handled like a host that has ended, and its processes end by themselves.

        Args:
            why: the reason in words, shown after the host's name and "was lost: ".
        """
        self._given_up = why
        self.transport.end(at_once=True)

    def hold_text(self, hold: bool) -> None:
        """Leave text in the processes' pipes (True), or read it again (False). Does not wait."""
        self._requests.send(HoldTextRequest(hold=hold))

    def put_in_inboxes(self, targets: list[int], data: bytes) -> None:
        """Put bytes into the inboxes of ranks. Does not wait for them."""
        self._requests.send_frame(framing.pack_input(targets, data))

    def start(self, process: int, start: Start) -> StartReply:
        """Start a rank, the store or the controller.

        Raises:
            HostError: the process could not be started.
        """
        try:
            reply = self.request(StartRequest(process=process, start=start), StartReply)
        except HostSilentError:  # the server may still start the process, which would have no owner
            self._requests.send(EndRequest(processes=[process], grace_s=0.0))
            raise
        self._leaders[process] = (reply.pid, reply.started)
        return reply

    def signal(self, targets: list[int], *numbers: int, value: int = 0) -> bool:
        """Send signals to processes, in this order. They are delivered when this returns.

        If the server does not answer, the transport sends them itself if it can.

        Args:
            targets: numbers of the processes.
            numbers: of the signals.
            value: sent with `RELEASE`.

        Returns:
            Whether the server sent them.

        Raises:
            HostError: the server ended, or could not send them.
        """
        as_ints = [int(number) for number in numbers]
        request = SignalRequest(processes=targets, signals=as_ints, value=value)
        if self.is_unreachable:  # delivered when the host is back, before later messages
            self._requests.send(request)
            return False
        if self._answers:
            with contextlib.suppress(HostSilentError):
                self.request(request, DoneReply, timeout_s=_ANSWER_S)
                return True
        self.transport.signal(
            [self._leaders[process] for process in targets if process in self._leaders], as_ints, value
        )
        return False

    def inspect(self, targets: list[int]) -> dict[int, Seen]:
        """Return the state and the stacks of processes that cannot answer. Takes at most 0.3 s, for the ranks to write
        stacks.

        Raises:
            HostGoneError: the server ended.
        """
        if self._answers and not self.is_unreachable:
            with contextlib.suppress(HostSilentError):
                return self.request(LookRequest(processes=targets), LookReply, timeout_s=_ANSWER_S).seen
        return self.transport.look({process: self._leaders[process] for process in targets if process in self._leaders})

    def end(self, targets: list[int], grace_s: float, *, orphans: bool = False) -> list[int]:
        """End processes and their descendants: `END`, then SIGKILL after `grace_s`.

        Args:
            targets: numbers of the processes.
            grace_s: seconds.
            orphans: also end descendants that have left their rank's process group and lost their parent.

        Returns:
            The ids of processes that could not be ended.
        """
        request = EndRequest(processes=targets, grace_s=grace_s, orphans=orphans)
        return self.request(request, EndReply, timeout_s=grace_s + _END_S).left

    def end_all(self, ranks: list[int], rest: list[int], grace_s: float) -> list[int]:
        """End all processes of a session, and stop reports about them: the ranks first, then the rest without grace.

        Returns:
            The ids of processes that could not be ended. If the server does not answer, this is its own id: its end
            will end all of them.
        """
        self.resume()
        try:
            left = [self.pid] if self.trouble() else []
            if not left:
                left = self.end(ranks, grace_s, orphans=True) + self.end(rest, 0.0)
        except HostError:  # the server has ended, and all its processes, or it does not answer
            left = [self.pid]
        self.release()
        return left

    def attach(self, on_text: TextCallback, on_ended: EndedCallback, on_gone: Callable[[], None]) -> None:
        """Set the callbacks for text, deaths and the end of the server."""
        self.on_text, self.on_ended, self.on_gone = on_text, on_ended, on_gone

    def release(self) -> None:
        """Remove the callbacks."""
        self.attach(lambda *_: None, lambda *_: None, lambda: None)

    def close(self) -> None:
        """End the server and all processes below it, and remove its directory."""
        if os.getpid() != self._owner_pid:
            return  # this is a forked child of the notebook, which does not own the server
        self._closing = True
        self.resume()
        self.transport.end(at_once=self._facts is None or self.is_unreachable)
        self._sweep()

    def _read(self) -> None:
        unpacker = framing.Unpacker()
        while data := self.transport.receive():
            self._taken += 1
            self._pulse.hear()
            for frame in unpacker.feed(data):
                if isinstance(frame, framing.ProcessText):
                    self._report(self.on_text, *frame)
                elif isinstance(frame, framing.Numbered) and type(frame.message) in self._events:
                    self._events.handle(frame.message)
                elif isinstance(frame, framing.Numbered):
                    self._requests.on_reply(frame.number, frame.message)
        # read the cause before the directory is removed
        self._requests.end(self.transport.how_it_ended(self._given_up))
        if not self._closing:
            self.transport.end()
            self._sweep()
            self._report(self.on_gone)
        self.transport.close()

    def _on_process_ended(self, message: ProcessEnded) -> None:
        self._leaders.pop(message.process, None)
        self._note_stopped(message.process, False)
        self._report(self.on_ended, message.process, message.status, message.why)

    def _note_stopped(self, process: int, is_stopped: bool) -> None:
        others = {number: since for number, since in self.stopped.items() if number != process}
        # a new dict, since other threads read it
        self.stopped = {**others, process: time.monotonic()} if is_stopped else others

    def _report(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a callback. An exception in it must not end the thread that reports deaths."""
        try:
            callback(*arguments)
        except Exception:
            _log.exception("a report of the host server was lost: %.200r", arguments)

    def _sweep(self) -> None:
        leaders, self._leaders = self._leaders, {}  # the ids may be reused later
        self.transport.sweep(list(leaders.values()))


def _name(request: Message) -> str:
    """Return the name of a request for a message to the user.

    Example:
        >>> _name(HoldTextRequest(hold=True))
        'hold text'
    """
    words = re.findall(r"[A-Z][a-z]*", type(request).__name__)
    return " ".join(words[:-1]).lower()
