"""`torch.distributed.rpc` on ranks, in cells that are run again."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError
from ddp_notebook.rank.remote_calls import Sent
from ddp_notebook.rank.rpc.failed_calls import LostWorkers
from ddp_notebook.rank.rpc.rpc_agent import Worker

DEFINITIONS = """
import os, time
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
def add(a, b): return a + b
def sleep(s): time.sleep(s)
def die(): os._exit(3)
class Counter:
    def __init__(self): self.count = 0
    def more(self): self.count += 1; return self.count
"""
INIT = "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\nother = f'worker{1 - rank}'\n"
CALL = "rpc.rpc_sync(other, add, args=(rank, 1))"


@pytest.fixture
def session(make_session):
    session = make_session(2)
    session.run(DEFINITIONS)
    return session


def said(session, code: str, **options: object) -> list[str]:
    """Return the printed text and the result of each rank."""
    result = session.run(code, **options)
    return [(result[rank].stdout + (result[rank].result or "")).strip() for rank in result.ranks]


def test_rpc_calls_functions_of_a_cell_on_another_rank(make_session):
    """The agents start twice at the session's store, and at an address that the cell sets in the environment or in the
    options. They listen on loopback only."""
    session = make_session(2)
    code = (
        "import os, psutil\nfrom torch.distributed import rpc\n"
        "class Twice:\n    def __init__(self, x): self.x = 2 * x\n"
        "def double(x): return Twice(x)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size, rpc_backend_options=options)\n"
        "answer = rpc.rpc_sync(f'worker{1 - rank}', double, args=(rank + 1,)).x\n"
        "me = psutil.Process()\nfound = getattr(me, 'net_connections', None) or me.connections  # of psutil 5\n"
        "listening = {c.laddr.ip for c in found() if c.status == 'LISTEN'}\n"
        "rpc.shutdown()\nanswer, listening - {'127.0.0.1'}"
    )
    own = "import os, socket\nbox = [None]\nif rank == 0:\n    s = socket.create_server(('127.0.0.1', 0))\n"
    own += "    box = [s.getsockname()[1]]; s.close()\ndist.broadcast_object_list(box, src=0)\n"
    options = "options = rpc.TensorPipeRpcBackendOptions(init_method=f'tcp://localhost:{box[0]}')\n"
    environment = "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(box[0]))\n"
    session.run("from torch.distributed import rpc; options = None")
    for before in ("", "", own + options, own + environment + "options = None\n"):
        result = session.run(before + code)
        assert [result[rank].result for rank in range(2)] == ["(2, set())", "(4, set())"]


def test_transports_of_the_options_count_and_else_nobody_polls(make_session):
    """Transports of an agent that runs already can be changed only in part."""
    definitions = (
        f"{DEFINITIONS}"
        "from pathlib import Path\n"
        "def polls(): return any('SHM' in one.read_text() for one in Path('/proc/self/task').glob('*/comm'))\n"
        "def init(**ways):\n"
        "    options = rpc.TensorPipeRpcBackendOptions(**ways)\n"
        "    rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2, rpc_backend_options=options)\n"
        "    rpc.rpc_sync(f'worker{1 - rank}', add, args=(torch.ones(2), 1)); rpc.shutdown()"
    )
    session = make_session(2)
    session.run(definitions)
    shared = "init(_transports=['shm', 'uv'], _channels=['basic']); polls()"
    (first, answer), _ = (told.splitlines() for told in said(session, shared))
    assert (first, answer) == ("init_rpc: 2 workers (worker0, worker1)", "True")
    assert said(session, shared) == [f"{first}\nTrue"] * 2
    as_before = f"{first}; transports and channels unchanged until the rank is started again"
    assert said(session, "init(_transports=['uv'])") == [as_before] * 2
    assert said(session, "init()") == [first] * 2

    session.stop()
    session = make_session(2)
    session.run(definitions)
    assert said(session, "init(); polls()") == [f"{first}\nFalse"] * 2


def test_references_gradients_and_names_last_from_cell_to_cell(session):
    """In plain torch the state of references is bound to the first agent of a process."""
    code = INIT + (
        "reference = rpc.remote(other, Counter)\n"
        "with dist_autograd.context() as context:\n"
        "    x = torch.ones(2, requires_grad=True)\n"
        "    dist_autograd.backward(context, [rpc.rpc_sync(other, torch.mul, args=(x, 3)).sum()])\n"
        "    gradient = dist_autograd.get_gradients(context)[x].tolist()\n"
        "print(reference.rpc_sync().more(), reference.to_here().count, gradient, reference.owner_name())\n"
        "its = rpc.get_worker_info(other)\nprint(rpc.get_worker_info().name, its.id, reference.owner() == its)"
    )
    line = "init_rpc: 2 workers (worker0, worker1)\n"
    for before in (line, line):
        assert said(session, code + "\nrpc.shutdown()") == [
            f"{before}1 1 [3.0, 3.0] worker{1 - rank}\nworker{rank} {1 - rank} True" for rank in range(2)
        ]
    assert (
        said(session, "rpc.init_rpc('ab'[rank], rank=1 - rank, world_size=2)\nrpc.get_worker_info('a')")
        == ["init_rpc: 2 workers (b, a)\nWorkerInfo(id=1, name=a)"] * 2
    )
    assert (
        said(session, "rpc.rpc_sync(rank, add, args=(1, 2)), rpc.rpc_sync('ab'[1 - rank], add, args=(1, 2))")
        == ["(3, 3)"] * 2
    )
    again = said(session, INIT + CALL)[1]
    over = "; RPC of an earlier cell without rpc.shutdown() has ended\n2"
    assert again == line.strip() + over, "a cell that failed is run again"


def test_some_ranks_may_be_all_workers(make_session):
    session = make_session(3)
    session.run(DEFINITIONS)
    code = "rpc.init_rpc(f'w{{rank}}', rank=rank{0}, world_size=2)\nrpc.rpc_sync({1}, add, args=(rank, 5))"
    for ranks, minus in ([0, 1], ""), ([1, 2], " - 1"), ([0, 1], ""):
        result = session.run(code.format(minus, f"1 - (rank{minus})") + "\n", ranks=ranks)
        assert [result[rank].result for rank in ranks] == [str(rank + 5) for rank in ranks]
        session.run("rpc.shutdown()", ranks=ranks)


@pytest.mark.parametrize(
    "wait", ["rpc.rpc_sync(other, sleep, args=(3,))", "rpc.remote(other, sleep, args=(3,)).to_here()"]
)
def test_a_stop_ends_a_wait_and_calls_work_at_once(session, wait):
    session.run(INIT)
    with pytest.raises(CellTimeoutError):
        session.run(f"if rank == 0: {wait}", timeout_s=0.3)
    assert said(session, CALL) == ["1", "2"]


def test_a_timeout_of_0_is_no_limit(session):
    options = "rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=0)"
    slow = "if rank: time.sleep(0.3)\n"
    code = f"{slow}rpc.init_rpc(f'w{{rank}}', rank=rank, world_size=2, {options})\n"
    call = "print(rpc.get_rpc_timeout(), rpc.rpc_sync(f'w{1 - rank}', add, args=(1, 2)))\nrpc.shutdown()"
    for _ in range(2):
        assert [one.splitlines()[-1] for one in said(session, code + call)] == ["0.0 3"] * 2


def test_what_not_all_do_ends_and_says_who_is_missing(session):
    with pytest.raises(CellTimeoutError):
        session.run("if rank: " + INIT, timeout_s=0.5)
    options = "rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.5)"
    with pytest.raises(RankError, match=r"of the 2 workers, rank 0 did not call it within 0.5 s"):
        session.run(f"if rank: rpc.init_rpc('a', rank=rank, world_size=2, {options})")
    assert said(session, INIT + CALL)[1].endswith("\n2")
    with pytest.raises(CellTimeoutError, match="waits for shutdown on worker0, "):
        session.run("if rank: rpc.shutdown()", timeout_s=0.8)


def test_a_shutdown_that_a_worker_does_not_join_names_it(session):
    session.run(INIT)
    with pytest.raises(RankError, match=r"shutdown: of the 2 workers, rank 1 did not call it within 0.2 s; each must"):
        session.run("if rank == 0: rpc.shutdown(timeout=0.2)")


def test_a_worker_that_dies_and_its_successor(session):
    session.run(INIT + "held = rpc.remote(other, Counter)\nheld.to_here()")
    with pytest.raises(
        (RankError, RankDiedError), match=r"worker1 \(rank 1\) ended before it answered die: run %ddp_h"
    ):
        session.run("if rank == 0: rpc.rpc_sync(other, die)")
    with pytest.raises(RankError, match=r"RankLostError: rank 1 died.*%ddp_heal replaces it"):
        session.run(INIT)
    session.ranks.heal()
    session.run(DEFINITIONS, ranks=[1])
    for _ in range(2):
        assert [one.splitlines()[-1] for one in said(session, INIT + CALL + "\n")] == ["1", "2"]
    for use in "held.to_here()", "held.rpc_sync().more()", "rpc.rpc_sync(other, add, args=(held, 1))":
        with pytest.raises(RankError, match=r"the value of this reference is lost, because worker1 \(rank 1\) has"):
            session.run(use, ranks=[0])


def test_a_worker_that_dies_while_the_other_waits_for_it(session):
    dies = "if rank:\n    import os, time\n    time.sleep(0.3)\n    os.kill(os.getpid(), 9)\n"
    for code in (dies + INIT, INIT + dies + "rpc.shutdown()"):
        with pytest.raises(RankDiedError) as died:
            session.run(code)
        result = died.value.result
        assert result is not None and "RankLostError: rank 1 died" in result[0].error
        session.ranks.heal()
        session.run(DEFINITIONS, ranks=[1])


def test_a_wait_for_a_late_worker_says_nothing_and_has_an_end(session):
    late = "time.sleep(rank)\n"
    result = session.run(late + INIT + late + "rpc.shutdown()")
    assert not any(result[rank].stderr for rank in result.ranks)
    options = "rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.501)"
    with pytest.raises(RankError, match=r"of the 2 workers, rank 0 did not call it within 0.501 s"):
        session.run(f"if rank: rpc.init_rpc('a', rank=rank, world_size=2, {options})", timeout_s=20)


def test_a_shutdown_ends_after_references_that_failed(session):
    """In this case torch raises in a callback, before its agent counts the call as finished."""
    session.run(INIT + "def which(): return 1")
    session.run("def which(): return 2", ranks=[0])
    with pytest.raises(RankError, match="rank 1 has another version of which than the caller"):
        session.run("if rank == 0: rpc.remote(other, which).to_here()", timeout_s=10)
    session.run("rpc.shutdown()", timeout_s=5)
    session.run(INIT + CALL)
    # The error if the callee ended before torch noted the reference.
    lost = r"reference is lost, because worker1 \(rank 1\)|worker1 \(rank 1\) ended before it answered die"
    with pytest.raises(RankError, match=lost):
        session.run("if rank == 0: rpc.remote(other, die).to_here()", timeout_s=10)
    session.ranks.heal()
    session.run(DEFINITIONS, ranks=[1])
    session.run(INIT + CALL)
    with pytest.raises(CellTimeoutError) as stopped:
        session.run("time.sleep(5)", timeout_s=0.6)
    assert "waits for" not in str(stopped.value)
    session.run("rpc.shutdown()", timeout_s=5)


def test_a_callee_that_ends_as_it_is_called_is_named():
    """torch's threads may find the loss first. Then the sending function raises their error."""
    losses = LostWorkers(lambda future: None)
    which = {"name": "worker1", "rank": 1, "here": 1, "number": 7}
    losses.learn([Worker(**which, device_count=0, device_maps={}, devices=[])])  # type: ignore[arg-type]
    call = Sent()
    call.function, call.worker = "die", 7
    cut = RuntimeError("EOF: end of file (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)")
    assert "worker1 (rank 1) ended before it answered die" in str(losses.explain_call(call, cut))
    assert losses.is_lost(7)
    assert losses.explain_call(call, RuntimeError("a value of the user's")) is None
    assert losses.explain_call(call, KeyboardInterrupt()) is None


