"""Two hosts with two ranks each over ssh, compared with one host: `python -m tests.benchmarks.hosts`, as root.

The hosts are network namespaces of this machine with an ssh server each, so both share its cores. Two host servers
import torch at the same time, and so do the two processes that a cold start is compared with.

cold      from the call to the end of the first all_reduce
import    two processes that import torch and `torch._dynamo` at the same time
warm      the same from a notebook whose last session was on these hosts, and on one machine
pass      a cell of a notebook on the hosts and on one machine; and `session.run("pass")` on the hosts, on one machine,
          and in two host servers of this machine without ssh, the minimum for two servers on the same cores
freed     a ring of recv across hosts, from the time limit of the cell to its end
healed    a killed rank of the remote host, from `session.ranks.heal` to the end of an all_reduce
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.transports.local import LocalTransport
from ddp_notebook.session import Session
from tests.benchmarks.frontend import FrontEnd
from tests.benchmarks.results import Figure, moment, table
from tests.kernels import NotebookKernel
from tests.ssh import namespaces, sshd

BAR_COLD, BAR_WARM, BAR_PASS = 1.2, 1.3, 1.3  # ratios to two imports and to one machine
BAR_FREED_S, BAR_HEALED_S = 0.5, 1.0
_HOSTS = ("a", "b")
_WORLD_SIZE = 4
_SUM = "x = torch.ones(1); dist.all_reduce(x)"
_IMPORT = "import torch, torch._dynamo; assert torch.optim"
_LIMIT_S = 0.3
_CELLS = 100  # cells per block
_WARM_STARTS = 3


def measure(rounds: int = 3) -> list[Figure]:
    """Start, run and heal ranks on two hosts. Return nothing if the hosts cannot be created."""
    with contextlib.ExitStack() as ends:
        directory = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        try:
            made = ends.enter_context(namespaces.hosts(directory, *_HOSTS))
        except pytest.skip.Exception as why:
            print(why)
            return []
        before = os.environ.get("DDP_NOTEBOOK_SSH")
        os.environ["DDP_NOTEBOOK_SSH"] = made.command
        ends.callback(_restore, "DDP_NOTEBOOK_SSH", before)
        return _measure(rounds, sshd.python(directory))


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name)
    if value is not None:
        os.environ[name] = value


def _measure(rounds: int, python: str) -> list[Figure]:
    times: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        times.setdefault(what, []).append(value)

    def start(hosts: str | None) -> Session:
        ssh = None if hosts is None else ddp_notebook.Ssh(hosts, python=python)
        return ddp_notebook.start(_WORLD_SIZE, hosts=ssh, grace_s=0.3)

    for _ in range(rounds):
        note("import", two_imports_s())
        began = time.perf_counter()
        with start(",".join(_HOSTS)) as session:
            session.run(_SUM)
            note("cold", time.perf_counter() - began)
            note("pass", _pass_ms(session))
            note("freed", _freed_s(session))
            note("healed", _healed_s(session))
        with start(None) as session:
            note("local pass", _pass_ms(session))
        with _without_ssh(), start(",".join(_HOSTS)) as session:
            note("pass without ssh", _pass_ms(session))
    with contextlib.closing(NotebookKernel()) as kernel:
        front_end = FrontEnd(kernel)
        front_end.set_up("%load_ext ddp_notebook")
        on_hosts = f"%ddp_start {_WORLD_SIZE} --hosts {','.join(_HOSTS)} --python {python}"
        here = f"%ddp_start {_WORLD_SIZE}"
        for _ in range(rounds):
            note("cell", _cell_ms(front_end, on_hosts))
            note("local cell", _cell_ms(front_end, here))
            for _ in range(_WARM_STARTS):
                note("warm", _warm_s(front_end, on_hosts))
                note("local warm", _warm_s(front_end, here))
    middle = {what: median(values) for what, values in times.items()}
    blocks = {what: tuple(values) for what, values in times.items()}
    return [
        Figure(
            what="cold start of 2 ranks on each of 2 hosts over ssh",
            value=middle["cold"],
            unit="s",
            bar=BAR_COLD,
            baseline=middle["import"],
            against="two imports of torch at the same time",
            blocks=blocks["cold"],
        ),
        Figure(
            what="warm start on these hosts, from a notebook",
            value=middle["warm"],
            unit="s",
            bar=BAR_WARM,
            baseline=middle["local warm"],
            against="warm start of 4 ranks on one machine",
            blocks=blocks["warm"],
        ),
        Figure(
            what="`pass` on these hosts, from a notebook",
            value=middle["cell"],
            unit="ms",
            bar=BAR_PASS,
            baseline=middle["local cell"],
            against="`pass` on 4 ranks of one machine",
            blocks=blocks["cell"],
        ),
        Figure(
            what="`pass` on these hosts, from a script",
            value=middle["pass"],
            unit="ms",
            bar=BAR_PASS,
            baseline=middle["local pass"],
            against="`pass` on 4 ranks of one machine",
            blocks=blocks["pass"],
        ),
        Figure(
            what="`pass` with two host servers on one machine, without ssh",
            value=middle["pass without ssh"],
            unit="ms",
            bar=BAR_PASS,
            baseline=middle["local pass"],
            against="`pass` on 4 ranks of one host server",
            blocks=blocks["pass without ssh"],
        ),
        Figure(
            what="deadlock across these hosts, from the time limit of the cell to its end",
            value=middle["freed"],
            unit="s",
            bar=BAR_FREED_S,
            blocks=blocks["freed"],
        ),
        Figure(
            what="replacement of a dead rank on a remote host, until the next all_reduce is done",
            value=middle["healed"],
            unit="s",
            bar=BAR_HEALED_S,
            blocks=blocks["healed"],
        ),
    ]


@contextlib.contextmanager
def _without_ssh() -> Iterator[None]:
    """Use host servers of this machine as hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectHosts, "_transport", lambda _, name: LocalTransport(os.environ, name))
        yield


