"""The output of the ranks as a front end receives it from a real kernel."""

from __future__ import annotations

import json
import re
import textwrap
import time

import pytest

from tests.conftest import is_within
from tests.kernels import Reply

# Lines of several ranks are merged if they arrive within 50 ms of each other.
pytestmark = pytest.mark.alone

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RANKS_OF = {"[0-2": (0, 1, 2), "[0-1": (0, 1), "[1-2": (1, 2), "[0,2": (0, 2), "[0": (0,), "[1": (1,), "[2": (2,)}
_SLOT = re.compile(r"<div[^>]*><div[^>]*>(\[[\d,-]+\])</div>(.*?)</div>", re.DOTALL)


def _slots(reply: Reply) -> list[tuple[str, str]]:
    """Return the slots of the only display as `(label, content)`."""
    [data] = reply.displays
    return _SLOT.findall(data["text/html"].partition(">")[2])


@pytest.fixture(scope="module")
def ranks(kernel):
    reply = kernel.run("%ddp_start 3")
    assert reply.status == "ok", reply.traceback
    yield kernel
    assert kernel.run("%ddp_stop").status == "ok"


@pytest.fixture
def usual_waits(ranks):
    """Let lines wait for other ranks as long as they do for users."""
    ranks.let_lines_wait(0.5)
    yield
    ranks.let_lines_wait()


def test_a_late_twin_joins_the_line_that_was_shown_last(ranks):
    reply = ranks.run("%%on_all_ranks\nimport time\ntime.sleep(0.3 * rank)\nprint('same')\nprint('next')")
    assert reply.stdout == "[0-2] same\n[0-2] next\n"


def test_values_stand_in_the_order_of_the_ranks(ranks):
    reply = ranks.run("%%on_all_ranks\nimport time\ntime.sleep(0.1 * (2 - rank))\nrank")
    assert reply.stdout == "[0] 0\n[1] 1\n[2] 2\n"


def test_text_that_was_shown_is_not_sent_again(ranks, usual_waits):
    code = "for i in range(10):\n    time.sleep(0.15)\n    print('x' * 1000, i)"
    reply = ranks.run("%%on_ranks 0-1\nimport time\n" + code)
    assert reply.stdout.count("x" * 1000) == 10
    assert reply.nbytes < 1.2 * len(reply.stdout)


def test_lines_that_differ_only_in_numbers_are_one(ranks):
    code = (
        "import time\ndist.barrier()\n"
        "for k in range(32):\n    print(f'epoch 0 step {k} loss {(k + rank) / 10:.1f}'); time.sleep(0.01)"
    )
    lines = ranks.run("%%on_all_ranks\n" + code).stdout.splitlines()
    joined = [f"[0-2] epoch 0 step {k} loss {k / 10:.1f} | {(k + 1) / 10:.1f} | {(k + 2) / 10:.1f}" for k in range(32)]
    assert len(set(lines).intersection(joined)) > 16, lines  # lines of a slow rank are shown separately
    shown = [
        found.groups() for line in lines if (found := re.fullmatch(r"\[(.*)\] epoch 0 step (\d+) loss (.*)", line))
    ]
    values = sorted((int(step), float(loss)) for _, step, losses in shown for loss in losses.split(" | "))
    assert values == [(k, (k + rank) / 10) for k in range(32) for rank in range(3)]
    log = ranks.run("import ddp_notebook; print(ddp_notebook.current().log(1))").stdout
    assert "epoch 0 step 31 loss 3.2" in log.splitlines()
    off = ranks.run("%%on_all_ranks --fold off\nprint('same'); print('loss', rank)").stdout.splitlines()
    assert sorted(off) == sorted(f"[{rank}] {text}" for rank in range(3) for text in ("same", f"loss {rank}"))


def test_lists_and_lines_of_many_numbers_have_a_line_per_rank(ranks):
    code = "first = [7 * k + rank for k in range(3)]\nprint(f'360 of 1437 images, starting with {first}')\n"
    code += (
        "print(torch.tensor([0.25, 0.5]) + rank)\nprint('a', *[rank + k for k in range(5)])\nprint('b', rank, 7, rank)"
    )
    starting = "360 of 1437 images, starting with"
    assert ranks.run("%%on_ranks 0-1\n" + code).stdout.splitlines() == [
        f"[0] {starting} [0, 7, 14]",
        f"[1] {starting} [1, 8, 15]",
        "[0] tensor([0.2500, 0.5000])",
        "[1] tensor([1.2500, 1.5000])",
        "[0] a 0 1 2 3 4",
        "[1] a 1 2 3 4 5",
        "[0-1] b 0 | 1 7 0 | 1",
    ]