def test_a_lost_reference_is_not_sent_to_others(make_session):
    """Otherwise the receiver waits without end until the owner knows of the reference."""
    session = make_session(3)
    session.run(DEFINITIONS)
    session.run(INIT.replace("1 - rank", "(rank + 1) % 3") + "held = rpc.remote(other, Counter)\nheld.to_here()")
    with pytest.raises((RankError, RankDiedError)):
        session.run("if rank == 0: rpc.rpc_sync(other, die)")
    session.ranks.heal()
    session.run(DEFINITIONS, ranks=[1])
    session.run(INIT)
    for use in "rpc.rpc_sync('worker2', add, args=(held, 1))", "held.local_value()":
        with pytest.raises(RankError, match=r"the value of this reference is lost, because worker1 \(rank 1\)"):
            session.run(use, ranks=[0], timeout_s=10)
    session.run("rpc.shutdown()", timeout_s=5)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "dist_autograd.context().__enter__()",
            "RPC has not been initialized, which distributed autograd needs",
        ),
        (INIT + "rpc.rpc_sync(7, add, args=(1, 2))", "no worker has rank 7: the ranks are 0 to 1"),
        (
            INIT + "import threading\nrpc.rpc_sync(other, add, args=(1, threading.Lock()))",
            "add cannot be called on another rank: argument 1, lock cannot be sent",
        ),
        (
            INIT + "import threading\ndef lock(): return threading.Lock()\nrpc.rpc_sync(other, lock)",
            "the result of the call, a lock, cannot be sent: .*; call rpc.remote",
        ),
        (
            INIT + "if rank == 0: rpc.remote(other, Counter).local_value()",
            "the value of this reference is on worker1 (rank 1): copy it with to_here()",
        ),
        ("rpc.rpc_sync('worker0', add, args=(1, 2))", "RPC has not been initialized"),
        (
            INIT + "rpc.rpc_sync('nobody', add, args=(1, 2))",
            "no worker is named 'nobody': the workers are worker0, worker1",
        ),
        (
            INIT + "rpc.rpc_sync(other, add, args=3)",
            "args must be a tuple of arguments, such as args=(3,), got 3",
        ),
        (INIT + INIT, "RPC is already initialized, as 'worker0': call rpc.shutdown"),
        ("rpc.init_rpc('w', rank=rank, world_size=2)", "rank 0 and rank 1 are both named 'w'"),
        ("rpc.init_rpc('w', rank=2, world_size=2)", "rank must be 0 to 1 with 2 workers, got 2"),
        ("rpc.init_rpc(b'w', rank=rank, world_size=2)", "Argument b'w' must be of type <class 'str'> but got type"),
        ("rpc.init_rpc(f'w{rank}')", "init_rpc needs a rank from 0 to 65535, got -1: pass rank=rank"),
        (
            "rpc.init_rpc('w', rank=rank, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method='x://y'))",
            "No rendezvous handler for x://",
        ),
    ],
)
def test_what_is_wrong_is_named(session, code, words):
    with pytest.raises(RankError, match=words.replace("(", r"\(").replace(")", r"\)")):
        session.run(code)


