"""The magics in a real kernel with a front end, on the newest ipykernel and on 6.31."""

from __future__ import annotations

import re

import IPython
import pytest

from tests.conftest import wait_until

SLEEPS = {
    "a sleep": "import time\nprint('go')\ntime.sleep(60)",
    "a loop": "print('go')\nwhile True: pass",
    "an await": "import asyncio\nprint('go')\nawait asyncio.sleep(60)",
    "a loop between awaits": "import asyncio\nawait asyncio.sleep(0)\nprint('go')\nwhile True: pass",
    "a task of an await": "import asyncio\nprint('go')\nawait asyncio.gather(*[asyncio.sleep(60) for _ in range(2)])",
}


@pytest.fixture(scope="module")
def ranks(kernel):
    """Start two ranks in a kernel with the magic."""
    reply = kernel.run("%ddp_start 2")
    assert reply.status == "ok", reply.traceback
    progress = reply.stdout.partition("\n")[0].rpartition("\r")[2]  # a slow start has shown its progress before
    assert progress.startswith("starting:  host server") and "engines" in progress
    assert "rank  host" in reply.stdout and "backend gloo" in reply.stdout
    yield kernel
    assert kernel.run("%ddp_stop").stdout == "stopped 2 ranks\n"


@pytest.mark.long
def test_the_first_cell(ranks):
    reply = ranks.run("%%on_all_ranks\nx = torch.full((2,), float(rank), device=device)\ndist.all_reduce(x)\nx")
    assert reply.stdout == "[0-1] tensor([1., 1.])\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "hint"),
    [
        ("print(rank)", "`rank` exists on the ranks only: put %%on_all_ranks above the cell\n"),
        (
            "model(1)",
            "`model` is set by a cell on the ranks: put %%on_all_ranks above the cell, or bring its values here with "
            "%ddp_pull model\n",
        ),
        ("loss.item()", "`loss` is set"),
        ("timed, A", "`timed` is set"),
        ("A, timed", ""),
        ("late", "`late` is set"),
        ("nn.Linear", "`nn` is imported on the ranks: put %%on_all_ranks above the cell, or import it here too\n"),
        (
            "import torch.distributed\ntorch.distributed.get_rank()",
            "the notebook is not in the process group of its ranks: put %%on_all_ranks above the cell\n",
        ),
        ("nobody_has_this", ""),
        # ranks do not have this name in a module either
        ("exec('def f(): return rank', names := {})\nnames['f']()", ""),
        ("1 / 0", ""),
        ("%%local\nprint(rank)", ""),
        ("%%on_all_ranks --here\nassert world_size", ""),
        ("%%on_all_ranks\nnobody_has_this", ""),
        ("%%on_all_ranks\nraise ValueError('Default process group has not been initialized')", ""),
    ],
)
def test_a_plain_cell_that_was_meant_for_the_ranks_says_so(ranks, cell, hint):
    sets = "%env A=1\n%time timed = 1\nmodel = lambda x: x\nfor step in range(2):\n    loss = torch.tensor(step)"
    assert ranks.run(f"%%on_all_ranks\n{sets}\nimport torch.nn as nn").status == "ok"
    assert ranks.run("%%time\n%%on_all_ranks\nlate = 1").status == "ok"
    reply = ranks.run(cell)
    assert reply.status == "error"
    assert hint in reply.stderr if hint else "put %%" not in reply.stderr, reply


@pytest.mark.parametrize(
    ("cell", "meant"),
    [
        ("%%on_all_rank\nrank", "%%on_all_ranks"),
        ("%%on_rank 0\nrank", "%%on_ranks"),
        ("x = 1\n%ddp_monitr", "%ddp_monitor"),
        ("%ddp_restar", "%ddp_restart"),
        ("# all ranks\n%%on_all_ranks\nrank", "first line"),
        ("%on_ranks 0 1", ""),  # IPython's own error message explains this one
        ("%nothing_like_it", ""),
    ],
)
def test_an_error_for_an_unknown_magic_suggests_a_magic(ranks, cell, meant):
    said = ranks.run(cell).stderr
    assert "not found" in said
    if meant == "first line":
        assert said.endswith("%%on_all_ranks must be the first line of its cell\n")
    else:
        assert f"did you mean {meant}?\n" in said if meant else "did you mean %" not in said


