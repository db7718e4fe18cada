"""Runs an entry of the fault table: injects one fault into ranks in one state, and checks the messages."""

from __future__ import annotations

import re
import signal
import tempfile
import textwrap
import time

import psutil

from ddp_notebook.run.rank_sets import parse_ranks
from tests.conftest import is_within, wait_until
from tests.faults.harness import KEPT, SUM, Ranks
from tests.faults.on_rank import Scene
from tests.faults.table import AT_ONCE_S, END_S, FAULT, HANG_AFTER_S, HOLD_S, Fault, State, limit_s
from tests.kernels import Reply

_ONE_PRESS_S = 1.0  # presses of the stop button within this time count as one
_STRUCK_FROM_INSIDE = """
if rank == victim:
    scene.wait_for("there", {others}, blocked={blocked})
    scene.mark("struck")
    {fault}
scene.{mark}("there")
try:
{enter}
finally:
    scene.mark("left")
"""
_STRUCK_FROM_OUTSIDE = """
scene.{mark}("there")
if rank == victim and not {takes_victim}: time.sleep(600)
try:
{enter}
finally:
    scene.mark("left")
"""
# Other messages that may appear.
_NOTE = re.compile(
    r"rank \d+ died\. %ddp_heal replaces it; .*"
    r"|rank \d+ was replaced and begins without variables: .*"
    r"|not ended yet: .*press stop again to replace (it|them), whose variables are lost"
    r"|ranks? [\d,-]+: no default process group after this cell; .*"
    r"|\[[\d,-]+\] \[rank\d+(?: \| \d+)*\]:\[E.* monitoredBarrier.*"  # from torch, about a dead rank
    r"|\[[\d,-]+\] \[rank\d+(?: \| \d+)*\]:\[W.* The hostname of the client socket cannot be retrieved.*"  # about ::1
    r"|group \[\d,\d\] of ranks \d,\d does not exist on rank \d and can no longer be used; make it again .*"
)
_ACT = re.compile(r"^ *ranks? (?P<ranks>[\d,-]+) (was |were |has |have )?(?P<act>.*)$", re.MULTILINE)


class TookLong(AssertionError):
    """Something took longer than its limit."""


def _check_time(took_s: float, limit_s: float, text: str) -> None:
    if not is_within(took_s, limit_s):
        raise TookLong(text)


def strike(ranks: Ranks, state: State, fault: Fault, victim: int) -> None:
    """Run an entry of the table, and once more if it took too long: the machine may have been busy.

    Raises:
        AssertionError, TimeoutError: A check failed.
    """
    try:
        _strike(ranks, state, fault, victim)
    except TookLong:
        _strike(ranks, state, fault, victim)


def _strike(ranks: Ranks, state: State, fault: Fault, victim: int) -> None:
    with tempfile.TemporaryDirectory(prefix="scene-") as directory, ranks.given_up_on_failure():
        pids = ranks.set_up(directory, victim, state.setup)
        if state.enter:
            reply = _in_a_cell(ranks, state, fault, victim, pids[victim], Scene(directory))
            _check_text(reply, set(range(ranks.world_size)), state, fault, victim)
        else:
            _between_cells(ranks, fault, victim, pids[victim])
        if fault.is_death and fault.signal != signal.SIGSTOP:
            assert f"rank {victim} was replaced" in _look_and_heal(ranks, victim)
        elif fault.is_death:
            ranks.heal(victim)  # the rank was already replaced
        ranks.check(pids, replaced=victim if fault.is_death else None)
        if state.again and (state.outlives_death or not fault.is_death):
            ranks.run(state.again)
        if state.leave:
            ranks.run(state.leave)


def _in_a_cell(ranks: Ranks, state: State, fault: Fault, victim: int, pid: int, scene: Scene) -> Reply:
    """Run a cell that meets the fault, within the time limit."""
    others = [rank for rank in range(ranks.world_size) if rank != victim]
    code = (_STRUCK_FROM_INSIDE if fault.code else _STRUCK_FROM_OUTSIDE).format(
        others=others,
        blocked=state.is_blocked,
        takes_victim=state.takes_victim,
        fault=fault.code,
        mark="mark_inside" if state.polls else "mark",
        enter=textwrap.indent(state.enter, "    "),
    )
    message = ranks.kernel.start(f"%%on_all_ranks\n{code}")
    if not fault.code:
        scene.wait_for("there", [*others, victim], blocked=state.is_blocked)
    if fault.signal:
        psutil.Process(pid).send_signal(fault.signal)
    if fault.signal == signal.SIGSTOP:
        pressed_at = _press_and_read_who_is_stopped(ranks, victim, pid, HOLD_S if state.holds_interpreter else 0.0)
        for rank, (_, left_at) in scene.wait_for("left", others, blocked=True).items():
            took_s = left_at - pressed_at
            _check_time(took_s, limit_s(state, FAULT["interrupt"]), f"rank {rank} left after {took_s:.2f} s")
    struck_at = time.monotonic()
    if fault.presses:
        ranks.kernel.interrupt()
    if fault.name == "double interrupt":
        time.sleep(0.2)
        ranks.kernel.interrupt()
    reply = ranks.kernel.finish(message)
    ended_at = time.monotonic()
    if fault.code:
        struck_at = scene.wait_for("struck", [victim])[victim][1]
    ranks.ended_s.append(ended_at - struck_at)
    took_s = ended_at - struck_at
    _check_time(took_s, limit_s(state, fault), f"ended after {took_s:.2f} s: {reply}")
    return reply