def test_a_callee_waits_for_a_def_of_its_running_cell(session):
    code = INIT + (
        "import time\nif rank: time.sleep(0.5)\n"
        "def late(x): return x + 1\nclass Late:\n    def __init__(self): self.x = 4\n"
        "print(rpc.rpc_sync(other, late, args=(rank,)), rpc.remote(other, Late).to_here().x)\nrpc.shutdown()"
    )
    for _ in range(2):
        assert [one.splitlines()[-1] for one in said(session, code)] == ["1 4", "2 4"]


@pytest.mark.long
def test_a_function_never_runs_in_its_old_version(session):
    define = "def which(): return {!r}\nclass Which:\n    def say(self): return {!r}\n"
    session.run(define.format("old", "old"))
    call = "print(rpc.rpc_sync(other, which), rpc.remote(other, Which).rpc_sync().say())"
    slow = "import time\nif rank: time.sleep(0.5)\n"
    told = said(session, INIT + slow + define.format("new", "new") + call)
    assert [one.splitlines()[-1] for one in told] == ["new new"] * 2
    session.run(define.format("newer", "newer"), ranks=[0])
    with pytest.raises(RankError, match="rank 1 has another version of which than the caller"):
        session.run(f"if rank == 0: {call}")
    with pytest.raises(RankError, match="rank 1 has no mine"):
        session.run("if rank == 0:\n    def mine(): ...\n    rpc.rpc_sync(other, mine)")
    with pytest.raises(RankError, match="the other rank cannot find <lambda> by its name"):
        session.run("rpc.rpc_sync(other, lambda: 1)")
    assert said(session, "rpc.rpc_sync(other, add, args=(1, 2))") == ["3", "3"]