def test_a_model_in_ddp_is_pulled_without_its_group(ranks):
    ranks.run("%%on_all_ranks\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))")
    advice = ranks.run("%ddp_pull model").evalue
    assert advice.endswith("%on_all_ranks inner = model.module, then %ddp_pull inner")
    assert ranks.run("%on_all_ranks inner = model.module").status == "ok"
    assert ranks.run("%ddp_pull inner").status == "ok"
    assert ranks.run("print(inner[1].weight.shape)").stdout == "torch.Size([1, 2])\n"


def test_what_each_rank_has_of_its_own_is_not_pushed(ranks):
    for name, what in (
        ("rank", "each rank's own value"),
        ("local_rank", "each rank's own value"),
        ("world_size", "each rank's own value"),
        ("device", "each rank's own value"),
        ("torch", "a module that every rank has imported"),
        ("dist", "a module that every rank has imported"),
    ):
        reply = ranks.run(f"{name} = 3\n%ddp_push {name}")
        assert reply.evalue == f"`{name}` cannot be pushed: on the ranks it is {what}. Push it under another name"
    assert ranks.run("%on_all_ranks rank").stdout == "[0] 0\n[1] 1\n"


def test_a_pushed_log_replaces_the_function_and_a_line_says_so(ranks):
    reply = ranks.run("log = '/tmp/steps.txt'\n%ddp_push log")
    assert reply.status == "ok"
    assert reply.stderr == (
        "`log` on ranks 0-1 now hides the function log(loss=...), which records metrics. "
        "`import ddp_notebook` finds it as ddp_notebook.log\n"
    )
    assert ranks.run("%on_all_ranks log").stdout == "[0-1] '/tmp/steps.txt'\n"
    assert ranks.run("%%on_all_ranks\nimport ddp_notebook\nddp_notebook.log(loss=1.0)").status == "ok"
    assert ranks.run("%on_all_ranks del log").status == "ok"
    assert ranks.run("%on_all_ranks log(loss=0.5)").status == "ok", "the function is back"


def test_a_figure_of_a_rank_is_shown(ranks):
    code = "%%on_all_ranks\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, {}]);"
    reply = ranks.run(code.format("rank"))
    [both] = reply.displays  # one display holds both
    assert both["text/html"].count('src="data:image/png;base64,') == 2
    reply = ranks.run(code.format(2))
    assert ["image/png" in data for data in reply.displays] == [True], "equal figures are shown once"
    assert reply.stdout == "[0-1]\n"


def test_text_appears_while_the_cell_runs(ranks):
    message = ranks.start("%%on_all_ranks\nprint('early')\nimport time\ntime.sleep(30)")
    ranks.wait_for_text("[0-1] early", timeout_s=5)
    ranks.interrupt()
    assert ranks.finish(message).ename == "KeyboardInterrupt"


def test_a_start_with_the_same_options_keeps_the_running_ranks(ranks):
    ranks.run("%on_all_ranks before = rank")
    said = "2 ranks are already running and keep their variables; %ddp_restart starts new ranks\n"
    for line in ("2", "", "2 --timeout 7 --backend auto", "2 --backend gloo"):
        reply = ranks.run(f"%ddp_start {line}")
        assert (reply.status, reply.stdout) == ("ok", said), line
    assert ranks.run("%on_all_ranks before").stdout == "[0] 0\n[1] 1\n"


def test_a_start_with_other_options_names_them(ranks):
    for line, differs in [
        ("3", "they have 2 ranks, and this line asks for 3 ranks. %ddp_resize 3 changes the number of ranks, "),
        ("--grace off --env A=1", "they have no --env, --grace 3, and this line asks for --env A=1, --grace off. %"),
    ]:
        reply = ranks.run(f"%ddp_start {line}")
        assert reply.ename == "SessionExistsError"
        assert reply.evalue.startswith(f"2 ranks are already running, with other options: {differs}"), reply.evalue
    assert ranks.run("ddp_notebook = __import__('ddp_notebook'); ddp_notebook.start(2)").evalue.endswith(
        "gloo> is already running; use it, restart it with %ddp_restart, or end it with %ddp_stop"
    )


