"""Interface for another feature that follows training steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.buckets import Model

_log = logging.getLogger(__name__)


class StepObserver:
    """Receives the parts of training steps, in the training threads, while something is recorded.

    Subclasses override the methods that they need. `tell` calls them, so that an error does not end the user's step.
    """

    def note(self, name: str, step: int, **details: Any) -> None:
        """Keep a fact about the cell for the notebook: its name, the step, and details as JSON values."""

    def inputs(self, model: Any, values: Sequence[Any]) -> None:
        """Called with the inputs of a DDP model or of the root of an FSDP model, when its forward begins or ends."""

    def ddp_forward(self, known: Model, *, synchronizes: bool, has_graph: bool) -> None:
        """Called after the forward of a DDP model.

        Args:
            synchronizes: the next backward averages its gradients.
            has_graph: gradients are enabled.
        """

    def fsdp_forward(self, root: Any) -> None:
        """Called after the forward of an FSDP model with gradients."""

    def fsdp_group_begins(self, parameters: Sequence[Any]) -> None:
        """Called with the whole parameters of a group before `fully_shard` splits them."""

    def fsdp_group_made(self, module: Any, group: Any) -> None:
        """Called when `fully_shard` has made a group of parameters for a module."""

    def backward_begins(self, outputs: Sequence[Any]) -> None:
        """Called before a backward, with the tensors whose gradients it computes; empty if they are not known."""

    def backward(self, outputs: Any, synchronized: Collection[Model], *, has_unknown: bool) -> None:
        """Called after a backward that succeeded.

        Args:
            outputs: the tensors whose gradients were computed.
            synchronized: DDP models with at least one averaged bucket.
            has_unknown: a reducer has averaged buckets, and their model is not known.
        """

    def step_begins(self, optimizer: Any) -> None:
        """Called when an optimizer step begins, before hooks of the user."""

    def stepped(self, optimizer: Any, step: int) -> None:
        """Called after an optimizer step, with the number of steps in the cell."""

    def loader_begins(self, loader: Any, iterator: Any) -> None:
        """Called when a loader begins a pass over its data."""

    def batch(self, iterator: Any, data: Any) -> None:
        """Called with each batch of a loader."""

    def loader_ended(self, iterator: Any) -> None:
        """Called when a loader has no more batches."""


def tell(observe: Any, *args: Any, **named: Any) -> None:
    """Call a method of an observer, hide its operators from the user's modes, and log an error."""
    try:
        unseen(observe, *args, **named)
    except Exception:  # the user's step must continue
        _log.info("a step was not observed", exc_info=True)
