"""Hundreds of simulated ranks: `python -m tests.benchmarks.many`, from the root of the repository.

This process is the notebook: its side of the wire with keys, requests, recording and clocks. The ranks are in other
processes with a real wire (`tests.benchmarks.fake_ranks`). All share the cores of this machine, so times are longer
than in practice. CPU time is that of this process alone.

connect    from the first invitation until all ranks have said hello
idle       no requests and no recording: heartbeats and clock comparison
answers    one request to all ranks, until the last answer
hang card  the ranks' answers as a display of the waiting ranks
records    5 batches per second from each rank
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any

from ddp_notebook.launch.host import open_files
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Hello, Probe, Vitals
from ddp_notebook.observe.observer import Observer
from ddp_notebook.run.groups.diagnosis import verdict
from ddp_notebook.run.groups.probe import RankProbe
from ddp_notebook.run.message_handlers import Dispatch
from ddp_notebook.run.output.card import Card
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring
from tests.benchmarks.fake_ranks import CELL, EVENTS
from tests.benchmarks.results import Figure, moment, table

SIZES = (64, 256, 1024)
BAR_CONNECT_S = {64: 5.0, 256: 10.0, 1024: 30.0}
BAR_IDLE = {64: 3.0, 256: 3.0, 1024: 12.0}
BAR_ANSWERS_MS = {64: 100.0, 256: 100.0, 1024: 300.0}
BAR_RECORDS = {64: 25.0, 256: 25.0, 1024: 100.0}
BAR_CARD_MS = 200.0
_RANKS_PER_PROCESS = 256
_BATCHES_PER_S = 5
_ANSWER_S = 30.0


class Notebook:
    """The notebook's side of a session with simulated ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._keyring = Keyring()
        self._hello: set[int] = set()
        self._all_there = threading.Event()
        self._endpoint = Endpoint.listen(self._keyring, self._on_message)
        self._bulk = BulkFetcher(self._endpoint.context, self._keyring)
        self.questions = Questions(self._send, lambda _: None)
        self.observer = Observer(world_size, self._send, lambda: range(world_size), lambda: ())
        self._dispatch = Dispatch()
        self._dispatch.add(self.observer.handlers)
        self._dispatch.add(self.questions.handlers)
        self._dispatch.add({Hello: self._on_hello})
        self._endpoint.start()

    def invite(self, rank: int) -> dict[str, Any]:
        peer = f"fake/{rank}"
        self._endpoint.expect(peer)
        address = self._keyring.invite(peer, control=self._endpoint.url, bulk=self._bulk.url)
        return {name: getattr(address, name) for name in address.__dataclass_fields__}

    def wait_for_hello(self, timeout_s: float) -> None:
        if not self._all_there.wait(timeout_s):
            raise TimeoutError(f"{len(self._hello)} of {self.world_size} ranks came within {timeout_s:g} s")

    def ask_all(self) -> dict[int, Vitals]:
        """Send one request to all ranks, and return their answers."""
        answers: dict[int, Vitals] = self.questions.ask_for(
            range(self.world_size), lambda number: Probe(request=number), _ANSWER_S
        )
        if len(answers) < self.world_size:
            raise TimeoutError(f"{len(answers)} of {self.world_size} ranks answered within {_ANSWER_S:g} s")
        return answers

    def close(self) -> None:
        self.observer.close()
        self._bulk.close()
        self._endpoint.close()

    def _send(self, rank: int, message: Message) -> None:
        self._endpoint.send(message, f"fake/{rank}")

    def _on_message(self, peer: str, _: int, message: Message) -> None:
        self._dispatch.on_message(int(peer.partition("/")[2]), message)

    def _on_hello(self, rank: int, _: Hello) -> None:
        self._hello.add(rank)
        if len(self._hello) == self.world_size:
            self._all_there.set()


class Ranks:
    """The processes of the ranks."""

    def __init__(self, notebook: Notebook) -> None:
        addresses = {rank: notebook.invite(rank) for rank in range(notebook.world_size)}
        self._processes = []
        for first in range(0, notebook.world_size, _RANKS_PER_PROCESS):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.fake_ranks"], stdin=subprocess.PIPE, text=True
            )
            self._processes.append(process)
            of_process = {rank: addresses[rank] for rank in list(addresses)[first : first + _RANKS_PER_PROCESS]}
            self._tell(process, {"world_size": notebook.world_size, "addresses": of_process})

    def record(self, seconds: float) -> None:
        """Make all ranks send batches."""
        for process in self._processes:
            self._tell(process, {"batches": round(seconds * _BATCHES_PER_S), "period_s": 1 / _BATCHES_PER_S})

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60)

    @staticmethod
    def _tell(process: subprocess.Popen[str], what: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()


@contextmanager
def session(world_size: int) -> Iterator[tuple[Notebook, Ranks, float]]:
    """Start a notebook with ranks, and yield the seconds until all are connected."""
    with closing(Notebook(world_size)) as notebook:
        began_s = time.monotonic()
        with closing(Ranks(notebook)) as ranks:
            notebook.wait_for_hello(60)
            connected_s = time.monotonic() - began_s
            notebook.observer.start()
            yield notebook, ranks, connected_s


def share_of_a_core(seconds: float) -> float:
    """Return the CPU load of this process in percent of a core."""
    cpu_s, began_s = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.monotonic() - began_s) * 100


