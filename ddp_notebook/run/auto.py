"""Send every plain cell to the ranks, for `%ddp_auto on`.

A plain cell is one that the user ran and that does not start with a magic of this package or with one like `%%html`.
Code that front ends run silently or without history, such as variable inspectors, stays in the notebook.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

# Magics that act on the notebook or its page, and magics of this package. Comments may precede a line magic.
_STAYS = re.compile(
    r"(\s*#.*\n)*\s*(%%(local|on_ranks|on_all_ranks|px|autopx|html|HTML|svg|SVG|js|javascript|markdown|latex)\b"
    r"|%ddp_|%on_all_ranks\b|%load_ext\b|%reload_ext\b|%unload_ext\b)"
)
_ATTRIBUTE = "_ddp_notebook_auto"


class AutoSend:
    """IPython input transformer that puts `%%on_all_ranks` on top of plain cells while `is_on`."""

    has_side_effects = True  # IPython then skips it when it checks if a cell is complete

    def __init__(self, shell: Any) -> None:
        self.is_on = False
        self._shell = shell

    @classmethod
    def of(cls, shell: Any) -> AutoSend:
        """Return the transformer of a shell, and create it at the first call."""
        found: AutoSend | None = getattr(shell, _ATTRIBUTE, None)
        if found is None:
            found = cls(shell)
            setattr(shell, _ATTRIBUTE, found)
            shell.input_transformers_cleanup.append(found)
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Send no cell to the ranks within the `with` block."""
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform the lines of a cell."""
        code = "".join(lines)
        if not self.sends(code) or not self._is_users(code):
            return lines
        return ["%%on_all_ranks\n", *self._empty_lines(lines), *lines]

    def sends(self, code: str) -> bool:
        """Return whether this code would run on the ranks, if the user runs it as a cell."""
        return self.is_on and bool(code.strip()) and not _STAYS.match(code)

    def _empty_lines(self, lines: list[str]) -> list[str]:
        """Return the empty lines above the code that IPython has removed. They keep line numbers correct."""
        if lines and not lines[0].strip():  # it removes none while the front end's debugger is on
            return []
        kernel = getattr(self._shell, "kernel", None)
        code = "" if kernel is None else self._shell.get_parent()["content"]["code"]
        return list(takewhile(lambda line: not line.strip(), code.splitlines(keepends=True)))

    def _is_users(self, code: str) -> bool:
        """Return whether the user has run this cell, according to the front end's request."""
        if getattr(self._shell, "kernel", None) is None:
            return True  # a terminal runs only what the user has typed
        request = self._shell.get_parent().get("content", {})
        return (
            not request.get("silent", True)
            and request.get("store_history", True)
            and request.get("code", "").strip() == code.strip()
        )
