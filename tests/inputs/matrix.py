"""Try every pair of an operation and a kind of tensor with torch alone, in two processes that may die.

    python -m tests.inputs.matrix [--only TEXT] [--write]

Prints the pairs. With `--write`, they are recorded in `tests/inputs/plain.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # functional collectives import it at their first use, which takes seconds in each process
import torch.distributed as dist

from tests.inputs.cases import ERROR, KINDS, MEMORY, OPERATIONS, RIGHT, WORLD, WRONG, attempt, is_defined, rows

RESULTS = Path(__file__).with_name("plain.json")
HANG, CRASH = "hang", "crash"
_WORST_FIRST = (CRASH, MEMORY, WRONG, ERROR, "refused", "late", HANG, RIGHT)
_AFTER_AN_ERROR_S = 2.0  # time for the other rank when one has raised
_REPEATS = 4  # further attempts of a case that depends on times
DEADLINE_S = 10.0


class Case(NamedTuple):
    """One attempt of a pair."""

    operation: str
    role: str
    kind: str
    is_async: bool

    @property
    def name(self) -> str:
        return f"{self.operation} | {self.role} | {self.kind} | {'async' if self.is_async else 'sync'}"


class Outcome(NamedTuple):
    """Verdict over all ranks, with the explanation of the rank that has it."""

    verdict: str
    words: str


def cases() -> Iterator[Case]:
    """Yield all attempts."""
    for operation, role in rows():
        for kind in KINDS:
            if is_defined(operation, role, kind):
                for is_async in (False, True) if OPERATIONS[operation].has_async else (False,):
                    yield Case(operation, role, kind, is_async)


def of_ranks(outcomes: list[Outcome]) -> Outcome:
    """Return the worst outcome of the ranks."""
    return min(outcomes, key=lambda one: (_WORST_FIRST.index(one.verdict), "peer" in one.words))


class Pair:
    """Two processes of a gloo group, which try one case after the other until one of them raises, hangs or dies."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._folder = tempfile.mkdtemp()
        self._ranks = [self._fork(rank) for rank in range(WORLD)]
        self.is_usable = True

    def run(self, case: Case) -> Outcome:
        """Try a case."""
        for rank in self._ranks:
            os.write(rank.asks, json.dumps(case).encode() + b"\n")
        outcomes = self._outcomes()
        self.is_usable = all(one.verdict in (RIGHT, WRONG, MEMORY) for one in outcomes)
        return of_ranks(outcomes)

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            os.close(rank.asks)
            os.close(rank.replies)
        shutil.rmtree(self._folder)

    def _outcomes(self) -> list[Outcome]:
        """Wait for the replies or deaths of the processes."""
        waiting, found = {one.replies: one.pid for one in self._ranks}, []
        until = time.monotonic() + DEADLINE_S
        while waiting and (left := until - time.monotonic()) > 0:
            for reply in select.select(list(waiting), [], [], left)[0]:
                pid, data = waiting.pop(reply), os.read(reply, 65536)  # a reply is one atomic write
                found.append(Outcome(*json.loads(data)) if data else _death_of(pid))
                if found[-1].verdict not in (RIGHT, WRONG, MEMORY):
                    until = min(until, time.monotonic() + _AFTER_AN_ERROR_S)
        return found + [Outcome(HANG, "")] * len(waiting)

    def _fork(self, rank: int) -> _Rank:
        replies, writes = os.pipe()
        reads, asks = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            os.close(writes)
            os.close(reads)
            return _Rank(pid, asks, replies)
        try:
            os.close(asks)  # so that the loop below ends with the parent
            os.close(replies)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stacks of a crash
            torch.set_num_threads(1)
            store = dist.FileStore(  # type: ignore[attr-defined]
                f"{self._folder}/store", WORLD
            )
            if self._backend == "nccl":
                torch.set_default_device(f"cuda:{rank}")
            dist.init_process_group(self._backend, store=store, rank=rank, world_size=WORLD)
            for line in os.fdopen(reads):
                verdict, words = attempt(*Case(*json.loads(line)), rank)
                os.write(writes, json.dumps([verdict, words[:300]]).encode())
                if verdict == ERROR:  # a script ends where it raises
                    break
        except BaseException:
            os.write(writes, json.dumps([CRASH, traceback.format_exc()[-300:]]).encode())
        os._exit(0)


class _Rank(NamedTuple):
    pid: int
    asks: int  # pipe of cases
    replies: int  # pipe of outcomes


def _death_of(pid: int) -> Outcome:
    _, status = os.waitpid(pid, 0)
    number = status & 127
    return Outcome(CRASH, signal.Signals(number).name if number else f"exit status {status >> 8}")


def run_plain(some: Iterable[Case], backend: str = "gloo") -> Iterator[tuple[Case, Outcome]]:
    """Try cases in forked processes, and yield each with its outcome."""
    pair = None
    try:
        for case in some:
            repeats = _REPEATS
            if pair is None or not pair.is_usable:
                if pair is not None:
                    pair.close()
                pair = Pair(backend)
            outcome = pair.run(case)
            if KINDS[case.kind].of == "pair":  # the result depends on the order of two operations in time
                while pair.is_usable and outcome.verdict == RIGHT and repeats:
                    outcome, repeats = pair.run(case), repeats - 1
            yield case, outcome
    finally:
        if pair is not None:
            pair.close()


def recorded(path: Path = RESULTS) -> dict[str, Outcome]:
    """Return the recorded outcomes by the name of the case."""
    if not path.exists():
        return {}
    return {name: Outcome(*outcome) for name, outcome in json.loads(path.read_text())["pairs"].items()}


def record(path: Path, found: dict[str, Outcome]) -> None:
    """Record outcomes, in addition to those of other cases."""
    every = recorded(path) | found
    pairs = {case.name: every[case.name] for case in cases() if case.name in every}
    short = {name: (verdict, " ".join(words.split())[:200]) for name, (verdict, words) in pairs.items()}
    path.write_text(json.dumps({"torch": torch.__version__, "pairs": short}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.inputs.matrix")
    parser.add_argument("--only", default="", help="regular expression for the name of a case")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--write", action="store_true", help=f"record the outcomes in {RESULTS.name}")
    given = parser.parse_args()
    found = {}
    some = (one for one in cases() if re.search(given.only, one.name))
    for case, outcome in run_plain(some, given.backend):
        found[case.name] = outcome
        print(f"{case.name:75} {outcome.verdict:7} {outcome.words}", flush=True)
    if given.write:
        record(RESULTS, found)


if __name__ == "__main__":
    main()
