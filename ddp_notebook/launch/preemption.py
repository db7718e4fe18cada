"""The machine will be taken away soon (`--on-preempt save DIR`): loops of `survive` save their state and end.

There are three signs:

- SIGTERM or SIGUSR1 to the process that owns the ranks: the kernel, or the keeper of a kept session
- a file in the folder
- a message of the job's tasks

Only the first sign counts; a second signal has its usual effect. A thread receives all of them, so the state of the
main thread does not matter.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.survive_messages import Save

FILE = "preempt"  # creating this file in the folder has the same effect
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 1.0


class Preemption:
    """Receives preemption warnings for one session.

    Args:
        folder: where loops save.
        cluster: the ranks.
        is_in_loop: whether ranks are in a loop that can save.
        say: prints a line for the user.
    """

    def __init__(
        self,
        folder: str,
        cluster: Cluster,
        is_in_loop: Callable[[], bool],
        say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._folder = Path(folder).absolute()
        self._cluster = cluster
        self._is_in_loop = is_in_loop
        self._say = say
        self._previous: dict[int, Any] = {}
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()  # reasons in words; "" when the session ends
        self._thread = threading.Thread(target=self._hear, name="ddp-preempt", daemon=True)

    def begin(self) -> None:
        """Start listening. Signals are received only if this is called in the main thread, the file always.

        Raises:
            UsageError: the folder cannot be written to.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / FILE).unlink(missing_ok=True)  # left by an earlier session
        except OSError as error:
            raise UsageError(
                f"--on-preempt save {self._folder}: {error.strerror}; name a folder that can be written to"
            ) from error
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._thread.start()

    def end(self) -> None:
        """Stop listening when the session ends."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
        self._came.put("")
        if self._thread.is_alive():
            self._thread.join(_LOOK_S)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, self._previous[number])  # a second signal has its usual effect
        self.hear(f"{signal.Signals(number).name} came")

    def hear(self, why: str) -> None:
        """Report that the session's time is over. From any thread, and from a signal handler.

        Args:
            why: the source of the warning, in words.
        """
        self._came.put(why)

    def _hear(self) -> None:
        file, is_told = self._folder / FILE, False
        while True:
            try:
                why = self._came.get(timeout=_LOOK_S)
            except queue.Empty:
                if is_told or not os.path.exists(file):  # `Path.exists` raises an error without permission
                    continue
                why = f"{file} is there"
            if not why:
                return
            if not is_told:  # each task of a job may send a warning
                self._tell(why)
            is_told = True

    def _tell(self, why: str) -> None:
        for rank in self._cluster.alive:
            self._cluster.send(rank, Save(folder=str(self._folder)))
        if self._is_in_loop():
            return  # the cell of the loop reports what was saved
        self._say(
            f"{why}. Nothing is saved, because no rank is in a loop of survive(). A loop that begins now saves "
            "its state after its first step. Otherwise save what you need while the ranks live"
        )
