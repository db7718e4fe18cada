"""Programs that reset state of the interpreter, each stopped by one press and followed by a next cell."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading

import pytest

import ddp_notebook
from ddp_notebook import stdlib
from ddp_notebook.errors import RankError, UsageError
from ddp_notebook.wire import signals
from tests.conftest import wait_until
from tests.resets import PROGRAMS, SILENT, reset_stop_and_go_on, run_until_stopped

# The timer would affect all later programs, and the dump of the stacks of running threads can crash CPython.
DUMPS_STACKS = "signals: stacks again and again"
SHARE_A_SESSION = [
    name
    for name in PROGRAMS
    if name.startswith(("signals", "clocks", "streams")) and name not in SILENT and name != DUMPS_STACKS
]


@pytest.mark.long
@pytest.mark.parametrize("program", SHARE_A_SESSION)
def test_stop_works_and_the_next_cell_finds_all_changes(session, program, tmp_path):
    """Changes that a program leaves are still present in the next one. The other programs have a session each
    (`tests/long`)."""
    reset_stop_and_go_on(session, program, "a loop", tmp_path)


@pytest.mark.processes
def test_no_signal_is_sent_to_a_process_that_it_would_end():
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(reads, 1)
        os._exit(7)
    try:
        for number in signals.OURS:
            signals.send(pid, number, 0)
    finally:
        os.write(writes, b"x")
        _, status = os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)
    assert os.waitstatus_to_exitcode(status) == 7


BROKEN = {
    "a dictionary that cannot be set": "class D(dict):\n    def __setitem__(self, *_): 1 / 0\n_oh = D()",
    "a dictionary without a length": "class D(dict):\n    def __len__(self): 1 / 0\n_oh = D()",
    "a list": "class L(list):\n    def append(self, *_): 1 / 0\n    def __getitem__(self, _): 1 / 0\n_dh = L()",
    "another method": "get_ipython = type('A', (), {'f': lambda self: 0})().f",
    "another module": "import types; __builtins__ = types.ModuleType('builtins')",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=list(BROKEN))
def test_a_value_of_a_subclass_breaks_no_later_cell(session, code):
    said = session.run(code)[0].stderr
    assert "replaced while this cell ran; IPython needs it" in said
    later = session.run("%cd .\nrank + 1")
    assert [later[rank].result for rank in (0, 1)] == ["1", "2"] and later[1].stderr == ""


def test_another_dictionary_or_list_stays(session):
    said = session.run("kept = _oh = {}; dirs = _dh = []; 5")
    assert said[0].stderr == ""
    assert session.run("_oh is kept and _dh is dirs")[0].result == "True"


def test_names_that_ipython_needs_are_not_pushed(session):
    for name in ("_oh", "_dh", "get_ipython", "__builtins__"):
        with pytest.raises(
            UsageError, match="cannot be pushed: IPython on the ranks needs its own value of it"
        ) as said:
            session.push(**{name: 5})
        assert str(said.value).endswith("Push it under another name")
    said = session.run("rank + 1")
    assert said[1].result == "2" and said[1].stderr == ""


NEEDED = {  # (module or class, name, message about the failure)
    "contextlib": ("contextlib", "_GeneratorContextManager", "IPython could not run this cell"),
    "ast": ("ast", "Expr", "IPython could not run this cell"),
    "sys": ("sys", "exc_info", "IPython could not run this cell"),
    "linecache": ("linecache", "checkcache", ""),
    "asyncio": ("asyncio.tasks", "ensure_future", ""),
    "math": ("math", "ceil", "the event loop of this rank failed"),
}


@pytest.mark.parametrize(("owner", "name", "failed"), NEEDED.values(), ids=list(NEEDED))
def test_needed_functions_are_put_back_after_a_failure(session, capsys, owner, name, failed):
    session.run(f"import {owner}; owner = {owner}" if "(" not in owner else f"owner = {owner}")
    session.run(f"kept = owner.{name}; owner.{name} = None")
    for code in ("rank + 1", "1 / 0"):
        with contextlib.suppress(RankError):
            session.run(code, timeout_s=10)
    with pytest.raises(RankError, match="ZeroDivisionError: division by zero"):
        session.run("1 / 0", timeout_s=10)
    said = capsys.readouterr()
    assert f"{failed} after " in said.err + said.out if failed else "put back" not in said.err + said.out
    later = session.run(f"had, owner.{name} = owner.{name} is kept, kept; rank + 1, had", timeout_s=10)
    assert [later[rank].result for rank in (0, 1)] == [f"(1, {bool(failed)})", f"(2, {bool(failed)})"]
    assert [row.state for row in session.status().rows] == ["idle"] * 2


_REPLACES = """
import os, threading, time
def replace(number):
    global _oh
    while not os.path.exists(f"{folder}/go-{number}-{rank}"): time.sleep(0.01)
    _oh = 5
    open(f"{folder}/done-{number}-{rank}", "w").close()
