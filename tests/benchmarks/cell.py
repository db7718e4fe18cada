"""Latency of `pass` on four ranks: `python -m tests.benchmarks.cell`, from the root of the repository.

The cells run in one real kernel, and a Jupyter client measures them. At first only our ranks run. Three
cells alternate:

    local           `pass` in the notebook itself
    ours            `%%on_all_ranks`
    least           a magic that writes a byte to each of four processes, in which IPython runs `pass`, and reads their
                    answers: the minimum for a cell on ranks

Then the first two run again while one busy process uses each core. Then the ranks create widgets and close them; blocks
with and without widgets alternate. Then a default `ipp.Cluster(4)` is started. Its idle processes and client slow down
the kernel a little (measured: ours 1.73 of local instead of 1.65). Three cells alternate:

    ours            as before
    px, default     `%%px` on that cluster, the reference of the bar
    px, our ranks   `%%px` through `session.client`, for comparison
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from statistics import median

from tests.benchmarks.frontend import LEAST, WAIT_UNTIL_WARM, FrontEnd, least
from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel

WORLD_SIZE = 4
BAR_PX, BAR_LOCAL, BAR_BUSY, BAR_WIDGETS = 0.45, 1.3, 1.6, 1.2  # ratios
WIDGETS = 500  # per rank
_OURS = {"ours": "%%on_all_ranks\npass"}
_BESIDE_LOCAL = {"local": "pass", **_OURS, "least": LEAST}
_BESIDE_PX = {**_OURS, "px, default": "%%px_default\npass", "px, our ranks": "%%px_ours\npass"}
_MAKE_WIDGETS = f"""%%on_all_ranks
import ipywidgets as widgets
many = [widgets.IntText() for _ in range({WIDGETS})]
"""
_CLOSE_WIDGETS = "%%on_all_ranks\nwidgets.Widget.close_all()\ndel many"
_START_CLUSTER = f"""
import ddp_notebook
import ipyparallel as ipp
_cluster = ipp.Cluster(n={WORLD_SIZE})
_client = _cluster.start_and_connect_sync()
_client.activate(suffix="_default")
ddp_notebook.current().client.activate(suffix="_ours")
assert len(_client) == len(ddp_notebook.current().client) == {WORLD_SIZE}
"""
_STOP_CLUSTER = "_client.close()\n_cluster.stop_cluster_sync()"


def measure(blocks: int = 5, per_block: int = 40) -> list[Figure]:
    """Run all cells in alternation."""
    with closing(NotebookKernel()) as kernel:
        front_end = FrontEnd(kernel)
        front_end.set_up("%load_ext ddp_notebook")
        front_end.set_up(WAIT_UNTIL_WARM)
        front_end.set_up(f"%ddp_start {WORLD_SIZE}")
        front_end.set_up(least(WORLD_SIZE))
        local = front_end.alternate_ms(_BESIDE_LOCAL, blocks=blocks, per_block=per_block)
        with _busy_cores() as cores:
            busy = front_end.alternate_ms({"local": "pass", **_OURS}, blocks=blocks, per_block=per_block)
        bare, full = _with_widgets_ms(front_end, blocks, per_block)
        front_end.set_up(_START_CLUSTER)
        try:
            px = front_end.alternate_ms(_BESIDE_PX, blocks=blocks, per_block=per_block)
        finally:
            front_end.set_up(_STOP_CLUSTER)
            front_end.set_up("%ddp_stop")
    return [
        _figure(px, "px, default", f"`%%px` on `ipp.Cluster({WORLD_SIZE})`", BAR_PX),
        _figure(local, "local", "local `pass`", BAR_LOCAL),
        _figure(local, "local", "local `pass`", BAR_LOCAL, "least"),
        _figure(busy, "local", f"local `pass` ({cores} other busy processes during both)", BAR_BUSY),
        Figure(
            what=f"`pass` on {WORLD_SIZE} ranks with {WIDGETS} widgets each",
            value=median(chain(*full)),
            unit="ms",
            bar=BAR_WIDGETS,
            baseline=median(chain(*bare)),
            against="`pass` without widgets",
            blocks=tuple(median(block) for block in full),
        ),
    ]


@contextmanager
def _busy_cores() -> Iterator[int]:
    """Start a busy process for each core. Yield their number."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield cores
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _with_widgets_ms(front_end: FrontEnd, blocks: int, per_block: int) -> tuple[list[list[float]], list[list[float]]]:
    """Run blocks of `pass` without and with widgets."""
    bare, full = [], []
    for _ in range(blocks):
        bare.append([front_end.run_s(_OURS["ours"]) * 1000 for _ in range(per_block)])
        front_end.set_up(_MAKE_WIDGETS)
        full.append([front_end.run_s(_OURS["ours"]) * 1000 for _ in range(per_block)])
        front_end.set_up(_CLOSE_WIDGETS)
    return bare, full


def _figure(taken: dict[str, list[list[float]]], against: str, words: str, bar: float, of: str = "ours") -> Figure:
    who = "ranks" if of == "ours" else "processes that read a byte from a pipe and run IPython (minimum)"
    return Figure(
        what=f"`pass` on {WORLD_SIZE} {who}",
        value=median(chain(*taken[of])),
        unit="ms",
        bar=bar,
        baseline=median(chain(*taken[against])),
        against=words,
        blocks=tuple(median(block) for block in taken[of]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cell")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--per-block", type=int, default=40, help="cells of each kind in a block")
    given = parser.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = measure(blocks=given.blocks, per_block=given.per_block)
    print("", moment(), "", *table(figures), sep="\n")


if __name__ == "__main__":
    main()
