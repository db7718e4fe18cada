"""Inject faults on ranks at the user's request, for `%ddp_fault`."""

from __future__ import annotations

import contextlib
import signal
import time

from ddp_notebook.errors import HostError, UsageError
from ddp_notebook.messages.faults import KINDS, OFF, Fault
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.faults.feature import fault_line
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.rank_sets import RankSet

_MOST_S = 3600.0
_DEATH_S = 5.0  # longest time until the death of a killed process is reported
_LOOK_S = 0.005


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
