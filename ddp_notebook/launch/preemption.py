"""A machine is about to be taken away (`--on-preempt save DIR`): loops of `survive` save and end.

That is told by SIGTERM or SIGUSR1 to the process that has the ranks, once: the kernel, or the keeper of a kept session;
by a file in the folder; or by the tasks of a job. A thread of its own hears of all, so that it makes no difference what
the main thread is in.
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

FILE = "preempt"  # whoever makes it in the folder asks for the same
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 1.0


class Preemption:
    """Hears for one session that its time is over.

    Args:
        folder: where loops save.
        cluster: the ranks.
        is_in_loop: whether ranks are in a loop that can save.
        say: told what their user should know.
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
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()  # by whom it was asked for; "": the session ends
        self._thread = threading.Thread(target=self._hear, name="ddp-preempt", daemon=True)

    def begin(self) -> None:
        """The ranks are there. Signals are heard where this is called in the main thread, the file always."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / FILE).unlink(missing_ok=True)  # it was meant for an earlier session
        except OSError as error:
            raise UsageError(
                f"--on-preempt save {self._folder}: {error.strerror}; name a folder that can be written to"
            ) from error
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._thread.start()

    def end(self) -> None:
        """The session ends."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
        self._came.put("")
        if self._thread.is_alive():
            self._thread.join(_LOOK_S)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, self._previous[number])  # a second one does what it always did
        self.hear(f"{signal.Signals(number).name} came")

    def hear(self, why: str) -> None:
        """Its time is over. From any thread, and from a handler of signals.

        Args:
            why: what has told it, in words.
        """
        self._came.put(why)

    def _hear(self) -> None:
        file, is_told = self._folder / FILE, False
        while True:
            try:
                why = self._came.get(timeout=_LOOK_S)
            except queue.Empty:
                if is_told or not os.path.exists(file):  # `Path.exists` raises where it may not look
                    continue
                why = f"{file} is there"
            if not why:
                return
            if not is_told:  # each task of a job may have told
                self._tell(why)
            is_told = True

    def _tell(self, why: str) -> None:
        for rank in self._cluster.alive:
            self._cluster.send(rank, Save(folder=str(self._folder)))
        if self._is_in_loop():
            return  # its cell says what was saved
        self._say(
            f"{why}, and nothing is saved, since no rank is in a loop of survive(): a loop that begins now saves its "
            "state after its first step. Else save what you need yourself while the ranks live"
        )
