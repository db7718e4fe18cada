"""64 ranks on one machine: `python -m tests.benchmarks.scale`, from the root of the repository.

`%ddp_start 64` in a real kernel whose host server is warm, then `pass` on all ranks, measured by a Jupyter client. Each
is compared with its minimum. For the start: 64 forks of a process with torch that only form a gloo group. For `pass`:
64 processes that answer a byte from a pipe, immediately or after IPython's `run_cell` has run `pass`, alone and in such
a group.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import chain
from statistics import median

from tests.benchmarks.frontend import LEAST, WAIT_UNTIL_WARM, FrontEnd, least
from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel

WORLD_SIZE = 64
BAR_START_S, BAR_CELL_MS = 3.0, 25.0
_CELL = "%%on_all_ranks\npass"
_CHECK = f"%%on_all_ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == {WORLD_SIZE}"

_GLOO = f"""
import os, socket, sys, time
import torch, torch._dynamo, torch.distributed as dist
torch.set_num_threads(1)
with socket.create_server(("127.0.0.1", 0)) as one: port = one.getsockname()[1]
def store(is_master): return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)
if not (server := os.fork()):
    kept = store(True)
    time.sleep(600)
time.sleep(0.5)
began, ranks = time.monotonic(), []
for rank in range({WORLD_SIZE}):
    if not (pid := os.fork()):
        dist.init_process_group("gloo", store=store(False), rank=rank, world_size={WORLD_SIZE})
        dist.all_reduce(torch.ones(1))
        os._exit(0)
    ranks.append(pid)
for pid in ranks: os.waitpid(pid, 0)
print(time.monotonic() - began)
os.kill(server, 9)
"""


def bare_gloo_s() -> float:
    """Return the time until the last of 64 plain processes has done its first all_reduce.

    Like ours, they use no name service, because an unanswered request can take 5 s.
    """
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "attempts:0"}
    done = subprocess.run([sys.executable, "-c", _GLOO], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(rounds: int = 3, per_block: int = 20) -> list[Figure]:
    """Start, run a block of cells and stop, `rounds` times in one kernel."""
    start_s: list[float] = []
    gloo_s: list[float] = []
    cell_ms: list[list[float]] = []
    with closing(NotebookKernel()) as kernel:
        front_end = FrontEnd(kernel)
        front_end.set_up("%load_ext ddp_notebook")
        for number in range(rounds):
            front_end.set_up(WAIT_UNTIL_WARM)
            start_s.append(front_end.run_s(f"%ddp_start {WORLD_SIZE}", timeout_s=120))
            front_end.set_up(_CHECK)
            (block,) = front_end.alternate_ms({f"{WORLD_SIZE} ranks": _CELL}, blocks=1, per_block=per_block).values()
            cell_ms += block
            front_end.set_up("%ddp_stop")
            gloo_s.append(bare_gloo_s())
            print(f"{WORLD_SIZE} ranks, round {number + 1}: {start_s[-1]:.2f} s, gloo {gloo_s[-1]:.2f} s", flush=True)
        front_end.set_up(least(WORLD_SIZE, is_bare=True))
        (bare_ms,) = front_end.alternate_ms({"bare": LEAST}, blocks=rounds, per_block=per_block).values()
        front_end.set_up(least(WORLD_SIZE))
        (least_ms,) = front_end.alternate_ms({"least": LEAST}, blocks=rounds, per_block=per_block).values()
        front_end.set_up(least(WORLD_SIZE, in_group=True))
        (group_ms,) = front_end.alternate_ms({"in a group": LEAST}, blocks=rounds, per_block=per_block).values()
    return [
        Figure(
            what=f"`%ddp_start {WORLD_SIZE}` with a warm host server",
            value=median(start_s),
            unit="s",
            bar=BAR_START_S,
            blocks=tuple(start_s),
        ),
        Figure(
            what=f"minimum for the start: {WORLD_SIZE} processes that only form a gloo group",
            value=median(gloo_s),
            unit="s",
            bar=BAR_START_S,
            blocks=tuple(gloo_s),
        ),
        Figure(
            what=f"`pass` on {WORLD_SIZE} ranks",
            value=median(chain(*cell_ms)),
            unit="ms",
            bar=BAR_CELL_MS,
            blocks=tuple(median(block) for block in cell_ms),
        ),
        Figure(
            what=f"minimum for `pass`: {WORLD_SIZE} processes that only answer a byte from a pipe",
            value=median(chain(*bare_ms)),
            unit="ms",
            bar=BAR_CELL_MS,
            blocks=tuple(median(block) for block in bare_ms),
        ),
        Figure(
            what=f"the same {WORLD_SIZE} processes, which also run `pass` with IPython's `run_cell`",
            value=median(chain(*least_ms)),
            unit="ms",
            bar=BAR_CELL_MS,
            blocks=tuple(median(block) for block in least_ms),
        ),
        Figure(
            what=f"the same {WORLD_SIZE} processes with `run_cell`, with torch and in a gloo group",
            value=median(chain(*group_ms)),
            unit="ms",
            bar=BAR_CELL_MS,
            blocks=tuple(median(block) for block in group_ms),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-block", type=int, default=20, help="cells after each start")
    given = parser.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = measure(rounds=given.rounds, per_block=given.per_block)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
