"""Waiting for a cell: showing what comes, passing interrupts on, answering `input()`, and knowing when to stop."""

from __future__ import annotations

import getpass
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ddp_notebook.errors import name_ranks
from ddp_notebook.events import Answer, Ask
from ddp_notebook.run.cell import CellRun, Shown
from ddp_notebook.run.interrupt import Interrupts
from ddp_notebook.run.screen import Screen

_AFTER_DEATH_S = 2.0  # what the others get to end when a rank has died
# A signal that comes between the interpreter's last look and the wait in `SimpleQueue.get` does not end the wait: its
# handler runs at the timeout.
_LOOK_S = 0.2
_REFRESH_S = 0.1  # what a flood brings is shown at least so often
_PIPES_S = 0.05  # what text gets to come through the pipes
_ONE_PRESS_S = 1.0  # presses of the stop button within so long count as one


class Controls(Protocol):
    """What can be done about a cell under way."""

    @property
    def is_running(self) -> bool: ...
    def interrupt(self, run: CellRun) -> None: ...
    def where(self, ranks: list[int]) -> dict[int, str]: ...
    def answer(self, rank: int, answer: Answer) -> None: ...


class Watch:
    """Follows one cell to its end.

    Args:
        run: the cell.
        controls: the session's.
        interrupts: presses of the stop button.
        screen: where to show what comes; None: nowhere, and nobody can be asked for input.
        timeout_s: seconds after which the cell is stopped; None: no limit.
    """

    def __init__(
        self,
        run: CellRun,
        controls: Controls,
        interrupts: Interrupts,
        screen: Screen | None,
        timeout_s: float | None = None,
    ) -> None:
        self.where: dict[int, str] = {}  # what the ranks were doing when the time was up
        self.timed_out = False
        self._run = run
        self._controls = controls
        self._interrupts = interrupts
        self._screen = screen
        self._stop_at = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._give_up_at = float("inf")
        self._handled = 0  # interrupts
        self._interrupted_at = float("inf")
        self._told = False
        self._asked: deque[tuple[int, Ask, float]] = deque()  # and since when

    def follow(self) -> None:
        """Return when the cell is over, or when nothing more can be done about it."""
        run, screen = self._run, self._screen
        pause: float | None = None
        refreshed_s = time.monotonic()
        while True:
            now = time.monotonic()
            left = min(self._give_up_at, self._stop_at) - now
            if self._asked:  # a question overtakes the text before it
                left = min(left, _PIPES_S)
            item = run.take(max(0.0, min(left, _LOOK_S if pause is None else pause)))
            if item is not None:
                self._take(item)
            if self._asked and time.monotonic() - self._asked[0][2] > _PIPES_S:
                rank, ask, _ = self._asked.popleft()
                if rank in run.pending:
                    self._answer(rank, ask)
            now = time.monotonic()
            talking = run.pending  # before the look whether all is shown: who is not in it has said everything
            if screen is not None and run.shown.empty():
                pause, refreshed_s = screen.refresh(talking), now
            elif screen is not None and now - refreshed_s > _REFRESH_S:
                pause, refreshed_s = screen.refresh(run.result.ranks), now
            if run.is_over and run.shown.empty():
                break
            now = time.monotonic()
            if now > self._give_up_at or not self._controls.is_running:
                break
            if self._interrupts.count > self._handled and not self._on_press(now):
                break
            if now > self._stop_at:
                self._on_timeout(now)
            if not self._told and now - self._interrupted_at > _ONE_PRESS_S and run.pending:
                self._tell_who_is_silent()
            if self._give_up_at == float("inf") and run.has_died:
                self._asked.clear()
                self._controls.interrupt(run)
                self._give_up_at = now + _AFTER_DEATH_S
        if screen is not None:
            screen.finish()

    def _take(self, item: Shown) -> None:
        if item.ask is not None:
            self._asked.append((item.rank, item.ask, time.monotonic()))
        elif self._screen is not None:
            self._screen.show(item)

    def _on_press(self, now: float) -> bool:
        """Somebody pressed stop. False: again, and some rank has still not answered."""
        if self._handled and now - self._interrupted_at > _ONE_PRESS_S:
            return False
        if not self._handled:
            self._interrupted_at = now
            self._asked.clear()
            if self._screen is not None:
                self._screen.hurry()
            self._controls.interrupt(self._run)
        self._handled = self._interrupts.count
        return True

    def _on_timeout(self, now: float) -> None:
        pending = self._run.pending
        found = self._controls.where(pending)
        self.where = {rank: found.get(rank, "no answer: in an operation that does not let go") for rank in pending}
        self.timed_out = True
        self._asked.clear()
        self._stop_at = float("inf")
        self._controls.interrupt(self._run)
        self._give_up_at = min(self._give_up_at, now + _AFTER_DEATH_S)

    def _tell_who_is_silent(self) -> None:
        self._told = True
        if self._screen is not None:
            self._screen.note(
                f"no answer yet to the interrupt: {name_ranks(self._run.pending)}, perhaps inside a collective; "
                "press stop again to get the notebook back"
            )

    def _answer(self, rank: int, ask: Ask) -> None:
        """Have the user answer a rank's `input()`."""
        text, error = "", ""
        if self._screen is None:
            error = "input() can be answered only while a cell of the notebook waits, without --quiet"
        else:
            self._screen.finish()
            read: Callable[[str], str] = getpass.getpass if ask.password else input
            try:
                with self._interrupts.raised():
                    text = read(f"[{rank}] {ask.prompt}")
            except KeyboardInterrupt:
                self._interrupts.count += 1
                return
            except Exception as failure:  # nobody is there: nbclient, a script without a terminal
                error = f"nobody can type here: {failure}"
        self._controls.answer(rank, Answer(request=ask.request, text=text, error=error))
