"""A notebook whose two ranks are on two hosts supports everything that ranks on one machine do.

Host "b" has a different clock: its Python is in a time namespace that is 1000 s ahead.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests import rights
from tests.conftest import is_within, wait_until
from tests.faults.on_rank import Scene
from tests.faults.test_table import nothing_is_left  # noqa: F401  # of the module, as there
from tests.kernels import NotebookKernel
from tests.ssh import namespaces, sshd
from tests.test_widgets import SLIDERS, VIEW
from tests.widgets.test_display import OWN_BUNDLE, TRAINS, Browser
from tests.widgets.unpacking import unpack

pytestmark = pytest.mark.alone  # changes links and addresses of the machine

AHEAD_S = 1000
_ITS_OWN_CLOCK = """
case "$AHEAD $SSH_CONNECTION" in " "*" {address} 22")
    unshare --time true && AHEAD=1 exec unshare --time --monotonic {ahead_s} --fork --kill-child "$0" "$@" ;;
esac
"""
SUM = "x = torch.ones(1); dist.all_reduce(x); print('sum', int(x))"
STEPS = """%%on_all_ranks
import time
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(12):
    if rank == 1: time.sleep(0.05)
    loss = net(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[tuple[namespaces.Namespaces, str]]:
    """Yield the hosts, and their Python."""
    directory = tmp_path_factory.mktemp("network")
    with namespaces.hosts(directory, "a", "b") as made:
        first = _ITS_OWN_CLOCK.format(address=made.addresses["b"], ahead_s=AHEAD_S)
        yield made, sshd.python(directory, first=first)


@pytest.fixture(scope="module")
def browser(network) -> Iterator[Browser]:
    """Return the front end of a notebook that has started the ranks."""
    made, python = network
    with closing(NotebookKernel(env={"DDP_NOTEBOOK_SSH": made.command, "DDP_NOTEBOOK_PRELOAD": "0"})) as kernel:
        front_end = Browser(kernel)
        front_end.run(f"{OWN_BUNDLE}\n%load_ext ddp_notebook")
        said = front_end.run(f"%ddp_start --hosts a:1,b:1 --python {shlex.quote(python)} --grace 0.5").stdout
        assert said.rpartition("\r")[2].startswith("starting:  2 host servers "), said
        yield front_end
    wait_until(made.are_idle, what="nothing is left on the hosts")


@pytest.fixture
def kernel(browser) -> NotebookKernel:
    """Return the kernel, for cells that may fail."""
    return browser.kernel


@pytest.fixture
def has_its_own_clock(browser) -> None:
    if not rights.may(*rights.TIME):
        pytest.skip("time namespaces cannot be made here")


def _sum(kernel: NotebookKernel) -> str:
    return kernel.run(f"%%on_all_ranks\n{SUM}").stdout


@pytest.mark.long
def test_equal_lines_are_folded_and_come_while_the_cell_runs(kernel):
    code = "import time\nprint('same')\nprint('rank', rank)\ntime.sleep(30)"
    message = kernel.start(f"%%on_all_ranks\n{code}")
    shown = kernel.wait_for_text("rank 0 | 1", timeout_s=5)
    assert shown == "[0-1] same\n[0-1] rank 0 | 1\n"
    kernel.interrupt()
    assert kernel.finish(message, timeout_s=5).ename == "KeyboardInterrupt"


def test_a_rank_of_the_other_host_asks(kernel):
    message = kernel.client.execute("%%on_ranks 1\nprint('hi', input('Name: '))", allow_stdin=True)
    assert kernel.client.get_stdin_msg(timeout=10)["content"] == {"prompt": "[1] Name: ", "password": False}
    kernel.client.input("Ann")
    assert kernel.finish(message).stdout == "[1] hi Ann\n"


def test_figures_are_shown_and_equal_ones_once(kernel):
    code = "%%on_all_ranks\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, {}]);"
    [both] = kernel.run(code.format("rank")).displays  # next to each other
    assert both["text/html"].count('src="data:image/png;base64,') == 2
    reply = kernel.run(code.format(2))
    assert ["image/png" in data for data in reply.displays] == [True] and reply.stdout == "[0-1]\n"


def test_a_slider_of_the_other_host_is_moved(browser):
    assert len([data for data in browser.run(SLIDERS).displays if VIEW in data]) == 2
    browser.set(browser.of("IntSliderModel", value=1)[-1], value=7)
    assert browser.run("%%on_all_ranks\nslider.value").stdout == "[0] 0\n[1] 7\n"
    assert len(browser.of("IntTextModel", value=70)) == 1, "what the callback has changed came back"


def test_stop_frees_a_deadlock_between_hosts(kernel, tmp_path):
    begin = f"from tests.faults.on_rank import Scene\nkept, scene = rank + 40, Scene({str(tmp_path)!r}, rank)"
    message = kernel.start(f"%%on_all_ranks\n{begin}\nscene.mark('there'); dist.recv(torch.ones(1), 1 - rank)")
    Scene(str(tmp_path)).wait_for("there", [0, 1], blocked=True)
    pressed = time.monotonic()
    kernel.interrupt()
    reply = kernel.finish(message, timeout_s=10)
    assert is_within(time.monotonic() - pressed, 0.5)
    assert (reply.ename, reply.evalue.splitlines()) == (
        "KeyboardInterrupt",
        [
            "the cell was stopped",
            "  rank 0 waited in recv #1 from rank 1 (float32[1], cell line 3)",
            "  rank 1 waited in recv #1 from rank 0 (float32[1], cell line 3)",
        ],
    )
    assert kernel.run("%%on_all_ranks\nkept").stdout == "[0] 40\n[1] 41\n" and _sum(kernel) == "[0-1] sum 2\n"


def test_values_go_there_and_come_back(kernel):
    kernel.run("numbers = [1, 2]\n%ddp_push numbers")
    kernel.run("%%on_all_ranks\nnumbers.append(rank)")
    assert kernel.run("%ddp_pull numbers").stdout == "[0] [1, 2, 0]\n[1] [1, 2, 1]\n"


def test_a_wrong_shape_is_refused(kernel):
    reply = kernel.run("%%on_all_ranks\ndist.all_reduce(torch.ones(rank + 1))")
    assert reply.ename == "RankError" and "rank 0 calls all_reduce(SUM, float32[1]); rank 1 calls all_reduce(SUM, " in (
        reply.evalue
    )
    assert _sum(kernel) == "[0-1] sum 2\n"


def test_what_differs_between_hosts_is_found(kernel):
    kernel.run("%%on_all_ranks\nmodel = torch.nn.Linear(4, 1)\nwith torch.no_grad(): model.weight.fill_(1 + rank)")
    kernel.run("%%on_all_ranks\nwith torch.no_grad(): model.bias.zero_()")
    said = kernel.run("%ddp_check model").stdout
    assert "\n  model.weight: rank 0 and rank 1 differ by up to 1 (relative 0.5)\n" in said, said


def test_the_status_names_the_hosts(kernel):
    rows = kernel.run("%ddp_status").stdout.splitlines()
    assert [re.split("  +", row)[i] for row in rows[1:3] for i in (0, 1, 5)] == ["0", "a", "idle", "1", "b", "idle"]


def test_the_status_shows_the_error_of_a_remote_clock(has_its_own_clock, kernel):
    [line] = [row for row in kernel.run("%ddp_status").stdout.splitlines() if row.startswith("clocks")]
    known = re.fullmatch(r"clocks are known: b to ±([\d.]+) ([µm])s", line)
    assert known is not None and 0 < float(known[1]) * {"µ": 1e-3, "m": 1}[known[2]] < 20, line


# ---- what was recorded, by clocks that differ

CLOCKS = """
import ddp_notebook
clock = ddp_notebook.current().recording.clock
print(*(value for rank in (0, 1) for value in (clock.offset_ns(rank), clock.error_ns(rank))))
"""


def test_clocks_are_compared_and_the_bound_is_shown(has_its_own_clock, kernel, tmp_path):
    here_ns, here_error_ns, there_ns, there_error_ns = map(int, kernel.run(CLOCKS).stdout.split())
    assert (here_ns, here_error_ns) == (0, 0), "it has this machine's"
    assert 0 < there_error_ns < 20e6 and abs(there_ns - AHEAD_S * 10**9) <= there_error_ns

    assert kernel.run(STEPS).status == "ok"
    report = kernel.run("%ddp_report").stdout
    assert re.search(r"\nThe clocks of the hosts agree to within [\d.]+ [µm]s: shorter waits are not reported", report)
    # On a busy machine the report first states that ranks have no core.
    says = r"\n(\d+ % of the step waits for rank 1 on b, |On average, a rank had no free core )"
    assert re.search(says, report), "the report names the host with the later clock"

    path = tmp_path / "trace.json"
    assert kernel.run(f"%ddp_trace {path}").status == "ok"
    trace = json.loads(path.read_text())
    error_us = trace["otherData"]["clock_error_us"]
    assert error_us["0"] == 0 < error_us["1"]
    labels = {e["pid"]: e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"}
    assert list(labels) == [1] and re.fullmatch(r"clock ±[\d.]+ [µm]s", labels[1])
    ends_us = {
        rank: max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank)
        for rank in (0, 1)
    }
    assert abs(ends_us[0] - ends_us[1]) < 1e6, "on one clock: theirs are 1000 s apart"


@pytest.mark.long
def test_a_monitor_shows_both_and_a_picture_stays(browser):
    browser.messages.clear()
    browser.run("%ddp_monitor")
    [monitor] = browser.monitors()
    browser.run(TRAINS)
    metrics = [row for header, data in browser.told(monitor) for row in unpack(header, data).get("metric", ())]
    assert {int(row["rank"]) for row in metrics} == {0, 1}
    browser.messages.clear()
    browser.run("%ddp_monitor")
    [stays, *_] = [m["content"]["data"] for m in browser.messages if m["msg_type"] == "update_display_data"]
    assert "image/png" in stays and "2 ranks, " in stays["text/plain"]


@pytest.mark.long
def test_a_lesson_runs_on_them(kernel):
    kernel.run("from ddp_notebook import lessons\nlesson = lessons.collective(inputs={0: [1, 2], 1: [3, 4]})")
    reply = kernel.run("print({rank: list(map(float, v)) for rank, v in lesson.run().items()}, lesson.agrees)")
    assert reply.stdout == "{0: [4.0, 6.0], 1: [4.0, 6.0]} True\n", reply


# ---- ranks end


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_ends_the_other_host_s_wait(kernel, rank):
    reply = kernel.run(f"%%on_all_ranks\nif rank == {rank}: raise ValueError('bad batch')\ndist.barrier()")
    assert reply.ename == "RankError" and f"ValueError: bad batch (rank {rank})" in reply.evalue
    assert _sum(kernel) == "[0-1] sum 2\n"


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_replaced_with_the_variables_of_the_other_host(kernel, rank):
    kernel.run("%%on_all_ranks\nkept = rank + 40")
    reply = kernel.run(f"%%on_all_ranks\nimport os\nif rank == {rank}: os._exit(3)\ndist.barrier()")
    assert reply.ename == "RankDiedError" and f"exited with status 3 (rank {rank})" in reply.evalue
    assert f"variables of rank {1 - rank} copied to rank {rank}" in kernel.run(f"%ddp_heal --from {1 - rank}").stdout
    assert kernel.run("%%on_all_ranks\nkept").stdout == f"[0-1] {41 - rank}\n" and _sum(kernel) == "[0-1] sum 2\n"


@pytest.mark.long
def test_a_rank_that_goes_to_another_host_has_the_clock_of_that(has_its_own_clock, network, kernel):
    """The last test: "b" is lost."""
    made, _ = network
    made.kill("b")
    reply = kernel.run("%%on_all_ranks\ndist.barrier()")
    assert "b was lost: " in reply.evalue + reply.stderr, reply
    assert "rank 1 is on a now" in kernel.run("%ddp_heal").stdout
    assert _sum(kernel) == "[0-1] sum 2\n"
    deadline = time.monotonic() + 5
    while (clocks := kernel.run(CLOCKS).stdout) != "0 0 0 0\n":
        assert time.monotonic() < deadline, clocks
