"""Recording without a notebook: `DDP_NOTEBOOK_RECORD=runs torchrun --nproc-per-node 4 -m ddp_notebook.record train.py`.

Each rank writes one file into that directory, which `ddp_notebook.load("runs")` reads. A script that imports
`ddp_notebook` before it forms its group is recorded as well, without the `-m`; `ddp_notebook.log(loss=loss)` logs
there as in a cell. Without the variable nothing happens.
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
    """Record this process from now on, into a file of the directory. Doing it twice is no error.

    Args:
        directory: made if it is not there.
        rank: of this process; None: as torchrun says.

    Raises:
        OSError: the directory cannot be made, or not written to.

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
    # Without a buffer, which a child that the user forks would write once more.
    file = open(Path(directory) / f"rank{number}-{os.getpid()}.ddp", "ab", buffering=0)  # noqa: SIM115  # for good

    deferred_destroy.install()
    recorder = Recorder()
    recorder.install()

    def write(data: bytes) -> None:
        if not file.closed:
            file.write(data)

    sharding.watch(recorder)
    _recording = RankRecording(recorder, CurrentLine(), lambda: number, write)
    _recording.event_buffer.thins = False  # nobody is there who could ask for all
    logs.install(_recording.metrics.log)
    pid = os.getpid()

    def close() -> None:
        if os.getpid() == pid:
            _recording.flusher.close()
            file.close()
            deferred_destroy.let_go()

    atexit.register(close)


def log(*unnamed: Any, step: int | None = None, **values: Any) -> None:
    """Log numbers of this rank: in a cell, where `log` is the same, and in a script that is recorded. Does nothing
    where nothing is recorded, as in the notebook itself.

    Args:
        step: the step that they belong to; None: the optimizer step in progress, or the last one, see `Metrics.log`.
        values: numbers, or tensors of one element, by name.

    Raises:
        TypeError: a value is neither, or has no name.

    Example:
        >>> ddp_notebook.log(loss=0.5)
    """
    if (log_here := logs.current()) is not None:
        log_here(*unnamed, step=step, **values)


def start_if_asked() -> None:
    """Record if the environment says where to."""
    if directory := os.environ.get(VARIABLE):
        start(directory)


def main() -> None:
    """Run a script, or with `-m` a module, as Python itself would, and record it."""
    arguments = sys.argv[1:]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit(f"usage: {VARIABLE}=DIRECTORY python -m ddp_notebook.record [-m] SCRIPT [ARGUMENT ...]")
    start_if_asked()
    program.run(arguments)


if __name__ == "__main__":
    from ddp_notebook import record  # the module that scripts import, not this copy of it

    record.main()
