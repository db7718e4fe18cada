"""`Session` as it is used to see what is spread over ranks: the public methods for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.run.cells.face import CellFace
from ddp_notebook.run.kernel import cell_number
from ddp_notebook.run.sharding.memory import Memory, RankMemory
from ddp_notebook.run.sharding.placements import Placements, placements_of
from ddp_notebook.run.values.face import ValueFace
from ddp_notebook.wire.record_options import RecordOptions

_ROOM = "ddp_notebook.rank.sharding"
_NOTHING = RecordOptions(level="off")  # the recording's own copies are not to be counted


class ShardingFace(CellFace, ValueFace):
    """The part of `Session` that looks at models in shards."""

    _memory: Memory | None = None  # what was measured last

    def placement(self, name: str | object) -> Placements:
        """Which rank holds which part of which parameter of a model, or of a tensor.

        Args:
            name: of a variable on the ranks, or of a part of one: "model", "model.blocks.0", "x".

        Raises:
            UsageError: a rank has no such model or tensor; or the model itself was given, not its name.

        Example:
            >>> session.placement("model").is_sharded
            False
        """
        if not isinstance(name, str):
            kind = type(name).__name__
            raise UsageError(f'placement takes the name of what ranks have, placement("model"), not a {kind}')
        return placements_of(name, self._ask(f"parts.told(globals(), {name!r})", "parts"))

    def memory(self, code: str = "") -> Memory:
        """The memory of parameters, gradients, optimizer state, activations and temporary tensors on each rank. The
        result has what was measured before beside it.

        The first three are counted where the optimizer steps, the others are the most that there were. All models and
        optimizers that are variables count. Torch's trackers see every operation: the code runs some times slower.

        Args:
            code: runs on all ranks meanwhile, such as "step()"; empty: what is held now.

        Raises:
            RankError: the code has failed, or torch's tracker cannot follow it.

        Source: torch.distributed._tools (`MemTracker`, `FSDPMemTracker`).

        Example:
            >>> session.memory()[0].activations
            0
        """
        told = self._ask(f"memory.measure(globals(), {code!r}, {cell_number()})", "memory")
        by_rank = {rank: RankMemory(**of) for rank, of in told.items()}
        before = None if self._memory is None else replace(self._memory, before=None)
        self._memory = found = Memory(code=code, by_rank=by_rank, before=before)
        return found

    def _ask(self, expression: str, module: str) -> dict[int, Any]:
        """Evaluate an expression with a module of the ranks' own, and return its value by rank."""
        load = f"__import__('importlib').import_module('{_ROOM}.{module}')"
        call = expression.replace(f"{module}.", f"{load}.", 1)
        self.run(f"_ddp_told = {call}", quiet=True, record=_NOTHING)
        told = dict(self.pull("_ddp_told"))
        self.run("del _ddp_told", quiet=True, record=_NOTHING)
        return told
