"""One cell on the ranks: its result, its permitted effects, and the state that it must not change."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import IPython
import psutil
import pytest

from ddp_notebook import session as sessions
from ddp_notebook.errors import CellTimeoutError, DDPNotebookError, RankDiedError, RankError, SessionBrokenError
from ddp_notebook.run.lint.warnings import foresee
from tests.conftest import wait_until


def test_result_text_and_displays_by_rank(session):
    result = session.run(
        "import sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)\n"
        "from IPython.display import display, HTML\ndisplay(HTML(f'<b>{rank}</b>'))\nrank * 10"
    )
    assert result.ok and result.ranks == [0, 1]
    for rank in result.ranks:
        assert (result[rank].stdout, result[rank].stderr) == (f"out {rank}\n", f"err {rank}\n")
        assert result[rank].displays[0]["text/html"] == f"<b>{rank}</b>"
        assert result[rank].result == str(rank * 10)
    assert "ok on ranks 0-1" in repr(result)


def test_text_keeps_its_order_whoever_writes_it(session):
    """Python, C, a subprocess and a forked child write without flushing."""
    result = session.run(
        "import ctypes, os, subprocess\n"
        "print('python')\n"
        "ctypes.CDLL(None).puts(b'C')\n"
        "subprocess.run(['echo', 'subprocess'])\n"
        "if (pid := os.fork()) == 0:\n"
        "    print('child', flush=True); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "os.system('echo shell')\n"
        "print('python again', end='')"
    )
    assert result[0].stdout == "python\nC\nsubprocess\nchild\nshell\npython again"


def test_text_of_loader_workers_arrives(session):
    result = session.run(
        "from torch.utils.data import DataLoader\n"
        "class Data:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i):\n"
        "        print('item', i, flush=True)\n"
        "        return i\n"
        "total = sum(int(i) for i in DataLoader(Data(), batch_size=None, num_workers=1))"
    )
    assert result[1].stdout == "item 0\nitem 1\n"
    assert session.pull("total") == {0: 1, 1: 1}


def test_a_megabyte_of_text_is_complete_before_the_cell_is_done(session):
    result = session.run("for i in range(20000): print(rank, i, 'x' * 40)")
    for rank in (0, 1):
        lines = result[rank].stdout.splitlines()
        assert len(lines) == 20000 and lines[-1] == f"{rank} 19999 {'x' * 40}"


def test_top_level_await(session):
    result = session.run("import asyncio\nawait asyncio.sleep(0.01)\nprint('waited')\nrank")
    assert result[1].stdout == "waited\n" and result[1].result == "1"


def test_cells_share_names_and_ipython(session):
    session.run("def f(): return rank + 1\nvalue = f()")
    result = session.run("!echo from the shell\n%time value\nvalue")
    assert "from the shell" in result[0].stdout and "Wall time" in result[0].stdout
    assert result[1].result == "2"
    assert session.run("_")[1].result == "2"


def test_a_page_is_shown_as_text(session, capsys):
    session.run("x = 1")
    session.run("x?")
    assert "Type:" in capsys.readouterr().out


def test_a_failing_cell_names_the_rank_and_the_line(session):
    with pytest.raises(RankError) as caught:
        session.run("a = 1\nif rank == 1:\n    raise ValueError(f'bad {a}')\nrank", execution_count=7)
    error = caught.value
    assert str(error) == "ValueError: bad 1 (rank 1); succeeded: rank 0"
    shown = "\n".join(error._render_traceback_())
    place = "In[7]" if IPython.version_info >= (8,) else "<cell line: 0>"
    assert "--- rank 1 ---" in shown and place in shown.replace("\x1b[32m", "").replace("\x1b[39m", "")
    assert error.result is not None and error.result[0].result == "0"


def test_the_same_traceback_is_shown_once(session):
    with pytest.raises(RankError) as caught:
        session.run("1 / 0")
    assert "\n".join(caught.value._render_traceback_()).count(": division by zero") == 2
    assert str(caught.value) == "ZeroDivisionError: division by zero (ranks 0-1)"


def test_a_timeout_in_a_script_shows_one_frame_of_the_package(session):
    with pytest.raises(CellTimeoutError) as caught:
        session.run("import time\ntime.sleep(60)", timeout_s=0.1)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [os.path.basename(frame.filename) for frame in frames] == ["test_cells.py", "session.py"]


def test_a_script_shows_plain_text_and_one_frame_of_ours(session):
    with pytest.raises(RankError) as caught:
        session.run("1 / 0")
    shown = "".join(traceback.format_exception(caught.value))
    assert "---> 1 1 / 0" in shown and "\x1b" not in shown
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [os.path.basename(frame.filename) for frame in frames] == ["test_cells.py", "session.py"], shown


def test_a_failing_cell_keeps_what_the_script_was_handling(session):
    with pytest.raises(RankError) as caught:
        try:
            raise KeyError("the script's own")
        except KeyError:
            session.run("1 / 0")
    assert "the script's own" in "".join(traceback.format_exception(caught.value))


def test_a_loader_with_a_failed_worker_is_freed_before_gc(session):
    """The collector closes the queues first, and then a loader waits 5 s for each of its workers."""
    session.run(
        "import gc, types\n"
        "from ddp_notebook.rank.cell import runner\n"
        "runner.gc = types.SimpleNamespace(collect=gc.disable)\n"
        "def bad(batch): raise ValueError(f'corrupt {batch}')"
    )
    try:
        with pytest.raises(
            RankError, match=r"Caught ValueError in DataLoader worker process 0. ValueError: corrupt \[0\]"
        ):
            session.run("for _ in torch.utils.data.DataLoader(range(8), num_workers=1, collate_fn=bad): pass")
        left = session.run(
            "[one for one in gc.get_objects() if type(one).__name__ == '_MultiProcessingDataLoaderIter']"
        )
    finally:
        session.run("runner.gc = gc; gc.enable()")
    assert [left[rank].result for rank in left.ranks] == ["[]", "[]"]


def test_a_syntax_error_is_an_error(session):
    with pytest.raises(RankError, match="SyntaxError"):
        session.run("def")


@pytest.mark.parametrize("code", ["exit()", "quit()", "import sys; sys.exit(1)"])
def test_leaving_python_ends_no_rank(session, code):
    before = session.ranks.pids()
    with pytest.raises(RankError):
        session.run(code)
    assert session.run("dist.barrier()").ok
    assert session.ranks.pids() == before


def test_input_without_anyone_to_type_says_so(session):
    with pytest.raises(RankError, match=r"input\(\) cannot be answered here"):
        session.run("input('name? ')")
    with pytest.raises(RankError, match="can be answered only while the notebook waits for its cell"):
        session.submit("input('name? ')").result(30)


def test_a_stop_during_an_ipython_error_still_ends_the_cell(session):
    with pytest.raises(RankError, match="escaped"):
        session.run(
            "import _thread, sys\n"
            "history = get_ipython().history_manager\n"
            "def fail(*_):\n"
            "    del history.store_output; sys.setprofile(press)\n"
            "    raise ValueError('escaped')\n"
            "def press(frame, event, _):\n"
            "    if event == 'call' and frame.f_code.co_name == 'show_escaped':\n"
            "        sys.setprofile(None); _thread.interrupt_main()\n"
            "history.store_output = fail",
            ranks=0,
            timeout_s=20,
        )
    assert session.run("print('goes on')", ranks=0, timeout_s=20)[0].stdout == "goes on\n"


def test_a_forked_child_that_comes_back_is_ended(session):
    """Otherwise two processes would share the rank's sockets."""
    result = session.run(
        "import os\nif child := os.fork(): status = os.waitpid(child, 0)[1]\nprint('here', bool(child))"
    )
    assert sorted(result[0].stdout.splitlines()) == ["here False", "here True"]
    assert session.run("print(status)")[0].stdout == "0\n"


