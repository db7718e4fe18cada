"""Record without a notebook: `DDP_NOTEBOOK_RECORD=runs torchrun --nproc-per-node 4 -m ddp_notebook.record train.py`.

Each rank writes one file into that directory, and `ddp_notebook.load("runs")` reads them. A script that imports
`ddp_notebook` before it initialises its group is recorded even without `-m`. `ddp_notebook.log(loss=loss)` works as in
a cell. Without the variable nothing is recorded.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from ddp_notebook.rank.script import program
from ddp_notebook.records import logs

VARIABLE = "DDP_NOTEBOOK_RECORD"
_recording: Any = None


def start(directory: str | os.PathLike[str], rank: int | None = None) -> None:
    """Record this process from now on, into a file of the directory. Further calls do nothing.

    Args:
        directory: created if it does not exist.
        rank: rank of this process; None: the rank that torchrun has set.

    Raises:
        OSError: the directory cannot be created or written.

    Example:
        >>> start("runs")  # doctest: +SKIP
    """
    global _recording
    if _recording is not None:
        return
    from ddp_notebook.rank.cell.current_line import CurrentLine
    from ddp_notebook.rank.group import deferred_destroy
    from ddp_notebook.rank.group.recorder import Recorder
    from ddp_notebook.rank.record.rank_recording import RankRecording
    from ddp_notebook.rank.sharding import feature as sharding

    number = int(os.environ.get("RANK", "0")) if rank is None else rank
    Path(directory).mkdir(parents=True, exist_ok=True)
    # Unbuffered, because a child process that the user forks would write the buffer again.
    file = open(Path(directory) / f"rank{number}-{os.getpid()}.ddp", "ab", buffering=0)  # noqa: SIM115  # for good

    deferred_destroy.install()
    recorder = Recorder()
    recorder.install()

    def write(data: bytes) -> None:
        if not file.closed:
            file.write(data)

    sharding.watch(recorder)
    _recording = RankRecording(recorder, CurrentLine(), lambda: number, write)
    _recording.event_buffer.thins = False  # no notebook can request all values
    logs.install(_recording.metrics.log)
    pid = os.getpid()

    def close() -> None:
        if os.getpid() == pid:
            _recording.flusher.close()
            file.close()
            deferred_destroy.let_go()

    atexit.register(close)


def log(*unnamed: Any, step: int | None = None, **values: Any) -> None:
    """Log numbers of this rank, in a cell or in a recorded script. If nothing is recorded, do nothing.

    Args:
        step: number of the step; None: the optimizer step in progress, or the last one, see `Metrics.log`.
        values: numbers, or tensors of one element, by name.

    Raises:
        TypeError: a value is neither a number nor such a tensor, or has no name.

    Example:
        >>> ddp_notebook.log(loss=0.5)
    """
    if (log_here := logs.current()) is not None:
        log_here(*unnamed, step=step, **values)


def start_if_asked() -> None:
    """Record if the environment variable names a directory."""
    if directory := os.environ.get(VARIABLE):
        start(directory)


def main() -> None:
    """Run a script, or with `-m` a module, as Python would, and record it."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit(f"usage: {VARIABLE}=DIRECTORY python -m ddp_notebook.record [-m] SCRIPT [ARGUMENT ...]")
    start_if_asked()
    program.run(arguments)


if __name__ == "__main__":
    from ddp_notebook import record  # the imported module, because `__main__` is a second copy of it

    record.main()