def test_functions_that_torch_has_wrapped(session):
    code = INIT + (
        "import torch\n@rpc.functions.async_execution\ndef later(x):\n"
        "    return rpc.rpc_async(rpc.get_worker_info(), add, args=(x, 1)).then(lambda f: f.wait() * 2)\n"
        "class Held:\n    @staticmethod\n    @rpc.functions.async_execution\n    def more(x): return later(x)\n"
        "rpc.rpc_sync(other, later, args=(rank,)), rpc.rpc_sync(other, Held.more, args=(rank,))"
    )
    assert [one.splitlines()[-1] for one in said(session, code)] == ["(2, 2)", "(4, 4)"]


def test_sparse_tensors_go_to_another_rank_and_back(session):
    """torch has no `nbytes` for sparse tensors."""
    ways = (
        "rpc.rpc_sync(other, add, args=(x, x))",
        "rpc.rpc_async(other, torch.add, args=(x, x)).wait()",
        "rpc.remote(other, add, args=(x, x)).to_here()",
    )
    sums = ", ".join(f"{way}.to_dense().sum().item()" for way in ways)
    assert said(session, f"{INIT}x = torch.eye(2).to_sparse()\n{sums}")[0].endswith("(4.0, 4.0, 4.0)")
    assert {call.nbytes_back for call in session.recording.calls() if call.kind == "rpc_async"} == {2 * (16 + 4)}


