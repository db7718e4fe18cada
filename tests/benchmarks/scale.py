"""64 ranks on one machine: `python -m tests.benchmarks.scale`, from the root of the repository.

`%ddp_start 64` in a real kernel whose host server is warm, then `pass` on all of them, seen by a Jupyter client.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import closing
from itertools import chain
from statistics import median

from tests.benchmarks.frontend import WAIT_UNTIL_WARM, FrontEnd
from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel

WORLD_SIZE = 64
BAR_START_S, BAR_CELL_MS = 3.0, 25.0
_CELL = "%%on_all_ranks\npass"
_CHECK = f"%%on_all_ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == {WORLD_SIZE}"


def measure(rounds: int = 3, per_block: int = 20) -> list[Figure]:
    """Start, run a block of cells and stop, `rounds` times in one kernel."""
    start_s: list[float] = []
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
            print(f"start of {WORLD_SIZE} ranks, round {number + 1}: {start_s[-1]:.2f} s", flush=True)
    return [
        Figure(
            what=f"`%ddp_start {WORLD_SIZE}`, host server warm",
            value=median(start_s),
            unit="s",
            bar=BAR_START_S,
            blocks=tuple(start_s),
        ),
        Figure(
            what=f"`pass` on {WORLD_SIZE} ranks",
            value=median(chain(*cell_ms)),
            unit="ms",
            bar=BAR_CELL_MS,
            blocks=tuple(median(block) for block in cell_ms),
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
