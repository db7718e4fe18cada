"""Breakpoints in the margin stop ranks on two hosts, one rank on each. The ranks' files are not the notebook's."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import rights
from tests.conftest import is_within, wait_until
from tests.debug.front_end import FrontEndDebugger, run_to_end, stopped
from tests.kernels import NotebookKernel
from tests.ssh import namespaces, sshd

pytestmark = [pytest.mark.long, pytest.mark.alone]  # changes links and addresses of the machine
ALL = "%%on_all_ranks\n"
SUM = f"{ALL}total = torch.ones(1)\ndist.all_reduce(total)\ntotal.item()"
LEASE_S = 5
OF_USER = "def h(a):\n    b = a + 1\n    return b\n"
CELL = """%%on_all_ranks
from {module} import h
def step(x):
    y = x * 10 + rank
    return h(y)
z = step(3)
open(f'{marks}/{{rank}}', 'w').close()"""
# Mounts the remote host's folder over that of the notebook, for this Python and its children.
_OTHER_FILES = (
    '[ -n "$BOUND" ] || { export BOUND=1; exec unshare -m sh -c \'mount --bind %s %s && exec "$0" "$@"\' "$0" "$@"; }'
)


class Hosts(NamedTuple):
    """Two hosts, and a notebook with a rank on each of them."""

    network: namespaces.Namespaces
    debugger: FrontEndDebugger
    folder: Path  # the user's files: `on_both` exists on all machines, `remote` on the hosts only
    marks: Path  # a folder that all machines share
    before: tuple[set[str], set[int]]  # ports and processes of the hosts before the debugger was on

    def cell(self, module: str = "on_both") -> str:
        return CELL.format(module=module, marks=self.marks)

    def run(self, code: str) -> object:
        return self.debugger.finish(self.debugger.kernel.start(code))


def ports_and_processes(network: namespaces.Namespaces) -> tuple[set[str], set[int]]:
    """Return the addresses at which processes of the hosts listen, and the processes without the ssh servers."""
    ports = set()
    for link in network.links.values():
        command = ["ip", "netns", "exec", link, "ss", "-H", "-l", "-n", "-t", "-u"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        ports |= {f"{link} {line.split()[4]}" for line in lines}
    return ports, {pid for name in network.links for pid in network.started(name)}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    if not rights.may(*rights.MOUNT):
        pytest.skip("mount namespaces cannot be made here")
    directory, marks = tmp_path_factory.mktemp("network"), tmp_path_factory.mktemp("marks")
    folder, remote = directory / "of_user", directory / "of_host"
    for made, modules in ((folder, ["on_both"]), (remote, ["on_both", "remote"])):
        made.mkdir()
        for module in modules:
            (made / f"{module}.py").write_text(OF_USER)
    with namespaces.hosts(directory, "one", "two") as network:
        python = shlex.quote(sshd.python(directory, first=_OTHER_FILES % (remote, folder)))
        with closing(NotebookKernel(env={"DDP_NOTEBOOK_SSH": network.command, "DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
            kernel.run("%load_ext ddp_notebook")
            options = f"--python {python} --grace 1 --hang-after 1 --lease {LEASE_S}"
            reply = kernel.run(f"%ddp_start --hosts one:1,two:1 {options}", 120)
            assert reply.status == "ok", reply.traceback
            assert kernel.run(f"{ALL}import sys; sys.path.insert(0, {str(folder)!r})").status == "ok"
            assert kernel.run(SUM).stdout == "[0-1] 2.0\n"
            before, debugger = ports_and_processes(network), FrontEndDebugger(kernel)
            debugger.start()
            yield Hosts(network, debugger, folder, marks, before)
            debugger.stop()
            kernel.run("%ddp_stop")
        wait_until(network.are_idle, what="nothing is left on the hosts")


def test_no_port_is_opened_and_no_process_started(hosts):
    debugger, code = hosts.debugger, f"{ALL}z = rank\nz + 1"
    ports, processes = hosts.before
    assert ports and len(processes) >= 4, "ranks and host servers"
    debugger.set_breakpoints(code, 3)
    cell = debugger.kernel.start(code)
    threads = stopped(debugger)
    assert [debugger.variables(thread)["z"] for thread in threads] == ["0", "1"]
    assert ports_and_processes(hosts.network) == (ports, processes)
    assert run_to_end(debugger, cell, threads).stdout == "[0] 1\n[1] 2\n"
    debugger.set_breakpoints(code)


def test_breakpoints_steps_variables_and_a_stop(hosts):
    debugger, code = hosts.debugger, hosts.cell()
    assert debugger.set_breakpoints(code, 4)[0]["verified"]
    cell = debugger.kernel.start(code)
    threads = stopped(debugger)
    for rank, thread in enumerate(threads):
        assert debugger.frames(thread) == [(f"[{rank}] step", 4), (f"[{rank}] <module>", 6)]
        assert debugger.evaluate(thread, "x * 100 + rank") == str(300 + rank)
        debugger.ask("next", threadId=thread)
        assert stopped(debugger, 1) == [thread]
        assert debugger.variables(thread) == {"x": "3", "y": str(30 + rank)}
        debugger.ask("stepIn", threadId=thread)
        assert stopped(debugger, 1) == [thread]
        assert debugger.frames(thread)[0] == (f"[{rank}] h", 2) and debugger.variables(thread) == {"a": str(30 + rank)}
    began = time.monotonic()
    debugger.kernel.interrupt()
    assert debugger.finish(cell).ename == "KeyboardInterrupt" and is_within(time.monotonic() - began, 1.0)
    debugger.set_breakpoints(code)
    assert not list(hosts.marks.iterdir()) and hosts.run(SUM).stdout == "[0-1] 2.0\n"


@pytest.mark.parametrize("module", ["on_both", "remote"])
def test_a_file_of_the_user(hosts, module):
    debugger, path = hosts.debugger, str(hosts.folder / f"{module}.py")
    reply = debugger.ask("setBreakpoints", source={"path": path}, breakpoints=[{"line": 3}], sourceModified=False)
    assert reply["success"] and [(one["verified"], one["line"]) for one in reply["body"]["breakpoints"]] == [(True, 3)]
    cell = debugger.kernel.start(hosts.cell(module))
    threads = stopped(debugger)
    for rank, thread in enumerate(threads):
        top = debugger.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
        assert (top["source"]["path"], top["line"]) == (path, 3)
        assert debugger.variables(thread) == {"a": str(30 + rank), "b": str(31 + rank)}
        asked = debugger.ask("source", source={"path": path}, sourceReference=top["source"].get("sourceReference", 0))
        assert asked["success"] and asked["body"]["content"] == OF_USER
    debugger.kernel.interrupt()
    assert debugger.finish(cell).ename == "KeyboardInterrupt" and not list(hosts.marks.iterdir())
    debugger.ask("setBreakpoints", source={"path": path}, breakpoints=[], sourceModified=False)
    assert hosts.run(SUM).stdout == "[0-1] 2.0\n"


def test_20_of_20_stops_run_no_further_line(hosts):
    debugger, code = hosts.debugger, hosts.cell()
    slowest_s, passed = 0.0, 0
    for n in range(20):
        debugger.set_breakpoints(code, 4)
        cell = debugger.kernel.start(code)
        first, second = stopped(debugger)
        debugger.ask("next", threadId=(first, second)[n % 2])
        assert stopped(debugger, 1) == [(first, second)[n % 2]]
        assert debugger.variables((first, second)[n % 2])["y"] == str(30 + n % 2)
        began = time.monotonic()
        debugger.kernel.interrupt()
        assert debugger.finish(cell, 5).ename == "KeyboardInterrupt"
        slowest_s = max(slowest_s, time.monotonic() - began)
        debugger.wait_for("continued", 2)
        debugger.events.clear()
        debugger.set_breakpoints(code)
        assert not list(hosts.marks.iterdir()) and hosts.run(SUM).stdout == "[0-1] 2.0\n"
        passed += 1
    print(f"{passed} of 20; slowest stop: {slowest_s:.2f} s")
    assert is_within(slowest_s, 1.0)


def test_the_lease_of_a_host_does_not_pause(hosts):
    """A host that is silent longer than the lease counts as lost, although its rank has stopped."""
    debugger, code = hosts.debugger, hosts.cell()
    debugger.set_breakpoints(code, 4)
    cell = debugger.kernel.start(code)
    first, second = stopped(debugger)
    hosts.network.cut("two")
    try:
        assert [one["threadId"] for one in debugger.wait_for("continued", timeout_s=8 * LEASE_S)] == [second]
        assert debugger.ask("debugInfo")["body"]["stoppedThreads"] == [first]
        debugger.ask("continue", threadId=first)
        assert debugger.finish(cell).ename == "RankDiedError"
    finally:
        hosts.network.cut("two", is_up=True)
