"""`Session` as it is used where a keeper has its ranks: the public methods for that."""

from __future__ import annotations

from ddp_notebook.launch.keep.remote import Remote
from ddp_notebook.run.assembly import Assembled


class KeptFace(Assembled):
    """The part of `Session` that is about who has its ranks."""

    _remote: Remote | None = None  # the keeper, if it has one

    @property
    def is_kept(self) -> bool:
        """Whether its ranks outlive the notebook, see `keep_h`."""
        return self._remote is not None

    @property
    def kept_as(self) -> str:
        """The name of a kept session, which `attach` takes; "" of another."""
        return "" if self._remote is None else self._remote.welcome.name

    @property
    def drives(self) -> bool:
        """Whether this notebook runs the cells, and does not only look on."""
        return self._remote is None or (self._remote.welcome.drives and not self._remote.gone)

    def detach(self) -> None:
        """Let the ranks of a kept session live on without this notebook, whose `stop` then ends nothing any more."""
        if self._remote is not None:
            self._remote.close("this notebook has left the session")

    def show_unseen(self, *, wait: bool = False, timeout_s: float = 30.0) -> list[str]:
        """Show what cells have printed and displayed that an earlier notebook has sent and not shown to their end.

        Args:
            wait: for the end of one that runs; the stop button ends it then.
            timeout_s: how long what was kept may take to come.

        Returns:
            A line about each that still runs.

        Raises:
            what `run` raises: of the first one that has not ended well.

        Example:
            >>> session.show_unseen(wait=True)
            []
        """
        if self._remote is None or not self.drives:
            return []
        self._remote.told_all.wait(timeout_s)
        numbers = {cell.cell: cell.execution_count for cell, *_ in self._remote.welcome.cells}
        left = self._parts.cells.show_adopted(wait=wait)
        return [
            f"cell [{numbers[run.number]}] of the earlier notebook still runs: %ddp_attach --wait shows the rest, and "
            "%ddp_interrupt ends it"
            for run in left
        ]