def test_stdout_and_stderr_lines_keep_the_order_of_their_rank(ranks):
    code = """
        import sys
        for number in range(20):
            print("a", number); print("b", file=sys.stderr); print("c", rank)
            print("d", number, file=sys.stderr, flush=True); print("e", rank, file=sys.stderr)
    """
    reply = ranks.run("%%on_all_ranks\n" + textwrap.dedent(code))
    shown = "".join(text if name != "display" else text["data"]["text/plain"] + "\n" for name, text in reply.shown)
    lines = [line.partition("] ") for line in shown.splitlines()]
    for rank in range(3):  # a slow rank has separate lines
        of_rank = [text[0] for label, _, text in lines if rank in _RANKS_OF[label]]
        assert of_rank == list("abcde") * 20, shown
    assert shown.count("[0-2] b\n") > 10, shown
    assert set(re.findall(r"\] ([a-e])", reply.stderr)) == {"b", "d", "e"}, "in its own stream"


def test_times_addresses_and_lists_of_variables_are_folded(ranks):
    code = "def load(): pass\nclass Net: pass\nnet = Net()\nshare = 0.5 + rank"
    assert ranks.run("%%on_all_ranks\n" + code).status == "ok"
    lines = ranks.run("%on_all_ranks %whos").stdout.splitlines()
    listed = {line.split()[1]: line for line in lines if line.startswith("[0-2] ")}
    assert "0x…" in listed["load"] and "0x…" in listed["net"] and listed["share"].endswith("0.5 | 1.5 | 2.5")
    assert ranks.run("%on_all_ranks net").stdout.startswith("[0-2] <__main__.Net at 0x…>")
    shown = ranks.run("%%on_all_ranks\n%%time\nsum(range(100_000 * (rank + 1))); print('done')").stdout.splitlines()
    assert shown[0] == "[0-2] done" and shown[1].startswith("[0-2] CPU times: user "), shown
    assert shown[-1].startswith("[0-2] Wall time: ") and shown[-1].count(" | ") == 2, shown
    log = ranks.run("import ddp_notebook; print(ddp_notebook.current().log(2))").stdout
    assert re.search(r"^<__main__.Net at 0x[0-9a-f]+>$", log, re.MULTILINE), "what is folded is there in full"


