"""Completion of the options of magics with Tab, from the declarations of their lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.run.lines import LineParser

_ATTRIBUTE = "_ddp_notebook_completing"


def watch(shell: Any, lines: Mapping[str, Callable[[], LineParser]]) -> None:
    """Register the completers with an IPython shell, once.

    Args:
        shell: IPython's.
        lines: by each magic with its percent signs, a function that returns the declaration of its line.
    """
    known: dict[str, Callable[[], LineParser]] = getattr(shell, _ATTRIBUTE, {})
    for magic in lines:
        if magic not in known:
            shell.set_hook("complete_command", _complete, str_key=magic)
    setattr(shell, _ATTRIBUTE, {**known, **lines})


def _complete(shell: Any, event: Any) -> list[str]:
    """Return the words that may stand at the cursor. For none IPython tries its other completers, such as files."""
    words = event.text_until_cursor.split()
    if not words or words[0] not in (known := getattr(shell, _ATTRIBUTE)):
        return []
    given = words[1:] if event.text_until_cursor[-1:].isspace() else words[1:-1]
    with contextlib.suppress(DDPNotebookError, OSError):  # names to attach to cannot be read
        return [word for word in known[words[0]]().completions(given) if word.startswith(event.symbol)]
    return []