def test_help_is_shown_and_nothing_is_run(ranks):
    for cell, words in [
        ("%ddp_start --help", "usage: %ddp_start [N] [option ...]\n\nStart ranks"),
        ("%ddp_start 3 -h", "usage: %ddp_start [N] [option ...]\n\nStart ranks"),
        ("%%on_all_ranks --help\nraise ValueError", "usage: %%on_all_ranks [option ...]"),
        ("%%on_ranks --help\nraise ValueError", "usage: %%on_ranks 0,2-3 [option ...]"),
        ("%on_all_ranks --help", "usage: %%on_all_ranks"),
        ("%ddp_memory --help", "usage: %ddp_memory [CODE]"),
        ("%ddp_torchrun --help", "usage: %ddp_torchrun [--agents N] [--name NAME] "),
        ("%ddp_help heal", "usage: %ddp_heal [--from RANK] [NAME ...]"),
        ("%ddp_help", "session:\n  %ddp_start "),
    ]:
        reply = ranks.run(cell)
        assert reply.status == "ok" and reply.stdout.startswith(words), (cell, reply)
    assert "  --hang-after S|off " in ranks.run("%ddp_start --help").stdout


def test_the_inspector_shows_the_help(ranks):
    for cell, words in [("%ddp_start", "  --keep-recording MB "), ("%%on_all_ranks", "  --watch NAME,... ")]:
        reply = ranks.client.inspect(cell, reply=True, timeout=20)["content"]
        assert reply["found"] and words in reply["data"]["text/plain"]
    [page] = ranks.client.execute("%ddp_pull?", reply=True, timeout=20)["content"]["payload"]
    assert "  --safe " in page["data"]["text/plain"] and "example" in page["data"]["text/plain"]


@pytest.mark.parametrize(
    ("cell", "completed"),
    [
        ("%ddp_start --ho", ["--hosts"]),
        ("%ddp_start 4 --keep-", ["--keep-output", "--keep-recording"]),
        ("%ddp_start --backend g", ["gloo"]),
        ("%%on_all_ranks --ba", ["--background"]),
        ("%%on_ranks 0 --q", ["--quiet"]),
        ("x = 1\n%ddp_pull x --s", ["--safe"]),
        ("%ddp_record v", ["values"]),
        ("%ddp_torchrun --ag", ["--agents"]),
    ],
)
def test_options_complete_with_tab(ranks, cell, completed):
    reply = ranks.client.complete(cell, reply=True, timeout=20)["content"]
    if IPython.version_info >= (8, 6):
        assert reply["matches"] == completed
    else:  # the completers of older versions add other names
        assert set(completed) <= set(reply["matches"])
    assert cell[reply["cursor_start"] : reply["cursor_end"]] == cell.split()[-1]


def test_ranks_with_spaces_between_them_are_one_word(ranks):
    for line in ("0 1", "0, 1", "0 ,1"):
        advice = "the ranks are one word, without spaces: %%on_ranks 0,1\nusage: %%on_ranks 0,2-3"
        assert advice in ranks.run(f"%%on_ranks {line}\nrank").evalue
    assert ranks.run("%%on_ranks 0 --timeout 5\nrank").stdout == "[0] 0\n"


_NO = "if rank == 1: raise ValueError('no')"


@pytest.mark.parametrize("code", [f"%%on_all_ranks\n{_NO}", f"ddp_notebook.current().run({_NO!r})"])
def test_a_failing_cell_stops_the_notebook(ranks, code):
    ranks.run("import ddp_notebook")
    reply = ranks.run(code)
    assert (reply.status, reply.ename) == ("error", "RankError")
    assert "--- rank 1 ---" in reply.traceback and "ValueError: no" in reply.traceback
    assert "ddp_notebook/" not in reply.traceback  # frames of this package would not help the user
    if "<cell line: 0>" in reply.traceback:  # IPython 7 names a cell by its file
        return
    of_ranks, of_notebook = (re.findall(r"In\[(\d+)\]", r.traceback)[0] for r in (reply, ranks.run("1 / 0")))
    assert int(of_notebook) == int(of_ranks) + 1  # ranks number the cell as the notebook does


def test_a_cell_in_a_cell_is_named_as_the_outer_one(ranks):
    code = f"try: ddp_notebook.current().run({_NO!r})\nexcept Exception as error: print(*error._render_traceback_())"
    here, there = (
        re.findall(r"In.*?\[.*?(\d+).*?\]|<cell line: 0>", ranks.run(f"{head}{code}").stdout)[0]
        for head in ("import ddp_notebook\n", "%%local\n")
    )
    assert here == there == "" or int(there) == int(here) + 1


