"""The tasks of one session: started, queued, connected, and ended with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ddp_notebook.launch.starters.starter import SHARED, Starter, shared_folder
from ddp_notebook.launch.transports import cleanup_process
from ddp_notebook.launch.transports.callback import OutpostConnection, OutpostListener
from ddp_notebook.launch.transports.outpost import VARIABLE
from ddp_notebook.launch.transports.ports import ANY, Listening
from ddp_notebook.messages.first_messages import to_line
from ddp_notebook.registry import modes, private

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 600.0  # between two reported states of a queue
_IN_ORDER_S = 3.0  # time for tasks to end in order before they are killed
_MODULE = "ddp_notebook.launch.transports.outpost"


class Tasks:
    """Tasks of a session. They start in the background.

    Args:
        starter: starts the tasks. It ends with them.
        python: the interpreter of the tasks; None: the notebook's own.
        env: variables on top of the tasks' environment.
        lease_s: seconds without a message after which each side declares the other lost.
        ports: for connections of tasks.
        saves: tasks report a signal that warns of the end of their job.

    Attributes:
        listening: local address and ports for the tasks.
        began_s: monotonic time since which no task waits in a queue.

    Raises:
        StartError: they cannot be started.
    """

    def __init__(
        self,
        starter: Starter,
        python: str | None,
        env: Mapping[str, str],
        *,
        lease_s: float,
        ports: range = ANY,
        saves: bool = False,
    ) -> None:
        self.began_s = time.monotonic()
        self.listening = Listening(starter.address, ports)
        self._starter = starter
        self._owner_pid = os.getpid()
        self._has_ended = threading.Event()
        self._goodbye: threading.Thread | None = None
        self._arrivals = OutpostListener(self.listening, lease_s, env, partial(starter.trouble, now=True), saves=saves)
        atexit.register(self._at_exit)
        try:
            text = to_line(self._arrivals.invitation).decode().rstrip()
            self._file = _shared_file(text)
            command = [python or sys.executable, "-P", "-m", _MODULE, "--file", str(self._file)]
            starter.start(command, {VARIABLE: text})
        except BaseException:
            self.end()
            raise

    def wait(
        self, timeout_s: float, check: Callable[[], None], report: Callable[[str], None]
    ) -> list[OutpostConnection]:
        """Wait until all tasks have connected.

        Args:
            timeout_s: time limit in seconds, after the queue.
            check: called often; an exception from it ends the wait.
            report: called with the state of the queue when it changes.

        Raises:
            StartError: tasks will not connect, or took too long.
        """
        said, say_at, pause_s = "", 0.0, _FIRST_PAUSE_S

        def remaining_s() -> float:
            nonlocal said, say_at, pause_s
            now = time.monotonic()
            is_queued = self._starter.is_queued and not self._arrivals.have_begun
            state = self._starter.state()
            if is_queued:
                self.began_s = now
            if state and state != said and (now >= say_at or not is_queued):
                report(state)  # rarely during hours in a queue, whose estimated start time changes
                said, say_at, pause_s = state, now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            return self.began_s + timeout_s - now

        called = self._arrivals.wait(self._starter.expected, self._starter.trouble, remaining_s, check)
        self._withdraw()  # no more tasks may connect
        return called

    def shares(self, transports: Sequence[OutpostConnection]) -> dict[str, int]:
        """Return the relative number of ranks by host, see `Starter`; {} if equal."""
        return (
            {transport.name: self._starter.shares[transport.task] for transport in transports}
            if self._starter.shares
            else {}
        )

    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        """Set a callback for the warning that the job ends soon. It is called from any thread."""

        def warned(signal: str, host: str) -> None:
            on_warned(f"{signal} came to the task on {host}")
            if signal == "SIGTERM" and not self._has_ended.is_set() and self._goodbye is None:
                self._goodbye = threading.Thread(target=self._end_before_they_are_killed, daemon=True)
                self._goodbye.start()

        self._arrivals.on_warned = warned

    def _end_before_they_are_killed(self) -> None:
        """End the tasks before a SIGKILL, so that their host servers can remove their files."""
        if (left_s := self._starter.killed_in_s()) is None:
            return
        if not self._has_ended.wait(max(0.0, left_s - min(_IN_ORDER_S, left_s / 2))):
            self._arrivals.say_goodbye()

    def status(self) -> str:
        """Return the line for `%ddp_status`; "" if there is none."""
        return self._starter.status()

    def notices(self) -> list[str]:
        """Return notices that the user has not seen yet."""
        return self._starter.notices()

    def _at_exit(self) -> None:
        """End the tasks at the exit of the notebook's process: otherwise they would wait for the lease."""
        if os.getpid() != self._owner_pid:
            return  # this is a forked child of the notebook, which does not own the tasks
        self._arrivals.say_goodbye()
        self._starter.end()

    def end(self) -> None:
        """End the remaining tasks. Call it after their hosts have ended."""
        self._has_ended.set()
        atexit.unregister(self._at_exit)
        self._arrivals.dismiss()
        self._starter.end()
        self._arrivals.close()
        with contextlib.suppress(AttributeError):
            self._withdraw()

    def _withdraw(self) -> None:
        """Remove the invitation."""
        self._file.unlink(missing_ok=True)
        cleanup_process.release(str(self._file))


def _shared_file(text: str) -> Path:
    """Write a file that only this user can read, for tasks that do not have the text in a variable."""
    folder = shared_folder()
    with private.writing_to(folder, SHARED):
        fd, path = modes.new_file("invitation-", ".json", folder)
        cleanup_process.guard(path)
        with open(fd, "w") as file:
            file.write(text)
    return Path(path)