def card_ms(notebook: Notebook, answers: dict[int, Vitals]) -> float:
    """Return the time to convert the answers of ranks to a display, if all but rank 0 wait in an all_reduce."""
    everybody = range(notebook.world_size)
    process = SimpleNamespace(is_alive=True, host=SimpleNamespace(label=""))
    cluster: Any = SimpleNamespace(ranks=list(everybody), process=lambda _: process)
    run: Any = SimpleNamespace(number=CELL, result=SimpleNamespace(by_rank=set(everybody)), pending=set(everybody))
    shown: list[dict[str, str]] = []
    outlet: Any = SimpleNamespace(
        can_update=True, new_id=lambda: "card", show=lambda data, display_id: shown.append(data), drain=lambda: None
    )
    began_s = time.perf_counter()
    views = RankProbe(cluster, notebook.questions).views(run, {**answers, 0: _runs(answers[0])}, {})
    Card(outlet).show(views, 12.0, verdict(views))
    took_ms = (time.perf_counter() - began_s) * 1000
    [data] = shown
    assert "not arrived at all_reduce #5: rank 0 is at cell line 3" in data["text/plain"], data["text/plain"]
    return took_ms


def _runs(waits: Vitals) -> Vitals:
    return Vitals(
        request=waits.request, rss_bytes=0, device_bytes=0, running_cell=CELL, running_s=1.0, where="cell line 3"
    )


def measure_one(world_size: int, seconds: float, questions: int) -> list[Figure]:
    """Run all measurements with `world_size` ranks."""
    with session(world_size) as (notebook, ranks, connected_s):
        time.sleep(2)  # the first clock comparisons, which follow each other quickly
        idle = share_of_a_core(seconds)
        took_ms, used_ms = [], []
        for _ in range(questions):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            answers = notebook.ask_all()
            took_ms.append((time.perf_counter() - began_s) * 1000)
            used_ms.append((time.process_time() - cpu_s) * 1000)
            time.sleep(0.2)
        cards_ms = [card_ms(notebook, answers) for _ in range(5)]
        ranks.record(seconds + 1)
        time.sleep(0.5)
        recording = share_of_a_core(seconds)
        time.sleep(3)
        came = notebook.observer.recording.store.rings["call"].end
        due = world_size * round((seconds + 1) * _BATCHES_PER_S) * EVENTS
    return [
        Figure(
            what=f"{world_size} simulated ranks: until all have connected",
            value=connected_s,
            unit="s",
            bar=BAR_CONNECT_S[world_size],
        ),
        Figure(
            what=f"{world_size} simulated ranks: load of the idle notebook, of one core",
            value=idle,
            unit="%",
            bar=BAR_IDLE[world_size],
        ),
        Figure(
            what=f"{world_size} simulated ranks: request to all, until the last answer",
            value=median(took_ms),
            unit="ms",
            bar=BAR_ANSWERS_MS[world_size],
            blocks=(min(took_ms), max(took_ms)),
        ),
        Figure(
            what=f"{world_size} simulated ranks: processor time of the notebook for this request",
            value=median(used_ms),
            unit="ms",
            bar=BAR_ANSWERS_MS[world_size],
            blocks=(min(used_ms), max(used_ms)),
        ),
        Figure(
            what=f"{world_size} simulated ranks: display of the answers as a hang card",
            value=median(cards_ms),
            unit="ms",
            bar=BAR_CARD_MS,
            blocks=(min(cards_ms), max(cards_ms)),
        ),
        Figure(
            what=f"{world_size} simulated ranks: load of the notebook, of one core, if each rank sends "
            f"{_BATCHES_PER_S} batches of {EVENTS} calls and {2 * EVENTS} values per second",
            value=recording,
            unit="%",
            bar=BAR_RECORDS[world_size],
        ),
        Figure(what=f"{world_size} simulated ranks: lost calls, of {due}", value=due - came, unit="", bar=0),
    ]


def measure(sizes: tuple[int, ...] = SIZES, seconds: float = 10, questions: int = 20) -> list[Figure]:
    """Run all measurements with each of these numbers of ranks."""
    open_files.allow(open_files.needed(max(sizes)))
    figures = []
    for world_size in sizes:
        figures += measure_one(world_size, seconds, questions)
        print(*figures[-7:], sep="\n", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.many")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--questions", type=int, default=20)
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    figures = measure(tuple(given.sizes), given.seconds, given.questions)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
