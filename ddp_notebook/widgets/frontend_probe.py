"""Measures if views in a front end answer, and if the kernel can read their messages while a cell runs.

A view sends `here` as soon as its JavaScript runs, and repeats it until it gets an answer. If the front end sends this
message to a subshell, the kernel reads it in another thread while the cell runs. If not, the main thread reads it after
the cell.

The kernel cannot know this in advance. VS Code, and JupyterLab before 4.4, send nothing to subshells even if the kernel
offers them. JupyterLab also sends its first messages to the main thread until it has created its subshell. So only the
last `here` message is conclusive.
"""

from __future__ import annotations

import time
from typing import Literal

from ddp_notebook.run.notebook_kernel import is_users_thread

ANSWER_S = 2.0  # time in which a view must send its first message

Answers = Literal["", "now", "after the cell"]
_before: Answers = ""  # result of earlier sessions in this process


class FrontendProbe:
    """State of the front end, derived from the messages of its views."""

    def __init__(self) -> None:
        self.when = _before  # when a view gets answers; "": not known yet
        self.is_there = _before != ""  # at least one view has answered
        self._was_overdue = False

    def __repr__(self) -> str:
        if self.is_missing:
            return "<FrontendProbe: no view has answered>"
        return f"<FrontendProbe: {self.when or 'not known yet'}>"

    @property
    def is_missing(self) -> bool:
        """Return whether a view was overdue and no view has answered since."""
        return self._was_overdue and not self.is_there

    def heard(self, *, is_last: bool = False) -> Answers:
        """Record that a message of a view was received. Must be called in the thread that reads the message.

        Args:
            is_last: The view will not repeat its `here` message.

        Returns:
            When the view gets answers; "" if this is not certain yet.
        """
        global _before
        self.is_there = True
        waits = is_users_thread()
        if waits and not is_last:
            return ""
        self.when = _before = "after the cell" if waits else "now"
        return self.when

    def is_overdue(self, shown_s: float) -> bool:
        """Return whether a view that was shown at this time should have answered by now.

        If so, views count as missing until one answers.

        Args:
            shown_s: Time of `time.monotonic()`.
        """
        if time.monotonic() > shown_s + ANSWER_S:
            self._was_overdue = True
        return self.is_missing