def test_displays_of_late_ranks_have_slots_in_the_order_of_ranks(ranks, usual_waits):
    code = (
        "import time\nfrom IPython.display import HTML\ntime.sleep(1.5 * (2 - rank))\n"
        "display(HTML(f'<b>{rank}</b>'))\nprint('after')"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    assert _slots(reply) == [("[0]", "<b>0</b>"), ("[1]", "<b>1</b>"), ("[2]", "<b>2</b>")]
    assert reply.stdout.splitlines() == ["", "[0-2] after"], (
        "the first one had a label, which is empty now; a late twin"
    )


def test_displays_of_a_late_rank_have_slots_in_their_rows(ranks, usual_waits):
    code = (
        "import time\nfrom IPython.display import HTML\ntime.sleep(0.8 * (2 - rank))\n"
        "for word in ('first', 'second', 'third'): display(HTML(f'<b>{word} {rank}</b>'))"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    rows = [_SLOT.findall(data["text/html"].partition(">")[2]) for data in reply.displays]
    assert rows == [
        [(f"[{rank}]", f"<b>{word} {rank}</b>") for rank in range(3)] for word in ("first", "second", "third")
    ]


def test_lines_of_late_ranks_stand_in_the_order_of_ranks(ranks, usual_waits):
    code = "import time\ntime.sleep(0.4 * (2 - rank))\nprint('abc'[rank]); print('end of', 'xyz'[rank])"
    lines = ranks.run("%%on_all_ranks\n" + code).stdout.splitlines()
    assert lines == ["[0] a", "[0] end of x", "[1] b", "[1] end of y", "[2] c", "[2] end of z"]


def test_captured_text_is_in_the_captured_streams(ranks, usual_waits):
    """A display that can be updated would stand in `outputs`, with its updates."""
    code = "import sys, time\ntime.sleep(0.3 * (2 - rank))\nprint('abc'[rank]); print('err', file=sys.stderr)\n"
    code += "print('unfinished', end='', flush=True); time.sleep(0.3); print()"
    assert ranks.run(f"%%capture found\n%%on_all_ranks\n{code}").status == "ok"
    out, err, outputs = json.loads(
        ranks.run("import json\nprint(json.dumps([found.stdout, found.stderr, len(found.outputs)]))").stdout
    )
    assert outputs == 0 and sorted(re.findall(r"\] ([abc])$", out, re.MULTILINE)) == ["a", "b", "c"]
    assert "] unfinished" in out and "] err" in err and "err" not in out


def test_bars_of_late_ranks_stand_in_the_order_of_ranks(ranks, usual_waits):
    code = (
        "import time\ntime.sleep(0.7 * (2 - rank))\n"
        "for i in range(3): print(f'\\rrank {rank}: {i}', end='', flush=True); time.sleep(0.2)\nprint()"
    )
    assert ranks.run("%%on_all_ranks\n" + code).stdout == "[0] rank 0: 2\n[1] rank 1: 2\n[2] rank 2: 2\n"


def test_displays_and_text_keep_their_order(ranks):
    code = (
        "from IPython.display import Markdown\n"
        "for i in range(5):\n    print('text', i)\n    display(Markdown(f'**{i}**'))"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    order = [c["data"].get("text/markdown") or c["data"]["text/plain"] if n == "display" else c for n, c in reply.shown]
    joined = "".join(order)
    at = [joined.index(piece) for i in range(5) for piece in (f"text {i}", f"**{i}**")]
    assert at == sorted(at), order


def test_a_bar_is_redrawn_in_its_place(ranks):
    code = (
        "import sys, time\n"
        "for i in range(8):\n"
        "    print(f'\\r{i} of 7', end='', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.15)\n"
        "print(file=sys.stderr)\nprint('done')"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    assert reply.stdout == "[0-2] 7 of 7\n[0-2] done\n"
    assert reply.nbytes < 200, "each state takes the place of the one before"


def test_tqdm(ranks):
    code = "from tqdm import tqdm\nimport time\nfor i in tqdm(range(5), desc=f'rank {rank}'): time.sleep(0.1)"
    reply = ranks.run("%%on_all_ranks\n" + code)
    lines = reply.stdout.splitlines() + reply.stderr.splitlines()
    assert [line[:12] for line in lines] == [f"[{rank}] rank {rank}: "[:12] for rank in range(3)], lines
    assert all("100%" in line and "5/5" in line for line in lines)


def test_clear_output_replaces_the_output_of_a_rank(ranks):
    code = (
        "import time\nimport matplotlib.pyplot as plt\nfrom IPython.display import clear_output\n%matplotlib inline\n"
        "for i in range(3):\n"
        "    clear_output(wait=True)\n    plt.plot([i, rank]); plt.show()\n    print('frame', i)\n    time.sleep(0.2)"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    slots = _slots(reply)
    assert [label for label, _ in slots] == ["[0]", "[1]", "[2]"], "one figure of each rank is left"
    assert all('src="data:image/png;base64,' in content for _, content in slots)
    assert "[0-2] frame 2" in reply.stdout and "frame 1" not in reply.stdout


def test_a_flood_is_cut_short_with_a_note_and_its_end(ranks):
    code = "line = 'y' * 99\nfor i in range(80_000): print(i, line)\nprint('the end', rank)"
    reply = ranks.run("%%on_all_ranks --ranks 0-1\n" + code)
    assert 4_000_000 < len(reply.stdout) < 11_000_000
    assert "... not shown:" in reply.stderr and "session.log(rank) has the text" in reply.stderr
    assert "[0-1] the end 0 | 1\n" in reply.stdout[-500:]
    log = ranks.run(
        "import ddp_notebook\nlog = ddp_notebook.current().log(1).splitlines()\n"
        "print([log.index(f'{i} ' + 'y' * 99) - len(log) for i in (0, 79_999)], log[-1])"
    )
    assert log.stdout == "[-80001, -2] the end 1\n"
    assert ranks.run("%%on_all_ranks\nprint('calm')").stdout == "[0-2] calm\n"


def test_what_a_thread_prints_between_cells_heads_the_next(ranks):
    ranks.run(
        "%%on_all_ranks\nimport threading\ngo = threading.Event()\n"
        "def late():\n    go.wait(); time.sleep(0.3); print('late')\n"
        "thread = threading.Thread(target=late); thread.start(); go.set()"
    )
    ranks.run("import time; time.sleep(1)")
    assert ranks.run("%%on_all_ranks\nprint('now')").stdout == "[0-2] (between cells) late\n[0-2] now\n"


def test_a_warning_is_shown_once_also_after_a_cell_on_some_ranks(ranks):
    for _ in range(2):
        ranks.run("%%on_ranks 1\npass")
    reply = ranks.run("%%on_all_ranks\nimport warnings\nwarnings.warn('mind')\n1 / 0")
    assert reply.stderr.count("mind") == 2 and reply.stderr.count("[0-2] ") == 2  # the warning and its line of code
    assert reply.traceback.count("ZeroDivisionError") <= 3 and "--- ranks 0-2 ---" in reply.traceback


def test_input_is_asked_in_the_notebook_and_names_the_rank(ranks):
    client = ranks.client
    message = client.execute(
        "%%on_all_ranks --ranks 0,2\nprint('before')\nname = input('Name: ')\nprint('hi', name)", allow_stdin=True
    )
    for rank in (0, 2):
        asked = client.get_stdin_msg(timeout=20)["content"]
        assert asked == {"prompt": f"[{rank}] Name: ", "password": False}
        client.input("Ann")
    reply = ranks.finish(message)
    assert reply.status == "ok", reply.traceback
    first, *rest = sorted(reply.stdout.splitlines())
    assert "[0,2] before" in (first, *rest) and reply.stdout.count("hi Ann") in (1, 2), reply.stdout


def test_getpass_hides_what_is_typed_and_stop_ends_the_question(ranks):
    client = ranks.client
    message = client.execute("%%on_ranks 1\nimport getpass\nsecret = getpass.getpass()", allow_stdin=True)
    assert client.get_stdin_msg(timeout=20)["content"] == {"prompt": "[1] Password: ", "password": True}
    client.input("xyz")
    assert ranks.finish(message).status == "ok"
    assert ranks.run("%%on_ranks 1\nsecret").stdout == "[1] 'xyz'\n"

    message = client.execute("%%on_ranks 1\ninput('never: ')", allow_stdin=True)
    client.get_stdin_msg(timeout=20)
    ranks.interrupt()
    assert ranks.finish(message, timeout_s=10).ename == "KeyboardInterrupt"
    assert ranks.run("%%on_all_ranks\n1").stdout == "[0-2] 1\n"


def test_auto_sends_what_the_user_runs_and_nothing_else(ranks):
    assert "every plain cell runs on all ranks" in ranks.run("%ddp_auto on").stdout
    try:
        assert ranks.run("where = 'there'\nrank").stdout == "[0] 0\n[1] 1\n[2] 2\n"
        assert ranks.run("%%local\nprint('here')").stdout == "here\n"
        for options in ({"silent": True}, {"store_history": False}):
            message = ranks.client.execute("hidden = 'notebook'", **options)
            if options != {"silent": True}:
                ranks.finish(message)
        assert ranks.run("%%local\nprint(hidden)").stdout == "notebook\n"
        assert ranks.run("'hidden' in globals()").stdout == "[0-2] False\n"
        assert ranks.run("%ddp_status").stdout.startswith("rank  host")
        said = ranks.run("# start the ranks\n\n# four of them\n%load_ext ddp_notebook\n%ddp_start 2")
        assert "3 ranks are already running" in said.evalue, "a comment above a magic does not send it to the ranks"
    finally:
        ranks.run("%ddp_auto off")
    assert ranks.run("'where' in globals()").displays == [{"text/plain": "False"}]
    wrong: Reply = ranks.run("%ddp_auto maybe")
    assert wrong.evalue == "%ddp_auto takes on or off, not 'maybe'"


def test_a_cell_may_be_run_later_and_from_a_thread(ranks):
    code = (
        "import ddp_notebook, threading\nsession = ddp_notebook.current()\n"
        "future = session.submit('import time; time.sleep(0.2); print(rank)', ranks='::2')\n"
        "other = session.run('print(1)', ranks=1)\n"
        "print([future.result()[rank].stdout for rank in (0, 2)], other.ranks)"
    )
    shown = ranks.run(code).stdout.splitlines()
    assert re.fullmatch(r"job \d+ is done after 0\.\d s", shown[0])
    assert shown[1:] == ["[0] 0", "[2] 2", "[1] 1", r"['0\n', '2\n'] [1]"]


def test_a_cell_that_leaves_no_group_is_told(ranks):
    reply = ranks.run("%%on_all_ranks\ndist.destroy_process_group()")
    assert reply.stderr.startswith("ranks 0-2: no default process group after this cell; dist.init_process_group()")
    assert ranks.run("%%on_all_ranks\npass").stderr == "", "once is enough"
    reply = ranks.run("%%on_all_ranks\ndist.init_process_group()\nx = torch.ones(1); dist.all_reduce(x); int(x)")
    assert (reply.stdout, reply.stderr) == ("[0-2] 3\n", "")


def test_finished_lines_stay_while_others_are_open(ranks):
    code = (
        "import time\n"
        "if rank == 1:\n    print('waiting', end='', flush=True); time.sleep(2); print()\n"
        "else:\n"
        "    for i in range(4):\n"
        "        print(f'step {i}', end='', flush=True); time.sleep(0.3); print(' done')"
    )
    lines = ranks.run("%%on_ranks 0-1\n" + code).stdout.splitlines()
    assert sorted(lines) == ["[0] step 0 done", "[0] step 1 done", "[0] step 2 done", "[0] step 3 done", "[1] waiting"]


def test_a_burst_of_cleared_displays_leaves_the_last(ranks):
    code = (
        "from IPython.display import HTML, clear_output\n"
        "for i in range(5):\n    clear_output(wait=True)\n    display(HTML(f'{i} of {rank}'))"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    assert _slots(reply) == [("[0]", "4 of 0"), ("[1]", "4 of 1"), ("[2]", "4 of 2")]


@pytest.mark.parametrize("shown", ["print('loading')", "display({'is': 'loading'})", "display(HTML('loading'))"])
@pytest.mark.parametrize("clear", ["clear_output()", "clear_output(wait=True)"])
@pytest.mark.parametrize("sleep", ["", "time.sleep(0.3); "])
def test_what_all_ranks_clear_is_gone(ranks, shown, clear, sleep):
    code = (
        f"import time\nfrom IPython.display import HTML, clear_output\n{shown}; {sleep}{clear}; display(HTML('ready'))"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    assert [data["text/html"] for data in reply.displays] == ["ready"]
    assert reply.stdout.split() in (["[0-2]"], ["[0]", "[1-2]"])


@pytest.mark.parametrize("shown", ["HTML(f'{i} of {rank}')", "{'step': i, 'rank': rank}"])
def test_repeated_clear_output_leaves_only_the_last_display(ranks, shown):
    code = (
        "import time\nfrom IPython.display import HTML, clear_output\n"
        f"for i in range(6):\n    clear_output(wait=True)\n    display({shown})\n    time.sleep(0.15 + 0.01 * rank)"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    if "HTML" in shown:
        assert _slots(reply) == [("[0]", "5 of 0"), ("[1]", "5 of 1"), ("[2]", "5 of 2")]
    else:
        assert reply.stdout.splitlines() == [f"[{rank}] {{'step': 5, 'rank': {rank}}}" for rank in range(3)]


def test_clear_output_at_different_times_leaves_no_old_display(ranks):
    code = (
        "import time\nfrom IPython.display import HTML, clear_output\n"
        "for letter in 'ab': display(HTML(f'{letter}{rank}'))\n"
        "time.sleep(0.3 * rank); clear_output(wait=True); display(HTML(f'c{rank}'))"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    assert _slots(reply) == [("[0]", "c0"), ("[1]", "c1"), ("[2]", "c2")], reply.shown


def test_what_is_cleared_last_waits_for_what_replaces_it(ranks):
    code = "from IPython.display import clear_output\nprint('the result'); clear_output(wait=True)"
    assert ranks.run("%%on_all_ranks\n" + code).stdout == "[0-2] the result\n"


def test_bars_and_many_large_displays_are_cleared(ranks):
    code = (
        "import time\nfrom IPython.display import HTML, clear_output\n"
        "for i in range(10): print(f'\\r{i} %', end=''); time.sleep(0.03)\n"
        "for i in range(30): clear_output(wait=i % 2 == 0); display(HTML(f'{i}' + ' ' * 200_000)); time.sleep(0.01)"
    )
    reply = ranks.run("%%on_all_ranks\n" + code)
    [data] = reply.displays
    shown = re.sub("<[^>]*>", " ", data["text/html"])  # ranks that were not in step have had slots
    assert f"{reply.stdout}{shown}".split() in (["[0-2]", "29"], ["[0]", "[1-2]", "29"]), reply.shown


def test_an_output_widget_that_clears_itself_clears_no_more(ranks):
    ranks.run("%%on_all_ranks\nimport ipywidgets")  # puts the ranks out of step
    code = "print('here'); box = ipywidgets.interactive(lambda a: print('a is', a), a=3); box.update()"
    assert "[0-2] here" in ranks.run("%%on_all_ranks\n" + code).stdout


def test_what_the_notebook_has_said_stays(ranks):
    ranks.run("%%on_all_ranks\nimport threading\nthread = threading.Timer(0.2, print, ['late']); thread.start()")
    time.sleep(0.5)  # no cell runs during this time
    code = "from IPython.display import clear_output\nprint('here'); clear_output(); print('end')"
    assert "(between cells) late" in ranks.run("%%on_all_ranks\n" + code).stdout


def test_what_some_ranks_clear_stays(ranks):
    code = "from IPython.display import clear_output\nprint('here')\nif rank: clear_output()\nprint('end')"
    assert "[0-2] here" in ranks.run("%%on_all_ranks\n" + code).stdout


def test_text_after_one_clear_is_all_there(ranks):
    code = "from IPython.display import clear_output\nclear_output()\nfor i in range(1000): print('line', i)"
    assert ranks.run("%%on_ranks 0\n" + code).stdout.count("line ") == 1000


def test_stop_in_a_flood_gives_the_notebook_back(ranks):
    message = ranks.start("%%on_all_ranks\nwhile True: print('x' * 20)")
    ranks.wait_for_text("[0-2] xxx")
    ranks.interrupt()
    reply = ranks.finish(message, timeout_s=20)
    assert reply.ename == "KeyboardInterrupt"
    assert reply.duration_s < 5
    assert ranks.run("%%on_all_ranks\n1").stdout == "[0-2] 1\n"


def test_stop_while_displays_are_made(ranks):
    code = "from IPython.display import HTML\nprint('go')\nwhile True: display(HTML('x' * 200_000))"
    for _ in range(5):
        message = ranks.start("%%on_ranks 0-1\n" + code)
        ranks.wait_for_text("] go")
        ranks.interrupt()
        assert ranks.finish(message, timeout_s=20).ename == "KeyboardInterrupt"
        assert ranks.run("%%on_all_ranks\n1").stdout == "[0-2] 1\n"


def test_errors_of_notebook_magics_name_their_place_under_auto(ranks):
    ranks.run("%ddp_auto on")
    try:
        assert "[0-2] rank of 3\n" in ranks.run("%%time\nprint('rank of', world_size)").stdout
        reply = ranks.run("x = 5\n%ddp_push x")
        assert "%ddp_push runs in the notebook" in reply.evalue
        assert "---> 3 1 / 0" in ranks.run("\n\n1 / 0").traceback
        assert ranks.run("%%local\nnosuchname").evalue == "the cell failed in the notebook: see the error above"
    finally:
        ranks.run("%ddp_auto off")


_R = "class R:\n    def __repr__(self): raise ValueError(repr(7))\n"
FAILING_DISPLAYS = {
    "a value": f"{_R}R()",
    "a value in a list": f"{_R}[R()]",
    "display": f"{_R}print('a')\ndisplay(R())\nprint('b')",
    "a rich view beside a text": (
        "class H:\n    def _repr_html_(self): raise ValueError(repr(7))\n    def __repr__(self): return 'text'\nH()"
    ),
    "a figure at the end of the cell": (
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.figure().suptitle(r'$\\frac{$');"
    ),
    "a cell in the cell": "get_ipython().run_cell('raise ValueError(repr(7))'); print('b')",
    "a traceback of its own": "try: raise ValueError(repr(7))\nexcept ValueError: get_ipython().showtraceback()",
}


@pytest.mark.parametrize("code", FAILING_DISPLAYS.values(), ids=FAILING_DISPLAYS)
def test_a_failing_display_fails_a_cell_as_in_a_plain_kernel(ranks, code):
    here, there = ranks.run(code), ranks.run("%%on_all_ranks\n" + code)
    assert there.status == here.status
    assert "ValueError: " in here.traceback
    if there.status == "ok":
        shown, told = _ANSI.sub("", there.stderr), ""
        assert here.traceback.splitlines()[-1] in shown
    else:
        shown, told = there.traceback, there.evalue
        assert "--- ranks 0-2 ---" in shown and "(ranks 0-2)" in told
    assert "ValueError: 7" in shown or "Expected \\frac{num}{den}" in shown
    assert "ddp_notebook" not in shown
    if "figure" not in code:
        # Equal lines of ranks that arrive more than 50 ms apart are shown separately.
        texts = dict.fromkeys(re.sub(r"^\[[\d,-]+\] ", "", line) for line in there.stdout.splitlines())
        assert list(texts) == _texts(here)


def _texts(reply: Reply) -> list[str]:
    return [*reply.stdout.splitlines(), *(data["text/plain"] for data in reply.displays)]


def test_one_press_ends_a_long_output_whose_cell_is_over(ranks):
    """The rate of displays is limited: a display after 4.5 MB arrives 3.6 s later."""
    code = "from IPython.display import HTML\nkept = 3\nfor letter in 'xy':\n    display(HTML(letter * 4_500_000))"
    message = ranks.start("%%on_ranks 0\n" + code)
    while "text/html" not in ranks.client.get_iopub_msg(timeout=20)["content"].get("data", {}):
        pass
    time.sleep(0.5)  # until the cell ends; a press during the cell would be a normal interrupt
    ranks.interrupt()
    pressed_s = time.monotonic()
    reply = ranks.finish(message, timeout_s=20)
    assert reply.ename == "KeyboardInterrupt" and is_within(time.monotonic() - pressed_s, 1)
    assert ranks.run("%%on_ranks 0\nkept").stdout == "[0] 3\n"


def test_a_very_long_line_is_cut_at_equal_positions_on_all_ranks(ranks):
    """The places do not depend on how the pipes split the text."""
    lengths: dict[int, list[int]] = {0: [], 1: [], 2: []}
    # An empty line is a display that had the part of a line, which is too long for it now.
    for line in filter(None, ranks.run("%%on_all_ranks\nprint('x' * 1_050_000)").stdout.splitlines()):
        label, _, text = line.partition(" ")
        first, last = int(label[1]), int(label[-2])  # "[0-2]" or "[1]"
        assert label in (f"[{first}-{last}]", f"[{first}]", f"[{first},{last}]"), label
        for rank in (first, last) if "," in label else range(first, last + 1):
            lengths[rank].append(len(text))
    assert lengths == dict.fromkeys(range(3), [100_000] * 10 + [50_000])


def test_a_long_line_that_comes_in_parts_is_whole(ranks):
    code = "import time\nfor _ in range(4):\n    print('x' * 3000, end='', flush=True); time.sleep(0.2)\nprint('end')"
    assert ranks.run("%%on_all_ranks\n" + code).stdout.strip() == "[0-2] " + "x" * 12_000 + "end"


def test_a_display_too_large_for_a_browser_is_replaced_by_a_note(ranks):
    code = "from IPython.display import HTML\nclass Table:\n    def __repr__(self): return 'a table ' + '.' * 999_992\n"
    reply = ranks.run(f"%%on_all_ranks\n{code}    def _repr_html_(self): return '<td>' * 3_000_000\nTable()")
    assert not reply.displays and reply.duration_s < 10
    assert reply.stdout.startswith("[0-2] a table ...") and 200_000 < len(reply.stdout) < 210_000
    told = "[... not sent, since it is too large: text/plain 1.0 MB, text/html 12 MB ...]"
    assert "[... 800,000 characters are left out ...]" in reply.stdout and told in reply.stdout
