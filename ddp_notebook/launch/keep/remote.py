"""A notebook's end of the stream to its keeper: what is asked, and what comes."""

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
from typing import Any

from ddp_notebook.errors import DDPNotebookError, HostError, UsageError
from ddp_notebook.launch import processes
from ddp_notebook.launch.host.owner.pulse import Pulse
from ddp_notebook.launch.host.owner.requests import HostSilentError
from ddp_notebook.launch.keep.channel import Channel
from ddp_notebook.launch.keep.state import Running, Waiting, Welcome
from ddp_notebook.registry import finding

_LOOK_S = 0.2
ANSWER_S = 1.5  # without an answer to a ping, until a message names the keeper
_GIVE_UP_S = 5.0  # until a request is given up; a loaded machine is slow
_ENDS_S = 1.0  # until it is seen that a keeper which has closed has ended
_log = logging.getLogger(__name__)


class Remote:
    """The keeper, from afar.

    Args:
        channel: to it. Its next message is a `Welcome`.

    Attributes:
        welcome: what it has told first.
        pid: its process, on this machine.
        gone: why there is no keeper any more, or none for this notebook; "" while there is one.
        told_all: set once all has come that was not shown before.
        lacking: new ranks that may lack variables, as long as nobody has supplied them.
        renumbered: told the former number of each rank that has stayed, by its new one, where another notebook has
            resized the session.
        running: told which cells run and wait, each time that this has changed.
    """

    def __init__(self, channel: Channel, welcome: Welcome, pid: int) -> None:
        self.welcome = welcome
        self.pid = pid
        self._who = processes.identity(pid)
        self._pulse = Pulse(lambda: self._ask("ping", {})[1])
        self.gone = ""
        self.told_all = threading.Event()
        self.lacking = welcome.lacking
        self.renumbered: Callable[[Mapping[int, int]], object] = lambda _: None
        self.running: Callable[[list[Running], list[Waiting]], object] = lambda *_: None
        self.notices: list[str] = []
        self.say: Callable[[str], object] | None = None  # shows a notice while something is waited for
        self._is_elsewhere = False  # this notebook has left, or lost it to another
        self._channel = channel
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[..., object]] = {}
        self._on_gone: Callable[[], object] = lambda: None

    def listen(self, handlers: dict[str, Callable[..., object]], on_gone: Callable[[], object]) -> None:
        """From now on hand on what comes, in a thread.

        Args:
            handlers: by the first word of a message; get the rest of it.
            on_gone: called when nothing more comes.
        """
        self._handlers, self._on_gone = handlers, on_gone
        threading.Thread(target=self._read, name="ddp-keeper", daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Say something that has no answer."""
        if not self.gone:
            try:
                self._channel.send(*message)
            except OSError:
                pass  # the reader sees the end of the stream

    @property
    def goes_on(self) -> bool:
        """Whether the session goes on whatever this notebook does."""
        return self._is_elsewhere or not (self.welcome.drives or self.gone)

    @property
    def ended_elsewhere(self) -> bool:
        """Return whether the session has ended after this notebook left it, lost it to another, or only watched it."""
        if self._is_elsewhere:
            return not processes.is_running(self._who)
        return bool(self.gone) and not self.welcome.drives

    def ask(self, op: str, *, check: Callable[[], None] = lambda: None, **parameters: Any) -> Any:
        """Have the keeper do something, and wait for that.

        Args:
            check: called often while it waits; what it raises is raised when the keeper has left off.

        Raises:
            HostSilentError: the keeper is stopped, or hangs.
            HostError: the keeper is gone.
            what the keeper has met.
        """
        number, answer = self._ask(op, parameters)
        is_named = False
        stopped: BaseException | None = None
        while True:
            try:
                return answer.result(_LOOK_S)
            except FutureTimeoutError:
                if answer.done():  # meanwhile, or it has met a timeout of its own
                    return answer.result()
                try:
                    check()
                except BaseException as reason:
                    stopped = reason
                    self.tell("cancel", number)
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

    def _ask(self, op: str, parameters: dict[str, Any]) -> tuple[int, Future[Any]]:
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self.gone:
                answer.set_exception(HostError(self.gone))
                return number, answer
            self._pending[number] = answer
        self.tell("do", number, op, parameters)
        return number, answer

    @property
    def is_stopped(self) -> bool:
        """Return whether the process of the keeper is stopped."""
        return not self.gone and processes.is_stopped_anywhere(self.pid)

    def resume(self) -> None:
        """Let a stopped keeper go on."""
        self._signal(signal.SIGCONT)
        self._pulse.forget()

    def kill(self) -> None:
        """End a keeper that does not answer."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if processes.is_running(self._who):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def pulse(self, after_s: float = ANSWER_S) -> str:
        """Why the keeper does not answer, as far as is known without a wait, in a sentence; "" if it does. Call it
        again and again: each call sends a ping where none is under way.

        Args:
            after_s: seconds without an answer after which it is named. One that is stopped is named at once.
        """
        if self.gone:
            return ""
        name = f"the keeper (process {self.pid}), which has the ranks of {self.welcome.name}"
        if self.is_stopped:
            return f"{name}, is stopped: kill -CONT {self.pid} lets it go on, and nothing is lost"
        silent_s = self._pulse.look()
        if silent_s < after_s:
            return ""
        held = processes.held(self.pid)
        why = f" ({held})" if held else ""
        return f"{name}, has not answered for {silent_s:.1f} s{why}; nothing is lost if it goes on, %ddp_stop ends it"

    def close(self, why: str) -> None:
        """This notebook has no business there any more."""
        self._is_elsewhere = self._is_elsewhere or not self.gone
        self.gone = self.gone or why
        self._channel.close()

    # ---- the thread that reads

    def _read(self) -> None:
        while (message := self._channel.receive(self._pulse.hear)) is not None:
            kind, *rest = message
            if kind == "reply":
                self._on_reply(*rest)
            elif kind == "told all":
                self.told_all.set()
            elif kind == "notice":
                self.notices.append(*rest)
            elif kind == "taken over":
                self._is_elsewhere = True
                self.gone = (
                    f"{rest[0]} has taken the session over: it goes on there, and this notebook has no ranks any more. "
                    f"%ddp_attach {self.welcome.name} shows it, and with --take-over takes it back"
                )
            elif kind == "ended":
                self.gone = f"the kept session {self.welcome.name} has ended: {rest[0]}; %ddp_start starts another"
            else:
                self._hand_on(kind, rest)
        why = self.gone or self._why_closed()
        with self._lock:
            self.gone = self.gone or why
            for answer in self._pending.values():
                answer.set_exception(HostError(self.gone))
            self._pending.clear()
        self.told_all.set()
        self._hand_on("gone", [])

    def _why_closed(self) -> str:
        name, until = self.welcome.name, time.monotonic() + _ENDS_S
        while time.monotonic() < until:
            if not _is_there(name):
                return f"the keeper of {name} has ended, and all ranks with it; %ddp_restart starts new ranks"
            time.sleep(_LOOK_S / 10)
        self._is_elsewhere = True
        return f"{name} goes on without this notebook, which took too long to read what ranks say: %ddp_attach {name}"

    def _hand_on(self, kind: str, rest: list[Any]) -> None:
        handler = self._on_gone if kind == "gone" else self._handlers.get(kind)
        try:
            if handler is not None:
                handler(*rest)
        except Exception:
            _log.exception("what the keeper said was lost: %.200r", (kind, *rest))

    def _on_reply(self, number: int, is_done: bool, result: Any) -> None:
        with self._lock:
            answer = self._pending.pop(number, None)
        if answer is None:
            return
        if is_done:
            answer.set_result(result)
        elif isinstance(result, DDPNotebookError | KeyboardInterrupt | OSError | TimeoutError):
            answer.set_exception(result)
        else:
            answer.set_exception(HostError(f"the keeper could not do that: {type(result).__name__}: {result}"))


def _is_there(name: str) -> bool:
    """Whether there is such a keeper. Where nobody can look nobody can attach either."""
    try:
        return name in (one.name for one in finding.everything())
    except (UsageError, OSError):
        return False
