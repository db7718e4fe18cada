"""The texts of `%ddp_help`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from ddp_notebook.errors import UsageError

# The first magic of each section.
_SECTIONS = {
    "ddp_start": "session",
    "ddp_record": "recording",
    "on_all_ranks": "cells",
    "ddp_pull": "variables",
    "ddp_sync": "files",
    "ddp_help": "help",
}


def overview(magics: Mapping[str, Any]) -> str:
    """List the magics with one line each.

    Args:
        magics: methods with a declared line, by name and in order.
    """
    names = {name: magic.parser().prog for name, magic in magics.items()}
    width = max(map(len, names.values()))
    lines = []
    for name, magic in magics.items():
        if name in _SECTIONS:
            lines += ["", f"{_SECTIONS[name]}:"]
        summary = (inspect.getdoc(magic) or "").partition("\n")[0]
        lines.append(f"  {names[name]:{width}}  {summary}")
    return "\n".join([*lines[1:], "", "%ddp_help ddp_start, or %ddp_start --help, shows the options of one magic"])


def about(name: str, magics: Mapping[str, Any]) -> str:
    """Return the help of one magic.

    Args:
        name: of the magic, with or without percent signs and `ddp_`.
        magics: methods with a declared line, by name.

    Raises:
        UsageError: there is no such magic.
    """
    bare = name.lstrip("%")
    for known in (bare, f"ddp_{bare}"):
        if known in magics:
            text: str = magics[known].getdoc()
            return text
    close = difflib.get_close_matches(bare, magics, n=1, cutoff=0.5)
    meant = f"did you mean %ddp_help {close[0]}? " if close else ""
    raise UsageError(f"unknown magic {name!r}; {meant}%ddp_help lists all magics")
