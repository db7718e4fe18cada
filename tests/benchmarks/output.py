"""Cost of the output of ranks: `python -m tests.benchmarks.output`, from the root of the repository.

bytes     on iopub, including framing, per byte printed on all ranks: four ranks print 300 different lines of 40 bytes
          per second each. The minute is divided into thirds, because the ratio must not grow
delay     from a print to its arrival in a front end: four ranks print different lines at the same time, so each line is
          held for 50 ms to merge it with equal lines
flood     two million lines on each of two ranks: growth of the notebook's memory, and the time of the next `pass`
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import closing
from statistics import median, quantiles
from typing import Any

import psutil

from tests.benchmarks.frontend import FrontEnd
from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel

WORLD_SIZE = 4
_LINES_PER_S = 300
_DELIMITER = b"<IDS|MSG>"
_PRINT = """%%on_all_ranks
import time
began = time.monotonic()
for i in range({count}):
    print(f"{{'abcd'[rank]}} line {{i:08d}} ".ljust(39, "."))  # ranks differ by letters, so lines are not merged
    time.sleep(max(0.0, began + (i + 1) / {per_s} - time.monotonic()))
"""
_DELAYS = """%%on_all_ranks
import time
for i in range({count}):
    time.sleep(0.3)
    print(f"{{'abcd'[rank]}} at{{time.time()}}")
"""
_FLOOD = """%%on_all_ranks --ranks 0-1
for i in range(2_000_000): print(i)
"""


def iopub(front_end: FrontEnd, code: str, timeout_s: float) -> list[tuple[float, int, dict[str, Any]]]:
    """Run a cell. Return its messages on iopub as `(seconds since the epoch, bytes, content)`."""
    client = front_end.kernel.client
    message_id = client.execute(code).encode()
    socket = client.iopub_channel.socket
    came = []
    until = time.monotonic() + timeout_s
    while True:
        if not socket.poll(max(0, round((until - time.monotonic()) * 1000))):
            raise TimeoutError(f"{code!r} did not end in {timeout_s:g} s")
        frames = socket.recv_multipart()
        _, parent, _, content = frames[frames.index(_DELIMITER) + 2 :][:4]
        if message_id not in parent:
            continue
        told = json.loads(content)
        came.append((time.time(), sum(map(len, frames)), told))
        if told.get("execution_state") == "idle":
            client.get_shell_msg(timeout=60)
            return came


def measure(seconds: int = 60, delays: int = 40) -> list[Figure]:
    """Run all three benchmarks."""
    with closing(NotebookKernel()) as kernel:
        front_end = FrontEnd(kernel)
        front_end.set_up("%load_ext ddp_notebook")
        front_end.set_up(f"%ddp_start {WORLD_SIZE}")
        count = seconds * _LINES_PER_S
        came = iopub(front_end, _PRINT.format(count=count, per_s=_LINES_PER_S), seconds * 3 + 60)
        began, ended = came[0][0], came[-1][0]
        third = (ended - began) / 3
        printed = 40 * count * WORLD_SIZE
        parts = [
            sum(n for at, n, _ in came if began + k * third <= at <= began + (k + 1) * third) / (printed / 3)
            for k in range(3)
        ]
        ratio = sum(n for _, n, _ in came) / printed

        delayed_ms: dict[str, float] = {}  # time of the first display, by line
        for at, _, content in iopub(front_end, _DELAYS.format(count=delays), 120):
            text = content.get("text") or (content.get("data") or {}).get("text/plain", "")
            for line in text.splitlines():
                if " at" in line:
                    delayed_ms.setdefault(line, (at - float(line.rpartition(" at")[2])) * 1000)

        process = psutil.Process(kernel.pid)
        before_ms = median(front_end.run_s("%%on_all_ranks\npass") * 1000 for _ in range(30))
        before_mib = process.memory_info().rss / 2**20
        sent = sum(n for _, n, _ in iopub(front_end, _FLOOD, 600))
        grown_mib = process.memory_info().rss / 2**20 - before_mib
        after_ms = median(front_end.run_s("%%on_all_ranks\npass") * 1000 for _ in range(30))
        front_end.set_up("%ddp_stop")
    return [
        Figure(
            what="bytes on iopub per printed byte, if 4 ranks print 300 different lines of 40 bytes per second each",
            value=ratio,
            unit="",
            bar=1.5,
            blocks=tuple(parts),
        ),
        Figure(
            what="delay from a print to its arrival in a front end, p95",
            value=quantiles(delayed_ms.values(), n=20)[-1],
            unit="ms",
            bar=100,
        ),
        Figure(
            what="memory growth of the notebook process, if 2 ranks print two million lines each",
            value=grown_mib,
            unit="MiB",
            bar=100,
        ),
        Figure(what="data sent to the front end for these lines", value=sent / 1e6, unit="MB", bar=15),
        Figure(
            what="`pass` after these lines",
            value=after_ms,
            unit="ms",
            bar=1.2,
            baseline=before_ms,
            against="`pass` before these lines",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.output")
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = measure(seconds=given.seconds)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
