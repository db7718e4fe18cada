"""Failing and interrupted cells, and the cells right after them."""

from __future__ import annotations

import re
import time

import pytest

from tests.long.watching import SUM, expect_sums, pids_of_ranks, send, start_ranks, wait_for_ranks

pytestmark = pytest.mark.long

_GO = "%%on_all_ranks\nimport asyncio, time\nprint(f'go {rank}.')\n"
STOPPED = re.compile(r"the cell was stopped(\n  ranks? [\d,-]+ (was|were) interrupted at cell line 3(, in \w+)?)+")
AWAITS = [
    "await asyncio.sleep(60)",
    "while True: await asyncio.sleep(0)",
    "while True: await asyncio.sleep(0.001); time.sleep(0.001)",
    "await asyncio.gather(*[asyncio.sleep(60) for _ in range(3)])",
    "await asyncio.to_thread(time.sleep, 0.2); await asyncio.sleep(60)",
]
INTERRUPTED = ["while True: pass", "time.sleep(60)", AWAITS[0], AWAITS[1]]
FAILING = [
    "1 / 0",
    "if rank == 1: raise ValueError('one rank only')",
    "if rank != 1: raise ValueError('all but one')",
    "this is no Python",
    "await asyncio.sleep(0); 1 / 0",
]


@pytest.fixture
def kernel(make_kernel):
    """Start a notebook with four ranks."""
    kernel = make_kernel()
    start_ranks(kernel)
    return kernel


def test_interrupting_an_await_ends_no_rank(kernel, tally):
    pids = pids_of_ranks(kernel)
    for n in tally(50, "interrupting an `await` cell ends no rank"):
        message = send(kernel, _GO + AWAITS[n % len(AWAITS)])
        wait_for_ranks(kernel, "go {rank}.")
        kernel.interrupt()
        reply = kernel.finish(message, timeout_s=15)
        assert reply.ename == "KeyboardInterrupt" and STOPPED.fullmatch(reply.evalue), reply
        assert pids_of_ranks(kernel) == pids
    expect_sums(kernel.run(SUM))


def test_a_cell_right_after_a_failed_one(kernel, tally):
    """Every other time the next cell is already queued in the kernel while the first one fails."""
    for n in tally(50, "a cell sent right after a failed one runs on all ranks"):
        failing = send(kernel, _GO + FAILING[n % len(FAILING)])
        queued = send(kernel, SUM) if n % 2 else ""
        assert kernel.finish(failing).ename == "RankError"
        expect_sums(kernel.finish(queued or send(kernel, SUM)))


def test_a_cell_right_after_an_interrupted_one(kernel, tally):
    """Every other time the next cell is already queued in the kernel while the first one is interrupted."""
    for n in tally(50, "a cell sent right after an interrupted one runs on all ranks"):
        interrupted = send(kernel, _GO + INTERRUPTED[n // 2 % len(INTERRUPTED)])
        wait_for_ranks(kernel, "go {rank}.")
        queued = send(kernel, SUM) if n % 2 else ""
        kernel.interrupt()
        reply = kernel.finish(interrupted, timeout_s=15)
        assert reply.ename == "KeyboardInterrupt" and STOPPED.fullmatch(reply.evalue), reply
        expect_sums(kernel.finish(queued or send(kernel, SUM)))


def test_a_second_press_behind_the_end_does_not_lose_the_reply(make_kernel, tally):
    """The press arrives while the kernel sends the reply of the cell that the first press has ended."""
    kernel = make_kernel()
    start_ranks(kernel, 2)
    for n in tally(60, "cells reply after the stop button is pressed twice"):
        message = kernel.start("%%on_all_ranks\nimport time; print('go'); time.sleep(60)")
        kernel.wait_for_text("go")
        kernel.interrupt()
        time.sleep(0.002 * n)
        kernel.interrupt()
        assert kernel.finish(message, timeout_s=10).ename == "KeyboardInterrupt"
