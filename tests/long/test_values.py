"""Transfers of large values, and the stop button."""

from __future__ import annotations

import time

import pytest

from tests.conftest import wait_until
from tests.kernels import NotebookKernel
from tests.long.watching import SUM, expect_sums, start_ranks

pytestmark = pytest.mark.long

_MAKE = "%%on_all_ranks\nbig = torch.zeros(125_000_000)\nfrom ddp_notebook.rank.engine import RankEngine"
_HELD = "%%on_all_ranks\nbulk = RankEngine.instance()._rank.agent.bulk; print('held', len(bulk._held), len(bulk._put))"
# Interrupted transfers, and the delay of the interrupt. Torch is imported before, which cannot be interrupted.
TRANSFERS = {
    "pull": "session.pull('big')",
    "push": "session.push(big=big)",
}


@pytest.fixture(scope="module")
def kernel():
    """Start a notebook with two ranks, and 500 MB on each of them."""
    kernel = NotebookKernel()
    try:
        start_ranks(kernel, 2)
        assert kernel.run(_MAKE).status == "ok"
        reply = kernel.run(
            "import torch, ddp_notebook\nsession = ddp_notebook.current()\nbig = torch.zeros(125_000_000)"
        )
        assert reply.status == "ok", reply
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize("what", TRANSFERS)
def test_interrupting_a_transfer_of_500_mb(kernel, tally, what):
    took_s = []
    for n in tally(
        10, f"a {what} of 500 MB on two ranks ends within 1 s after the stop button, and the next cell runs"
    ):
        message = kernel.start(f"print('go', flush=True)\n{TRANSFERS[what]}")
        kernel.wait_for_text("go")
        time.sleep(0.1 + 0.2 * n)  # in the pickle, in the transfer from one rank, or from the other
        kernel.interrupt()
        pressed = time.monotonic()
        reply = kernel.finish(message)
        took_s.append(time.monotonic() - pressed)
        if reply.status == "ok":  # it was faster
            assert n > 3
            kernel.run("pass")  # the interrupt may arrive in the next cell
            continue
        assert reply.ename == "KeyboardInterrupt", reply
        assert took_s[-1] < 1.0, took_s
        expect_sums(kernel.run(SUM), world_size=2)
        wait_until(lambda: kernel.run(_HELD).stdout == "[0-1] held 0 0\n", what="the ranks forget it")
    print(f"{what}: ended after {', '.join(f'{one:.2f}' for one in took_s)} s")
