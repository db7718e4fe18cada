"""The stop button of VS Code, many times in a row. See `tests/test_vscode.py`."""

from __future__ import annotations

import random
import time

import pytest

from tests.conftest import wait_until
from tests.kernels import NotebookKernel
from tests.test_vscode import CELLS, NEXT, NEXT_OF_CLIENT, SETUP, below, start_cell

pytestmark = pytest.mark.long
TIMES = 50
AT_ONCE_S = 1.0  # limit for the stop button
LOCAL = ["while True: pass", "time.sleep(600)"]
# Checked by its exit code: on busy cores, pexpect loses output that a command writes just before it ends, also in plain
# IPython (1 of 236 commands).
JOB = (
    "for _ in range(2): train(load(), 0.02)\n!sleep 0.5\n"
    "print('cut' if _exit_code else 'whole')\nprint('ended', train(kept))"
)
END_OF_JOB = "result = job.result(30)\nprint([result[rank].stdout.split() for rank in (0, 1)])"
SEED = 16


@pytest.fixture
def kernel(make_kernel) -> NotebookKernel:
    kernel = make_kernel()
    assert kernel.run("import time\n%load_ext ddp_notebook\n%ddp_start 2 --hang-after off").status == "ok"
    assert kernel.run(SETUP).status == "ok"
    return kernel


def test_it_ends_its_cell_and_nothing_else(kernel, tally):
    """Stop alternately a cell of the ranks, and a local cell during an abandoned cell of the ranks, at any moment.

    The next cell is often already queued in the kernel.
    """
    choice = random.Random(SEED)
    before = kernel.run(NEXT_OF_CLIENT).stdout
    assert before.startswith("True ")
    for n in tally(TIMES, "VS Code's stop button ends the cell and nothing else"):
        is_local = n % 2
        if is_local:
            assert kernel.run(f"job = session.submit({JOB!r})").status == "ok"
            message = _send(kernel, f"print('there', flush=True)\n{choice.choice(LOCAL)}")
            kernel.wait_for_text("there")
        else:
            message = start_cell(kernel, choice.choice(list(CELLS)))
        time.sleep(choice.uniform(0.0, 0.6))  # random moment
        queued = _send(kernel, NEXT) if not is_local and choice.random() < 0.5 else ""
        pressed_at = time.monotonic()
        got = kernel.interrupt_in_vscode()
        took_to_press_s = time.monotonic() - pressed_at
        assert len(got) > 15
        reply = kernel.finish(message, 15)
        assert reply.ename == "KeyboardInterrupt", reply
        assert time.monotonic() - pressed_at - took_to_press_s < AT_ONCE_S, reply
        if is_local:
            ended = kernel.run(END_OF_JOB)
            assert ended.stdout == f"{[['whole', 'ended', '780']] * 2}\n", ended
        shown = kernel.finish(queued or _send(kernel, NEXT))
        assert (shown.status, shown.stdout) == ("ok", "[0-1] 780 780 True\n"), shown
        assert kernel.run(NEXT_OF_CLIENT).stdout == before
        wait_until(lambda: not below(kernel, "sleep"))


def _send(kernel: NotebookKernel, code: str) -> str:
    return kernel.client.execute(code, stop_on_error=False)
