"""Wrong uses that nothing else complains about: the training goes on, and learns nothing, or something else.

Some a rank sees by itself; of others the notebook compares what ranks tell (`run/agree/mistakes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.rank.group.modules import Modules
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.sharding import doubled
from ddp_notebook.rank.sharding.optimizers import of_optimizers
from ddp_notebook.rank.sharding.replicas import Replicas
from ddp_notebook.rank.sharding.saves import Saves
from ddp_notebook.rank.sharding.scaling import Scaling
from ddp_notebook.stdlib import contextlib


class Mistakes:
    """This rank's.

    Args:
        recorder: sees collectives.
        modules: knows their names.
    """

    def __init__(self, recorder: Recorder, modules: Modules) -> None:
        def listen(look: Any) -> None:
            recorder.look = look

        self._scaling = Scaling(listen)
        self._replicas = Replicas(modules.of_context)
        self._saves = Saves()

    def watch(self) -> None:
        """Begin to look. Of what this torch does not have nothing is said."""
        for watch in (self._scaling.watch, self._replicas.watch, self._saves.watch, doubled.watch):
            with contextlib.suppress(ImportError, AttributeError):
                watch()

    def begin_cell(self, cell: int) -> None:
        """A cell begins.

        Args:
            cell: its number, the same on all ranks.
        """
        self._scaling.begin_cell()
        self._replicas.begin_cell(cell)
        self._saves.begin_cell(cell)

    def facts(self, namespace: Mapping[str, Any]) -> dict[str, Any]:
        """What to tell the notebook, as JSON: `told`, what is wrong in words; `replicas` and `saves`, to be compared
        with those of other ranks. Empty if there is nothing.

        Args:
            namespace: the variables.
        """
        facts = {
            "told": [*of_optimizers(namespace), *doubled.of_models(namespace), *self._scaling.told()],
            "replicas": self._replicas.told(),
            "saves": self._saves.told(),
        }
        return {"kind": "mistake", **facts} if any(facts.values()) else {}
