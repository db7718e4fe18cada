"""Methods of `session.ranks`: replace dead ranks, change their number, form the group again, inject faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.run.interrupted import OF_RANKS, tells_interrupts
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.session_parts import SessionParts

if TYPE_CHECKING:
    from ddp_notebook.run.resize.resizing import Resizing


@tells_interrupts(OF_RANKS)
class SessionRanks:
    """The ranks of a session and their process group."""

    def __init__(
        self, parts: Callable[[], SessionParts], when_stopped: Callable[[Callable[[], object]], object]
    ) -> None:
        self._parts = parts
        self._register = when_stopped

    def heal(self, from_rank: int | None = None, names: Sequence[str] = ()) -> list[str]:
        """Replace dead ranks, and form the group again.

        A new process takes the number, the device and the environment of a dead rank. The other ranks keep their
        variables.

        Args:
            from_rank: a living rank whose variables are copied to the new ranks; None: they start without variables. If
                no rank is dead, copy to the ranks that were replaced last.
            names: names of variables; none: all that can be pickled.

        Returns:
            Sentences that describe what was done.

        Raises:
            UsageError: `from_rank` is not a living rank, or has no such variable.
            StartError: a process or the group could not be started.

        Example:
            >>> session.ranks.heal(from_rank=0)
            ['rank 1 was replaced', '... variables of rank 0 copied to rank 1: x, model, ...']
        """
        return self._parts().healing.heal(from_rank, names)

    def resize(self, world_size: int, *, build: str | None = None, without: RankSet = None) -> list[str]:
        """Change the number of ranks, and form the group again.

        Remaining ranks keep all variables. New ranks get the variables that are equal on all ranks, from the first one.
        DDP models use the new group.

        Args:
            world_size: new number of ranks.
            build: name of a function defined in a cell. It rebuilds sharded objects (FSDP, DTensor, device meshes) and
                returns them by name: `{"model": model, "optimizer": optimizer}`. Their state is transferred.
            without: ranks that leave; None: the last ones. Dead ranks leave first.

        Returns:
            Sentences that describe what was done, and which variables the new ranks did not get.

        Raises:
            UsageError: the hosts have no room for so many ranks, state is sharded, or RPC is running. Nothing was
                changed.
            SessionBrokenError: a cell has not ended.
            StartError: a process could not be started, and nothing was changed; or the group could not be formed.

        Example:
            >>> session.ranks.resize(3)
            ['3 ranks now: rank 2 is new', ...]
            >>> session.ranks.resize(2)
            ['2 ranks now: rank 2 has left']
        """
        resizing: Resizing = self._parts().hooks.need("resize")
        return resizing.resize(world_size, build, without)

    def reform(self, timeout_s: float = 60.0) -> list[str]:
        """Form the process group again with the same ranks. All variables are kept; a dead store is replaced.

        Objects that hold a group continue to work: DDP and FSDP models, device meshes, variables. After an interrupt or
        a failed cell the group is formed again automatically.

        Returns:
            Sentences about resources that could not be restored.

        Raises:
            SessionBrokenError: a rank is dead; `heal` replaces it.
            StartError: the group could not be formed.
        """
        return self._parts().healing.reform(timeout_s)

    def fault(self, kind: str, ranks: RankSet = None, *, after_s: float | None = None, by_s: float = 0.1) -> str:
        """Inject a fault on ranks, to test how your code and this session react.

        Args:
            kind: "kill": the process ends, immediately or `after_s`. "hang": the cell's code blocks until a stop or the
                grace time ends it. "raise": it raises an error. "slow": each optimizer step and each collective outside
                of backward takes `by_s` longer. "off": pending faults are cancelled.
            ranks: ranks that fail.
            after_s: seconds from the start of the running or next cell; None: at its start.

        Returns:
            A sentence that describes the fault.

        Raises:
            UsageError: the fault or a rank does not exist, or a time is out of range.
            SessionBrokenError: one of the ranks is dead.

        Example:
            >>> session.ranks.fault("slow", 1, by_s=0.05)
            'rank 1 will take 0.05 s longer for each step and each collective until %ddp_fault off: in ...'
        """
        from ddp_notebook.run.faults.feature import FaultInjector

        parts = self._parts()
        return FaultInjector(parts.liveness, parts.questions).make(kind, ranks, after_s, by_s)

    @property
    def epoch(self) -> int:
        """Number of the group, increased each time it is formed."""
        return self._parts().liveness.cluster.epoch

    def pids(self, kind: str = "rank") -> list[int]:
        """Return the process ids of the living "rank", "store" or "controller" processes, or of the "host server"."""
        return self._parts().hosts.pids if kind == "host server" else self._parts().liveness.cluster.pids(kind)

    def when_stopped(self, call: Callable[[], object]) -> None:
        """Register a callback for views that show ranks.

        It is called once when the session stops, before its ranks end, or immediately if the session is stopped
        already.

        Args:
            call: the callback. Its errors are logged and ignored.

        Example:
            >>> session.ranks.when_stopped(lambda: print("the ranks end"))
        """
        self._register(call)
