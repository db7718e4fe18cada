"""`Session` as it is used to look after the ranks: the public methods for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_notebook.run.agree.agreement import Agreement
from ddp_notebook.run.assembly import Assembled
from ddp_notebook.run.groups import states
from ddp_notebook.run.groups.faults import Faults
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.status import Status

if TYPE_CHECKING:
    import ipyparallel


class GroupFace(Assembled):
    """The part of `Session` that looks after its ranks."""

    @property
    def epoch(self) -> int:
        """Number of the group: raised each time it is formed anew."""
        return self._parts.living.cluster.epoch

    @property
    def client(self) -> ipyparallel.Client:
        """A plain `ipp.Client` of the same engines, for `%%px`, views and ipyparallel's own tools.

        Its controller is started at the first use, and one that is gone again at the next.

        Raises:
            ClientError: it cannot be reached.
        """
        self._parts.living.check()
        return self._parts.client.get()

    def status(self) -> Status:
        """Return every rank's host, process, device, memory and state; the last training run; how well hosts' clocks
        are known; the time left of a job."""
        parts = self._parts
        cluster = parts.living.cluster
        recording = parts.observer.recording
        return states.status(
            cluster, parts.questions, self._placement, parts.hosts.status(), recording, lost=self._state_without_hosts
        )

    @property
    def _state_without_hosts(self) -> str:
        """What is said of the ranks' state once nothing that has started them is to be reached."""
        return "died"

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
        return self._parts.healing.reform(timeout_s)

    def interrupt(self, *, replace: bool = False) -> list[str]:
        """End the cells that have not ended, as the stop button ends the one that the notebook waits for: those that
        were given up and still run on some ranks, and those of `wait=False`. If there is none, end calls of
        `session.client` on the ranks. Variables are kept.

        Args:
            replace: give a new process, which begins without variables, to each rank that has not ended its cell after
                2 s.

        Returns:
            What was done, in sentences; where it did not help, what the ranks are in.

        Raises:
            StartError: a new process or the group did not come up.

        Example:
            >>> session.interrupt()
            ['the cell was ended on rank 1; all variables are kept']
        """
        return self._parts.unended.end(replace=replace)

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
            >>> session.heal(from_rank=0)
            ['rank 1 was replaced', '... variables of rank 0 copied to rank 1: x, model, ...']
        """
        return self._parts.healing.heal(from_rank, names)

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
            >>> session.resize(3)
            ['3 ranks now: rank 2 is new', ...]
            >>> session.resize(2)
            ['2 ranks now: rank 2 has left']
        """
        return self._parts.resizing.resize(world_size, build, without)

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
            >>> session.fault("slow", 1, by_s=0.05)
            'rank 1 will take 0.05 s longer for each step and each collective until %ddp_fault off: in ...'
        """
        return Faults(self._parts.living, self._parts.questions).make(kind, ranks, after_s, by_s)

    def check(self, *names: str) -> Agreement:
        """Whether ranks agree: in parameters, buffers, optimizer state, data length, random state and versions, or in
        these variables. By checksums, so no data moves while they agree.

        Args:
            names: variables; none: all models, optimizers, loaders and what else has to be the same.

        Raises:
            SessionBrokenError: less than two ranks are there and have nothing else to do.

        Example:
            >>> session.check("model")
            2 ranks agree: 2 parameters (4 elements)
        """
        return self._parts.checking.check(names)

    @property
    def trouble(self) -> str:
        """What is wrong with the host server, by which the ranks get their cells, and what helps; "": nothing."""
        return self._parts.living.cluster.trouble()
