"""A dead rank is replaced in place; the others never restart."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from typing import Any

import psutil
import pytest

from ddp_notebook.errors import (
    CellTimeoutError,
    DDPNotebookError,
    RankDiedError,
    RankError,
    SessionBrokenError,
    StartError,
    UsageError,
)
from ddp_notebook.launch import forming
from ddp_notebook.launch.process import RANK, Process, Processes
from tests.conftest import wait_until

SUM = "x = torch.ones(1); dist.all_reduce(x); int(x)"
TRAIN = (
    "torch.manual_seed(0)\n"
    "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))\n"
    "model = torch.nn.parallel.DistributedDataParallel(net)\n"
    "opt = torch.optim.Adam(model.parameters())\n"
    "def step():\n"
    "    opt.zero_grad()\n"
    "    model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()\n"
    "    opt.step()\n"
    "for _ in range(3): step()\n"
    "lock = __import__('threading').Lock()"
)


@pytest.fixture(scope="module")
def session(waiting_host_server):
    from ddp_notebook import api

    waiting_host_server()
    with api.start(3) as running:
        yield running


def kill(session, rank: int) -> None:
    """Kill a rank between two cells."""
    os.kill(session.ranks.pids()[rank], signal.SIGKILL)
    wait_until(lambda: "died" in repr(session), what="the death was not noticed")


def test_a_rank_that_dies_in_a_cell(session, capsys):
    session.run("kept = rank * 10")
    others = [pid for rank, pid in enumerate(session.ranks.pids()) if rank != 1]
    with pytest.raises(RankDiedError, match=r"^exited with status 3 \(rank 1\)") as caught:
        session.run("import os\nif rank == 1: os._exit(3)\ndist.all_reduce(torch.ones(8))")
    acts = "\n".join(caught.value.others)  # a rank that reaches it after the death of the other does not start it
    assert re.fullmatch(
        r"(ranks? [0,2]+ waited in all_reduce #1 of group default \(float32\[8\], cell line 3\)\n?"
        r"|ranks? [0,2]+ (was|were) stopped at cell line 3(, in all_reduce)?\n?)+",
        acts,
    ), acts
    assert "rank 1 died. %ddp_heal replaces it" in capsys.readouterr().err

    result = session.run("kept")  # other cells run on the survivors
    assert {rank: result[rank].result for rank in result.ranks} == {0: "0", 2: "20"}
    assert "rank 1 died: this cell runs on ranks 0,2. %ddp_heal" in capsys.readouterr().err
    with pytest.raises(RankError, match=r"rank 1 died \(exited with status 3\); %ddp_heal replaces it, and until then"):
        session.run("dist.barrier()")
    assert "until then cells run" not in capsys.readouterr().err  # its first line contained this already
    with pytest.raises(SessionBrokenError, match=r"rank 1 died: exited with status 3(.|\n)*%ddp_heal"):
        session.run("1", ranks=1)

    assert session.ranks.heal() == [
        "rank 1 was replaced and begins without variables: run the cells that define them again, or copy them with "
        "%ddp_heal --from RANK"
    ]
    assert [pid for rank, pid in enumerate(session.ranks.pids()) if rank != 1] == others
    result = session.run(SUM + ", 'kept' in globals(), (rank, local_rank, world_size)")
    assert [result[r].result for r in range(3)] == [f"(3, {r != 1}, ({r}, {r}, 3))" for r in range(3)]


def test_the_group_of_a_mesh_is_made_again_with_its_mesh(session):
    imported = "from torch.distributed.device_mesh import DeviceMesh"
    session.run(
        f"{imported}\nnamed, plain = DeviceMesh('cpu', [0, 1], mesh_dim_names=('b',)), DeviceMesh('cpu', [0, 1])"
    )
    kill(session, 1)
    notes = "\n".join(session.ranks.heal())
    again = "make its mesh again on all ranks: mesh = init_device_mesh(...), and take mesh.get_group({}) of the new one"
    assert again.format('"b"') in notes and again.format("0") in notes, notes
    with pytest.raises(RankError, match=re.escape(again.format('"b"'))):
        session.run("if rank == 0: dist.barrier(named.get_group('b'))")
    session.run(f"{imported}\nplain = DeviceMesh('cpu', [0, 1])\nif rank < 2: dist.barrier(plain.get_group(0))")


def test_that_an_idle_rank_has_died_is_told_once(session, capsys):
    kill(session, 1)
    for is_told in (True, False):
        with pytest.raises(RankError, match="ZeroDivisionError"):
            session.run("1 / 0", ranks=0)
        assert ("rank 1 died. %ddp_heal replaces it" in capsys.readouterr().err) == is_told
    session.ranks.heal()
    kill(session, 1)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        session.run("1 / 0", ranks=0)
    assert "rank 1 died. %ddp_heal replaces it" in capsys.readouterr().err, "another one"
    session.ranks.heal()


def test_what_each_rank_has_of_its_own_is_named(session):
    session.run("%reset -f")
    session.run("mine, path, same = rank * 10, f'log-{rank}', [1, 2]")
    kill(session, 1)
    said = session.ranks.heal(from_rank=2)
    assert said[1].endswith("copied to rank 1: mine, path, same")
    assert said[2:] == [
        "mine, path differed between ranks, and rank 1 has the value of rank 2 now: set it again on rank 1"
    ]
    kill(session, 1)
    assert session.ranks.heal(2, ["mine"]) == ["rank 1 was replaced", "1 variable of rank 2 copied to rank 1: mine"]
    kill(session, 0)
    session.run("path = 'log'", ranks=2)
    assert session.ranks.heal(from_rank=2)[1:] == ["3 variables of rank 2 copied to rank 0: mine, path, same"], (
        "mine is equal"
    )


def test_a_model_and_its_optimizer_come_from_another_rank(session):
    session.run(TRAIN)
    kill(session, 0)
    said = session.ranks.heal(from_rank=2)
    assert said[0] == "rank 0 was replaced"
    assert said[1].endswith("variables of rank 2 copied to rank 0: kept, x, net, model, opt, step, os") or (
        "variables of rank 2 copied to rank 0" in said[1]
    )
    assert any(line.startswith("lock was not copied: a lock cannot be pickled") for line in said)
    session.run("for _ in range(3): step()", timeout_s=30)
    assert session.check("net", "opt").agrees
    assert session.run("opt.param_groups[0]['params'][0] is net[0].weight")[0].result == "True"


def test_samplers_of_another_rank_share_out_data_for_the_new_one(session):
    session.run(
        "from torch.utils.data import DataLoader, DistributedSampler\n"
        "sampler = DistributedSampler(range(60), seed=3); sampler.set_epoch(2)\n"
        "loader = DataLoader(range(60), batch_size=5, sampler=sampler)"
    )
    items = "sorted(int(item) for batch in loader for item in batch)"
    before = [session.run(items)[rank].result for rank in range(3)]
    kill(session, 1)
    session.ranks.heal()
    session.run(
        "from torch.utils.data import DistributedSampler\nown = DistributedSampler(range(60), rank=0, num_replicas=3)",
        ranks=1,
    )
    session.ranks.heal(from_rank=0)
    assert [session.run(items)[rank].result for rank in range(3)] == before
    assert session.run("loader.sampler is sampler, sampler.rank")[1].result == "(True, 1)"
    assert session.run("own.rank", ranks=1)[1].result == "0", "the new rank has made it, and means it"
    session.run("del own", ranks=1)


def test_samplers_of_some_ranks_are_left_and_told(session, capsys):
    session.run(
        "from torch.utils.data import DistributedSampler\n"
        "del sampler, loader\nhalf = DistributedSampler(range(60), rank=rank % 2, num_replicas=2)"
    )
    kill(session, 1)
    session.ranks.heal(0, ["half"])
    session.run("pass")
    assert "1 DistributedSampler is not for all earlier ranks, and not changed" in capsys.readouterr().err
    session.run("del half")


def test_functions_of_another_rank_see_what_later_cells_change(session):
    session.run("factor = 2\ndef times(x): return factor * x, rank")
    kill(session, 1)
    session.ranks.heal(from_rank=0)
    session.run("factor = 3")
    result = session.run("times(5)")
    assert [result[rank].result for rank in range(3)] == ["(15, 0)", "(15, 1)", "(15, 2)"]


def test_named_variables_only_and_afterwards(session):
    session.run("a, b = 1, 2")
    kill(session, 2)
    session.ranks.heal()
    with pytest.raises(UsageError, match="--from RANK must come before"):
        session.ranks.heal(names=["a"])
    with pytest.raises(UsageError, match="rank 2 is new and has no variables"):
        session.ranks.heal(2)
    with pytest.raises(UsageError, match="rank 7 does not exist"):
        session.ranks.heal(7)
    with pytest.raises(DDPNotebookError, match="rank 0: undefined variable 'nothing'"):
        session.ranks.heal(0, ["nothing"])
    assert session.ranks.heal(0, ["a"]) == ["1 variable of rank 0 copied to rank 2: a"]
    result = session.run("[name for name in ('a', 'b') if name in globals()]")
    assert result[2].result == "['a']" and result[0].result == "['a', 'b']"


def test_heal_refuses_an_unknown_name_before_any_change(session):
    kill(session, 1)
    with pytest.raises(DDPNotebookError, match=r"^rank 0: undefined variable 'nosuch'$"):
        session.ranks.heal(0, ["nosuch"])
    assert "rank 1 died" in repr(session) or "1 died" in repr(session)
    assert session.ranks.heal()[0].startswith("rank 1 was replaced")


def test_a_sub_group_with_the_new_rank_says_how_to_make_it_again(session):
    session.run("with_2 = dist.new_group([0, 2]); without = dist.new_group([0, 1])")
    kill(session, 2)
    said = session.ranks.heal()
    assert any("group [0,2] of ranks 0,2 does not exist on rank 2" in line for line in said)
    result = session.run(
        "x = torch.ones(1)\nif rank < 2: dist.all_reduce(x, group=without); print(int(x))", timeout_s=20
    )
    assert result[1].stdout == "2\n"
    with pytest.raises(RankError, match=r"make it again on all ranks: dist.new_group\(\[0, 2\]\)"):
        session.run("if rank == 0: dist.barrier(with_2)")
    code = "with_2 = dist.new_group([0, 2]); x = torch.ones(1)\nif rank != 1: dist.all_reduce(x, group=with_2); int(x)"
    assert session.run(f"{code}\nx", timeout_s=20)[2].result == "tensor([2.])"


def test_ipyparallels_client_knows_the_new_rank(session):
    assert session.client.ids == [0, 1, 2]
    kill(session, 1)
    session.ranks.heal()
    pids = session.client[:].apply_sync(os.getpid)
    assert sorted(pids) == sorted(session.ranks.pids())
    assert session.client[1].apply_sync(os.getpid) == session.ranks.pids()[1]
    session._parts.client.close()  # its sockets belong to this process


def test_a_cell_that_waited_for_its_turn_while_a_rank_died(session):
    first = session.submit("import os\nif rank == 1: os._exit(3)")
    second = session.submit("rank")
    with pytest.raises(RankDiedError):
        first.result(20)
    with contextlib.suppress(RankDiedError):
        assert second.result(20).ranks == [0, 2]
    session.ranks.heal()


def test_a_healing_that_fails_can_be_tried_again(session, monkeypatch):
    from ddp_notebook.launch.engines import Engines

    kill(session, 1)
    call = Engines.call

    def call_and_kill(engines, ranks):
        call(engines, ranks)
        os.kill(session._cluster.process(1).pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(Engines, "call", call_and_kill)
        with pytest.raises(StartError, match="no new process for rank 1"):
            session.ranks.heal()
    assert session.ranks.heal()[0].startswith("rank 1 was replaced")
    assert session.run(SUM, timeout_s=20)[1].result == "3"


def _begin_call(session, begun):
    """Start a call of `session.client` that occupies the main thread of rank 0 for 30 s."""
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(30)"
    call = session.client[0].execute(code, block=False)
    wait_until(begun.exists)
    return call


def test_heal_names_a_client_call_that_blocks_it(session, tmp_path):
    call = _begin_call(session, tmp_path / "begun")
    kill(session, 1)
    assert session.status().rows[0].state.startswith("in a call of session.client for")
    began, epoch = time.monotonic(), session.ranks.epoch
    with pytest.raises(StartError, match=r"^rank 0 is in a call of session.client, and .*%ddp_interrupt"):
        session.ranks.heal()
    assert session.ranks.epoch == epoch, "a group was to form that rank 0 cannot join"
    assert time.monotonic() - began < forming._FORM_TIMEOUT_S

    assert session.interrupt() == ["a call of session.client was ended on rank 0; all variables are kept"]
    assert session.ranks.heal()[0].startswith("rank 1 was replaced")
    assert not call.successful()
    assert session.run(SUM, timeout_s=20)[1].result == "3"
    session._parts.client.close()


def test_a_late_answer_names_the_call_of_the_client(session, capsys, tmp_path):
    _begin_call(session, tmp_path / "begun")
    for seconds in (2.0, 10.0):
        session._parts._tell_who_is_slow(0, seconds, True)
    session.interrupt()
    session._parts.client.close()
    why = "it answers after its call of session.client"
    said = [f"rank 0 has not answered for {seconds} s: {why}" for seconds in (2, 10)]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("has_started", "remedy"),
    [(False, "give the start more time (--timeout, timeout_s)"), (True, "%ddp_interrupt ends a cell")],
)
def test_a_missing_rank_is_explained_at_the_start_and_later(has_started, remedy, monkeypatch):
    nothing: Any = None
    processes = Processes()
    for rank, said in enumerate(({"Formed"}, set[str]())):
        processes.by_rank[rank] = Process(number=rank, kind=RANK, host=nothing, rank=rank, said=said)
    processes.by_rank[0].lacks_others = True
    of_group = forming.Forming(processes, nothing, True, range(0), store_prefix="", guard=False)
    of_group.has_started = has_started
    monkeypatch.setattr(forming, "_REPORT_S", -1.0)
    with pytest.raises(StartError, match=r"^rank 1 did not join the group in time, probably because ") as raised:
        of_group._raise_absence("the group to form")
    assert remedy in str(raised.value) and ("--timeout" in str(raised.value)) != has_started


def test_the_rank_that_did_not_join_is_named_without_store_keys(session, monkeypatch, tmp_path):
    call = _begin_call(session, tmp_path / "begun")
    with monkeypatch.context() as patch:
        patch.setattr(forming, "_FORM_TIMEOUT_S", 1.0)
        patch.setattr(session._parts.cells.recovery, "check_calls", lambda *_: None)
        with pytest.raises(StartError, match=r"^rank 0 did not join the group in time, .*%ddp_interrupt") as raised:
            session.ranks.reform()
    assert "keys" not in str(raised.value) and "/" not in str(raised.value)
    session.interrupt()
    call.wait(30)
    assert not call.successful()
    session.ranks.reform()
    assert session.run(SUM, timeout_s=20)[1].result == "3"
    session._parts.client.close()


def press_stop(after_s: float = 0.0) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


def press_after(patch, owner, name: str) -> None:
    """Press stop after this step."""
    step = getattr(owner, name)

    def step_and_press(*args, **kwargs):
        done = step(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return done

    patch.setattr(owner, name, step_and_press)


SLOW = """
class Slow:
    def __reduce__(self):
        import time
        time.sleep(0.6)
        return int, ()
