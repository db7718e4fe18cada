"""Wait for a cell: show its output, answer `input()`, and end the cell if it would not end by itself.

A cell is ended by aborting the operations of its ranks and interrupting them, when

- stop is pressed: immediately;
- a rank fails or dies: after the grace time, or as soon as all other ranks are blocked on it;
- a rank waits for a rank that has ended the cell: after the grace time;
- its time limit is reached.

These times do not run while a host is unreachable.
"""

from __future__ import annotations

import getpass
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ddp_notebook.messages.ranks import InputReply, InputRequest
from ddp_notebook.run.cells.cell import CellRun, OutputItem
from ddp_notebook.run.cells.interrupt import ONE_PRESS_S, Interrupts
from ddp_notebook.run.groups.diagnosis import LeftBehind, left_behind, stuck, verdict
from ddp_notebook.run.groups.rank_view import Views
from ddp_notebook.run.output.card import STOP
from ddp_notebook.run.output.screen import Screen

# A signal between the last check of the interpreter and the wait in `SimpleQueue.get` does not end the wait. Its
# handler runs at the timeout.
_LOOK_S = 0.2
_REFRESH_S = 0.1  # refresh interval during a flood of output
_FULL_S = 0.02  # interval of checks for whether the front end accepts more displays
_PIPES_S = 0.05  # time for text to arrive through the pipes
_END_S = 2.0  # time for ranks to end an interrupted cell
_END_EACH_S = 0.125  # the same per rank, for many ranks
_WAITING_S = 0.1  # interval of checks for whether the other ranks are blocked
_ENDED_S = 0.4  # interval of checks for whether ranks wait for ranks that have ended the cell
_ENDED_EACH_S = 0.02  # the same per rank, for many ranks
_CARD_S = 1.0  # interval of updates of the card
_NOTICES_S = 1.0  # interval of checks for new notices
_HALTS_S = 0.5  # interval of checks for stopped or hanging processes
_CLEAN_UP_S = 10.0  # time in which a rank that cleans up is not replaced
_LEAVE_S = 4.0  # from a press until the prompt returns, if only ranks remain that do not answer


class Reached(Protocol):
    """A host that is alive, as far as is known."""

    @property
    def name(self) -> str: ...
    @property
    def silent_s(self) -> float: ...
    @property
    def unheard(self) -> str: ...


class Halt(NamedTuple):
    """A process that is stopped or does not answer."""

    name: str  # name of the process
    sentence: str  # sentence about the process, with the remedy that loses least


