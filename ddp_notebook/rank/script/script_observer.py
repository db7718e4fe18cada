"""Observes a script in this process and reports to the attached notebook, if any.

Operations of the script are always observed, so that a notebook can attach during a hang and show which ranks wait.
Rows are only recorded while a notebook is attached. The notebook cannot slow the script down: rows wait in the event
buffer, which drops and counts the oldest ones. After 50 unacknowledged messages, no further batches are sent.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddp_notebook.messages.first_messages import ObserveScript
from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.registry.torchrun import RankEntry
from ddp_notebook.stdlib import os, threading, time, traceback

if TYPE_CHECKING:
    from ddp_notebook.messages.script_abort import Cut


_MOST_WAITING = 50  # maximum number of unacknowledged messages before batches are held back
_FAREWELL_S = 2.0  # timeout for the attached notebook to receive the last messages
_MOST_LINES = 200  # maximum length of a traceback


class ScriptObserver:
    """Observer of one rank.

    Args:
        place: registry data of this process.
    """

    def __init__(self, place: RankEntry) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._seen: _Seen | None = None  # set when torch is imported
        self._told: ObserveScript | None = None  # from the attached notebook
        self._agent: Any = None
        self._round = 0
        self._began_s = time.monotonic()

    # ---- the main thread

    def install(self) -> None:
        """Start to observe torch. Call it after torch was imported."""
        from ddp_notebook.rank.script import breakpoints  # imports torch

        try:
            seen = _Seen(lambda: self._place.rank, self._send, self._is_busy)
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:  # unknown torch version
            print(
                f"ddp_notebook: a notebook cannot attach to scripts with this version of torch ({error})",
                file=sys.stderr,
            )
            return
        breakpoints.refuse_without_terminal()
        with self._lock:
            self._seen = seen
            if self._told is not None:
                self._watch(self._told)

    def end(self, failure: BaseException | None) -> None:
        """Report the end of the script to the attached notebook, and wait briefly for its acknowledgement."""
        with self._lock:
            agent, seen = self._agent, self._seen
        if agent is None or seen is None:
            return
        from ddp_notebook.messages.ranks import CellDone

        seen.recording.end_cell()
        seen.recording.flusher.flush()
        agent.send(CellDone(cell=self._round, **_how_it_ended(failure), **seen.last_words(failure, self._began_s)))
        until = time.monotonic() + _FAREWELL_S
        while agent.endpoint.waiting() and time.monotonic() < until:
            time.sleep(0.01)
        self.leave()

    # ---- the door's thread

    def begin(self, said: ObserveScript) -> None:
        """Attach a notebook."""
        with self._lock:
            self._told = said
            if self._seen is not None:
                self._watch(said)

    def leave(self) -> None:
        """Detach the notebook and drop unsent messages."""
        with self._lock:
            self._told = None
            if self._seen is not None:
                self._seen.stop()
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.endpoint.close()

    def _watch(self, said: ObserveScript) -> None:
        import ddp_notebook.messages.script_abort  # noqa: F401  # registers its message classes
        from ddp_notebook.rank.agent import RankAgent

        assert self._seen is not None
        self._round = said.round
        agent = RankAgent(
            said.address,
            self._place.rank,
            on_message=self._on_message,
            vitals=self._vitals,
            on_asked=self._seen.recording.flusher.on_asked,
        )
        self._agent = agent
        agent.start()
        self._seen.begin(self._round)

    # ---- the agent's thread, and the recorder's

    def _send(self, data: bytes) -> None:
        from ddp_notebook.messages.ranks import Recorded

        if (agent := self._agent) is not None:
            agent.send(Recorded(data=data))

    def _is_busy(self) -> bool:
        agent = self._agent
        return agent is None or agent.endpoint.waiting() > _MOST_WAITING

    def _on_message(self, message: Any) -> None:
        from ddp_notebook.messages.script_abort import Cut

        if isinstance(message, Cut):
            threading.Thread(target=self._free, args=(message,), name="ddp-free", daemon=True).start()

    def _free(self, asked: Cut) -> None:
        from ddp_notebook.messages.script_abort import WasCut

        assert self._seen is not None
        who = "a notebook" if self._told is None else self._told.who
        if what := self._seen.free(asked):
            print(
                f"ddp_notebook: {who} has aborted {what} on rank {self._place.rank}; it raises an error here",
                file=sys.stderr,
            )
        if (agent := self._agent) is not None:
            agent.send(WasCut(request=asked.request, what=what))

    def _vitals(self, *, with_shortages: bool) -> dict[str, Any]:
        """Return the fields of `Vitals`. Exhausted resources of a script are not checked."""
        del with_shortages
        from ddp_notebook.rank.cell.exceptions import with_type

        assert self._seen is not None
        fields: dict[str, Any] = {"running_cell": self._round, "running_s": time.monotonic() - self._began_s}
        try:
            return fields | self._seen.vitals()
        except Exception as error:  # for example, the script has replaced a function that a library calls
            return fields | {"device_bytes": 0, "unread": with_type(error)}


class _Seen:
    """Parts of the observer that need torch. Created in the main thread, right after torch was imported."""

    def __init__(self, rank: Callable[[], int], send: Callable[[bytes], None], is_busy: Callable[[], bool]) -> None:
        from ddp_notebook.rank.cell.current_line import CurrentLine
        from ddp_notebook.rank.group import deferred_destroy
        from ddp_notebook.rank.group.connections.abort import Connections
        from ddp_notebook.rank.group.recorder import Recorder
        from ddp_notebook.rank.group.release import Release
        from ddp_notebook.rank.record.rank_recording import RankRecording
        from ddp_notebook.rank.sharding import feature as sharding
        from ddp_notebook.records import logs

        deferred_destroy.install()
        self._where = CurrentLine(is_script=True)
        self._recorder = Recorder()
        self._recorder.install()
        self._connections = Connections(self._recorder)
        self._connections.watch()
        self._release = Release(self._recorder, self._connections, self._where, lambda: None)
        sharding.watch(self._recorder)
        self.recording = RankRecording(self._recorder, self._where, rank, send, is_busy)
        self.stop()
        logs.install(self.recording.metrics.log)
        pid = os.getpid()

        def close() -> None:
            if os.getpid() == pid:
                self.recording.flusher.close()
                deferred_destroy.let_go()

        atexit.register(close)

    def begin(self, number: int) -> None:
        """Start recording for a notebook without earlier data."""
        from ddp_notebook.messages.record_options import RecordOptions

        self.recording.tell_again()
        self.recording.begin_cell(number, number, RecordOptions(level="values"), {})

    def stop(self) -> None:
        """Stop recording."""
        event_buffer = self.recording.event_buffer
        event_buffer.level = 0
        event_buffer.pop(len(event_buffer))

    def free(self, asked: Cut) -> str:
        from ddp_notebook.rank.script.free_waits import free

        which = asked.name, asked.group, asked.number
        return free(self._recorder, self._connections, self._release, *which)

    def vitals(self) -> dict[str, Any]:
        """Return the position of the main thread, as fields of `Vitals`."""
        import torch
        import torch.distributed as dist

        doing = self._release.now()
        return {
            "device_bytes": torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0,
            "where": doing.place,
            "operation": None if doing.operation is None else doing.operation.to_json(),
            "thread": doing.thread,
            "group": {"is_there": dist.is_initialized()},
        }

    def last_words(self, failure: BaseException | None, began_s: float) -> dict[str, Any]:
        """Return the position and operation of the script's error, as fields of `CellDone`."""
        failed = None if failure is None else self._recorder.failed
        return {
            "duration_s": time.monotonic() - began_s,
            "place": "" if failure is None else self._where.of_traceback(failure.__traceback__),
            "operation": None if failed is None or failed.error is not failure else failed.call.describe().to_json(),
        }


def _how_it_ended(failure: BaseException | None) -> dict[str, Any]:
    if failure is None or (isinstance(failure, SystemExit) and not failure.code):
        return {"status": "ok"}
    lines = "".join(traceback.format_exception(failure)).splitlines()
    status = "interrupted" if isinstance(failure, KeyboardInterrupt) else "error"
    return {
        "status": status,
        "ename": type(failure).__name__,
        "evalue": words(failure),
        "traceback": lines[-_MOST_LINES:],
    }
