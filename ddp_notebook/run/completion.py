"""Completion of the options of magics with Tab, from the declarations of their lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core import completer

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.line_parser import LineParser

_ATTRIBUTE = "_ddp_notebook_lines"
Lines = Mapping[str, Callable[[], LineParser]]


def watch(shell: Any, lines: Lines) -> None:
    """Register the completions with an IPython shell, once.

    Args:
        shell: IPython's.
        lines: by each magic with its percent signs, a function that returns the declaration of its line.
    """
    is_registered = hasattr(shell, _ATTRIBUTE)
    setattr(shell, _ATTRIBUTE, lines)
    if is_registered:
        return
    if not hasattr(completer, "context_matcher"):  # before IPython 8.6
        for magic in lines:
            shell.set_hook("complete_command", _hook, str_key=magic)
        return

    @completer.context_matcher()
    def match_options(context: Any) -> dict[str, Any]:
        words = _completions(getattr(shell, _ATTRIBUTE), context.text_until_cursor, context.token)
        # Without `suppress`, Jedi completes `--s` with the names in Python that begin with an s.
        found = [completer.SimpleCompletion(text=word, type="param") for word in words]
        return {"completions": found, "suppress": bool(found)}

    shell.Completer.custom_matchers.append(match_options)


def _hook(shell: Any, event: Any) -> list[str]:
    return _completions(getattr(shell, _ATTRIBUTE), event.text_until_cursor, event.symbol)


def _completions(lines: Lines, text: str, begun: str) -> list[str]:
    """Return the words that may stand at the cursor. For none IPython tries its other completers, such as files.

    Args:
        lines: see `watch`.
        text: of the line up to the cursor.
        begun: the beginning of the word at the cursor, as IPython separates words.
    """
    words = text.split()
    if not words or words[0] not in lines or words[0] == begun:
        return []
    given = words[1:] if text[-1:].isspace() else words[1:-1]
    with contextlib.suppress(DDPNotebookError, OSError):  # names to attach to cannot be read
        return [word for word in lines[words[0]]().completions(given) if word.startswith(begun)]
    return []
