"""Repeated Tabs: in cells that end at any moment, and at a property that begins a collective."""

import contextlib
import queue
import random
import time

import pytest

from tests.kernels import NotebookKernel

pytestmark = pytest.mark.long


@pytest.fixture
def front(make_kernel):
    kernel: NotebookKernel = make_kernel()
    kernel.run("%load_ext ddp_notebook\n%ddp_start 2")
    kernel.run(
        "%%on_all_ranks --quiet\nimport time\nclass Odd:\n    @property\n    def danger(self): return "
        "dist.all_reduce(torch.ones(1))\nodd = Odd()"
    )
    return kernel


def ask(kernel, code):
    """Return the matches. Replies to cells that arrive in between are dropped."""
    asked = kernel.client.complete(code, len(code))
    while True:
        message = kernel.client.get_shell_msg(timeout=20)
        if message["parent_header"].get("msg_id") == asked:
            return message["content"]["matches"]


def test_the_last_status_is_idle_after_20_cells_with_tabs(front):
    draw = random.Random(1)
    for _ in range(20):
        seconds = draw.uniform(0.05, 0.4)
        front.start(f"%%on_all_ranks --quiet\ntime.sleep({seconds})")
        until = time.monotonic() + seconds + 0.05
        while time.monotonic() < until:
            assert ask(front, "%%on_all_ranks\nod") == ["odd"]
        states = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = front.client.get_iopub_msg(timeout=0.7)
                if message["msg_type"] == "status":
                    states.append(message["content"]["execution_state"])
        assert states[-1] == "idle", states[-6:]


def test_20_tabs_at_a_property_with_a_collective(front):
    for number in range(20):
        assert ask(front, "%%on_all_ranks\nodd.danger.") == []
        assert ask(front, "%%on_all_ranks\nodd.dang") == ["danger"]
        front.client.inspect("%%on_all_ranks\nodd.danger", 26)
        reply = front.run(
            f"%%on_all_ranks --timeout 20\nt = torch.full((1,), {number}.)\ndist.all_reduce(t)\nprint(t.item())"
        )
        assert reply.stdout == f"[0-1] {2.0 * number}\n"
