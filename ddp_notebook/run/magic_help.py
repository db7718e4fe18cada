"""Texts of `%ddp_help`, and completion for the lines of magics."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core import completer

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.line_parser import LineParser

_ATTRIBUTE = "_ddp_notebook_lines"
Lines = Mapping[str, Callable[[], LineParser]]


def watch_completion(shell: Any, lines: Lines) -> None:
    """Register the completions with an IPython shell, once.

    Args:
        shell: the IPython shell.
        lines: by magic name with percent signs, a function that returns the declaration of its line.
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
        # Without `suppress`, Jedi completes `--s` with Python names that begin with an s.
        found = [completer.SimpleCompletion(text=word, type="param") for word in words]
        return {"completions": found, "suppress": bool(found)}

    shell.Completer.custom_matchers.append(match_options)


def _hook(shell: Any, event: Any) -> list[str]:
    return _completions(getattr(shell, _ATTRIBUTE), event.text_until_cursor, event.symbol)


def _completions(lines: Lines, text: str, begun: str) -> list[str]:
    """Return the possible words at the cursor. For an empty list IPython tries its other completers, such as files.

    Args:
        lines: see `watch_completion`.
        text: the line up to the cursor.
        begun: the part of the word before the cursor, as split by IPython.
    """
    words = text.split()
    if not words or words[0] not in lines or words[0] == begun:
        return []
    given = words[1:] if text[-1:].isspace() else words[1:-1]
    with contextlib.suppress(DDPNotebookError, OSError):  # names of sessions and jobs cannot be read
        return [word for word in lines[words[0]]().completions(given) if word.startswith(begun)]
    return []


# Magics of the core by section, in the order of the overview. Magics of features name their section.
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "session": ("ddp_start", "ddp_status", "ddp_restart", "ddp_stop", "ddp_interrupt", "ddp_heal", "ddp_check"),
    "recording": (),
    "cells": ("on_all_ranks", "on_ranks", "local", "ddp_auto"),
    "variables": ("ddp_pull", "ddp_peek", "ddp_push"),
    "files": (),
    "help": ("ddp_help",),
}


def sections(magics: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the magics by section, in the order of the overview."""
    found = {section: list(names) for section, names in _SECTIONS.items()}
    for name, magic in magics.items():
        if (section := getattr(magic, "section", None)) is not None:
            names = found[section]
            names.insert(names.index(magic.after) + 1 if magic.after in names else len(names), name)
    return found


def in_order(magics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the magics in the order of the overview. In the class, magics of features come last."""
    return {name: magics[name] for names in sections(magics).values() for name in names}


def overview(magics: Mapping[str, Any]) -> str:
    """Return a list of the magics, with one line each.

    Args:
        magics: methods with a declared line, by name, in order.
    """
    names = {name: magic.parser().prog for name, magic in magics.items()}
    width = max(map(len, names.values()))
    lines = []
    first = {names[0]: section for section, names in sections(magics).items() if names}
    for name, magic in magics.items():
        if name in first:
            lines += ["", f"{first[name]}:"]
        summary = (inspect.getdoc(magic) or "").partition("\n")[0]
        lines.append(f"  {names[name]:{width}}  {summary}")
    return "\n".join([*lines[1:], "", "%ddp_help ddp_start, or %ddp_start --help, shows the options of one magic"])


def about(name: str, magics: Mapping[str, Any]) -> str:
    """Return the help of one magic.

    Args:
        name: name of the magic, with or without percent signs and `ddp_`.
        magics: methods with a declared line, by name.

    Raises:
        UsageError: the magic does not exist.
    """
    bare = name.lstrip("%")
    for known in (bare, f"ddp_{bare}"):
        if known in magics:
            text: str = magics[known].getdoc()
            return text
    close = difflib.get_close_matches(bare, magics, n=1, cutoff=0.5)
    meant = f"did you mean %ddp_help {close[0]}? " if close else ""
    raise UsageError(f"unknown magic {name!r}; {meant}%ddp_help lists all magics")