def wait(number):
    while not os.path.exists(f"{folder}/done-{number}-{rank}"): time.sleep(0.01)
"""


@pytest.mark.parametrize("code", ["os.getpid = None", "def fail(*_): raise OSError('no')\nos.getpid = fail"])
def test_functions_that_show_values_are_put_back(session, capsys, code):
    session.run(f"import os\n{code}")
    with pytest.raises(RankError):
        session.run("5")
    assert "IPython could not show a value of this cell after os.getpid" in capsys.readouterr().err
    assert session.run("5")[0].result == "5"


def test_a_limit_of_no_open_files_is_refused(session):
    head = "import os, resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    for call in ("resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))", "resource.prlimit(0, 7, (2, hard))"):
        with pytest.raises(RankError, match=r"RLIMIT_NOFILE must be at least 3 on a rank, got [02]: "):
            session.run(head + call)
    session.run(head + "resource.prlimit(os.getpid(), 7); resource.setrlimit(7, resource.getrlimit(7))")


def test_a_name_that_a_thread_replaces_is_told_of_the_right_cell(session, tmp_path):
    begin = "threading.Thread(target=replace, args=({},), daemon=True).start()"
    code = f"folder = {str(tmp_path)!r}{_REPLACES}{begin.format(1)}"
    assert session.run(code)[0].stderr == ""
    said = session.run("open(f'{folder}/go-1-{rank}', 'w').close(); wait(1)", timeout_s=20)[0].stderr
    assert "_oh was replaced while this cell ran; IPython needs it, so it was put back" in said
    assert session.run(begin.format(2))[0].stderr == ""
    for rank in (0, 1):
        (tmp_path / f"go-2-{rank}").touch()
    wait_until(lambda: len(list(tmp_path.glob("done-2-*"))) == 2)
    said = session.run("x = 1")[0].stderr
    assert "_oh was replaced before this cell ran; IPython needs it, so it was put back" in said
    assert session.run("rank + 1")[1].result == "2"


def test_a_rank_without_pending_signals_is_stopped(session, tmp_path):
    for name, goes_on in (("loop", "while True: pass"), ("wait", "dist.barrier() if rank == 0 else time.sleep(60)")):
        folder = tmp_path / name
        folder.mkdir()
        begun = f"open({str(folder)!r} + f'/begun-{{rank}}', 'w').close()"
        with pytest.raises(KeyboardInterrupt):
            run_until_stopped(session, f"{_NO_WAITING_SIGNALS}import time\n{begun}\n{goes_on}", folder)
    assert session.run("resource.setrlimit(resource.RLIMIT_SIGPENDING, before); kept")[0].result == "7"


@pytest.mark.long
def test_names_that_ipython_needs_are_put_back_with_a_line(make_session_alone):
    session = make_session_alone(2)
    said = session.run("_oh = 5")[0].stderr
    assert said == ("ddp_notebook: _oh was replaced while this cell ran; IPython needs it, so it was put back\n")
    assert session.run("rank + 1")[1].result == "2"


def test_print_of_a_program_stays_and_len_does_not(make_session_alone):
    """Many training scripts replace `print` so that only rank 0 prints."""
    session = make_session_alone(2)
    said = session.run(
        "import builtins\nreal = print\ndef only_first(*args): rank == 0 and real(*args)\n"
        "builtins.print, builtins.len = only_first, lambda _: 3"
    )[0].stderr
    assert "len in builtins was replaced while this cell ran; it was put back" in said
    printed = session.run("print('here', len([]))")
    assert [printed[rank].stdout for rank in (0, 1)] == ["here 0\n", ""]

    # A working import hook stays. A hook that fails for any module would end every later cell.
    works = "seen = []\nplain = builtins.__import__\ndef hook(*args): seen.append(args[0]); return plain(*args)\n"
    assert session.run(f"{works}builtins.__import__ = hook")[0].stderr == ""
    assert session.run("import json; 'json' in seen")[0].result == "True"
    said = session.run("def broken(*args): raise ValueError\nbuiltins.__import__ = broken")[0].stderr
    assert "__import__ in builtins was replaced while this cell ran; it was put back" in said
    assert session.run("import json; rank")[1].result == "1"


def test_builtins_replaced_between_cells_are_restored(make_session_alone, tmp_path):
    """Without `len` and `range` the event loop fails. Without `isinstance` and `hasattr` the next cell fails. Without
    `int` and `max` threads of the rank fail."""
    session = make_session_alone(2)
    session.run("import builtins, os, threading; kept = 5; make, write, begin = os.mkdir, setattr, threading.Thread")
    for names in ("len range", "hasattr getattr isinstance", "int max"):
        session.run(f"""
