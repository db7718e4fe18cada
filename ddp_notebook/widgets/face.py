"""`Session` as it is used to look on: the public methods for its monitors."""

from __future__ import annotations

from ddp_notebook.run.assembly import there_already
from ddp_notebook.widgets.placing import Placing


class ViewFace:
    """The part of `Session` that shows what its ranks do."""

    _live: Placing | None = None

    def monitor(self, cell: int | None = None) -> None:
        """Show what the ranks do, live: losses, gradient synchronisation, a timeline, tensors and ranks.

        Args:
            cell: only this one; None: all, those to come among them.

        Raises:
            UsageError: nothing was recorded of this cell.
        """
        self.views.show(cell)

    @property
    def views(self) -> Placing:
        """Where its monitors stand. `widgets.Monitor(session)` is one more."""
        return there_already(self._live)
