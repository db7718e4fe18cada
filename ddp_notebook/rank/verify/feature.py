"""Feature of a rank that compares a training step with one process, and restores everything afterwards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_notebook.rank.hooks import Core, Feature

if TYPE_CHECKING:
    from ddp_notebook.rank.verify.model_state import ModelState

_feature: VerifyFeature | None = None  # the one of this process
_LIBRARIES = ("torch", "numpy", "random", "math", "itertools")
_DATA = (
    *(int, float, complex, str, bytes, range, slice, np.ndarray, np.generic, np.random.Generator, BuiltinFunctionType),
    *(torch.device, torch.dtype, torch.Size, torch.Generator, DataLoader, Dataset, Sampler),
)
_MOST_PARTS = 10_000


class VerifyFeature(Feature):
    """Comparison of a training step with one process."""

    def __init__(self, core: Core) -> None:
        global _feature
        super().__init__(core)
        self._state: ModelState | None = None  # state to restore; None: no comparison is in progress
        _feature = self
        self.watches_cells = False

    def cell_ends(self) -> None:
        """Restore the state after an interrupted comparison. No interrupt is raised here."""
        if self._state is not None:
            self._restore()

    def _watch_cells(self, on: bool) -> None:
        self.watches_cells = on
        self.core.update_cell_hooks()

    def _restore(self) -> None:
        state = self._state
        assert state is not None
        self.core.network.recorder.instead = None
        state.restore()
        self._state = None
        self._watch_cells(False)

    def _keep(self, state: ModelState) -> None:
        self._state = state
        self._watch_cells(True)

    def compare(self, namespace: MutableMapping[str, Any], code: dict[str, Any], main: str) -> dict[str, Any] | None:
        """Compare a step, see `Comparison`. Return its facts on rank 0, or `{"refusal": ...}`."""
        # These modules import `torch.distributed.fsdp`, which takes time.
        from ddp_notebook.rank.verify.comparison import Comparison
        from ddp_notebook.rank.verify.ranks import RefusedError
        from ddp_notebook.rank.verify.step import Step

        try:
            recorder, hidden = self.core.network.recorder, self.core.shell.user_ns_hidden
            return Comparison(namespace, Step(**code), main, recorder, hidden, self._keep).run()
        except RefusedError as error:
            return {"refusal": str(error)}
        finally:
            if self._state is not None:
                self._restore()


def compare(namespace: MutableMapping[str, Any], code: dict[str, Any], main: str) -> dict[str, Any] | None:
    """Compare a step in this process, see `VerifyFeature.compare`."""
    assert _feature is not None
    return _feature.compare(namespace, code, main)


def data_names(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of variables that hold data, and nothing that could compute with parameters.

    Example:
        >>> data_names({"x": torch.ones(3), "sizes": [1, 2], "net": torch.nn.Linear(1, 1), "torch": torch})
        ['x', 'sizes', 'torch']
    """
    return [name for name, value in namespace.items() if _is_data(value)]


def factor_facts(namespace: Mapping[str, Any], factors: Sequence[str], called: Sequence[str]) -> dict[str, Any]:
    """Return facts about the factors of a loss, see `factors.factor_values` and `factors.are_known`."""
    from ddp_notebook.rank.verify.factors import are_known, factor_values

    return {"values": factor_values(namespace, factors), "is_known": are_known(namespace, called)}


def _is_data(value: object, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(value, list | tuple | dict):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and len(parts) <= _MOST_PARTS and all(_is_data(one, depth - 1) for one in parts)
    return value is None or isinstance(value, _DATA)


FEATURE = VerifyFeature