def test_a_cell_may_close_or_redirect_its_output(session):
    """The end of the cell is still detected, and the next cell can print."""
    session.run("import os, sys\nsaved = os.dup(1)\nos.close(1)")
    session.run("os.dup2(saved, 1)\nos.close(saved)")
    assert session.run("print('back')")[0].stdout == "back\n"


def test_the_signal_handler_of_a_cell_does_not_outlive_it(session):
    session.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    handlers = session.run("signal.getsignal(signal.SIGINT).__qualname__")
    assert handlers[0].result == "'SignalHandlers._on_sigint'"


def test_text_between_cells_heads_the_next_cell(session, capsys):
    session.run(
        "import threading, time, os\n"
        "gate = threading.Event()\n"
        "def late():\n    gate.wait(); print('late words', flush=True); done.set()\n"
        "done = threading.Event()\n"
        "threading.Thread(target=late).start()\n"
        "threading.Timer(0.05, gate.set).start()"
    )
    session.run("pass")  # the thread may write before, during or after this cell
    session.run("assert done.wait(5)")
    session.run("pass")
    shown = capsys.readouterr().out
    assert shown in ("[0-1] late words\n", "[0-1] (between cells) late words\n") or shown.count("late words") == 2


def test_run_in_another_thread_returns_its_output_unprinted(session, capsys):
    results = []
    thread = threading.Thread(target=lambda: results.append(session.run("print('from a thread'); rank")))
    thread.start()
    thread.join(30)
    assert results[0][1].stdout == "from a thread\n" and results[0][1].result == "1"
    assert "from a thread" not in capsys.readouterr().out


