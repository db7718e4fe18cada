"""The clock of time limits stands still while it is held."""

from __future__ import annotations

import time

import pytest

from ddp_notebook.rank.group.held_time import HeldTime


def test_held_time_does_not_count():
    clock, began_ns = HeldTime(), time.monotonic_ns() - 1_000_000_000
    clock.hold(True)
    before_s = clock.elapsed_s(began_ns)
    time.sleep(0.05)
    assert clock.elapsed_s(began_ns) == pytest.approx(before_s, abs=1e-4) and before_s >= 1
    clock.hold(True)  # another notebook
    clock.hold(False)
    time.sleep(0.01)
    assert 0.01 < clock.elapsed_s(began_ns) - before_s < 0.04


def test_a_later_operation_is_not_put_off():
    clock = HeldTime()
    clock.hold(True)
    time.sleep(0.02)
    clock.hold(False)
    began_ns = time.monotonic_ns() - 500_000_000
    assert 0.3 < clock.elapsed_s(began_ns) < 0.49, "20 ms of it were held"
    assert clock.elapsed_s(time.monotonic_ns()) < 0.01


def test_a_limit_is_not_reached_while_time_is_held():
    clock, began_ns = HeldTime(), time.monotonic_ns() - 5_000_000_000
    assert clock.left_s(2, began_ns) == 0 and 2.9 < clock.left_s(8, began_ns) <= 3
    clock.hold(True)
    assert clock.left_s(2, began_ns) > 0
    clock.hold(False)
    assert clock.left_s(2, began_ns) == 0
    clock.reset()
    assert clock.elapsed_s(began_ns) >= 5
