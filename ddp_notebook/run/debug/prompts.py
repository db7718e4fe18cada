"""Prompt of a cell whose ranks have stopped in a debugger.

One prompt names the ranks that get the next line: "(rank 2)" or "(ranks 0-3)". A line may name other ranks, see
`commands`. While a prompt is open, time limits of the cell and of its operations are held. The same holds while a rank
has stopped in the debugger of the front end, which has no prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ddp_notebook.errors import SessionBrokenError, UsageError
from ddp_notebook.messages.ranks import InputReply, InputRequest
from ddp_notebook.records.words import group_by_value, list_ranks, name_ranks
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.debug.commands import parse_command
from ddp_notebook.run.debug.prompt_line import PromptLine, ask_line, can_read
from ddp_notebook.run.groups.named_ranks import Coordinates

_GATHER_S = 0.2  # time for other ranks to stop too, from the last rank that has stopped or got a command
_POLL_S = 0.01  # interval of polls for a typed line
_QUITS = ("q", "quit", "exit")
_NO_USER = (
    "breakpoint() reads commands from the notebook, and this cell accepts no input: run it without --quiet and "
    "--background, and not with nbclient or papermill, or print the values instead"
)


class Ranks(Protocol):
    """The ranks of the session."""

    def parse(self, asked: str, meshes: Coordinates) -> list[int]: ...
    def answer(self, rank: int, answer: InputReply) -> None: ...
    def hold_timeouts(self, cell: int, on: bool) -> None: ...
    def cell_is_stopped(self, run: CellRun) -> bool: ...


class Prompts:
    """Prompts of one cell. All methods are called in the thread that waits for the cell.

    Args:
        run: the cell.
        ranks: the ranks of the session.
        say: shows a sentence under the cell.
        finish: shows all output that has arrived.
        quit: stops the cell on all ranks.
        may_ask: whether the caller of the cell can answer; False: a job, or a cell without output.
    """

    def __init__(
        self,
        run: CellRun,
        ranks: Ranks,
        say: Callable[[str], None],
        finish: Callable[[], None],
        quit: Callable[[], None],
        *,
        may_ask: bool,
    ) -> None:
        self.resumed_s = -float("inf")  # time when the last prompt was closed
        self._run = run
        self._ranks = ranks
        self._say = say
        self._finish = finish
        self._quit = quit
        self._may_ask = may_ask
        self._stopped: dict[int, InputRequest] = {}  # ranks that wait for a command
        self._waiting: dict[int, list[InputRequest]] = {}  # further threads of a stopped rank
        self._awaited: set[int] = set()  # ranks that got the last command
        self._changed_s = 0.0  # time of the last stop or command
        self._is_over = False  # the cell ends
        self._held_since_s: float | None = None  # time limits are held since then
        self._counted_s = 0.0  # time up to which held time was counted
        self._line: PromptLine | None = None  # the open request for a line
        self._selected: list[int] | None = None  # ranks chosen by the user; None: all stopped ranks
        self._shown_places = ""  # places shown last
        self._ended: set[int] = set()  # ranks whose failure was shown
        self._unheld: dict[int, Sequence[str]] = {}  # operations whose limits run on, by rank

    @property
    def is_open(self) -> bool:
        """Return whether ranks wait for commands, so that time limits are held."""
        return self._held_since_s is not None

    @property
    def poll_s(self) -> float:
        """Return the seconds until the next call of `poll`."""
        return _POLL_S if self.is_open else float("inf")

    def on_request(self, rank: int, request: InputRequest) -> None:
        """Handle a rank that has stopped, or that has executed a command."""
        if rank not in self._run.pending:
            return
        if not self._may_ask or not can_read():
            self._ranks.answer(rank, InputReply(request=request.request, error=_NO_USER))
            return
        self._hold()
        if rank in self._stopped:
            self._waiting.setdefault(rank, []).append(request)
        else:
            self._stopped[rank] = request
        self._awaited.discard(rank)
        self._changed_s = time.monotonic()

    def _hold(self) -> None:
        """Hold time limits from now on."""
        if self._held_since_s is None:
            self._held_since_s = self._counted_s = time.monotonic()
            self._ended = {one for one in self._run.ranks if self._has_failed(one)}
            self._ranks.hold_timeouts(self._run.number, True)

    def on_unheld(self, rank: int, operations: Sequence[str]) -> None:
        """Handle the operations of a rank whose time limits cannot be held."""
        if operations:
            self._unheld[rank] = operations

    def poll(self) -> float:
        """Handle typed lines, and show prompts. Return the seconds since the last call for which limits were held."""
        is_stopped = not self._is_over and self._ranks.cell_is_stopped(self._run)
        if is_stopped:
            self._hold()
        if not self.is_open:
            return 0.0
        now = time.monotonic()
        self._drop_ended()
        if self._line is not None and (line := self._line.poll()) is not None:
            self._line = None
            self._on_line(line)
        elif self._line is None and self._stopped and self._is_complete(now):
            self._ask()
        held_s, self._counted_s = now - self._counted_s, now
        if not is_stopped and ((not self._stopped and not self._awaited) or self._has_gone_on(now)):
            self._release()
        return held_s

    def close(self) -> None:
        """End all prompts, because the cell ends."""
        self._is_over = True
        self._stopped.clear()
        self._waiting.clear()
        if self.is_open:
            self._release()

    def _release(self) -> None:
        self._line, self._held_since_s, self._selected, self._shown_places = None, None, None, ""
        self._awaited.clear()
        self.resumed_s = time.monotonic()
        self._ranks.hold_timeouts(self._run.number, False)

    # ---- stopped ranks

    def _drop_ended(self) -> None:
        """Forget ranks that have ended the cell, and report failures."""
        pending = set(self._run.pending)
        for rank in [rank for rank in self._stopped if rank not in pending]:
            del self._stopped[rank]
            self._waiting.pop(rank, None)
        self._awaited &= pending
        for rank in self._run.ranks:
            if rank not in self._ended and self._has_failed(rank):
                self._ended.add(rank)
                one = self._run.result[rank]
                at = f", at {one.place}" if one.place else ""
                self._say(f"rank {rank} has {'died' if one.status == 'died' else 'failed'}: {one.error}{at}")
        for operations, ranks in group_by_value({rank: tuple(ops) for rank, ops in self._unheld.items()}).items():
            self._say(
                f"these time limits run on while the debugger waits, on {list_ranks(ranks)}: {', '.join(operations)}"
            )
        self._unheld.clear()

    def _has_failed(self, rank: int) -> bool:
        return self._run.result[rank].status in ("error", "died")

    def _is_complete(self, now: float) -> bool:
        """Return whether no further rank is expected to stop soon."""
        if now - self._changed_s > _GATHER_S:
            return True
        if self._shown_places or self._selected is not None:
            return not self._awaited
        return set(self._stopped) >= set(self._run.pending)

    def _has_gone_on(self, now: float) -> bool:
        """Return whether the ranks that got commands run on, and no rank waits for one."""
        return not self._stopped and now - self._changed_s > _GATHER_S

    def _current(self) -> list[int]:
        stopped = sorted(self._stopped)
        return [rank for rank in self._selected or stopped if rank in self._stopped] or stopped

    # ---- the prompt

    def _ask(self) -> None:
        self._finish()
        places = group_by_value({rank: one.stopped_at for rank, one in self._stopped.items()})
        shown = "; ".join(f"{list_ranks(ranks)} at {place}" for place, ranks in places.items())
        differ = len(places) > 1 or set(self._stopped) != set(self._run.ranks)
        if differ and shown != self._shown_places:
            self._say(f"stopped: {shown}")
        self._shown_places = shown
        self._line = ask_line(f"({name_ranks(self._current())}) ")

    def _on_line(self, line: str) -> None:
        meshes = {rank: one.meshes for rank, one in self._stopped.items()}
        try:
            command = parse_command(line, lambda asked: self._ranks.parse(asked, meshes))
        except (UsageError, SessionBrokenError) as error:
            self._say(str(error))
            return
        ranks = self._current()
        if command.ranks is not None:
            ranks = [rank for rank in command.ranks if rank in self._stopped]
            is_all = line.lstrip()[1:].split(" ")[0] == "all"
            if (others := [rank for rank in command.ranks if rank not in self._stopped]) and not is_all:
                self._say(f"{list_ranks(others)}: not stopped in a debugger")
            if not command.text:
                self._selected = None if is_all else ranks or None
                return
        if command.text.strip() in _QUITS:
            self._quit()
            return
        for rank in ranks:
            request = self._stopped.pop(rank)
            self._awaited.add(rank)
            self._ranks.answer(rank, InputReply(request=request.request, text=command.text))
            if further := self._waiting.get(rank):
                self._stopped[rank] = further.pop(0)
        self._changed_s = time.monotonic()
