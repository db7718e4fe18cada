"""After an ended or failed cell, the group forms again, and objects that hold a group keep working."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from ddp_notebook.errors import RankError
from ddp_notebook.launch import forming
from ddp_notebook.messages.encoding import Message
from ddp_notebook.run.groups.recovery import are_in_step
from ddp_notebook.wire.signals import RELEASE
from tests.conftest import sockets_of, wait_until

DEADLOCK = "dist.recv(torch.ones(1), (rank + 1) % world_size)"
SUM = "x = torch.ones(1); dist.all_reduce(x); int(x)"


def press_stop(session, after_s: float = 0.5) -> None:
    """Press stop half a second after the start of the next cell: a garbage collection before it could take longer."""

    def press() -> None:
        wait_until(lambda: session._cells.watched is not None, 20)
        time.sleep(after_s)  # time for the ranks to reach the intended call
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


def stop_in(session, code: str) -> str:
    """Return the message about a stopped cell."""
    press_stop(session)
    with pytest.raises(KeyboardInterrupt) as caught:
        session.run(code)
    return str(caught.value)


def results(session, code: str) -> list[str | None]:
    result = session.run(code, timeout_s=20)
    return [result[rank].result for rank in result.ranks]


# ---- what goes on


@pytest.mark.long
def test_a_wait_may_last_longer_than_the_forming_of_a_group(make_session_alone, monkeypatch):
    """A group and the guard form with a short timeout, and then wait as long as torch.

    Runs before the first test that uses the module's session.
    """
    monkeypatch.setattr(forming, "_FORM_TIMEOUT_S", 2.0)
    waits = ["dist.send(x, 0) if rank else dist.recv(x, 1)", "dist.all_reduce(x)", "dist.barrier()"]
    session = make_session_alone(2)
    for again in (False, True):
        if again:
            session.ranks.reform()
        for wait in waits:
            session.run(f"import time\nx = torch.ones(1)\nif rank: time.sleep(2.5)\n{wait}")
    session.stop()


def test_a_group_whose_operation_has_timed_out_forms_again(session):
    """Also if the cell has caught the error, and nothing else indicates a failure."""
    session.run("from datetime import timedelta; import time; short = dist.new_group(timeout=timedelta(seconds=1))")
    for code in ("{}", "try:\n    {}\nexcept RuntimeError: pass"):
        wait = code.format("time.sleep(2) if rank else dist.all_reduce(torch.ones(1), group=short)")
        epoch = session.ranks.epoch
        if "try" in code:
            session.run(wait)
        else:
            with pytest.raises(RankError, match="imed out"):
                session.run(wait)
        assert session.ranks.epoch == epoch + 1
        assert results(session, "x = torch.ones(1); dist.all_reduce(x, group=short); int(x)") == ["2", "2"]
    session.run("dist.destroy_process_group(short); del short")


def test_a_sub_group_in_a_variable(session):
    session.run("g = dist.new_group([0, 1], group_desc='pair')")
    epoch = session.ranks.epoch
    said = stop_in(session, "dist.all_reduce(torch.ones(3), group=g) if rank else dist.barrier()")
    assert "rank 0 waited in barrier #1 of group default (cell line 1)" in said
    assert "rank 1 waited in all_reduce #1 of group pair (float32[3], cell line 1)" in said
    assert session.ranks.epoch == epoch + 1
    assert results(session, "x = torch.ones(1); dist.all_reduce(x, group=g); dist.barrier(g); int(x)") == ["2", "2"]


LAZY = """
import os
from pathlib import Path
def slack_ns(thread):
    try:
        return Path(f"/proc/{thread}/timerslack_ns").read_text().strip()
    except PermissionError:  # of other threads only with CAP_SYS_NICE
        return "not told"
def loops():
    for thread in os.listdir("/proc/self/task"):
        try:
            if Path(f"/proc/{thread}/comm").read_text().startswith(("gloo_", "pt_gloo")):
                yield slack_ns(thread)
        except FileNotFoundError:
            pass  # one of an earlier group, which has just been freed
g = dist.new_group()
found = list(loops())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/timerslack_ns"), reason="no timers that may be late")
def test_only_threads_of_idle_groups_have_a_large_timer_slack(session):
    """Otherwise gloo's threads use two thirds of the CPU time of an idle rank."""
    stop_in(session, DEADLOCK)  # the default group was formed again
    session.run(LAZY)
    usual = Path("/proc/self/timerslack_ns").read_text().strip()
    assert results(session, "slack_ns(os.getpid())") == [repr(usual)] * 2
    assert results(session, "len(found) >= 2") == ["True"] * 2
    told = results(session, "set(found)")
    assert told in (["{'20000000'}"] * 2, ["{'not told'}"] * 2)


