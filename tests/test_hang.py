"""A stuck cell shows which ranks wait for each other. Other cells do not."""

from __future__ import annotations

import re
import time

import pytest

from tests.conftest import is_within

HANG_AFTER_S = 1


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run(f"%ddp_start 2 --hang-after {HANG_AFTER_S} --grace 1").status == "ok"
    yield kernel
    kernel.run("%ddp_stop")


def cards(reply) -> list[dict[str, str]]:
    return [data for data in reply.displays if "text/html" in data]


def wait_for_card(kernel, timeout_s: float = 20.0) -> dict[str, str]:
    """Return the card as first shown."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=timeout_s)
        data = message["content"].get("data", {})
        if message["msg_type"] == "display_data" and "no progress" in data.get("text/plain", ""):
            return data


@pytest.mark.long
def test_the_card_shows_blocked_ranks_until_they_continue(ranks):
    message = ranks.start(
        "%%on_all_ranks\nimport time\nuntil = time.monotonic() + 3.5\n"
        "while rank == 1 and time.monotonic() < until: time.sleep(0.05)\n"
        "dist.all_reduce(torch.ones(3, 2)); print('on')"
    )
    card = wait_for_card(ranks)
    text = card["text/plain"].splitlines()
    assert re.fullmatch(r"no progress for \d s: not arrived at all_reduce #\d+: rank 1 is at cell line 3", text[0])
    assert re.fullmatch(
        r"  rank 0: waiting in all_reduce #\d+ of group default \(float32\[3,2\], 24 B, cell line 4\), for \d s",
        text[1],
    )
    assert text[2] == "  rank 1: at cell line 3"
    assert text[3] == "  The stop button ends the cell; every variable is kept."
    assert 'role="status"' in card["text/html"] and "<script" not in card["text/html"]
    reply = ranks.finish(message)
    assert reply.status == "ok" and reply.stdout == "[0-1] on\n"
    assert [data["text/plain"] for data in cards(reply)] in ([], [""])  # the card was removed


def test_a_deadlock_is_named_and_the_stop_button_ends_it(ranks):
    message = ranks.start("%%on_all_ranks\nkept = rank\ndist.recv(torch.ones(2), 1 - rank)")
    text = wait_for_card(ranks)["text/plain"]
    assert "they wait for each other: rank 0 in recv #1 from rank 1, rank 1 in recv #1 from rank 0" in text
    ranks.interrupt()
    reply = ranks.finish(message)
    assert reply.ename == "KeyboardInterrupt"
    assert reply.evalue.splitlines()[1:] == [
        "  rank 0 waited in recv #1 from rank 1 (float32[2], cell line 2)",
        "  rank 1 waited in recv #1 from rank 0 (float32[2], cell line 2)",
    ]
    again = ranks.run("%%on_all_ranks\nx = torch.tensor([kept]); dist.all_reduce(x); x.item()")
    assert again.stdout == "[0-1] 1\n"


def test_a_thread_that_waits_is_named(ranks):
    message = ranks.start(
        "%%on_all_ranks\nimport threading, time\ndef work(): dist.all_reduce(torch.ones(3))\n"
        "thread = threading.Thread(target=work, name='worker')\nif rank == 0: thread.start(); thread.join()\n"
        "else: time.sleep(600)"
    )
    waiting = r"rank 0: waiting in all_reduce #\d+ of group default \(float32\[3\], 12 B, {}\), for \d s"
    where = "thread 'worker' at cell line 2 in work"
    assert re.search(waiting.format(where), wait_for_card(ranks)["text/plain"])
    ranks.interrupt()
    reply = ranks.finish(message)
    assert re.search(rf"rank 0 waited in all_reduce #\d+ of group default \(float32\[3\], {where}\)", reply.evalue)
    assert reply.stderr == ""  # and its traceback is not shown


def test_a_rank_that_holds_the_interpreter_is_found_by_its_stack(ranks):
    message = ranks.start(
        "%%on_all_ranks\ndef slow():\n    return sum(range(10**8 * 2))\nif rank == 0: slow()\ndist.barrier()"
    )
    text = wait_for_card(ranks)["text/plain"]
    assert "rank 0: no answer: cell line 2 in slow, in one long call during which no other thread can run" in text
    assert ranks.finish(message).status == "ok"


@pytest.mark.long
def test_a_slow_but_healthy_cell_gets_no_card(ranks):
    """Ranks that compute longer than the limit, independently or in step."""
    for code in (
        "import time\nuntil = time.monotonic() + 3\nwhile time.monotonic() < until: torch.ones(100).sum()",
        "import time\nfor _ in range(25): time.sleep(0.1); dist.all_reduce(torch.ones(10))",
        "import time\ntime.sleep(2.5)",
    ):
        reply = ranks.run("%%on_all_ranks\n" + code)
        assert reply.status == "ok" and not reply.displays and "no progress" not in reply.stderr, reply


def test_fail_fast_shows_the_culprit_first(ranks):
    reply = ranks.run(
        "%%on_all_ranks\nif rank == 1: raise ValueError('bad batch')\ndist.all_reduce(torch.ones(1024))", timeout_s=20
    )
    assert reply.ename == "RankError" and is_within(reply.duration_s, 3)
    lines = [line for line in reply.traceback.splitlines() if line.strip()]
    assert lines[0] == "--- rank 1 ---"
    failed = next(number for number, line in enumerate(lines) if line.startswith("ValueError: bad batch"))
    assert re.fullmatch(
        r"rank 0 waited in all_reduce #\d+ of group default \(float32\[1024\], cell line 2\)", lines[failed + 1]
    )
    assert lines[failed + 2].startswith("RankError: ValueError: bad batch (rank 1); interrupted: rank 0")


def test_ranks_that_end_within_the_grace_keep_their_result(ranks):
    reply = ranks.run(
        "%%on_all_ranks\nimport time\nif rank == 1: raise ValueError('early')\ntime.sleep(0.4); kept = 'done'; kept"
    )
    assert reply.stdout == "[0] 'done'\n" and "succeeded: rank 0" in reply.evalue


@pytest.mark.long
def test_grace_off_lets_the_others_end_by_themselves(make_kernel):
    kernel = make_kernel()
    kernel.run("%load_ext ddp_notebook")
    assert kernel.run("%ddp_start 2 --grace off").status == "ok"
    reply = kernel.run("%%on_all_ranks\nimport time\nif rank == 1: raise ValueError('no')\ntime.sleep(4); 'whole'")
    assert reply.stdout == "[0] 'whole'\n"
    for line, words in (
        ("--grace soon", "--grace must be a number of seconds or off, got 'soon'"),
        (
            "--hang-after -1",
            "--hang-after must be a positive number of seconds, at most a week, e.g. --hang-after 5, or off, got -1",
        ),
        ("--guard maybe", "invalid choice: 'maybe'"),
    ):
        assert words in kernel.run(f"%ddp_start 2 {line}").evalue


def test_uneven_data_in_ddp_end_the_cell_with_the_advice_to_join(ranks):
    loop = "for x in data:\n    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()"
    ranks.run(
        "%%on_all_ranks\nfrom torch.distributed.algorithms.join import Join\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.DataLoader(torch.ones(2 + rank, 4))"
    )
    message = ranks.start(f"%%on_all_ranks\n{loop}")
    text = wait_for_card(ranks)["text/plain"]
    assert re.search(r"in all_reduce #\d+, and rank 0 has ended the cell without it", text)
    assert "rank 0 has made 2 optimizer steps with 2 batches, and rank 1 waits after 2 steps" in text
    assert "The data of rank 0 ended after 2 batches, and rank 1 has taken 3: put `with Join([model]):`" in text
    assert "(mean of gradients, float32[20]" in text
    reply = ranks.finish(message)
    assert reply.ename == "RankError"
    assert re.match(r"the cell was stopped: rank 1 waits in all_reduce #\d+, and rank 0 has ended", reply.evalue)
    joined = loop.replace("\n", "\n    ")
    assert ranks.run(f"%%on_all_ranks\nwith Join([model]):\n    {joined}").status == "ok"


STUCK_IN_STR = (
    "%%on_all_ranks\nkept = rank\nimport time\nclass E(Exception):\n    def __str__(self): time.sleep(1000)\n"
    "if rank == 1: raise E\ndist.barrier()"
)


def test_a_stop_ends_a_rank_that_formats_its_traceback(ranks):
    message = ranks.start(STUCK_IN_STR)
    text = wait_for_card(ranks)["text/plain"]
    assert re.match(r"no progress for \d s: rank 1 has failed \(E\), and rank 0 waits in barrier #\d+", text)
    assert "  rank 1: has failed, and formats its traceback: E\n" in text
    ranks.interrupt()
    pressed_s = time.monotonic()
    reply = ranks.finish(message)
    assert is_within(time.monotonic() - pressed_s, 1)
    assert reply.evalue == "E (rank 1); interrupted: rank 0"
    assert "its traceback was not formatted to the end: stop was pressed" in reply.traceback
    assert ranks.run("%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); kept + int(x)").stdout == "[0] 2\n[1] 3\n"


# Repeated interrupts, each 50 us after the previous one, until the rank has handled the failure.
STUCK_IN_A_FLOOD = """%%on_all_ranks --quiet
import signal, time
from ddp_notebook.wire.signals import AGAIN
def again(_, frame):
    global left
    left -= 1
    if left == 0: signal.setitimer(signal.ITIMER_REAL, 0)
    signal.getsignal(AGAIN)(AGAIN, frame)