@pytest.mark.parametrize("code", SLEEPS.values(), ids=SLEEPS)
def test_the_interrupt_reaches_every_rank(ranks, code):
    ranks.run("%%on_all_ranks\nkept = rank")
    message = ranks.start("%%on_all_ranks\n" + code)
    ranks.wait_for_text("] go")
    ranks.interrupt()
    reply = ranks.finish(message, timeout_s=10)
    assert reply.ename == "KeyboardInterrupt"
    assert re.fullmatch(
        r"the cell was stopped(\n  ranks? [01,]+ (was|were) interrupted at (cell line \d|the start of the cell).*)+",
        reply.evalue,
    )
    reply = ranks.run("%%on_all_ranks\nx = torch.tensor([kept]); dist.all_reduce(x); x.item()")
    assert reply.stdout == "[0-1] 1\n"


@pytest.fixture(scope="module")
def px(ranks):
    """Give the kernel `%px` and `%%px`, which need a controller."""
    assert ranks.run("import ddp_notebook; ddp_notebook.current().client.activate()").status == "ok"


def test_an_interrupt_before_the_cell_began(ranks, px, tmp_path):
    """A `%%px` cell occupies the rank. The cell of this package waits for it and is stopped while it waits."""
    ranks.run("%px ran = False")
    ranks.run(
        "%%px --noblock\nimport os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()\n"
        "try: time.sleep(30)\n"
        "except KeyboardInterrupt: time.sleep(1.0)  # the signal; the message follows it"
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)  # otherwise the second cell may run first
    message = ranks.start("print('sent')\nget_ipython().run_cell_magic('on_all_ranks', '', 'ran = True')")
    ranks.wait_for_text("sent")
    ranks.interrupt()
    assert ranks.finish(message, timeout_s=10).ename == "KeyboardInterrupt"
    assert ranks.run("%%on_all_ranks\nran").stdout == "[0-1] False\n"


def test_status_and_the_words_for_mistakes(ranks):
    status = ranks.run("%ddp_status").stdout
    assert status.startswith("rank  host") and status.count("idle") == 2
    for code, ename, words in [
        ("%ddp_status now", "UsageError", "%ddp_status takes no 'now'"),
        ("%ddp_restart --live html", "UsageError", "write %ddp_restart alone, or %ddp_stop and %ddp_start with"),
        ("%on_all_ranks\nx = 1", "UsageError", "or %%on_all_ranks above a whole cell"),
        ("%%on_all_ranks --fast\n1", "UsageError", "unrecognized arguments: --fast\nusage: %%on_all_ranks [option"),
    ]:
        reply = ranks.run(code)
        assert reply.ename == ename and words in reply.evalue, reply
    assert ranks.run("%%on_all_ranks\nrank").status == "ok"


def test_restart_and_stop(make_kernel):
    kernel = make_kernel(env={"DDP_NOTEBOOK_PRELOAD": "0"})
    kernel.run("%load_ext ddp_notebook")
    for code in ("%ddp_status", "%ddp_stop", "%ddp_restart", "%%on_all_ranks\n1"):
        reply = kernel.run(code)
        assert reply.ename == "NoSessionError" and "%ddp_start 4" in reply.evalue
    for line, words in [  # mistakes that are found without a host server; the others are in `test_start`
        ("0", "N must be at least 1"),
        ("many", "N must be a whole number of ranks, got 'many'"),
        ("2 --fast", "unrecognized arguments: --fast"),
        ("2 --backend smoke", "unknown backend 'smoke'"),
        ("2 --env A", "--env takes NAME=VALUE"),
    ]:
        reply = kernel.run(f"%ddp_start {line}")
        assert reply.ename == "UsageError" and words in reply.evalue, reply
    assert kernel.run("%ddp_start 1 --env MINE=1").status == "ok"
    first = kernel.run("%%on_all_ranks\nimport os; os.getpid(), os.environ['MINE']").stdout
    assert "'1'" in first
    assert kernel.run("%ddp_restart").status == "ok"
    again = kernel.run("%%on_all_ranks\nimport os; os.getpid(), os.environ['MINE']").stdout
    assert "'1'" in again and again != first
    assert kernel.run("%ddp_stop").stdout == "stopped 1 rank\n"
    assert kernel.run("import ddp_notebook; print(ddp_notebook.current())").stdout == "None\n"