def _press_and_read_who_is_stopped(ranks: Ranks, victim: int, pid: int, held_s: float = 0.0) -> float:
    """Press stop for the first time. Return the time of the press."""
    pressed_at = time.monotonic()
    ranks.kernel.interrupt()
    told = ranks.kernel.wait_for_text("press stop again")
    took_s = time.monotonic() - pressed_at
    assert took_s > _ONE_PRESS_S, f"told after {took_s:.2f} s: {told}"
    _check_time(took_s, _ONE_PRESS_S + AT_ONCE_S + held_s, f"told after {took_s:.2f} s: {told}")
    assert re.search(_stopped(victim, pid), told), told
    return pressed_at


def _between_cells(ranks: Ranks, fault: Fault, victim: int, pid: int) -> None:
    """Inject the fault while no cell runs, and check that the next cell reports it."""
    if fault.code:
        ranks.run(f"if rank == victim: threading.Timer(0.2, exec, [{fault.code!r}, globals()]).start()")
    elif fault.signal:
        psutil.Process(pid).send_signal(fault.signal)
    if fault.is_interrupt:
        for _ in range(fault.presses):
            ranks.kernel.interrupt()
            time.sleep(0.2)
    elif fault.signal == signal.SIGSTOP:
        message = ranks.kernel.start(f"%%on_all_ranks\n{SUM}")
        told = _wait_for_card(ranks)
        assert re.search(_stopped(victim, pid), told), told
        _press_and_read_who_is_stopped(ranks, victim, pid)
        ranks.kernel.interrupt()
        assert ranks.kernel.finish(message, AT_ONCE_S + END_S).ename == "KeyboardInterrupt"
    else:
        wait_until(lambda: not psutil.pid_exists(pid), what="the rank's end")


def _wait_for_card(ranks: Ranks) -> str:
    """Read the output of the cell until the hang card appears. Return its text."""
    reply, until = Reply(), time.monotonic() + HANG_AFTER_S + END_S
    while not (cards := [data["text/plain"] for data in reply.displays if "no progress" in data["text/plain"]]):
        reply.read(ranks.kernel.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic())))
    return cards[0]


def _look_and_heal(ranks: Ranks, victim: int) -> str:
    """Run a cell on the other ranks, check their variables and the message, and heal. Return the output of the
    healing."""
    reply = ranks.kernel.run(f"%%on_all_ranks\n{KEPT}")
    assert f"rank {victim} died" in reply.stderr, reply
    ranks.check_kept(reply, {rank: rank for rank in range(ranks.world_size) if rank != victim})
    return ranks.heal(victim)


def _check_text(reply: Reply, in_state: set[int], state: State, fault: Fault, victim: int) -> None:
    """Check that the error names the victim and the actions of the other ranks, with little other output."""
    shown = reply.traceback
    assert reply.ename == fault.ename, reply
    acts = {rank: found["act"] for found in _ACT.finditer(shown) for rank in parse_ranks(found["ranks"], 99)}
    if fault.ename != "KeyboardInterrupt":
        assert re.search(rf"{fault.text}.*\(rank {victim}\)", reply.evalue), shown
        in_state.remove(victim)
    elif fault.signal or not state.takes_victim:
        assert re.search(fault.text or r"^interrupted at cell line \d+$", acts.pop(victim)), shown
        in_state.remove(victim)
    assert set(acts) == in_state and all(re.search(state.line, act) for act in acts.values()), f"{acts} in {shown}"
    if fault.is_death and fault.signal != signal.SIGSTOP:
        assert f"rank {victim} died. %ddp_heal replaces it" in reply.stderr, reply
    own = f"[{victim}]" if fault.name == "SIGSEGV" else "no line"  # last words of Python
    lines = [line for line in reply.stderr.splitlines() if not line.startswith(own)]
    assert reply.stdout == "" and all(_NOTE.fullmatch(line) for line in lines), reply


def _stopped(rank: int, pid: int) -> str:
    """Return the pattern of the message about a stopped process."""
    return rf"rank {rank}\b.*its process \(?(pid )?{pid}\)? is stopped; kill -CONT {pid}( on \S+)? resumes it"
