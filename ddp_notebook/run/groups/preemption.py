"""The notebook's machine is about to be taken away (`--on-preempt save DIR`): loops of `survive` save and end.

That is told by SIGTERM or SIGUSR1 to the kernel, once, or by a file in the folder. A thread of its own hears of both,
so that it makes no difference what the main thread is in.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.wire.survival import Save

FILE = "preempt"  # whoever makes it in the folder asks for the same
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_S = 1.0


class Preemption:
    """Hears for one session that its time is over.

    Args:
        folder: where loops save.
        cluster: the ranks.
        is_in_loop: whether ranks are in a loop that can save.
    """

    def __init__(self, folder: str, cluster: Cluster, is_in_loop: Callable[[], bool]) -> None:
        self._folder = Path(folder).absolute()
        self._cluster = cluster
        self._is_in_loop = is_in_loop
        self._previous: dict[int, Any] = {}
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()  # by whom it was asked for; "": the session ends
        self._thread = threading.Thread(target=self._hear, name="ddp-preempt", daemon=True)

    def begin(self) -> None:
        """The ranks are there. Signals are heard where this is called in the main thread, the file always."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / FILE).unlink(missing_ok=True)  # it was meant for an earlier session
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
        self._came.put(signal.Signals(number).name)

    def _hear(self) -> None:
        file, is_told = self._folder / FILE, False
        while True:
            try:
                name = self._came.get(timeout=_LOOK_S)
            except queue.Empty:
                if is_told or not file.exists():
                    continue
                why = f"{file} is there"
            else:
                if not name:
                    return
                why = f"{name} came"
            is_told = True
            self._tell(why)

    def _tell(self, why: str) -> None:
        for rank in self._cluster.alive:
            self._cluster.send(rank, Save(folder=str(self._folder)))
        if self._is_in_loop():
            return  # its cell says what was saved
        print(
            f"{why}, and nothing is saved, since no rank is in a loop of survive(): a loop that begins now saves its "
            "state after its first step. Else save what you need yourself while the kernel lives",
            file=sys.stderr,
            flush=True,
        )