def test_cells_of_several_threads_take_turns(session):
    session.run("order = []")
    code = "order.append('in'); import time; time.sleep(0.02); order.append('out')"
    threads = [threading.Thread(target=session.run, args=(code,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert session.pull("order")[0] == ["in", "out"] * 4


def test_pull_small_and_large(session):
    session.run("small = {'a': rank}\nlarge = torch.full((1_500_000,), float(rank))")
    assert session.pull("small") == {0: {"a": 0}, 1: {"a": 1}}
    large = session.pull("large")
    assert large[1].shape == (1_500_000,) and float(large[1].sum()) == 1_500_000.0


def test_pull_names_what_cannot_be_had(session):
    with pytest.raises(DDPNotebookError, match="ranks 0-1: undefined variable 'nowhere'"):
        session.pull("nowhere")
    session.run("import threading\nlock = threading.Lock()")
    with pytest.raises(DDPNotebookError, match=r"ranks 0-1: 'lock' \(lock\) cannot be pickled"):
        session.pull("lock")


def test_a_function_of_a_cell_travels_by_value(session):
    session.run("def double(x): return 2 * x")
    assert session.pull("double")[1](21) == 42


def test_status_tells_of_every_rank(session):
    status = session.status()
    assert [row.pid for row in status.rows] == session.ranks.pids()
    text = repr(status)
    assert text.startswith("rank  host") and "idle" in text and "backend gloo, group 1" in text


def test_a_failed_pull_leaves_nothing_in_the_ranks(session):
    session.run("if rank == 0: big = torch.zeros(5_000_000)")
    for _ in range(3):
        with pytest.raises(DDPNotebookError, match="rank 1: undefined variable 'big'"):
            session.pull("big")
    code = "from ddp_notebook.rank.engine import RankEngine; held = RankEngine.instance()._rank.agent.bulk._held"
    session.run(code)
    session.run("import time\nuntil = time.monotonic() + 5\nwhile held and time.monotonic() < until: time.sleep(0.01)")
    assert session.run("len(RankEngine.instance()._rank.agent.bulk._held)")[0].result == "0"


def test_a_flood_waits_in_the_ranks(session, monkeypatch):
    """The notebook's memory does not grow with output that it cannot show in time."""

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(len(text) / 20e6)  # a front end that reads 20 MB/s
            return len(text)

    monkeypatch.setattr(sys, "stdout", Slow())
    before = psutil.Process().memory_info().rss
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match="ranks 0,1 were interrupted at cell line"):
        session.run("line = 'x' * 200\nwhile True: print(line)")
    assert psutil.Process().memory_info().rss - before < 150e6
    assert session.run("rank").ok


def test_a_flood_of_displays_waits_in_the_ranks(session):
    """Displays use the wire, which has no back-pressure, and the end of the cell comes after them."""
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in session.ranks.pids())]
    before = [process.memory_info().rss for process in processes]
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match=r"^the cell was stopped"):
        session.run("from IPython.display import HTML\nwhile True: display(HTML('x' * 200_000))")
    assert time.monotonic() - began < 6
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert grown[0] < 400e6 and max(grown[1:]) < 150e6, [f"{nbytes >> 20} MiB" for nbytes in grown]
    assert session.run("rank").ok


