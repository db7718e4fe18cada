"""A debugger on two hosts, one rank on each."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conftest import is_within, wait_until
from tests.debug.driver import Debugged
from tests.debug.test_held import OPERATIONS, SETUP, STOPS
from tests.kernels import NotebookKernel
from tests.ssh import namespaces, sshd

pytestmark = [pytest.mark.long, pytest.mark.alone]  # changes links and addresses of the machine
ALL = "%%on_all_ranks\n"
SUM = f"{ALL}y = torch.ones(1); dist.all_reduce(y); y.item()"
PROMPT_S = 6
LEASE_S = 5
HELD = ("a collective", "a send", "DDP in its first step", "an asynchronous operation", "monitored_barrier")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[tuple[namespaces.Namespaces, str]]:
    """Yield the hosts, and their Python."""
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "one", "two") as made:
        yield made, sshd.python(directory)


@pytest.fixture(scope="module", params=["on", "off"], ids=["guard on", "guard off"])
def user(network, request) -> Iterator[Debugged]:
    made, python = network
    with closing(NotebookKernel(env={"DDP_NOTEBOOK_SSH": made.command, "DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
        kernel.run("%load_ext ddp_notebook")
        options = f"--python {shlex.quote(python)} --guard {request.param} --grace 1 --hang-after 1 --lease {LEASE_S}"
        reply = kernel.run(f"%ddp_start --hosts one:1,two:1 {options}", 120)
        assert reply.status == "ok", reply.traceback
        assert kernel.run(SETUP).status == "ok"
        yield Debugged(kernel)
        kernel.run("%ddp_stop")
    wait_until(made.are_idle, what="nothing is left on the hosts")


@pytest.mark.parametrize("name", HELD)
def test_limits_of_2_s_are_held(user, name):
    reply = user.run(ALL + OPERATIONS[name], [f"({PROMPT_S}) c"], 60)
    assert reply.status == "ok", reply.traceback
    assert "time limits run on" not in reply.stderr


def test_commands_stop_and_the_end_of_a_cell(user):
    code = f"{ALL}import socket\nkept = rank * 10\nbreakpoint()\nkept += 1"
    reply = user.run(code, ["p kept", "@host=one p kept", "n", "c"])
    assert reply.stdout.splitlines()[2:5] == ["[0] 0", "[1] 10", "[0] 0"], reply.stdout
    reply = user.run(f"{ALL}{STOPS}dist.barrier()", ["(stop)"])
    assert reply.ename == "KeyboardInterrupt" and is_within(reply.duration_s, 1.0)
    assert user.run(f"{ALL}{STOPS}dist.barrier()", ["q"]).status == "ok"
    assert user.run(SUM).stdout == "[0-1] 2.0\n"


def test_the_lease_of_a_host_does_not_pause(network, user):
    """A host that is silent longer than the lease counts as lost, although a prompt is open."""
    made, _ = network
    message = user.start(f"{ALL}{STOPS}dist.barrier()")
    user.prompt()
    made.cut("two")
    try:
        user.kernel.wait_for_text("rank 1 has died", 8 * LEASE_S)
        user.type("c")
        assert user.kernel.finish(message).ename == "RankDiedError"
    finally:
        made.cut("two", is_up=True)
