"""Forecasts compared with runs: each rank has a link of its own with a limited rate, and waits instead of computing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import ddp_notebook
from tests.recording.scripts import environment

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(900)]

_RATE_MBIT = 40  # 0.005 GB/s: sending takes hardly any processor time
_MOST_OFF = 0.1
_NET = "10.78.7"
_numbers = itertools.count()

_TRAIN = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backward_s):
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None

class Layer(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(Waits.apply(x, 0.075))

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*[Layer(SIZE, SIZE) for _ in range(4)]), bucket_cap_mb=BUCKET_MB)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    optimizer.zero_grad()
    for micro in range(MICRO):
        x = torch.randn(8, SIZE)
        with model.no_sync() if micro < MICRO - 1 else torch.enable_grad():
            model(x).square().mean().backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
"""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def links(count: int) -> Iterator[list[str]]:
    """Make network namespaces with one link each, which sends at `_RATE_MBIT`. Yield their names."""
    mark = f"{os.getpid() % 10_000}{next(_numbers)}"
    bridge = f"fcb{mark}"
    with ExitStack() as ends:
        _run("ip", "link", "add", bridge, "type", "bridge")
        ends.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        names = []
        for number in range(count):
            name = f"fc{mark}n{number}"
            _run("ip", "netns", "add", name)
            ends.callback(_run, "ip", "netns", "del", name)
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", name, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{_NET}.{10 + number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            rate = ("rate", f"{_RATE_MBIT}mbit", "burst", "16k", "latency", "500ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
            names.append(name)
        yield names


def trained(
    folder: Path, ranks: int, *, size: int = 360, bucket_mb: float = 0.4, steps: int = 12, micro: int = 1
) -> ddp_notebook.Recording:
    """Train on this number of ranks, each with its own link, and return the recording."""
    records = folder / f"ranks{ranks}b{bucket_mb}m{micro}"
    values = {"SIZE": size, "BUCKET_MB": bucket_mb, "STEPS": steps, "MICRO": micro}
    script = folder / "train.py"
    code = _TRAIN
    for name, value in values.items():
        code = code.replace(name, str(value))
    script.write_text(code)
    with links(ranks) as names:
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "ddp_notebook.record", str(script)],
                env=environment(records)
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": "0",
                    "MASTER_ADDR": f"{_NET}.10",
                    "MASTER_PORT": "29411",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank, name in enumerate(names)
        ]
        try:
            assert [process.wait(180) for process in processes] == [0] * ranks
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return ddp_notebook.load(records)


def _compare(recording: ddp_notebook.Recording, run: ddp_notebook.Recording, **changes: Any) -> None:
    """Compare the forecast of a recording with a run."""
    ranks = run.world_size
    found = recording.forecast([ranks], **changes)
    assert found.predictions, found.verdict
    predicted, measured = found.predictions[0].step_ns, run.runs()[-1].step_ns
    off = predicted / measured - 1
    print(f"{ranks} ranks {changes}: predicted {predicted / 1e6:.1f} ms, measured {measured / 1e6:.1f} ms, {off:+.1%}")
    assert abs(off) <= _MOST_OFF


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_run_on_2_ranks_predicts_4_and_8(tmp_path):
    recording = trained(tmp_path, 2)
    print(recording.forecast([4, 8]))
    for ranks in (4, 8):
        _compare(recording, trained(tmp_path, ranks))


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_buckets_and_micro_steps_are_predicted(tmp_path):
    recording = trained(tmp_path, 2)
    _compare(recording, trained(tmp_path, 2, bucket_mb=25), bucket_mb=25)
    _compare(recording, trained(tmp_path, 4, micro=3), micro_steps=3)