def test_groups_that_were_destroyed_are_freed_in_a_thread(session):
    """The thread waits for gloo's threads, once for each connection."""
    session.run(
        "import threading, weakref\nfreed = []\n"
        "def note(): freed.append(threading.current_thread().name)\n"
        "for _ in range(6):\n"
        "    g = dist.new_group()\n    weakref.finalize(g, note)\n    dist.destroy_process_group(g)\n    del g"
    )
    wait_until(lambda: results(session, "len(freed) >= 2") == ["True"] * 2, what="two are freed")
    assert results(session, "set(freed)") == ["{'ddp-free'}"] * 2


def test_new_groups_form_if_ranks_made_unequal_numbers_of_groups(session):
    """torch numbers groups on each rank separately, and ranks connect by this number."""
    with pytest.raises(RankError, match="not here"):
        session.run("if rank: raise ValueError('not here')\nmine = dist.new_group([0])")
    assert results(session, "g = dist.new_group([0, 1]); x = torch.ones(1); dist.all_reduce(x, group=g); int(x)") == [
        "2",
        "2",
    ]


def test_groups_made_by_members_form_on_ranks_in_unequal_groups(session):
    """torch names them after all groups of a rank. Also after a destroyed group, and after forming again."""
    make = (
        "local = dist.new_group([0, 1], use_local_synchronization=True)\n"
        "x = torch.ones(1); dist.all_reduce(x, group=local)"
    )
    session.run("mine = dist.new_group([0])")
    assert results(session, f"{make}; int(x)") == ["2", "2"]
    session.run("alone = dist.new_group([1], use_local_synchronization=True)", timeout_s=20)
    assert results(session, f"first = local\n{make}; int(x) if local is not first else 0") == ["2", "2"]
    session.run("dist.destroy_process_group(local)")
    assert results(session, f"{make}; int(x)") == ["2", "2"]
    stop_in(session, DEADLOCK)
    assert results(session, "x = torch.ones(1); dist.all_reduce(x, group=local); int(x)") == ["2", "2"]
    session.run("mine = dist.new_group([0])")
    assert results(session, f"{make}; int(x)") == ["2", "2"]


def test_a_group_that_waits_for_a_rank_that_makes_another_one(session):
    """Both are the first group after the default one, so rank 1 finds an address of rank 0 and waits for its
    connection."""
    stop_in(session, "if rank == 0: mine = dist.new_group([0])\ng = dist.new_group([0, 1])")
    assert results(session, "g = dist.new_group([0, 1]); x = torch.ones(1); dist.all_reduce(x, group=g); int(x)") == [
        "2",
        "2",
    ]


def test_a_new_group_is_nothing_to_the_notebook(session, monkeypatch):
    """Each rank knows its own connections. Messages about them would grow with the square of the ranks."""
    endpoint = session._cluster._endpoint
    receive, send = endpoint._receive, endpoint.send
    told: list[Message] = []

    def on_message(peer: str, epoch: int, message: Message) -> None:
        told.append(message)
        receive(peer, epoch, message)

    def tell(message: Message, peer: str) -> None:
        told.append(message)
        send(message, peer)

    monkeypatch.setattr(endpoint, "_receive", on_message)
    monkeypatch.setattr(endpoint, "send", tell)
    session.run("groups = [dist.new_group([0, 1]) for _ in range(3)]")
    session.run("print('said'); display('shown')")
    kinds = {type(message).__name__ for message in told}
    assert "Display" in kinds
    assert kinds <= {"Display", "CellDone", "Recorded", "ClockProbe", "ClockReply", "Probe", "Taken", "Vitals"}


def test_where_the_kernel_does_not_list_what_an_epoll_holds(session):
    """Then each rank cuts the connections that others have opened."""
    session.run(
        "from ddp_notebook.rank.group.connections import sockets\nloops, sockets._loops = sockets._loops, lambda: []\n"
        "g = dist.new_group([0, 1])"
    )
    assert "waited in recv" in stop_in(session, DEADLOCK)
    stop_in(session, "dist.all_reduce(torch.ones(3), group=g) if rank else dist.barrier()")
    stop_in(session, "if rank == 0: mine = dist.new_group([0])\nh = dist.new_group([0, 1])")
    session.run("sockets._loops = loops")
    assert results(session, SUM) == ["2", "2"]


MODEL = (
    "torch.manual_seed(0)\n"
    "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))\n"
    "model = torch.nn.parallel.DistributedDataParallel(net)\n"
    "opt = torch.optim.Adam(model.parameters())\n"
    "def step():\n"
    "    opt.zero_grad()\n"
    "    model(torch.ones(2, 4) * (rank + 1)).sum().backward()\n"
    "    opt.step()\n"
    "step(); step()"
)