def two_imports_s() -> float:
    """Return the time of two processes that import torch at the same time."""
    began = time.perf_counter()
    both = [subprocess.Popen([sys.executable, "-c", _IMPORT]) for _ in _HOSTS]
    assert [one.wait() for one in both] == [0, 0]
    return time.perf_counter() - began


def _pass_ms(session: Session) -> float:
    run: Callable[[], object] = lambda: session.run("pass", quiet=True)  # noqa: E731
    for _ in range(_CELLS // 5):
        run()
    each = []
    for _ in range(_CELLS):
        began = time.perf_counter()
        run()
        each.append(time.perf_counter() - began)
    return median(each) * 1e3


def _cell_ms(front_end: FrontEnd, start: str) -> float:
    front_end.set_up(start)
    each = [front_end.run_s("%%on_all_ranks\npass") for _ in range(_CELLS + _CELLS // 5)][_CELLS // 5 :]
    front_end.set_up("%ddp_stop")
    return median(each) * 1e3


def _warm_s(front_end: FrontEnd, start: str) -> float:
    """Return the time of a start with idle host servers, after an earlier session."""
    took_s = front_end.run_s(f"{start}\n%on_all_ranks {_SUM}")
    front_end.set_up("%ddp_stop")
    return took_s


def _freed_s(session: Session) -> float:
    began = time.perf_counter()
    with contextlib.suppress(CellTimeoutError):
        session.run("dist.recv(torch.ones(1), (rank + 1) % world_size)", timeout_s=_LIMIT_S, quiet=True)
    freed_s = time.perf_counter() - began - _LIMIT_S
    session.run(_SUM, quiet=True)
    return freed_s


def _healed_s(session: Session) -> float:
    with contextlib.suppress(RankDiedError):
        session.run(f"import os\nif rank == {_WORLD_SIZE - 1}: os.kill(os.getpid(), 9)\ndist.barrier()", quiet=True)
    began = time.perf_counter()
    session.ranks.heal()
    session.run(_SUM, quiet=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.hosts")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(moment(), "", *table(measure(given.rounds)), sep="\n")


if __name__ == "__main__":
    main()
