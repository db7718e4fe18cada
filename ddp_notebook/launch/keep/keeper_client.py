"""A notebook's end of the stream to its keeper: requests, and incoming messages."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from ddp_notebook.errors import HostError, UsageError
from ddp_notebook.launch import processes
from ddp_notebook.launch.host.owner.requests import HostSilentError, Pulse
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.exception_data import error_of
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.sync.sync import Synced
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import Message, from_json
from ddp_notebook.messages.framing import ProcessText
from ddp_notebook.messages.hosts import Notice, PingRequest
from ddp_notebook.messages.keeper import (
    AllSent,
    CancelRequest,
    FailureReply,
    RunningCell,
    SessionEnded,
    TakenOver,
    Waiting,
    Welcome,
)
from ddp_notebook.registry import lookup

_R = TypeVar("_R", bound=Message)

_LOOK_S = 0.2
ANSWER_S = 1.5  # time without an answer to a ping until a message names the keeper
_GIVE_UP_S = 5.0  # time until a request fails; generous for loaded machines
_ENDS_S = 1.0  # time to wait for the end of a keeper that has closed the stream
_log = logging.getLogger(__name__)


class KeeperClient:
    """Client of a keeper.

    Args:
        channel: to the keeper, after its `Welcome`.
        welcome: the first message of the keeper.
        pid: its process, on this machine.

    Attributes:
        gone: why the keeper has ended, or is closed to this notebook; "" while it serves this notebook.
        told_all: set after all messages that were not shown before.
        lacking: new ranks that may lack variables, until a notebook has initialised them.
        renumbered: called with the former number of each kept rank, by its new one, after another notebook has resized
            the session.
        running: called with the running and waiting cells after each change.
    """

    def __init__(self, channel: Channel, welcome: Welcome, pid: int) -> None:
        self.welcome = welcome
        self.options = StartOptions.from_json(welcome.options)
        self.synced: Synced | None = None if welcome.synced is None else from_json(Synced, welcome.synced)
        self.pid = pid
        self._who = processes.identity(pid)
        self._pulse = Pulse(lambda: self._ask(PingRequest())[1])
        self.gone = ""
        self.told_all = threading.Event()
        self.lacking = welcome.lacking
        self.renumbered: Callable[[Mapping[int, int]], object] = lambda _: None
        self.running: Callable[[list[RunningCell], list[Waiting]], object] = lambda *_: None
        self.notices: list[str] = []
        self.say: Callable[[str], object] | None = None  # shows a notice during a wait
        self._is_elsewhere = False  # this notebook has left the session, or another has taken it over
        self._channel = channel
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Message]] = {}
        self._lock = threading.Lock()
        self._on_text: Callable[[int, int, bytes], object] = lambda *_: None
        self._handlers: dict[type[Message], Callable[[Any], object]] = {
            AllSent: lambda _: self.told_all.set(),
            Notice: lambda message: self.notices.append(message.text),
            TakenOver: self._on_taken_over,
            SessionEnded: self._on_session_ended,
        }
        self._events: Table[object] = Table(self._handlers)
        self._on_gone: Callable[[], object] = lambda: None

    def listen(
        self,
        handlers: Mapping[type[Message], Callable[[Any], object]],
        on_text: Callable[[int, int, bytes], object],
        on_gone: Callable[[], object],
    ) -> None:
        """Start a thread that passes on incoming messages.

        Args:
            handlers: by the kind of a message.
            on_text: gets rank, file descriptor and bytes of text.
            on_gone: called after the last message.
        """
        self._events = Table({**self._handlers, **handlers})
        self._on_text, self._on_gone = on_text, on_gone
        threading.Thread(target=self._read, name="ddp-keeper", daemon=True).start()

    def send(self, message: Message, number: int = 0) -> None:
        """Send a message; without a number it gets no reply."""
        if not self.gone:
            try:
                self._channel.send(message, number)
            except OSError:
                pass  # the reader notices the end of the stream

    @property
    def goes_on(self) -> bool:
        """True if the session continues whatever this notebook does."""
        return self._is_elsewhere or not (self.welcome.drives or self.gone)

    @property
    def ended_elsewhere(self) -> bool:
        """True if the session has ended after this notebook left it, lost it to another, or only watched it."""
        if self._is_elsewhere:
            return not processes.is_running(self._who)
        return bool(self.gone) and not self.welcome.drives

    def ask(self, message: Message, expected: type[_R], *, check: Callable[[], None] = lambda: None) -> _R:
        """Send a request and wait for its reply.

        Args:
            message: the request.
            expected: the kind of its reply.
            check: called often during the wait; an exception from it is raised after the keeper has stopped the work.

        Raises:
            HostSilentError: the keeper is stopped, or hangs.
            HostError: the keeper has ended.
            any error of the keeper.
        """
        number, answer = self._ask(message)
        is_named = False
        stopped: BaseException | None = None
        while True:
            try:
                return _as(expected, answer.result(_LOOK_S))
            except FutureTimeoutError:
                if answer.done():  # done in the meantime, or the error is a timeout of the keeper
                    return _as(expected, answer.result())
                try:
                    check()
                except BaseException as reason:
                    stopped = reason
                    self.send(CancelRequest(number=number))
                self._show_notices()
                if why := self.pulse(_GIVE_UP_S):
                    raise stopped or HostSilentError(why) from None
                if (why := self.pulse()) and not is_named:
                    is_named = True
                    self._say(why)
            except KeyboardInterrupt:
                if stopped is not None:
                    raise stopped from None
                raise

    def _show_notices(self) -> None:
        if self.say is not None:
            notices, self.notices = self.notices, []
            for notice in notices:
                self.say(notice)

    def _say(self, text: str) -> None:
        if self.say is not None:
            self.say(text)

    def _ask(self, message: Message) -> tuple[int, Future[Message]]:
        number, answer = next(self._numbers), Future[Message]()
        with self._lock:
            if self.gone:
                answer.set_exception(HostError(self.gone))
                return number, answer
            self._pending[number] = answer
        self.send(message, number)
        return number, answer

    @property
    def is_stopped(self) -> bool:
        """True if the process of the keeper is stopped."""
        return not self.gone and processes.is_stopped_anywhere(self.pid)

    def resume(self) -> None:
        """Continue a stopped keeper."""
        self._signal(signal.SIGCONT)
        self._pulse.forget()

    def kill(self) -> None:
        """Kill a keeper that does not answer."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if processes.is_running(self._who):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pulse(self, after_s: float = ANSWER_S) -> str:
        """Return a sentence about a keeper that does not answer, without a wait; "" if it answers.

        Call it repeatedly: each call sends a ping unless one is pending.

        Args:
            after_s: seconds without an answer after which it is named. A stopped keeper is named at once.
        """
        if self.gone:
            return ""
        name = f"the keeper (process {self.pid}), which has the ranks of {self.welcome.name}"
        if self.is_stopped:
            return f"{name}, is stopped: kill -CONT {self.pid} resumes it, and nothing is lost"
        silent_s = self._pulse.poll()
        if silent_s < after_s:
            return ""
        held = processes.held(self.pid)
        why = f" ({held})" if held else ""
        return f"{name}, has not answered for {silent_s:.1f} s{why}; nothing is lost if it continues; %ddp_stop ends it"

    def close(self, why: str) -> None:
        """Close the stream when this notebook leaves the session."""
        self._is_elsewhere = self._is_elsewhere or not self.gone
        self.gone = self.gone or why
        self._channel.close()

    # ---- the thread that reads

    def _read(self) -> None:
        while (came := self._channel.receive(self._pulse.hear)) is not None:
            try:
                if isinstance(came, ProcessText):
                    self._on_text(*came)
                elif came.number:
                    self._on_reply(*came)
                else:
                    self._events.handle(came.message)
            except Exception:
                _log.exception("a message of the keeper was lost: %.200r", came)
        why = self.gone or self._why_closed()
        with self._lock:
            self.gone = self.gone or why
            for answer in self._pending.values():
                answer.set_exception(HostError(self.gone))
            self._pending.clear()
        self.told_all.set()
        try:
            self._on_gone()
        except Exception:
            _log.exception("the end of the keeper was not reported")

    def _on_taken_over(self, message: TakenOver) -> None:
        self._is_elsewhere = True
        self.gone = (
            f"{message.driver} has taken the session over, and this notebook no longer has ranks. "
            f"%ddp_attach {self.welcome.name} shows it, and with --take-over takes it back"
        )

    def _on_session_ended(self, message: SessionEnded) -> None:
        self.gone = f"the kept session {self.welcome.name} has ended: {message.why}; %ddp_start starts another"

    def _why_closed(self) -> str:
        name, until = self.welcome.name, time.monotonic() + _ENDS_S
        while time.monotonic() < until:
            if not _is_there(name):
                return f"the keeper of {name} has ended, and all ranks with it; %ddp_restart starts new ranks"
            time.sleep(_LOOK_S / 10)
        self._is_elsewhere = True
        return f"this notebook read the output of {name} too slowly and was detached: %ddp_attach {name} attaches again"

    def _on_reply(self, message: Message, number: int) -> None:
        with self._lock:
            answer = self._pending.pop(number, None)
        if answer is None:
            return
        if isinstance(message, FailureReply):
            answer.set_exception(error_of(message.failure))
        else:
            answer.set_result(message)


def _as(expected: type[_R], reply: Message) -> _R:
    if not isinstance(reply, expected):
        raise HostError(f"the keeper answered with {type(reply).__name__} instead of {expected.__name__}")
    return reply


def _is_there(name: str) -> bool:
    """Return whether this keeper exists. False if the registry cannot be read, because attaching would fail too."""
    try:
        return name in (one.name for one in lookup.everything())
    except (UsageError, OSError):
        return False