def test_a_model_in_ddp_goes_on_after_its_backward_was_cut(session):
    session.run(MODEL)
    said = stop_in(session, "if rank == 0: step()\nelse:\n    import time; time.sleep(60)")
    assert "rank 0 waited in all_reduce #" in said and "rank 1 was interrupted at cell line 3" in said
    session.run("for _ in range(3): step()", timeout_s=20)
    assert session.check("model").agrees


def test_a_comm_hook_of_the_users_stays(session):
    session.run(
        MODEL + "\nfrom torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "calls = []\n"
        "def hook(state, bucket):\n"
        "    calls.append(1)\n"
        "    return allreduce_hook(None, bucket)\n"
        "model.register_comm_hook(None, hook)"
    )
    stop_in(session, DEADLOCK)
    assert results(session, "calls.clear(); step(); len(calls) > 0") == ["True", "True"]


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 has it, and a line says so")
def test_fsdp_and_a_mesh_go_on(session):
    session.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor import distribute_tensor, Shard\n"
        "mesh = init_device_mesh('cpu', (world_size,))\n"
        "torch.manual_seed(0)\n"
        "stop_at = -1\n"
        "class Layer(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.number == stop_at and rank == 1: raise ValueError('here')\n"
        "        return super().forward(x)\n"
        "layers = [Layer(8, 8) for _ in range(3)]\n"
        "for number, layer in enumerate(layers): layer.number = number\n"
        "sharded = torch.nn.Sequential(*layers)\n"
        "for layer in [*layers, sharded]: fully_shard(layer, mesh=mesh)\n"
        "def step():\n"
        "    loss = sharded(torch.ones(2, 8)).sum(); loss.backward(); sharded.zero_grad()\n"
        "    return round(loss.item(), 4)\n"
        "first = step()\n"
        "table = distribute_tensor(torch.arange(8.), mesh, [Shard(0)])"
    )
    for at in (0, 2):
        with pytest.raises(RankError, match="here"):
            session.run(f"stop_at = {at}\nstep()", timeout_s=20)
        assert results(session, "stop_at = -1\nstep() == first == step()") == ["True", "True"]
    assert results(session, "table.full_tensor().sum().item(), mesh.get_group().size()") == ["(28.0, 2)"] * 2


def test_a_wait_at_a_store(session):
    said = stop_in(session, "dist.distributed_c10d._get_default_store().wait(['never set'])")
    assert "ranks 0,1 were interrupted at cell line 1" in said
    assert results(session, SUM) == ["2", "2"]


def test_the_timeouts_stay(session):
    stop_in(session, DEADLOCK)
    session.run(SUM)
    assert results(session, "dist.distributed_c10d._get_default_store().timeout.total_seconds()") == ["1800.0"] * 2
    timeouts = "from ddp_notebook.rank.group.calls import timeout_of\ntimeout_of(dist.group.WORLD).total_seconds()"
    session.run("from datetime import timedelta\ndist.group.WORLD.set_timeout(timedelta(seconds=33))")
    assert results(session, timeouts) == ["33.0"] * 2, "of the connections that there are now"
    session.run("dist.group.WORLD.set_timeout(timedelta(seconds=1800))")


def test_a_group_that_a_rank_has_destroyed_says_so_on_use(session):
    session.run("g = dist.new_group([0, 1])")
    with pytest.raises(RankError, match="ends here"):
        session.run(
            "if rank == 0:\n    dist.destroy_process_group(g)\n    raise ValueError('ends here')\ndist.barrier()"
        )
    with pytest.raises(RankError, match=r"does not exist on rank 0 and can no longer be used; make it again on all"):
        session.run("if rank == 1: dist.barrier(g)")
    assert results(session, SUM) == ["2", "2"]


def test_the_users_own_except_does_not_keep_a_cell(session):
    said = stop_in(session, "while True:\n    try: " + DEADLOCK + "\n    except Exception: pass")
    assert "waited in recv #1" in said
    assert results(session, SUM) == ["2", "2"]


