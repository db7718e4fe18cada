"""Recording of a rank. It also works without a notebook, see `ddp_notebook.record`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ddp_notebook.messages.record_options import LEVELS, RecordOptions, profile_path
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.record.batches import BatchMaker
from ddp_notebook.rank.record.event_buffer import VALUES, EventBuffer
from ddp_notebook.rank.record.flusher import Flusher
from ddp_notebook.rank.record.metrics import MetricLogger
from ddp_notebook.rank.record.training.spans import CELL, TrainingSpans
from ddp_notebook.rank.variables.between import BetweenSteps
from ddp_notebook.records.units import size
from ddp_notebook.registry import private
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, time

if TYPE_CHECKING:
    from ddp_notebook.rank.record.baseline_run import BaselineRun
    from ddp_notebook.rank.record.nan.catcher import NanCatcher


class TorchProfile:
    """A profile of the running cell.

    Args:
        path: the Chrome trace file that `end` writes.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=activities)
        with _silent():
            self._profiler.start()

    def end(self) -> None:
        """End the profile and write it. If that fails, print a message and leave an empty file."""
        with _silent():
            self._profiler.stop()
        folder = os.path.dirname(self._path)
        private.restore(folder)
        with _silent():
            self._profiler.export_chrome_trace(self._path)  # it raises no error when it fails
        with contextlib.suppress(OSError):  # torch cannot create the file on a full disk
            os.chmod(self._path, 0o600)
        if not _is_whole(self._path):
            free = size(shutil.disk_usage(folder).free)
            print(
                f"ddp_notebook: the profile is lost: it could not be written to {folder} ({free} are free)",
                file=sys.stderr,
            )
            open(self._path, "wb").close()


def _is_whole(path: str) -> bool:
    """Return whether torch has written the complete trace: its last entry is the trace's name."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - len(path) - 100))
            return b'"traceName"' in file.read()
    except OSError:  # the file does not exist
        return False


@contextmanager
def _silent() -> Iterator[None]:
    """Redirect fd 2 to /dev/null: torch 2.13 writes two lines with times and process ids to it at every log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class RankRecording:
    """The recording of one rank.

    Args:
        recorder: observes the operations.
        where: recognizes files of cells.
        rank: returns the rank's number.
        send, is_busy: see `Flusher`.
        between: tasks for the main thread between two steps.
    """

    def __init__(
        self,
        recorder: Recorder,
        where: CurrentLine,
        rank: Callable[[], int],
        send: Callable[[bytes], None],
        is_busy: Callable[[], bool] = lambda: False,
        between: BetweenSteps | None = None,
    ) -> None:
        self.event_buffer = recorder.event_buffer = EventBuffer(where.cells, recorder.modules)
        self.event_buffer.repeating, self.event_buffer.repeat = recorder.repeating, recorder.repeat
        self.training = TrainingSpans(
            self.event_buffer, between, recorder.identities, recorder.declare, recorder.why_ended
        )
        self.metrics = MetricLogger(self.event_buffer, self.training, where.cells)
        self.flusher = Flusher(self.event_buffer, BatchMaker(rank, where.of_calls), send, is_busy)
        self._recorder = recorder
        self._rank = rank
        self._solo: BaselineRun | None = None
        self._catcher: NanCatcher | None = None  # made when a cell first asks for it
        self._profile: TorchProfile | None = None
        self._prompt = ""
        self._began_ns = self._began_at = 0
        self.training.install()
        where.action = self.training.pipelines.words
        recorder.meaning = self.training.pipelines.meaning
        self.flusher.start()

    def tell_again(self) -> None:
        """Prepare for a new receiver, which has no earlier data."""
        self.training.tell_again()
        self.flusher.tell_again()

    def begin_cell(
        self, cell: int, title: int, options: RecordOptions, namespace: dict[str, Any], *, has_prompt: bool = False
    ) -> None:
        """Start recording a cell.

        Args:
            cell, title: number of the cell, and its number in `In [n]`.
            options: what to record.
            namespace: the user's variables.
            has_prompt: the cell belongs to a notebook, which shows `In [n]`.
        """
        self.flusher.is_in_cell = True
        self.flusher.looks_again = True
        self.training.namespace = namespace
        self._prompt = f"In [{title}]" if has_prompt else ""
        asks_for_values = bool(options.full_bytes or options.watch or options.gradient)
        level = LEVELS.index(options.level) if options.level else VALUES
        self.event_buffer.enter(cell, title, level, thins=not asks_for_values)
        self.training.begin_cell(options.gradient)
        self.training.between.is_in_cell = True
        self.event_buffer.full_bytes = options.full_bytes
        self.metrics.counts.clear()
        if options.watch or self.metrics.watched:
            self.metrics.watch(options.watch)
        if options.solo is not None:
            from ddp_notebook.rank.record.baseline_run import BaselineRun  # imports torch.distributed.optim: 0.4 s

            solo = self._solo = BaselineRun(namespace, *options.solo)
            self._recorder.instead = solo.run
            self.training.on_step.append(solo.on_step)
        if options.catch_nan:
            self._catch_nan(namespace)
        if options.profile:
            self._profile = TorchProfile(str(profile_path(options.profiles, cell, self._rank())))
        self._began_ns, self._began_at = time.monotonic_ns(), self.event_buffer.puts

    def _catch_nan(self, namespace: dict[str, Any]) -> None:
        from ddp_notebook.rank.record.nan.catcher import NanCatcher

        self._catcher = self._catcher or NanCatcher(self._recorder, self.event_buffer, self.training.note)
        self._catcher.begin_cell(namespace)

    def end_cell(self) -> None:
        """End the recording of a cell. A cell without records leaves no rows."""
        if self._catcher is not None:
            self._catcher.end_cell()
        self.training.between.end_cell()
        self.flusher.is_in_cell = False
        self.event_buffer.end_cell()
        if self.event_buffer.puts != self._began_at:
            self.training.put(CELL, self._prompt, self._began_ns)
            self.flusher.looks_again = True
            self.event_buffer.hurries.set()  # in a training loop the recorder's thread sleeps for long
        solo, self._solo = self._solo, None
        if solo is not None:
            self._recorder.instead = None
            self.training.on_step.remove(solo.on_step)
            solo.end()
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.end()
        if self.metrics.watched:
            self.metrics.end_cell()  # last: these functions print, and the cell may have closed stderr
        self.training.end_cell()
