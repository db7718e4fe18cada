"""Presses of the stop button at critical moments. These tests need no ranks."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from ddp_notebook.messages.ranks import InputRequest
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.interrupt import Interrupts
from ddp_notebook.run.cells.run_queue import QueueSlot, RunQueue
from ddp_notebook.run.cells.watch import Watch
from ddp_notebook.run.output.screen import Screen


def test_an_interrupt_at_the_start_of_a_turn_is_not_lost():
    turn = RunQueue()
    before, place = QueueSlot(turn), QueueSlot(turn)

    class Wait(threading.Event):
        """An event that is set at the moment at which the interrupt arrives."""

        def wait(self, timeout: float | None = None) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            turn.leave(before)
            return super().wait(timeout)

    place.wait_is_over = Wait()
    with pytest.raises(KeyboardInterrupt, match="interrupted while waiting"), place:
        pass
    with turn.if_free() as is_free:
        assert is_free


def test_one_at_a_question_and_the_next_count_as_one(monkeypatch):
    """The first press has ended the cell. The second press must not interrupt the new process group."""

    def pressed(_) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    run = CellRun(1, [0], lambda _: None)
    controls: Any = None  # not used
    with Interrupts(run.wake) as interrupts:
        watch = Watch(run, controls, interrupts, Screen([0]))
        watch._answer(0, InputRequest(cell=1, request=1, prompt="?", password=False))
        assert interrupts.count == 1
        check = interrupts.after_this()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2
        check()
