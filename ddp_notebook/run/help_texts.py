"""The texts of `%ddp_help`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from ddp_notebook.errors import UsageError

# The magics by section, in the order of the overview.
_SECTIONS = {
    "session": (
        *("ddp_start", "ddp_attach", "ddp_torchrun", "ddp_status", "ddp_restart", "ddp_stop", "ddp_interrupt"),
        *("ddp_heal", "ddp_resize", "ddp_fault", "ddp_check", "ddp_memory"),
    ),
    "recording": ("ddp_record", "ddp_report", "ddp_monitor", "ddp_trace"),
    "cells": (*("on_all_ranks", "on_ranks", "ddp_jobs", "ddp_wait", "ddp_cancel", "local", "ddp_auto"),),
    "variables": ("ddp_pull", "ddp_peek", "ddp_push"),
    "files": ("ddp_sync", "ddp_fetch"),
    "help": ("ddp_help",),
}


def in_order(magics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the magics in the order of the overview; the magics of features come last in a class."""
    order = [name for names in _SECTIONS.values() for name in names]
    return {name: magics[name] for name in sorted(magics, key=order.index)}


def overview(magics: Mapping[str, Any]) -> str:
    """List the magics with one line each.

    Args:
        magics: methods with a declared line, by name and in order.
    """
    names = {name: magic.parser().prog for name, magic in magics.items()}
    width = max(map(len, names.values()))
    lines = []
    first = {names[0]: section for section, names in _SECTIONS.items()}
    for name, magic in magics.items():
        if name in first:
            lines += ["", f"{first[name]}:"]
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