slow, fine = Slow(), 1
"""


def test_a_press_of_stop_in_each_phase(session, monkeypatch, capsys):
    """One press ends it, no step is left unfinished, and a message lists the finished ones."""
    from ddp_notebook.launch import forming
    from ddp_notebook.launch.engines import Engines
    from ddp_notebook.launch.membership.members import Members
    from ddp_notebook.run.groups.recovery import Recovery

    session.run(SLOW, ranks=0)
    kill(session, 1)
    others = [session.ranks.pids()[0], session.ranks.pids()[1]]
    for owner, step in ((Members, "_start_rank"), (Members, "call_to_form"), (Engines, "call")):
        with monkeypatch.context() as patch:
            patch.setattr(forming, "_FORM_TIMEOUT_S", 60.0)  # the others wait for the new process until the next call
            press_after(patch, owner, step)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt) as caught:
                session.ranks.heal()
        assert time.monotonic() - began < 10  # well within that
        assert str(caught.value) == "the healing was interrupted: rank 1 got no new process; %ddp_heal tries again"
        assert session.ranks.pids() == others and "rank 1 died" in repr(session)
    press_stop(0.2)
    with pytest.raises(KeyboardInterrupt, match=r"^the healing was interrupted: nothing was changed$"):
        session.ranks.heal(0, ["slow"])
    with monkeypatch.context() as patch:
        press_after(patch, Recovery, "heal")
        with pytest.raises(KeyboardInterrupt) as caught:
            session.ranks.heal(0, ["fine"])
    again = "not everything was copied, and %ddp_heal --from 0 copies it again"
    assert str(caught.value) == f"the healing was interrupted: rank 1 was replaced, {again}"
    assert not any("ddp_notebook" in line for line in caught.value._render_traceback_())  # type: ignore[attr-defined]
    assert session.ranks.heal(0, ["fine"]) == ["1 variable of rank 0 copied to rank 1: fine"]
    capsys.readouterr()
    assert session.run(SUM, timeout_s=20)[1].result == "3"
    assert "between cells" not in capsys.readouterr().out


def test_a_press_while_the_group_forms(session, monkeypatch):
    from ddp_notebook.launch.membership.members import Members

    with monkeypatch.context() as patch:
        press_after(patch, Members, "call_to_form")
        with pytest.raises(KeyboardInterrupt, match=r"^interrupted while the group was formed: the next cell forms"):
            session.ranks.reform()
        with pytest.raises(KeyboardInterrupt, match=r"^interrupted while the group was formed again: the cell was not"):
            session.run(SUM)
    assert session.run(SUM, timeout_s=20)[1].result == "3"


# Run a leftover thread of the previous Form while the new group is connecting, as can happen on a busy machine.
LATE_THREADS = """
import gc
from ddp_notebook.rank.group.connections.reconnect import Reconnection
from ddp_notebook.rank.process import Rank

