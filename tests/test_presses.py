"""Presses of the stop button that come at an awkward moment, without ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.run.cells.turn import Turn
from ddp_notebook.run.cells.watch import Watch
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.wire.events import InputRequest


def test_a_press_is_not_lost_when_the_turn_comes_at_the_same_time(monkeypatch):
    turn = Turn()

    class Lock:
        """One that becomes free while the press comes."""

        def __init__(self) -> None:
            self.is_held = False

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if not blocking:
                return False
            os.kill(os.getpid(), signal.SIGINT)
            self.is_held = True
            return True

        def release(self) -> None:
            self.is_held = False

    lock = Lock()
    monkeypatch.setattr(turn, "_lock", lock)
    with pytest.raises(KeyboardInterrupt, match="interrupted while it waited"), turn:
        pass
    assert not lock.is_held


def test_one_at_a_question_and_the_next_count_as_one(monkeypatch):
    """The first has ended the cell, and the second is not meant for the group that forms after it."""

    def pressed(_) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    run = CellRun(1, [0], lambda _: None)
    controls: Any = None  # not needed
    with Interrupts(run.wake) as interrupts:
        watch = Watch(run, controls, interrupts, Screen([0]))
        watch._answer(0, InputRequest(cell=1, request=1, prompt="?", password=False))
        assert interrupts.count == 1
        check = interrupts.after_this()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2
        check()