def replace(ended=threading.Event(), folder=f'{tmp_path}/{names} {{rank}}'):
    ended.wait(0.05)
    for name in {names.split()}: write(builtins, name, None)
    make(folder)
begin(target=replace).start()
""")
        wait_until(lambda names=names: all((tmp_path / f"{names} {rank}").exists() for rank in (0, 1)))
        assert (
            session.run("dist.barrier(); kept, len([1]), isinstance(1, int)", timeout_s=10)[1].result == "(5, 1, True)"
        )


def test_copies_of_modules_have_their_own_methods(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a cell has replaced this method")

    assert stdlib.threading and stdlib.queue and stdlib.socket  # copied at their first use, before a cell runs
    for cls, names in (
        (threading.Event, "set wait is_set clear"),
        (threading.Condition, "__enter__ __exit__ wait notify_all"),
        (queue.Queue, "get put"),
        (socket.socket, "send recv accept bind listen fileno close settimeout"),
    ):
        for name in names.split():
            monkeypatch.setattr(cls, name, fail, raising=False)
    event = stdlib.threading.Event()
    waiting: queue.Queue[int] = stdlib.queue.Queue()
    event.set()
    waiting.put(5)
    near, far = stdlib.socket.socketpair()
    near.send(b"x")

    assert event.wait(1) and waiting.get() == 5 and far.recv(9) == b"x"
    server = stdlib.socket.create_server(("127.0.0.1", 0))
    caller = stdlib.socket.create_connection(server.getsockname())
    called, _ = server.accept()
    caller.sendall(b"y")
    assert called.recv(9) == b"y" and isinstance(called, socket.socket)
    for one in (near, far, server, caller, called):
        one.close()


def test_replaced_methods_of_sockets_end_no_rank(make_session_alone, tmp_path):
    session = make_session_alone(2)
    for kind in ("sockets: methods of sockets fail", "select: selectors return nothing"):
        folder = tmp_path / kind.partition(":")[0]
        folder.mkdir()
        reset_stop_and_go_on(session, kind, "a loop", folder, forms_anew=True)


@pytest.mark.parametrize("broken", ["def broken(*_, **__): raise SystemExit(3)", "def broken(*_, **__): sleep(600)"])
def test_cells_run_and_groups_form_without_os_and_threading(make_session_alone, broken):
    session = make_session_alone(2)
    session.run("import os, threading; from time import sleep; kept = rank + 10")
    for name in ("os.stat", "os.path.isdir", "threading.Thread"):
        session.run(f"{broken}\n{name} = broken", timeout_s=20)
        session.ranks.reform()
        after = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x), kept - rank)", timeout_s=20)
        assert [after[rank].stdout for rank in (0, 1)] == ["2 10\n"] * 2, name
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: len(session.ranks.pids()) == 1)
    session.ranks.heal()
    after = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x))", timeout_s=20)
    assert after[0].stdout == "2\n"


def test_what_a_cell_replaces_is_compared_by_identity(make_session_alone):
    """An `__eq__` of a user's object is not called. A missing module is found even if the number of modules is the
    same."""
    session = make_session_alone(2)
    session.run(
        "import builtins, sys, threading, unittest.mock\n"
        "kept = threading\n"
        "del sys.modules['threading']; import tabnanny\n"
        "class Stops:\n    def __eq__(self, _): raise KeyboardInterrupt\n"
        "builtins.len, builtins.sum = Stops(), unittest.mock.ANY"
    )
    assert session.run("import threading\nlen([1]), sum([2]), threading is kept")[1].result == "(1, 2, True)"


def test_a_callback_that_stops_the_event_loop_ends_no_rank(make_session_alone):
    session = make_session_alone(2)
    session.run("kept = rank\nfrom tornado.ioloop import IOLoop; IOLoop.current().call_later(0, IOLoop.current().stop)")
    for _ in range(5):
        assert session.run("kept")[1].result == "1"


def test_a_handler_for_a_signal_of_ours_is_refused_with_a_line(make_session_alone):
    session = make_session_alone(2)
    code = f"import signal\nsignal.signal({signals.INTERRUPT}, print)\nsignal.signal(signal.SIGUSR1, print)"
    assert (
        f"the session uses signal {signals.INTERRUPT}, so this handler is never called" in session.run(code)[0].stderr
    )
    kept = session.run("signal.getsignal(signal.SIGUSR1) is print")
    assert kept[0].result == "True"


def test_a_cell_that_ignores_interrupts_is_stopped_after_a_while(make_session_alone, tmp_path):
    """Its second interrupt would replace the ranks."""
    session = make_session_alone(2)
    begun = f"open({str(tmp_path)!r} + f'/begun-{{rank}}', 'w').close()"
    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(
            session, f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{begun}\nwhile True: pass", tmp_path
        )
    assert session.run("signal.getsignal(signal.SIGINT) is not signal.SIG_IGN")[0].result == "True"


_NO_WAITING_SIGNALS = """
import resource
before = resource.getrlimit(resource.RLIMIT_SIGPENDING)
if rank == 0: resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, before[1]))
kept = 7
"""


_LOADER = """
import signal, sys, atexit, asyncio, torch.utils.data
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, number): return number
def reset(_):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    atexit._run_exitfuncs(); asyncio.set_event_loop(None); sys.stdin = sys.stdout = sys.stderr = None
loader = torch.utils.data.DataLoader(
    Numbers(), num_workers=2, worker_init_fn=reset, multiprocessing_context="fork"
)
seen, kept = 0, rank + 10
"""


@pytest.mark.long
def test_a_loaders_worker_that_resets_signals_harms_nothing(make_session_alone, tmp_path):
    """User code runs in ranks and their child processes, but not in the keeper, the watchdog and the host server."""
    session = make_session_alone(2)
    session.run(_LOADER)
    pids = session.ranks.pids()
    for number in range(2):
        begun = f"open({str(tmp_path)!r} + f'/begun-{{rank}}', 'w').close()"
        code = f"for batch in loader:\n    seen += 1\n    if seen % 5 == 0: {begun}"
        with pytest.raises(KeyboardInterrupt):
            run_until_stopped(session, code, tmp_path)
        after = session.run("x = torch.ones(1); dist.all_reduce(x); print(int(x), kept - rank, seen >= 5)")
        assert [after[rank].stdout for rank in (0, 1)] == ["2 10 True\n"] * 2, number
        for file in tmp_path.iterdir():
            file.unlink()
    assert session.ranks.pids() == pids


def test_the_rank_calls_nothing_that_a_cell_has_replaced_or_made(make_session_alone):
    """Examples are methods of a displayed value or of a raised exception, and `os.getpid`."""
    session = make_session_alone(2)
    shown = [
        "class AttrDict(dict):\n"
        "    def __init__(self, **values): super().__init__(**values); self.__dict__ = self\n"
        "AttrDict(values=[1, 2])",
        "class Endless(list):\n"
        "    def __iter__(self): raise ValueError('no')\n"
        "    def __repr__(self): return 'Endless'\n"
        "Endless([1])",
        "class Full(dict):\n    def __contains__(self, _): raise ValueError('no')\nOut = _oh = Full()",
        "import os; os.getpid = lambda: 0",
        "import builtins; __builtins__ = vars(builtins)",  # cloudpickle leaves it in this state
    ]
    for code in shown:
        session.run(code)
        for number in (5, 6, 7):
            said = session.run(str(number))[1]
            assert (said.result, said.stderr) == (str(number), "")
    raised = [
        "class Other(Exception):\n    def __getattribute__(self, _): raise RuntimeError('no')\nraise Other",
        "class Causes(Exception):\n    __cause__ = __context__ = __notes__ = args = property(lambda self: 1 / 0)\n"
        "raise Causes",
    ]
    for code in raised:
        with pytest.raises(RankError) as error:
            session.run(code)
        assert "ddp_notebook/rank" not in str(error.value.tracebacks)
        assert session.run("8")[0].result == "8"
    assert all(row.rss_bytes for row in session.status().rows)


@pytest.mark.processes
def test_the_status_says_why_the_state_of_a_rank_cannot_be_read():
    """A cell has removed what torch itself needs. The status gives this reason, and not for example a long call."""
    with ddp_notebook.start(1) as session:
        with contextlib.suppress(RankError):  # the end of the cell needs it too
            session.run("torch.distributed.distributed_c10d._world = None", quiet=True)

        [row] = session.status().rows
        assert row.state == "its state cannot be read: AttributeError: 'NoneType' object has no attribute 'pg_names'"


def test_converters_of_all_messages_exist_before_the_first_cell(make_session):
    session = make_session(2)
    missing = "[k.__name__ for k in encoding._KINDS.values() if k not in encoding._CODECS]"
    result = session.run(f"from ddp_notebook.messages import encoding\nprint({missing})", quiet=True)
    assert [result[rank].stdout for rank in result.ranks] == ["[]\n"] * 2