[process] = [one for one in gc.get_objects() if type(one) is Rank]
over, renew = process.place, Reconnection.renew

def renew_late(self, place):
    late = threading.Thread(target=process._form, args=(over,))
    late.start()
    late.join(0.5)  # with the fault it cuts connections until this forming ends
    return renew(self, place)

import threading
Reconnection.renew = renew_late
"""


def test_a_late_thread_of_a_call_that_is_over_cuts_nothing(session):
    session.run(LATE_THREADS)
    try:
        session.ranks.reform()
    finally:
        session.run("Reconnection.renew = renew")
    assert session.run(SUM)[0].result == "3"


def test_a_copied_function_has_its_text(session):
    """In tracebacks, and for code that reads it."""
    session.run("def twice(x):\n    return 2 * x + offset\noffset = 1")
    session.run("def wait():\n    import time; time.sleep(60)")
    kill(session, 1)
    session.ranks.heal(0)
    read = "import inspect\ntext = inspect.getsource(twice), twice(rank)"
    session.run(read)
    assert session.pull("text") == {
        rank: ("def twice(x):\n    return 2 * x + offset\n", 2 * rank + 1) for rank in range(3)
    }
    with pytest.raises(RankError) as caught:
        session.run("twice(None)", ranks=1)
    assert "return" in (shown := "".join(caught.value.tracebacks[1])) and "offset" in shown, shown
    with pytest.raises(RankError) as caught:
        session.run("twice(None)")
    assert len({*map(tuple, caught.value.tracebacks.values())}) == 1, "the cell has one name on all ranks"
    with pytest.raises(CellTimeoutError, match=r"ranks 0-2: at .*line 2 in wait"):
        session.run("wait()", timeout_s=0.5)


def test_variables_that_fail_oddly_are_named(session):
    session.run("class Odd:\n    def __reduce_ex__(self, _): raise NotImplementedError\nodd, fine = Odd(), 1")
    kill(session, 2)
    said = session.ranks.heal(0)
    assert any(line.startswith("odd was not copied: a Odd cannot be pickled (NotImplementedError)") for line in said)


def test_nothing_to_heal(session):
    assert session.ranks.heal() == ["no rank has died"]


def test_nobody_to_copy_from_where_all_have_died(make_session_alone):
    session = make_session_alone(2)
    with pytest.raises(RankDiedError):
        session.run("import os; os._exit(1)")
    assert session.ranks.heal() == [
        "ranks 0,1 were replaced and begin without variables: run the cells that define them again"
    ]


def test_healing_by_itself(make_session_alone, capsys):
    """The last test: it replaces the module's session."""
    session = make_session_alone(2, heal=True)
    session.run("kept = 1")
    kill(session, 0)
    result = session.run(SUM)
    assert [result[rank].result for rank in (0, 1)] == ["2", "2"]
    assert "rank 0 was replaced and begins without variables" in capsys.readouterr().err
    with pytest.raises(RankDiedError):
        session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "rank 1 died. The next cell or %ddp_heal replaces it" in capsys.readouterr().err
    assert session.run(SUM)[1].result == "2"
    assert len(session.ranks.pids()) == 2 and all(psutil.pid_exists(pid) for pid in session.ranks.pids())
