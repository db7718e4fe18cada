"""The tasks of one session: they are started, wait in a queue, call in, and end with it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_notebook.launch.starters.base import Starter
from ddp_notebook.launch.ways.called import Arrivals, Called
from ddp_notebook.launch.ways.outpost import VARIABLE

_MODULE = "ddp_notebook.launch.ways.outpost"


class Tasks:
    """Of a session that is started so. They start in the background.

    Args:
        starter: which starts them. It ends with them.
        python: the interpreter there; None: the notebook's own.
        env: variables on top of those that they have there.
        lease_s: seconds without a word after which a task is given up, on both sides.

    Attributes:
        address: of this machine, at which they call.
        began_s: monotonic time since which none waits in a queue.

    Raises:
        StartError: they cannot be started.
    """

    def __init__(self, starter: Starter, python: str | None, env: Mapping[str, str], *, lease_s: float) -> None:
        self.began_s = time.monotonic()
        self.address = starter.address
        self._starter = starter
        self._arrivals = Arrivals(self.address, lease_s, env, starter.trouble)
        try:
            text = self._arrivals.invitation.to_json()
            self._file = _shared_file(text)
            command = [python or sys.executable, "-P", "-m", _MODULE, "--file", str(self._file)]
            starter.start(command, {VARIABLE: text})
        except BaseException:
            self.end()
            raise

    def wait(self, timeout_s: float, check: Callable[[], None], report: Callable[[str], None]) -> list[Called]:
        """Wait until all of them have called.

        Args:
            timeout_s: seconds that they get, behind the queue.
            check: called often; what it raises ends the wait.
            report: told what the queue says, when that changes.

        Raises:
            StartError: they will not come, or took too long.
        """
        said = ""

        def remaining_s() -> float:
            nonlocal said
            if self._starter.is_queued:
                self.began_s = time.monotonic()
            if (state := self._starter.state()) != said and state:
                report(state)
            said = state
            return self.began_s + timeout_s - time.monotonic()

        return self._arrivals.wait(lambda: self._starter.tasks, self._starter.trouble, remaining_s, check)

    def end(self) -> None:
        """End what is left of them. Call it when their hosts have ended."""
        self._starter.end()
        self._arrivals.close()
        with contextlib.suppress(AttributeError, OSError):
            self._file.unlink()


def _shared_file(text: str) -> Path:
    """A file that only this user can read, in the home directory: most clusters share it. Tasks of machines that do
    not have the text in a variable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_notebook"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix="invitation-", suffix=".json", dir=folder)  # mode 600
    with open(fd, "w") as file:
        file.write(text)
    return Path(path)
