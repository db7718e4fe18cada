"""Whether views in a front end answer, and when the kernel reads what they say: measured, not asked of the kernel.

A view says that it is there as soon as its JavaScript runs, and some times more until it is answered. Where the front
end sends that to a subshell, the kernel reads it in a thread beside the cell; else in its main thread, where it waits
for the cell. A kernel alone knows only what it offers: VS Code, and JupyterLab before 4.4, send nothing to subshells,
whatever the kernel has. JupyterLab's first messages may go to the main thread too, until it has its subshell: so it is
the last one that tells.
"""

from __future__ import annotations

import time
from typing import Literal

from ddp_notebook.run.notebook_kernel import is_users_thread

ANSWER_S = 2.0  # what a view gets to say that it is there

Answers = Literal["", "now", "after the cell"]
_before: Answers = ""  # what is known of this process' front end from earlier sessions


class FrontendProbe:
    """What is known of the front end, from what its views have said."""

    def __init__(self) -> None:
        self.when = _before  # what a view says is answered; "": not known yet
        self.is_there = _before != ""  # a view has answered
        self._was_overdue = False

    def __repr__(self) -> str:
        if self.is_missing:
            return "<FrontendProbe: no view has answered>"
        return f"<FrontendProbe: {self.when or 'not known yet'}>"

    @property
    def is_missing(self) -> bool:
        """Whether a view had its time, and none has answered since."""
        return self._was_overdue and not self.is_there

    def heard(self, *, is_last: bool = False) -> Answers:
        """A view has said something. To be called in the thread that reads it.

        Args:
            is_last: it will not say again that it is there.

        Returns:
            When it is answered; "" as long as this is not certain.
        """
        global _before
        self.is_there = True
        waits = is_users_thread()
        if waits and not is_last:
            return ""
        self.when = _before = "after the cell" if waits else "now"
        return self.when

    def is_overdue(self, shown_s: float) -> bool:
        """Whether a view that was shown then should have answered by now; from then on they are missing.

        Args:
            shown_s: of `time.monotonic()`.
        """
        if time.monotonic() > shown_s + ANSWER_S:
            self._was_overdue = True
        return self.is_missing