def test_a_handler_of_the_users_does_not_keep_a_cell(session):
    stop_in(session, "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + DEADLOCK)
    assert results(session, SUM) == ["2", "2"]


HANDLES = """
import signal
count = 0
def handler(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, handler)
until = time.monotonic() + 5
while not count and time.monotonic() < until: pass
until = time.monotonic() + 1
while time.monotonic() < until: pass
"""
AWAITS = """
import asyncio, signal
heard = asyncio.Event()
asyncio.get_running_loop().add_signal_handler(signal.SIGINT, heard.set)
await asyncio.wait_for(heard.wait(), 5)
asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
"""


def test_a_handler_of_the_users_gets_an_interrupt_once(session):
    press_stop(session)
    with contextlib.suppress(KeyboardInterrupt):
        session.run(f"import time\n{HANDLES}")
    assert session["count"] == {0: 1, 1: 1}


def test_a_handler_of_asyncio_gets_it(session):
    press_stop(session)
    with contextlib.suppress(KeyboardInterrupt):
        session.run(AWAITS)
    assert results(session, "heard.is_set()") == ["True", "True"]


# ---- what is not done


def test_a_failure_on_all_ranks_alike_leaves_the_group_as_it_is(session):
    names = ("model", "net", "opt", "sharded", "layers", "layer", "step")
    session.run(f"for name in {names}: globals().pop(name, None)\nimport gc; gc.collect()")
    epoch = session.ranks.epoch
    for code in ("1 / 0", SUM + "\n1 / 0", "w = dist.all_reduce(torch.ones(1), async_op=True); w.wait(); 1 / 0"):
        with pytest.raises(RankError):
            session.run(code)
    # after sharding a class of modules, an unfinished forward is indistinguishable from none
    assert session.ranks.epoch - epoch in (0, 2)
    assert results(session, SUM) == ["2", "2"]


def test_a_warning_lists_ranks_with_different_optimizer_steps(session, capsys):
    with pytest.raises(RankError, match="in between"):
        session.run(
            "p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=0.1); p.grad = torch.ones(1)\n"
            "o.step()\n"
            "if rank == 1: raise ValueError('in between')\n"
            "o.step()"
        )
    assert "optimizer steps in this cell: 2 on rank 0, 1 on rank 1. Parameters may differ now: %ddp_check" in (
        capsys.readouterr().err
    )


def state(collective=0, sent=None, recv=0, **more):
    counts = {"0": {"collective": collective, "send": 0, "recv": recv, "sent": sent or {}}}
    known = {"made": 1, "is_cut": False, "is_busy": False, "has_communicated": True, "has_models": False, "steps": 0}
    return {"counts": counts, **known, **more}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({0: state(3), 1: state(3)}, True),
        ({0: state(3), 1: state(2)}, False),
        ({0: state(sent={"1": 2}), 1: state(recv=2)}, True),
        ({0: state(sent={"1": 2}), 1: state(recv=1)}, False),
        ({0: state(), 1: state(recv=1)}, False),
        ({0: state(made=2), 1: state()}, False),
        ({0: state(is_cut=True), 1: state()}, False),
        ({0: state(is_busy=True), 1: state()}, False),
        ({0: state(has_models=True), 1: state()}, False),
        ({0: state(3, has_communicated=False), 1: state(2, has_communicated=False)}, True),
    ],
)
def test_whether_ranks_are_in_step(states, expected):
    assert are_in_step(states) is expected


def test_a_late_release_does_not_affect_the_next_cell(session):
    """The thread that waits for the signal may get the interpreter only during a later cell."""
    future = session.submit("import time\ntime.sleep(1)\n" + SUM)
    wait_until(lambda: all("in a cell" in row.state for row in session.status().rows))
    session._cluster.signal([0, 1], RELEASE, value=1)  # the number of a cell that ended long ago
    assert [future.result(20)[rank].result for rank in (0, 1)] == ["2", "2"]


# ---- leftovers


def test_threads_that_make_groups_end_with_a_stopped_cell(session):
    stop_in(
        session,
        "import threading\n"
        "make = {'target': dist.new_group, 'args': ([0, 1],), 'daemon': True}\n"
        "threads = [threading.Thread(**make) for _ in range(2 * (rank == 0))]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n"
        "threading.Event().wait()",
    )
    assert results(session, "for one in threads: one.join(5)\nsum(one.is_alive() for one in threads)") == ["0", "0"]
    assert results(session, "g = dist.new_group([0, 1]); x = torch.ones(1); dist.all_reduce(x, group=g); int(x)") == [
        "2",
        "2",
    ]


GROUPS = """
for _ in range(6):
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=pair)
    dist.destroy_process_group(pair)
"""


def test_connections_of_reformed_and_destroyed_groups_are_closed(make_session_alone):
    """The last test: it replaces the module's session."""
    session = make_session_alone(2)

    def sockets() -> list[int]:
        return [sockets_of(pid) for pid in session.ranks.pids()]

    for _ in range(4):
        session.ranks.reform()
    before = sockets()
    for _ in range(6):
        session.ranks.reform()
    wait_until(lambda: all(map(int.__le__, sockets(), before)), what=f"{sockets()} instead of {before} sockets")

    session.run(GROUPS)
    before = sockets()
    session.run(GROUPS)
    what = f"{sockets()} instead of {before} sockets after groups of the user's"
    wait_until(lambda: all(map(int.__le__, sockets(), before)), what=what)  # the oldest are freed in a thread
