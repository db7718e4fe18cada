"""Liveness checks, and the errors for dead ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.records.words import format_ranks, group_by_value, list_ranks
from ddp_notebook.run.rank_sets import RankSet, parse_ranks

_GIVES_UP = "%ddp_heal gives it up now"
_RESUMED_S = 1.0  # data of a resumed connection arrive within this time, such as after `kill -CONT` of its ssh
_LOOK_S = 0.02
_HEAL = "%ddp_heal replaces dead ranks; %ddp_restart starts new ranks"


class Liveness:
    """Checks which ranks of a session are alive.

    Args:
        cluster: the ranks, which need not have been started.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.has_ended = False  # the session was stopped
        self.by_name: Callable[[str], list[int]] | None = None  # parses sets of ranks such as `tp=1`

    def end(self) -> None:
        """Mark the session as stopped."""
        self.has_ended = True

    # Each of the following methods raises SessionBrokenError if its requirement is not met.

    @property
    def cluster(self) -> Cluster:
        """Return the ranks of a session that was not stopped."""
        if self.has_ended:
            raise SessionBrokenError("this session was stopped; start another with %ddp_start")
        return self._cluster

    def check_host(self) -> Cluster:
        """Return the ranks, if their host servers or keeper are alive."""
        cluster = self.cluster
        if not cluster.is_running:
            raise SessionBrokenError(cluster.trouble() or "the ranks have ended; %ddp_restart starts new ones")
        return cluster

    def check(self, ranks: Sequence[int] | None = None) -> Cluster:
        """Return the ranks, if these ranks are alive; None: all."""
        cluster = self.check_host()
        if gone := [rank for rank in cluster.gone if ranks is None or rank in ranks]:
            raise SessionBrokenError(f"{_how_they_died(cluster, gone)}\n{_HEAL}")
        return cluster

    def check_cells_arrive(self, ranks: Sequence[int] | None = None) -> None:
        """Check that the host servers can pass cells to these ranks; None: all. Values do not need host servers."""
        cluster = self.check_host()
        until = time.monotonic() + _RESUMED_S
        while (unheard := _among(ranks, cluster.unheard)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if unheard:
            others = [rank for rank in cluster.alive if rank not in cluster.unheard]
            there = f"; {_GIVES_UP}, and %%on_ranks {format_ranks(others)} runs without it" if others else ""
            raise SessionBrokenError("; ".join(dict.fromkeys(unheard.values())) + there)
        if cluster.is_stopped and (why := cluster.trouble()):  # the host server may have resumed in the meantime
            raise SessionBrokenError(why)
        if why := cluster.cut_off():
            raise SessionBrokenError(why)

    def check_rank(self, rank: int) -> None:
        """Check that one rank is alive and not stopped."""
        cluster = self.check_host()
        process = cluster.process(rank)
        if not process.is_alive:
            raise SessionBrokenError(f"rank {rank} died: {process.tell_end()}")
        if why := process.stopped or cluster.cut_off():
            raise SessionBrokenError(why)

    def for_cell(self, ranks: RankSet) -> tuple[list[int], list[str]]:
        """Return the ranks that run a cell, and notes about them. A cell for all ranks leaves out dead ranks.

        Raises:
            UsageError: a rank does not exist.
        """
        cluster = self.check_host()
        chosen = self.parse(ranks)
        gone = [rank for rank in cluster.gone if rank in chosen]
        if not gone:
            return chosen, []
        left = [rank for rank in chosen if rank not in gone]
        if ranks is not None or not left:
            raise SessionBrokenError(f"{_how_they_died(cluster, gone)}\n{_HEAL}")
        return left, [f"{list_ranks(gone)} died: this cell runs on {list_ranks(left)}. {_HEAL}"]

    # These methods do not raise it.

    def parse(self, ranks: RankSet) -> list[int]:
        """Return a set of ranks as numbers, even of dead ranks.

        Raises:
            UsageError: a rank does not exist, or a name such as `tp` is unknown.
            SessionBrokenError: the set has names, and a rank does not answer.
        """
        if isinstance(ranks, str) and "=" in ranks and self.by_name is not None:
            return self.by_name(ranks)
        world_size = self._cluster.placement.world_size
        return list(range(world_size)) if ranks is None else parse_ranks(ranks, world_size)

    @property
    def to_ask(self) -> list[int] | None:
        """Return the ranks that can answer requests. None: the session or its host servers have ended."""
        return None if self.has_ended or not self._cluster.is_running else self._cluster.alive

    @property
    def are_here(self) -> bool:
        """Return whether all ranks are on the notebook's machine."""
        return self._cluster.is_here


def _among(ranks: Sequence[int] | None, why: Mapping[int, str]) -> dict[int, str]:
    return {rank: words for rank, words in why.items() if ranks is None or rank in ranks}


def _how_they_died(cluster: Cluster, ranks: list[int]) -> str:
    hows = group_by_value({rank: cluster.process(rank).tell_end() for rank in ranks})
    return "; ".join(f"{list_ranks(those)} died: {how}" for how, those in hows.items())