def test_presses_within_a_second_count_as_one(session, tmp_path):
    """The cell ends after both presses, because a later press would end the test run."""
    pressed = tmp_path / "pressed"

    def press_twice() -> None:
        wait_until(lambda: session._cells.watched is not None, 20)
        time.sleep(0.3)  # the ranks run the cell
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.0005)
        pressed.touch()

    threading.Thread(target=press_twice).start()
    with pytest.raises(KeyboardInterrupt, match=r"^the cell was stopped\n  ranks 0,1 were interrupted at cell line 2$"):
        session.run(
            "import os, time\ntry: time.sleep(60)\nfinally:\n"
            f"    while not os.path.exists({str(pressed)!r}): time.sleep(0.001)"
        )


def test_a_press_before_the_cell_is_sent_is_not_lost(session, monkeypatch):
    """The press arrives in a callback of the garbage collector, where Python ignores exceptions."""

    def foresee_with_press(*args):
        thing = type("Thing", (), {})()
        callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        assert callback() is None
        return foresee(*args)

    monkeypatch.setattr(sessions, "foresee", foresee_with_press)
    with pytest.raises(KeyboardInterrupt):
        session.run("was_run = True")
    monkeypatch.undo()
    assert session.run("'was_run' in globals()")[0].result == "False"


def test_a_group_formed_again_by_the_users_own_code(session):
    """Scripts call it in this way. The store of the session exists, and rank 0 does not try to start one."""
    session.run("dist.destroy_process_group()\ndist.init_process_group('gloo')")
    assert session.run("x = torch.ones(1); dist.all_reduce(x); x")[0].result == "tensor([2.])"
    session.ranks.reform()
    assert session.run("x = torch.ones(1); dist.all_reduce(x); x")[0].result == "tensor([2.])"


def test_a_rank_that_dies_ends_the_cell_with_its_last_words(make_session_alone):
    session = make_session_alone(2)
    with pytest.raises(RankDiedError) as caught:
        session.run(
            "import os, time\n"
            "if rank == 1:\n    print('about to'); os.write(2, b'last words'); os.abort()\n"
            "time.sleep(60)"
        )
    assert str(caught.value) == "killed by SIGABRT (rank 1); interrupted: rank 0"
    shown = "\n".join(caught.value._render_traceback_())
    assert "last words" in shown and "about to" in shown
    with pytest.raises(SessionBrokenError, match=r"rank 1 died: killed by SIGABRT(.|\n)*%ddp_heal"):
        session.run("1", ranks="1")
    assert session.run("1").ranks == [0]
    assert [row.state for row in session.status().rows] == ["idle", "died"]


@pytest.mark.slow
def test_importing_the_package_stays_light():
    """The notebook imports no torch: a kernel without ranks stays small."""
    code = "import sys, ddp_notebook.session, ddp_notebook.magics; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "False\n"
