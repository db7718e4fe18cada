"""A kept session compared with a plain one: `python -m tests.benchmarks.kept`, from the root of the repository.

Two processes, each with a session of four ranks: `plain` runs the cluster in its own process, `kept` through a keeper.
Blocks of `pass` alternate between them, so both meet the same load. Starts alternate too; each is in a fresh process,
and its time runs from the call to the end of the first `pass`. A plain start is measured twice: `cold`, and `warm` with
a host server that has imported torch before. A kept start is always cold, since the keeper starts its own host server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.benchmarks.results import Figure, moment, table

WORLD_SIZE = 4
BAR_PASS, BAR_START_S = 1.03, 0.1  # below both, every session could run through a keeper
KINDS = ("plain", "kept")
STARTS = ("plain", "warm", "kept")
_ROOT = Path(__file__).parents[2]
_SESSION = """
import contextlib, json, os, sys, time
import ddp_notebook
from ddp_notebook import Keep
from ddp_notebook.launch import warm
keep = Keep(hours=1) if sys.argv[1] == "kept" else None
if sys.argv[1] == "warm":
    warm.prepare()
    time.sleep(6)  # until the host server has imported torch
began = time.perf_counter()
with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
    session = ddp_notebook.start(int(sys.argv[3]), keep=keep)
    session.run("pass")
print(json.dumps([time.perf_counter() - began]), flush=True)
for line in sys.stdin if sys.argv[2] == "pass" else ():
    times = []
    for _ in range(int(line)):
        began = time.perf_counter()
        session.run("pass")
        times.append(time.perf_counter() - began)
    print(json.dumps(times), flush=True)
session.stop()
"""


class _Process:
    """One process with a session.

    Args:
        kind: "plain", "warm" or "kept".
        what: "pass" or "start".
    """

    def __init__(self, kind: str, what: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SESSION, kind, what, str(WORLD_SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.start_s = self._read()[0]

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def pass_s(self, count: int) -> list[float]:
        """Run `count` cells, and return the seconds of each."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        times: list[float] = json.loads(self._process.stdout.readline())
        return times


def measure_pass(blocks: int, per_block: int) -> dict[str, list[float]]:
    """Return the seconds of the median `pass` of each block, by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        processes = {kind: stack.enter_context(_Process(kind, "pass")) for kind in KINDS}
        for process in processes.values():
            process.pass_s(per_block)
        for block in range(blocks):
            for kind in KINDS if block % 2 else reversed(KINDS):
                found[kind].append(median(processes[kind].pass_s(per_block)))
                time.sleep(0.05)
    return found


def measure_start(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a start and its first `pass`, by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in STARTS}
    for number in range(rounds):
        for kind in STARTS if number % 2 else reversed(STARTS):
            with _Process(kind, "start") as process:
                found[kind].append(process.start_s)
    return found


def measure(blocks: int = 30, per_block: int = 40, rounds: int = 5) -> list[Figure]:
    """Return both figures. A `Figure` compares by ratio, so the bar of the start is converted to one."""
    passes, starts = measure_pass(blocks, per_block), measure_start(rounds)
    ratios = sorted(kept / plain for kept, plain in zip(passes["kept"], passes["plain"], strict=True))
    spread = f"quartiles of the ratio {ratios[len(ratios) // 4]:.3f} and {ratios[-1 - len(ratios) // 4]:.3f}"
    figures = [
        Figure(
            what=f"`pass` on {WORLD_SIZE} ranks of a kept session, from a script ({blocks} blocks, {spread})",
            value=1000 * median(passes["kept"]),
            unit="ms",
            bar=BAR_PASS,
            baseline=1000 * median(passes["plain"]),
            against="a plain session",
        )
    ]
    for kind, name in (("plain", "cold start of a plain session"), ("warm", "warm start of a plain session")):
        baseline = median(starts[kind])
        figures.append(
            Figure(
                what=f"start of a kept session with {WORLD_SIZE} ranks, until the first `pass` is done",
                value=median(starts["kept"]),
                unit="s",
                bar=round(1 + BAR_START_S / baseline, 3),
                baseline=baseline,
                against=name,
                blocks=tuple(starts["kept"]),
            )
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kept", description=__doc__)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = measure(blocks=given.blocks, rounds=given.rounds)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