signal.signal(signal.SIGALRM, again)
class E(Exception):
    def __str__(self):
        global left
        try: time.sleep(1000)
        finally:
            left = 100
            signal.setitimer(signal.ITIMER_REAL, 5e-5, 5e-5)
"""


def test_a_failure_is_one_however_often_the_stop_comes(ranks):
    assert ranks.run(STUCK_IN_A_FLOOD).status == "ok"
    for _ in range(3):
        message = ranks.start("%%on_all_ranks\nprint('here', flush=True)\nif rank == 1: raise E\ndist.barrier()")
        ranks.wait_for_text("here")
        wait_for_card(ranks)
        ranks.interrupt()
        assert ranks.finish(message).evalue == "E (rank 1); interrupted: rank 0"


@pytest.mark.long
def test_a_very_deep_traceback_is_short(ranks):
    """Two functions that call each other: IPython formats every frame, which took 26 s for 9000 (1.1 MB of text)."""
    reply = ranks.run(
        "%%on_all_ranks\nimport sys\nlimit = sys.getrecursionlimit(); sys.setrecursionlimit(20_000)\n"
        "def f(n): return g(n - 1)\ndef g(n):\n    if n < 0: raise ValueError('deep')\n    return f(n - 1)\nf(9000)"
    )
    ranks.run("%%on_all_ranks\nsys.setrecursionlimit(limit)")
    assert reply.duration_s < 20
    assert "frames in the middle of this traceback are left out" in reply.traceback
    assert reply.traceback.count("in f(n)") > 40 and "ValueError: deep" in reply.traceback
    assert len(reply.traceback) < 100_000
