"""Faults on ranks at the user's request: the declaration of `%ddp_fault`, and how it makes ranks fail."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from typing import TYPE_CHECKING

from ddp_notebook.errors import HostError, UsageError
from ddp_notebook.line_parser import LineParser
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature
from ddp_notebook.run.interrupted import OF_RANKS

if TYPE_CHECKING:
    from ddp_notebook.run.groups.liveness import Liveness
    from ddp_notebook.run.rank_requests import Questions
    from ddp_notebook.run.rank_sets import RankSet

_MOST_S = 3600.0
_DEATH_S = 5.0  # longest time until the death of a killed process is reported
_LOOK_S = 0.005


@functools.cache
def fault_line() -> LineParser:
    parser = LineParser("%ddp_fault", "%ddp_fault kill --ranks 1 --after 2", "%ddp_fault slow --ranks 0 --by 0.05")
    parser.add_argument("kind", metavar="kill|hang|slow|raise|off", help="the fault to inject; off ends it")
    parser.add_argument("--ranks", metavar="0,2-3", help="the ranks that fail; all by default with off")
    parser.add_argument("--after", metavar="S", help="seconds after the start of the running or next cell")
    parser.add_argument("--by", metavar="S", default="0.1", help="with slow: seconds added to each step (0.1)")
    return parser


def ddp_fault(commands: Commands, line: str) -> None:
    """Make ranks fail on purpose, to see how the code reacts."""
    parser = fault_line()
    given = parser.parse_line(line)
    after_s = None if given.after is None else parser.number(float, "--after", given.after, "number of seconds")
    by_s = parser.number(float, "--by", given.by, "number of seconds")
    print(commands().of_session().ranks.fault(given.kind, given.ranks, after_s=after_s, by_s=by_s))


class FaultInjector:
    """Makes ranks fail.

    Args:
        liveness: liveness checks of the ranks.
        questions: sends requests to the ranks.
    """

    def __init__(self, liveness: Liveness, questions: Questions) -> None:
        self._liveness = liveness
        self._questions = questions

    def make(self, kind: str, ranks: RankSet, after_s: float | None, by_s: float) -> str:
        """Inject a fault, see `SessionRanks.fault`."""
        from ddp_notebook.messages.faults import KINDS, OFF, Fault

        if kind not in (*KINDS, OFF):
            raise UsageError(f"the fault must be one of {', '.join(KINDS)}, {OFF}, got {kind!r}\nusage: {_usage()}")
        for name, seconds in (("after", after_s), ("by", by_s)):
            if seconds is not None and not 0 <= seconds <= _MOST_S:
                raise UsageError(f"--{name} must be 0 to {_MOST_S:g} seconds, got {seconds:g}")
        if ranks is None and kind != OFF:
            raise UsageError(f"{kind} needs the ranks, as in --ranks 1\nusage: {_usage()}")
        chosen = self._liveness.parse(ranks)
        if kind == OFF:
            chosen = [rank for rank in chosen if rank in self._liveness.check_host().alive]
        cluster = self._liveness.check(chosen)
        whose = list_ranks(chosen)
        if kind == "kill" and after_s is None:
            with contextlib.suppress(HostError):  # the host server has ended, and its ranks with it
                cluster.signal(chosen, signal.SIGKILL)
            until = time.monotonic() + _DEATH_S
            while set(chosen) & set(cluster.alive) and time.monotonic() < until:
                time.sleep(_LOOK_S)
            return f"{whose} {'was' if len(chosen) == 1 else 'were'} killed"
        self._questions.ask_all(chosen, lambda n: Fault(request=n, kind=kind, after_s=after_s or 0.0, by_s=by_s))
        if kind == OFF:
            return f"no more faults on {whose}"
        will = {
            "kill": "will be killed",
            "hang": "will hang until it is stopped" if len(chosen) == 1 else "will hang until they are stopped",
            "slow": f"will take {by_s:g} s longer for each step and each collective until %ddp_fault off",
            "raise": "will raise an error",
        }
        when = f"{after_s:g} s into" if after_s else "in"
        return f"{whose} {will[kind]}: {when} the cell that runs, or the next one"


def _usage() -> str:
    return fault_line().usage_line


FEATURE = NotebookFeature(
    magics={"ddp_fault": FeatureMagic(fault_line, ddp_fault, OF_RANKS["fault"], "session", "ddp_resize")}
)