def test_a_list_that_holds_itself_comes_back(session):
    session.run("def same(x): return x")
    code = "x = [torch.ones(2)]; x.append(x)\ncame = rpc.rpc_sync(other, same, args=(x,))\ncame[1] is came"
    assert said(session, f"{INIT}{code}")[0].endswith("True")


def test_an_argument_that_makes_calls_as_it_is_pickled(session):
    """One of the calls fails. Each call is identified by its own function."""
    session.run(
        "def same(x): return x\n"
        "class Asks:\n"
        "    def __reduce__(self):\n"
        "        try: rpc.rpc_async(other, len, args=([lambda: 0],))\n"
        "        except Exception: pass\n"
        "        return int, (rpc.rpc_sync(other, add, args=(1, 2)),)\n"
    )
    code = "for _ in range(2):\n    print(rpc.rpc_sync(other, same, args=(Asks(),)))"
    assert said(session, f"{INIT}if rank == 0:\n    {code.replace(chr(10), chr(10) + '    ')}\nrpc.shutdown()") == [
        "init_rpc: 2 workers (worker0, worker1)\n3\n3",
        "init_rpc: 2 workers (worker0, worker1)",
    ]
    calls = session.recording.calls()
    assert sorted((call.function, call.nbytes_back is None, call.begun_ns is None) for call in calls) == [
        *[("add", True, False)] * 2,
        *[("same", True, False)] * 2,
    ]


def test_torchscript_and_modules_on_another_rank(session):
    code = INIT + (
        "from torch.distributed.nn import RemoteModule\nx = torch.ones(2)\n"
        "asked = rpc.rpc_sync(other, twice, args=(x,)), rpc.remote(other, twice, args=(x,)).to_here()\n"
        "modules = [RemoteModule(to, torch.nn.Identity) for to in (other, f'{other}/cpu', f'rank:{1 - rank}')]\n"
        "told = [module.forward(x).tolist() for module in modules]\n"
        "agent = rpc._get_current_rpc_agent()\n"
        "names = [agent.get_worker_info().name, *sorted(one.name for one in agent.get_worker_infos())]\n"
        "rpc.shutdown()\nprint(*(one.tolist() for one in asked), *told, *names)"
    )
    session.run("@torch.jit.script\ndef twice(x: torch.Tensor):\n    return 2 * x")
    for _ in range(2):
        for rank, text in enumerate(said(session, code)):
            expected = f"{'[2.0, 2.0] ' * 2}{'[1.0, 1.0] ' * 3}worker{rank} worker0 worker1"
            assert text.splitlines()[-1] == expected


