"""What is in shards while the number of ranks changes: gathered before, built anew and scattered after."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from ddp_notebook.errors import RankError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.record_options import RecordOptions
from ddp_notebook.run.cells.cells import Cells

_MODULE = "__import__('ddp_notebook.rank.resize.sharded', fromlist=['gather'])"
_NOTHING = RecordOptions(level="off")


class Sharded:
    """Of one session. Cells do it, so that one that hangs or fails ends as any other. The caller has the turn.

    Args:
        cells: run them.
        cluster: the ranks.
    """

    def __init__(self, cells: Cells, cluster: Cluster) -> None:
        self.is_left = False  # state that was gathered, and is not in a model again
        self._cells = cells
        self._cluster = cluster

    def gather(self, build: str, names: Sequence[str]) -> None:
        """Bring these variables together, in rank 0's memory.

        Raises:
            RankError: it failed, or there is no such function; nothing was changed.
        """
        self._run(f"{_MODULE}.gather(globals(), {build!r}, {list(names)!r})")
        self.is_left = True

    def build(self, build: str) -> list[str]:
        """Build them anew. Returns what was done, in sentences.

        Raises:
            RankError: it failed, and can be tried again: rank 0 has what was gathered.
        """
        try:
            self._run(f"{_MODULE}.build(globals(), {build!r})")
        except RankError as error:
            count = len(self._cluster.ranks)
            hint = (
                f"there {'is 1 rank' if count == 1 else f'are {count} ranks'} now, and rank 0 has what was gathered: "
            )
            hint += f"correct {build}() and repeat this line"
            kind = type(error)
            raise kind(error.tracebacks, error.summaries, error.result, hint=hint, others=error.others) from None
        self.is_left = False
        return [f"{build}() has rebuilt the sharded objects, with the state that they had"]

    def _run(self, code: str) -> None:
        self._cells.run(code, lambda: (self._cluster.ranks, []), record=_NOTHING, place=nullcontext())
