"""Methods of `session.ranks`: replace dead ranks, change the number of ranks, form the group again, inject faults."""

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

    def __init__(self, parts: Callable[[], SessionParts]) -> None:
        self._parts = parts

    def heal(self, from_rank: int | None = None, names: Sequence[str] = ()) -> list[str]:
        """Replace ranks that have died: a new process takes the number, the device and the environment, and the group
        forms again. The other ranks keep what they have.

        Args:
            from_rank: a living rank whose variables the new ranks get; None: they begin empty. Where no rank has died,
                the ranks that were replaced last get them.
            names: which variables; none: all that can be pickled.

        Returns:
            What was done, in sentences.

        Raises:
            UsageError: `from_rank` is no living rank, or has no such variable.
            StartError: a process or the group did not come up.

        Example:
            >>> session.ranks.heal(from_rank=0)
            ['rank 1 was replaced', '... variables of rank 0 copied to rank 1: x, model, ...']
        """
        return self._parts().healing.heal(from_rank, names)

    def resize(self, world_size: int, *, build: str | None = None, without: RankSet = None) -> list[str]:
        """Have more or fewer ranks. Those that stay keep every variable; those that come get what is the same on all
        ranks, from the first one. The group forms again, and models in DDP go on in it.

        Args:
            world_size: how many.
            build: name of a function of a cell that builds what is in shards (FSDP, DTensor, device meshes) anew, and
                returns it by names: `{"model": model, "optimizer": optimizer}`. The state goes over.
            without: ranks that leave; None: the last ones. Ranks that have died leave before others.

        Returns:
            What was done, in sentences; what new ranks did not get.

        Raises:
            UsageError: there is no room for so many; or something is in shards, or RPC runs. Nothing was changed.
            SessionBrokenError: a cell has not ended.
            StartError: a process did not come up, and nothing was changed; or the group did not.

        Example:
            >>> session.ranks.resize(3)
            ['3 ranks now: rank 2 is new', ...]
            >>> session.ranks.resize(2)
            ['2 ranks now: rank 2 has left']
        """
        resizing: Resizing = self._parts().hooks.need("resize")
        return resizing.resize(world_size, build, without)

    def reform(self, timeout_s: float = 60.0) -> list[str]:
        """Form the process group anew: same ranks, every variable kept. A store that is gone is replaced.

        What holds a group (a model in DDP or FSDP, a device mesh, a variable) goes on with it. After an interrupt or a
        failed cell this happens by itself.

        Returns:
            What could not be had again, in sentences.

        Raises:
            SessionBrokenError: a rank is gone; `heal` replaces it.
            StartError: it did not form.
        """
        return self._parts().healing.reform(timeout_s)

    def fault(self, kind: str, ranks: RankSet = None, *, after_s: float | None = None, by_s: float = 0.1) -> str:
        """Let something go wrong on ranks, to see what your code and this session make of it.

        Args:
            kind: "kill": the process ends, at once or `after_s`. "hang": the code of a cell stands still until a stop
                or a grace frees it. "raise": it raises. "slow": each optimizer step, and each collective that is no
                backward's, takes `by_s` longer. "off": what was asked for and has not happened is forgotten.
            ranks: which of them.
            after_s: seconds into the cell that runs, or the next one; None: at its beginning.

        Returns:
            What will happen, in a sentence.

        Raises:
            UsageError: no such fault, rank or time.
            SessionBrokenError: one of the ranks is gone.

        Example:
            >>> session.ranks.fault("slow", 1, by_s=0.05)
            'rank 1 will take 0.05 s longer for each step and each collective until %ddp_fault off: in ...'
        """
        from ddp_notebook.run.faults.faults import FaultInjector

        parts = self._parts()
        return FaultInjector(parts.liveness, parts.questions).make(kind, ranks, after_s, by_s)

    @property
    def epoch(self) -> int:
        """Number of the group: raised each time it is formed anew."""
        return self._parts().liveness.cluster.epoch

    def pids(self, kind: str = "rank") -> list[int]:
        """Process ids of the living "rank", "store" or "controller" processes, or of the "host server"."""
        return self._parts().hosts.pids if kind == "host server" else self._parts().liveness.cluster.pids(kind)