class Silence:
    """Follows unreachable hosts of a session during a cell.

    Args:
        hosts: returns the hosts that are not lost.
        say: shows a sentence.
    """

    def __init__(self, hosts: Callable[[], Sequence[Reached]], say: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._say = say
        self._since: dict[str, float] = {}  # time of the last message, by name of the silent host
        self._counted_s = 0.0  # time up to which silence was counted

    @property
    def is_heard(self) -> bool:
        """Return whether all hosts were reachable at the last poll."""
        return not self._since

    def poll(self) -> float:
        """Show changes since the last poll. Return the seconds since then in which a host was unreachable.

        The caller adds these seconds to all time limits.
        """
        now, hosts = time.monotonic(), {host.name: host for host in self._hosts()}
        was_heard = self.is_heard
        for name, host in hosts.items():
            if host.unheard and name not in self._since:
                self._since[name] = now - host.silent_s
                self._say(host.unheard)
        for name, since in list(self._since.items()):
            if name not in hosts or not hosts[name].unheard:
                del self._since[name]
                if name in hosts:  # the cell's error reports a lost host
                    self._say(f"{name} is back after {now - since:.0f} s")
        if was_heard and self.is_heard:
            return 0.0
        began, self._counted_s = min(self._since.values(), default=now) if was_heard else self._counted_s, now
        return now - began


def _print_note(text: str) -> None:
    """Print a line under the waiting cell, which shows no output of its ranks."""
    print(text, file=sys.stderr, flush=True)


class Halts:
    """Follows stopped or hanging processes of a session during a cell. Each is reported once.

    Args:
        look: returns a sentence for each of them outside the cell, without waiting.
        say: shows a sentence.
    """

    def __init__(self, look: Callable[[], Sequence[Halt]], say: Callable[[str], None]) -> None:
        self._look = look
        self._say = say
        self._said: set[str] = set()  # names of reported processes

    def poll(self) -> None:
        """Show changes since the last poll."""
        halts = self._look()
        for halt in halts:
            if halt.name not in self._said:
                self._say(halt.sentence)
        self._said = {halt.name for halt in halts}


_NEVER_S = float("inf")


class EndedRanks:
    """Decides whether a cell can still end by itself, although some of its ranks have ended it.

    Two looks must have the same result: a rank may be between two operations.

    Args:
        grace_s: seconds from then until the cell must be ended; None: never.
        interval_s: seconds between two looks.
        again_s: seconds until the second look, which confirms the first.
    """

    def __init__(self, grace_s: float | None, interval_s: float, again_s: float) -> None:
        self.look_at = _NEVER_S  # time of the next look
        self.is_certain = False  # ranks wait for ranks that have ended the cell
        self.is_over = False  # the cell must be ended now
        self._found: dict[int, LeftBehind] = {}
        self._ends_at = _NEVER_S
        self._grace_s = _NEVER_S if grace_s is None else grace_s
        self._interval_s = interval_s
        self._again_s = again_s

    def is_due(self, now: float) -> bool:
        """Return whether it is time to look. The first call starts the interval."""
        if self.look_at == _NEVER_S:
            self.look_at = now + self._interval_s
        return now >= self.look_at

    def look(self, views: Views, now: float) -> None:
        """Handle the activity of all ranks.

        Args:
            now: time of the end of the look.
        """
        found = left_behind(views)
        before, self._found = self._found, found
        self.look_at = now + self._interval_s
        if not found or before != found:
            self.is_certain = False
            self._ends_at = _NEVER_S
            if found:
                self.look_at = now + self._again_s
            return
        self.is_certain = True
        may_end = any(left.may_end for left in found.values())
        self._ends_at = min(self._ends_at, now + self._grace_s) if may_end else _NEVER_S
        self.look_at = min(self.look_at, max(self._ends_at, now))
        self.is_over = now >= self._ends_at

    def ends_in_s(self, now: float) -> float | None:
        """Return the seconds until the cell is ended; None if it is not."""
        return max(0.0, self._ends_at - now) if self._ends_at < _NEVER_S else None

    def put_off(self, seconds: float) -> None:
        """Extend all times, because a host was unreachable."""
        self.look_at += seconds
        self._ends_at += seconds

    def reset(self) -> None:
        """Start again: no rank has ended the cell, or the cell is being ended."""
        self.look_at = self._ends_at = _NEVER_S
        self.is_certain = self.is_over = False
        self._found = {}


class Prompts(Protocol):
    """Prompts of the debuggers in which ranks of a cell have stopped."""

    resumed_s: float

    @property
    def is_open(self) -> bool: ...
    @property
    def poll_s(self) -> float: ...
    def on_request(self, rank: int, request: InputRequest) -> None: ...
    def poll(self) -> float: ...
    def close(self) -> None: ...


class Controls(Protocol):
    """Operations on a running cell."""

    @property
    def is_running(self) -> bool: ...
    def hosts(self) -> Sequence[Reached]: ...
    def notices(self) -> list[str]: ...
    def halts(self, run: CellRun, *, has_card: bool) -> Sequence[Halt]: ...
    def halted_s(self, run: CellRun) -> float: ...
    def survive(self, run: CellRun, check: Callable[[], None]) -> bool: ...
    def interrupt(self, run: CellRun) -> None: ...
    def inspect(self, run: CellRun) -> Views: ...
    def cause(self, run: CellRun, views: Views) -> str: ...
    def kill(self, ranks: list[int]) -> None: ...
    def answer(self, rank: int, answer: InputReply) -> None: ...
    def is_stopped(self, run: CellRun) -> bool: ...
    def prompts(self, run: CellRun, screen: Screen | None, interrupts: Interrupts, may_ask: bool) -> Prompts | None: ...


class SideView(Protocol):
    """A view below a cell's output, drawn by the main thread."""

    @property
    def is_shown(self) -> bool:
        """Return whether the view shows something."""

    def holds(self, waits_s: float, quiet_s: float) -> bool:
        """Return whether output must wait, because the view may appear above it.

        Args:
            waits_s: seconds that the output has waited.
            quiet_s: seconds without output before that.
        """

    def look(self, cell: int) -> None:
        """Update the view while the cell runs. Called often."""

    def end(self, cell: int) -> None:
        """Finish the view: the cell has ended or was abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """Description of the caller that waits for a cell.

    Args:
        name: name of the cell in messages.
        ends: action that ends the cell, as text.
        replaces: action that replaces ranks which do not end the cell; text before "it" or "them".
        can_answer: whether the user can answer `input()`.
    """

    name: str = "the cell"
    ends: str = STOP
    replaces: str = "press stop again to replace"
    can_answer: bool = True


NOTEBOOK = Waiter()


class Watch:
    """Follows one cell to its end.

    Args:
        run: the cell.
        controls: operations on the cell.
        interrupts: presses of the stop button.
        screen: shows the output; None: no output, and `input()` cannot be answered.
        timeout_s: seconds after which the cell is stopped; None: no limit.
        grace_s: seconds for the other ranks after a rank failed; None: no limit.
        hang_after_s: seconds that a rank waits in an operation before the card shows the waiting ranks; None: never.
        beside: view below the cell's output.
        waiter: description of the waiting caller.
    """

    def __init__(
        self,
        run: CellRun,
        controls: Controls,
        interrupts: Interrupts,
        screen: Screen | None,
        timeout_s: float | None = None,
        grace_s: float | None = None,
        hang_after_s: float | None = None,
        beside: SideView | None = None,
        waiter: Waiter = NOTEBOOK,
    ) -> None:
        self.views: Views = {}  # activity of the ranks at the timeout
        self.why = ""  # cause of the hang according to the last inspection
        self.timed_out = False
        self.was_left = False  # the cell was ended, because ranks waited for ranks that have ended it
        self.killed: list[int] = []  # ranks that did not answer and were killed
        self._run = run
        self._controls = controls
        self._interrupts = interrupts
        self._screen = screen
        self._beside = beside
        self._waiter = waiter
        self._grace_s = grace_s
        self._end_s = max(_END_S, _END_EACH_S * len(run.result.ranks))
        self._hang_after_s = hang_after_s
        now = time.monotonic()
        self._stop_at = float("inf") if timeout_s is None else now + timeout_s
        self._card_at = float("inf") if hang_after_s is None else now + hang_after_s
        self._grace_ends_at = float("inf")
        self._look_at = float("inf")  # time of the next check for whether the other ranks are blocked
        self._stuck: dict[int, tuple[str, int]] = {}  # result of the last check
        self._ended = EndedRanks(grace_s, _ENDED_S + _ENDED_EACH_S * len(run.result.ranks), _WAITING_S)
        self._give_up_at = float("inf")
        self._handled = 0  # number of handled interrupts
        self._released_at = float("inf")
        self._told = False
        self._silence = Silence(lambda: controls.hosts(), screen.note if screen is not None else lambda _: None)
        self._notices_at = now + _NOTICES_S
        say = screen.note if screen is not None else _print_note if waiter is NOTEBOOK else lambda _: None
        self._halts = Halts(lambda: controls.halts(run, has_card=screen is not None), say)
        self._halts_at = now + _HALTS_S
        self._halted_s = 0.0  # seconds for which a rank of the cell has been stopped or silent
        self._leave_at = float("inf")  # time to stop waiting if only ranks remain that do not answer
        self._prompts: Prompts | None = None  # from the first stop in a debugger on
        self._asked: deque[tuple[int, InputRequest, float]] = deque()  # rank, request, time of arrival

    @property
    def has_released(self) -> bool:
        """Return whether the cell was interrupted on its ranks."""
        return self._released_at != float("inf")

    def follow(self) -> None:
        """Return when the cell is over, or when nothing more can be done about it."""
        run, screen = self._run, self._screen
        pause: float | None = None
        refreshed_s = time.monotonic()
        while True:
            self._take_next(_LOOK_S if pause is None else pause)
            if self._asked:
                self._answer_next()
            now = time.monotonic()
            # read before checking that all output was shown: other ranks have sent all their output
            talking = run.pending
            if screen is not None and (screen.is_full or run.shown.empty()):
                pause, refreshed_s = screen.refresh(talking), now
            elif screen is not None and (screen.is_due or now - refreshed_s > _REFRESH_S):
                pause, refreshed_s = screen.refresh(run.result.ranks), now
            if run.is_over and run.shown.empty():
                break
            self._hear()
            now = time.monotonic()
            if now > self._give_up_at or not self._controls.is_running:
                break
            if not run.is_over:
                self._act(now)
                if self._beside is not None:
                    self._beside.look(run.number)
        if self._prompts is not None:
            self._prompts.close()
        if screen is not None:
            screen.card.remove()
            screen.finish()

    def _take_next(self, pause_s: float) -> None:
        """Handle the next item of the cell, if one arrives before another deadline.

        Args:
            pause_s: longest wait in seconds.
        """
        if self._screen is not None and self._screen.is_full:
            time.sleep(_FULL_S)
            return
        next_s = min(self._give_up_at, self._stop_at, self._grace_ends_at, self._look_at, self._card_at)
        next_s = min(next_s, self._ended.look_at)
        left = next_s - time.monotonic()
        if self._prompts is not None:
            left = min(left, self._prompts.poll_s)
        if self._asked:  # a request overtakes the text before it
            left = min(left, _PIPES_S)
        item = self._run.next_item(max(0.0, min(left, pause_s)))
        if item is not None:
            self._take(item)

    def _hear(self) -> None:
        """Extend all time limits by the time in which a host was unreachable, or a debugger waited for a command."""
        unheard_s = self._silence.poll()
        if self._prompts is None and not self.has_released and self._controls.is_stopped(self._run):
            self._open_prompts()
        if self._prompts is not None:
            unheard_s += self._prompts.poll()
        if unheard_s:
            self._stop_at += unheard_s
            self._grace_ends_at += unheard_s
            self._look_at += unheard_s
            self._ended.put_off(unheard_s)
            self._give_up_at += unheard_s
            if self._screen is None or not self._screen.card.is_shown:
                self._card_at += unheard_s

    def _act(self, now: float) -> None:
        """End the cell if it is time, and report causes of a hang, dying ranks and notices."""
        if self._interrupts.count > self._handled:
            self._on_press(now)
        if self._screen is not None and now > self._notices_at:
            for notice in self._controls.notices():
                self._screen.note(notice)
            self._notices_at = now + _NOTICES_S
        if self._prompts is not None and self._prompts.is_open:  # ranks wait for the user
            return
        if now > self._stop_at:
            self._on_timeout(now)
        if not self.has_released and self._controls.survive(self._run, self._interrupts.check):
            self._ended.reset()
            # a rank's death may be known before the failures of others
            self._look_at = self._grace_ends_at = float("inf")
        elif self._run.has_failed:
            self._ended.reset()
            self._on_failure(now)
        elif not self.has_released:
            self._on_ended_ranks(now)
        if self._handled and not self._told and now - self._released_at > ONE_PRESS_S:
            self._tell_who_is_silent()
        if now > self._leave_at:
            self._leave_at = float("inf") if self._some_answer() else now
            self._give_up_at = min(self._give_up_at, self._leave_at)
        if now > self._halts_at:
            self._halts_at = now + _HALTS_S
            self._look_for_halts(now)
        if now > self._card_at:
            self._card_at = time.monotonic() + self._on_no_progress()

    def _take(self, item: OutputItem) -> None:
        if item.ask is not None and item.ask.stopped_at:
            self._on_debugger(item.rank, item.ask)
        elif item.ask is not None:
            self._asked.append((item.rank, item.ask, time.monotonic()))
        elif self._screen is not None:
            self._screen.show(item)

    def _on_debugger(self, rank: int, request: InputRequest) -> None:
        """Handle a rank that has stopped in a debugger."""
        if self.has_released:  # the rank notices its interrupt soon
            return
        self._open_prompts()
        if self._prompts is not None:
            self._prompts.on_request(rank, request)

    def _open_prompts(self) -> None:
        if self._prompts is None:
            can_answer = self._screen is not None and self._waiter.can_answer
            self._prompts = self._controls.prompts(self._run, self._screen, self._interrupts, can_answer)
        if self._screen is not None:
            self._screen.card.remove()

    # ---- ending it

    def _release(self, now: float) -> None:
        self._asked.clear()
        if self._prompts is not None:
            self._prompts.close()
        self._look_at = self._grace_ends_at = self._stop_at = float("inf")
        self._ended.reset()
        if self._released_at == float("inf"):
            self._released_at = now
            self._controls.interrupt(self._run)

    def _on_press(self, now: float) -> None:
        """Handle a press of stop: end the cell. A later press replaces the ranks that have not ended it."""
        # Compare the time of the press: this thread may have been inspecting the ranks since.
        again = self._handled and self._interrupts.pressed_s - self._released_at > ONE_PRESS_S
        self._handled = self._interrupts.count
        if again:
            views = self._controls.inspect(self._run)
            # A rank that cleans up ends the cell by itself, and keeps its variables.
            may_clean_up = now - self._released_at < _CLEAN_UP_S
            self.killed = [
                rank
                for rank in self._run.pending
                if not may_clean_up or rank not in views or views[rank].state != "internal"
            ]
            self._controls.kill(self.killed)
            self._give_up_at = now + self._end_s
        else:
            if self._screen is not None:
                self._screen.hurry()
            self._release(now)

    def _on_timeout(self, now: float) -> None:
        self.views = self._controls.inspect(self._run)
        self.why = self._cause(self.views)
        self.timed_out = True
        self._release(now)
        self._give_up_at = min(self._give_up_at, now + self._end_s)

    def _on_failure(self, now: float) -> None:
        """Give the other ranks the grace time after a failure, unless all are blocked on the failed rank."""
        if self._released_at != float("inf"):
            if self._give_up_at == float("inf") and not self._handled:
                self._give_up_at = now + self._end_s
            return
        if self._grace_s is None:
            return
        if self._look_at == float("inf"):
            self._look_at = now + _WAITING_S / 2
            self._grace_ends_at = now + self._grace_s
            return
        if now >= self._look_at:
            found = stuck(self._controls.inspect(self._run))
            before, self._stuck = self._stuck, found
            if set(found) >= set(self._run.pending) and found == before:
                self._grace_ends_at = 0.0
            self._look_at = time.monotonic() + _WAITING_S
        if now >= self._grace_ends_at:
            self._release(now)
            self._give_up_at = now + self._end_s

    def _on_ended_ranks(self, now: float) -> None:
        """Show the card at once if ranks wait for ranks that have ended the cell, and end the cell after the grace."""
        pending = len(self._run.pending)
        if not 0 < pending < len(self._run.result.ranks):
            self._ended.reset()
        elif self._ended.is_due(now):
            views = self._controls.inspect(self._run)
            was_certain = self._ended.is_certain
            self._ended.look(views, time.monotonic())
            if self._ended.is_certain and not was_certain and self._hang_after_s is not None:
                self._card_at = min(self._card_at, now)
            if self._ended.is_over:
                self.was_left, self.why = True, self._cause(views)
                self._release(now)
                self._give_up_at = now + self._end_s

    # ---- saying why it does not end

    def _cause(self, views: Views) -> str:
        """Return the cause of a hang, and where the paths of the ranks diverged, as far as they are known."""
        why = verdict(views)
        return "; ".join(filter(None, [why, self._controls.cause(self._run, views)])) if why else ""

    def _look_for_halts(self, now: float) -> None:
        """Report stopped or hanging processes. Ranks of the cell appear on the card."""
        self._halts.poll()
        had_halted, self._halted_s = self._halted_s, self._controls.halted_s(self._run)
        if self._halted_s and not had_halted:
            self._card_at = min(self._card_at, now)

    def _some_answer(self) -> bool:
        """Return whether a rank that is still in the cell answers, so that it may end the cell."""
        views = self._controls.inspect(self._run)
        return any(views[rank].state != "silent" for rank in self._run.pending if rank in views)

    def _tell_who_is_silent(self) -> None:
        self._told = True
        self._leave_at = self._released_at + _LEAVE_S
        if self._screen is None:
            return
        views = self._controls.inspect(self._run)
        left = {rank: view for rank, view in views.items() if view.state not in ("ended", "outside", "died")}
        if all(view.state == "internal" for view in left.values()):  # they end the cell soon
            return
        states = "; ".join(f"rank {rank}: {view.doing}" for rank, view in left.items())
        them = "it, whose variables are lost" if len(left) == 1 else "them, whose variables are lost"
        wait = "Wait"
        if self._waiter is NOTEBOOK and all(view.state == "silent" for view in left.values()):
            left_s = self._leave_at - time.monotonic()
            wait = f"Wait {max(1.0, left_s):.0f} s for the prompt, while the cell goes on there"
        self._screen.note(f"not ended yet: {states}. {wait}, or {self._waiter.replaces} {them}")

    def _on_no_progress(self) -> float:
        """Show which ranks wait for which, if one has waited long enough. Return the seconds until the next check."""
        if self._screen is None or self._released_at != float("inf") or self._asked:
            return _CARD_S
        views = self._controls.inspect(self._run)
        hang_after_s = float("inf") if self._hang_after_s is None else self._hang_after_s
        longest = max((max(view.since_s, view.child_s) for view in views.values()), default=0.0)
        if self._prompts is not None:
            longest = min(longest, time.monotonic() - self._prompts.resumed_s)
        is_halted = self._halted_s and any(view.state == "silent" for view in views.values())
        if longest >= hang_after_s or is_halted or self._ended.is_certain:
            longest = max(longest, self._halted_s if is_halted else 0.0)
            self.why = self._cause(views)
            self._screen.card.show(views, longest, self.why, self._ended.ends_in_s(time.monotonic()))
            return _CARD_S
        self.why = ""
        self._screen.card.remove()
        return max(_REFRESH_S, min(_CARD_S, hang_after_s - longest))

    def _answer_next(self) -> None:
        """Answer the lowest of the ranks that requested input at the same time, after its text has arrived."""
        first_s = self._asked[0][2]
        asked = min((one for one in self._asked if one[2] - first_s < _PIPES_S), key=lambda one: one[0])
        rank, ask, since_s = asked
        if time.monotonic() - since_s > _PIPES_S:
            self._asked.remove(asked)
            if rank in self._run.pending:
                self._answer(rank, ask)

    def _answer(self, rank: int, ask: InputRequest) -> None:
        """Let the user answer a rank's `input()`."""
        text, error = "", ""
        if self._screen is None or not self._waiter.can_answer:
            error = "input() can be answered only while the notebook waits for its cell: no --background, no --quiet"
        else:
            self._screen.finish()
            read: Callable[[str], str] = getpass.getpass if ask.password else input
            try:
                with self._interrupts.raised():
                    text = read(f"[{rank}] {ask.prompt}")
            except KeyboardInterrupt:
                self._interrupts.press()
                return
            except Exception as failure:  # no user can type: nbclient, or a script without a terminal
                error = f"input() cannot be answered here: {failure}"
        self._controls.answer(rank, InputReply(request=ask.request, text=text, error=error))
