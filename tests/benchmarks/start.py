"""Start of four CPU ranks to their first all_reduce: `python -m tests.benchmarks.start`, from the repository's root.

Five kinds alternate, each time in a fresh process:

today   a default `ipp.Cluster(4)`, then torch imported and a gloo group formed on its engines
warm    `ddp_notebook.start(4)` some time after `%load_ext`, when the host server has imported torch
cold    `ddp_notebook.start(4)` with no host server
import  torch imported, with `torch._dynamo`, which the first optimizer of a process imports
least   a process that imports the same and forks children that only form a group: the minimum for a cold start

Times run from the call to the end of the first all_reduce. They exclude the imports of the notebook process. For a warm
start, the times of its stages are reported too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.results import Figure, moment, table

WORLD_SIZE = 4
BAR_WARM, BAR_COLD = 0.05, 0.35  # ratios to `today`
BAR_WARM_S, BAR_BEYOND_IMPORT_S = 0.3, 0.5
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 180
_TODAY_CELL = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{file}", rank=rank, world_size={world_size})
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == {world_size}
"""
_OUR_CELL = f"x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == {WORLD_SIZE}"


def sample_today_s() -> float:
    """Measure the workflow without this package: ipyparallel's defaults, and a cell that forms the group."""
    import ipyparallel as ipp

    with tempfile.TemporaryDirectory() as directory:
        cell = _TODAY_CELL.format(file=f"{directory}/store", world_size=WORLD_SIZE)
        cluster = ipp.Cluster(n=WORLD_SIZE)
        began = time.perf_counter()
        try:
            view = cluster.start_and_connect_sync()[:]
            view.scatter("rank", range(WORLD_SIZE), flatten=True, block=True)
            view.execute(cell, block=True)
            return time.perf_counter() - began
        finally:
            cluster.stop_cluster_sync()


def sample_warm_s() -> float:
    """Measure a warm start, as after `%load_ext` and a short pause."""
    from ddp_notebook.launch import warm

    warm.prepare()
    host, _ = warm.claim(os.environ)
    host.facts()
    warm.give_back(host)
    return sample_cold_s()


def sample_cold_s() -> float:
    """Measure a start with the existing host server, which does not exist unless one was started before."""
    from ddp_notebook.api import start
    from ddp_notebook.launch.direct import DirectCluster

    start_ranks = DirectCluster.start

    def start_and_note(cluster: DirectCluster, deadline: float, report: Any, *rest: Any) -> None:
        def note(stage: str) -> None:
            stages_s[stage] = time.perf_counter() - began
            report(stage)

        start_ranks(cluster, deadline, note, *rest)

    DirectCluster.start = start_and_note  # type: ignore[method-assign,assignment]
    began = time.perf_counter()
    with start(WORLD_SIZE) as session:
        session.run(_OUR_CELL)
        return time.perf_counter() - began


def sample_import_s() -> float:
    """Measure the imports of a plain training process."""
    began = time.perf_counter()
    import torch
    import torch._dynamo

    assert torch.optim
    return time.perf_counter() - began


_LEAST = f"""
import os, torch, torch._dynamo, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
done, tell = os.pipe()
for rank in range({WORLD_SIZE}):
    if os.fork():
        continue
    own = dist.TCPStore("127.0.0.1", store.port)
    dist.init_process_group("gloo", store=own, rank=rank, world_size={WORLD_SIZE})
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == {WORLD_SIZE}
    os.write(tell, b"1")
    os._exit(0)
for _ in range({WORLD_SIZE}):
    assert os.read(done, 1)
print("done", flush=True)
"""


def sample_least_s() -> float:
    """Measure the minimum for a cold start, in another process, because a notebook process cannot be forked."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", _LEAST], stdout=subprocess.PIPE) as least:
        assert least.stdout is not None and least.stdout.readline()
        return time.perf_counter() - began


stages_s: dict[str, float] = {}  # stages of this process's start
_STAGES = {
    "processes": "all ranks have connected",
    "group": "the process group is formed",
    "engines": "all IPython engines are ready",
}
SAMPLES: dict[str, Callable[[], float]] = {
    "today": sample_today_s,
    "warm": sample_warm_s,
    "cold": sample_cold_s,
    "import": sample_import_s,
    "least": sample_least_s,
}


def sample_in_fresh_process_s(kind: str) -> tuple[float, dict[str, float]]:
    """Run one start. Return its seconds, and the time of each stage."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # ours sets it; resolving a host name without an entry takes time
    env.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--sample", kind],
        cwd=_ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the start {kind!r} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["start_s"]), found["stages_s"]


def measure(rounds: int = 3) -> list[Figure]:
    """Run all kinds in turn, `rounds` times."""
    subprocess.run([sys.executable, "-c", "import torch._dynamo, ipyparallel"], check=True)  # fills the disk cache
    seconds: dict[str, list[float]] = {kind: [] for kind in SAMPLES}
    reached_s: dict[str, list[float]] = {stage: [] for stage in _STAGES}
    for number in range(rounds):
        kinds = list(SAMPLES) if number % 2 == 0 else list(reversed(SAMPLES))
        for kind in kinds:
            took_s, stages = sample_in_fresh_process_s(kind)
            seconds[kind].append(took_s)
            for stage, at_s in stages.items() if kind == "warm" else ():
                reached_s[stage].append(at_s)
            print(f"start of {WORLD_SIZE} ranks, round {number + 1}, {kind}: {seconds[kind][-1]:.2f} s", flush=True)
    today_s = median(seconds["today"])

    def figure(kind: str, words: str, bar: float) -> Figure:
        return Figure(
            what=f"{words} start of {WORLD_SIZE} ranks, until the first all_reduce is done",
            value=median(seconds[kind]),
            unit="s",
            bar=bar,
            baseline=today_s,
            against=f"`ipp.Cluster({WORLD_SIZE})`, import of torch, gloo group",
            blocks=tuple(seconds[kind]),
        )

    import_s = median(seconds["import"])

    def beyond_import(kind: str, words: str) -> Figure:
        return Figure(
            what=f"{words}, minus the import of torch and `torch._dynamo` ({import_s:.2f} s)",
            value=median(seconds[kind]) - import_s,
            unit="s",
            bar=BAR_BEYOND_IMPORT_S,
            blocks=tuple(one - alone for one, alone in zip(seconds[kind], seconds["import"], strict=True)),
        )

    return [
        figure("warm", "warm", BAR_WARM),
        *(
            Figure(
                what=f"warm start of {WORLD_SIZE} ranks, until {_STAGES[stage]}",
                value=median(at_s),
                unit="s",
                bar=BAR_WARM_S,
                blocks=tuple(at_s),
            )
            for stage, at_s in reached_s.items()
        ),
        figure("cold", "cold", BAR_COLD),
        beyond_import("cold", f"cold start of {WORLD_SIZE} ranks"),
        beyond_import("least", "minimum for a cold start: a process that imports, forks and forms a group"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample", choices=SAMPLES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sample is not None:
        print("\n" + json.dumps({"start_s": SAMPLES[given.sample](), "stages_s": stages_s}))
        return
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = measure(rounds=given.rounds)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