def test_the_caller_gets_the_full_error_with_the_worker_name(session):
    session.run(INIT + "def divide(a, b):\n    return a / b")
    with pytest.raises(RankError, match="ZeroDivisionError") as failed:
        session.run("if rank == 0: rpc.rpc_sync(other, divide, args=(1, 0))")
    result = failed.value.result
    assert result is not None
    assert "On worker1 (rank 1):" in result[0].error and "return a / b" in result[0].error
    told = "divide failed, and its caller gets the error: ZeroDivisionError('division by zero')\n"
    assert (result[1].stderr, result[1].stdout, result[1].status) == (told, "", "ok")
    caught = "try: rpc.remote(other, divide, args=(1, 0)).to_here()\nexcept ZeroDivisionError as error: print('caught')"
    assert said(session, caught) == ["caught"] * 2


def test_an_error_that_cannot_be_shown_reaches_the_caller(session):
    session.run(
        INIT + "class Silent(RuntimeError):\n    __str__ = __repr__ = lambda self: None\n"
        "def fail():\n    raise Silent\n"
    )
    with pytest.raises(RankError) as failed:
        session.run("if rank == 0: rpc.rpc_sync(other, fail, timeout=20)")
    result = failed.value.result
    assert result is not None and "<Silent.__repr__ failed>" in result[1].stderr and result[1].status == "ok"
    assert "Silent" in result[0].error


def test_text_of_a_callee_belongs_to_the_cell_that_calls(session, capsys):
    session.run(INIT + "def talk(s):\n    time.sleep(s); print('of the callee')")
    capsys.readouterr()
    result = session.run("if rank == 0: rpc.rpc_sync(other, talk, args=(0.3,))")
    assert (result[0].stdout, result[1].stdout) == ("", "of the callee\n")
    assert capsys.readouterr().out == "[1] of the callee\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("wait", "what"),
    [
        ("rpc.rpc_sync(other, sleep, args=(4,))", "sleep"),
        ("rpc.rpc_async(other, sleep, args=(4,)).wait()", "sleep"),
        ("rpc.remote(other, sleep, args=(4,)).to_here()", "sleep"),
        ("held.rpc_sync().rest(4)", "rest"),
    ],
)
def test_a_stop_says_what_a_rank_waits_for(session, wait, what):
    session.run(
        INIT + "class Held:\n    def rest(self, s): time.sleep(s)\nheld = rpc.remote(other, Held)\nheld.to_here()"
    )
    with pytest.raises(CellTimeoutError, match=rf"waits for {what} on worker1 \(rank 1\), call \d+, 1 s"):
        session.run(f"if rank == 0: {wait}", timeout_s=1)
    assert said(session, "rpc.rpc_sync(other, add, args=(1, 2))") == ["3", "3"]


SLOW = """
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): time.sleep(3 * ctx.needs_input_grad[0]); return gradient
def twice(x): return 2 * Slow.apply(x)
"""


def test_a_stop_ends_a_backward_of_distributed_autograd(session):
    session.run(INIT + SLOW)
    code = (
        "if rank == 0:\n    x = torch.ones(1, requires_grad=True)\n    with dist_autograd.context() as context:\n"
        "        dist_autograd.backward(context, [rpc.rpc_sync(other, twice, args=(x,)).sum()])"
    )
    with pytest.raises(CellTimeoutError, match=r"waits for backward|in backward"):
        session.run(code, timeout_s=1.5)  # a busy machine may need a second to get to this line
    assert said(session, CALL) == ["1", "2"]
    session.run("def twice(x): return 2 * x")
    assert said(session, code + "\n        print(dist_autograd.get_gradients(context)[x])")[0] == "tensor([2.])"
    with pytest.raises(RankError, match="requires_grad not set on root"):
        session.run("with dist_autograd.context() as context: dist_autograd.backward(context, [torch.ones(1).sum()])")


def test_a_callee_in_shutdown_refuses_a_stale_function(session):
    """The cell of the callee defines no more functions, so the call does not wait for one. If the cell has run a new
    `def`, the call finds it."""
    session.run("def rule(x): return 2 * x")
    session.run("def rule(x): return 10 * x", ranks=[0])
    with pytest.raises(RankError, match="rank 1 has another version of rule than the caller: run the cell that"):
        session.run(INIT + "if rank == 0: rpc.rpc_sync(other, rule, args=(3,))\nrpc.shutdown()", timeout_s=20)
    code = "def rule(x): return 10 * x\n" + INIT + "if rank == 0: print(rpc.rpc_sync(other, rule, args=(3,)))\n"
    assert said(session, code + "rpc.shutdown()")[0].endswith("30")
