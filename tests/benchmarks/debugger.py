"""Commands for a debugger in which all ranks stand: `python -m tests.benchmarks.debugger`, from the root.

Each result is the median time from a typed line to the next prompt: `n` twice, then `p` with two values.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median

from tests.benchmarks.results import Figure, moment, table
from tests.debug.driver import Debugged
from tests.kernels import NotebookKernel

_CODE = """%%on_all_ranks
x = torch.ones(4)
breakpoint()
for step in range(1000):
    y = x + step
    z = y.sum()"""
_FIRST = ["n"] * 5  # not counted
_COMMANDS = ["p step, z" if at % 3 == 2 else "n" for at in range(60)]


def measure() -> list[Figure]:
    """Measure on two and on four ranks."""
    return [_on(2, 80), _on(4, 120)]


def _on(ranks: int, bar_ms: float) -> Figure:
    with closing(NotebookKernel()) as kernel:
        kernel.run(f"%load_ext ddp_notebook\n%ddp_start {ranks}")
        user = Debugged(kernel)
        reply = user.run(_CODE, [*_FIRST, *_COMMANDS, "q"])
        assert reply.status == "ok", reply.traceback
        kernel.run("%ddp_stop")
    took_ms = [1e3 * wait_s for wait_s in user.waits_s[1 + len(_FIRST) :]]
    what = f"a command for the debugger of {ranks} ranks"
    return Figure(what=what, value=median(took_ms), unit="ms", bar=bar_ms, blocks=(min(took_ms), max(took_ms)))


if __name__ == "__main__":
    print(moment())
    print("\n".join(table(measure())))
