"""Runs the cells that control a model in DDP on the ranks, and returns their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook import RecordOptions

if TYPE_CHECKING:
    from ddp_notebook import Agreement, Session
    from ddp_notebook.lessons.ddp.inside_options import Options

Numbers = Mapping[int, list[float]]  # by rank


class Driver:
    """One model on all ranks, an instance `_inside` of `ranks.Inside`.

    Args:
        session: Session to run in.
        model: Python expression that creates a module; None for the model of the lesson.
    """

    def __init__(self, session: Session, model: str | None) -> None:
        self.session = session
        self._model = model
        self.parameter = ""  # name of the parameter whose gradient is shown; set by `make`

    def make(self, options: Options) -> None:
        """Create the model again, not in DDP yet."""
        self.session.push(_inside_options=options)
        make = "None" if self._model is None else f"lambda: ({self._model})"
        self.cell(
            "from torch import nn\n"
            "from ddp_notebook.lessons.ddp.ranks import Inside as _Inside\n"
            f"_inside = _Inside(_inside_options, {make}, device)\n"
            "_inside_network, _inside_found = _inside.network, _inside.parameter"
        )
        self.parameter = self.session.pull("_inside_found", 0)[0]

    def do(self, call: str) -> tuple[str, ...]:
        """Call a method of `ranks.Inside`. Return the torch.distributed operations that rank 0 called in it."""
        began = time.monotonic_ns()
        self.cell(
            f"_inside_found = _inside.{call}\n"
            "_inside_gradient = dict(_inside.network.named_parameters())[_inside.parameter].grad"
        )
        calls = self.session.recording.collectives(rank=0)
        return tuple(one.op for one in calls if one.issue_ns >= began and not one.op.startswith("comm hook"))

    def found(self) -> dict[int, Any]:
        """Return the result of the last call, by rank."""
        return dict(self.session["_inside_found"].items())

    def weights(self) -> Numbers:
        """Return the first weights of the shown parameter."""
        self.cell("_inside_found = _inside.weights()")
        return {rank: one["weights"] for rank, one in self.found().items()}

    def check_weights(self) -> Agreement:
        """Check that all ranks hold the same weights."""
        return self.session.check("_inside_network")

    def check_gradient(self) -> Agreement:
        """Check that all ranks hold the same gradient of the shown parameter."""
        return self.session.check("_inside_gradient")

    def train(self, steps: int) -> None:
        """Run whole steps, and record the gradient of the shown parameter."""
        self.cell(f"_inside_found = _inside.train({steps})", gradient=self.parameter)

    def cell(self, code: str, gradient: str = "") -> None:
        """Run code without output.

        Args:
            gradient: Name of a parameter whose gradient is recorded.
        """
        self.session.run(code, quiet=True, record=RecordOptions(level="all", gradient=gradient))
