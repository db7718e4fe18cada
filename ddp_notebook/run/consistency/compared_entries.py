"""Text of an agreement: equal entries, entries that were not compared, and short lists of names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_notebook.records.names import printable
from ddp_notebook.records.words import name_ranks

BEYOND_REPR = "beyond its repr"  # reason for a partial comparison
MOST_NAMES = 6  # shown values of one entry, or names in one line
_UNITS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))
_WORDS = {
    "parameter": ("parameter", "parameters"),
    "buffer": ("buffer", "buffers"),
    "optimizer": ("optimizer entry", "optimizer entries"),
    "scheduler": ("scheduler entry", "scheduler entries"),
    "scaler": ("scaler entry", "scaler entries"),
}
_TOPICS = {"data": "data length", "version": "versions", "setting": "settings"}  # topics that are not counted


def variable_of(entry: str) -> str:
    """Return the variable to which an entry belongs: `"model"` for `"model.fc.weight"`."""
    return re.split(r"[.\[]", entry, maxsplit=1)[0]


def summarize(same: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a description of equal entries: `"62 parameters, 4 buffers (11.2 M elements), versions"`; "" if none.

    Entries whose contents were not compared do not count; see `notes_on`.
    """
    partly = {variable_of(entry) for entry, fact in same.items() if not is_compared(fact)}
    same = {entry: fact for entry, fact in same.items() if is_compared(fact)}
    kinds = Counter(fact["kind"] for fact in same.values())
    texts = []
    if own := list(dict.fromkeys(variable_of(entry) for entry, fact in same.items() if fact["kind"] == "variable")):
        texts.append(list_names(own) + (f" ({kinds['variable']} entries)" if kinds["variable"] > len(own) else ""))
    for kind, (singular, plural) in _WORDS.items():
        if kinds[kind]:
            texts.append(f"{kinds[kind]} {singular if kinds[kind] == 1 else plural}")
        if kind == "buffer" and (kinds["parameter"] or kinds["buffer"]):
            elements = sum(f.get("elements", 0) for f in same.values() if f["kind"] in ("parameter", "buffer"))
            texts[-1] += f" ({format_count(elements)} elements)"
    texts += [topic for kind, topic in _TOPICS.items() if kinds[kind]]
    rest = list_names([name for name in dict.fromkeys(map(variable_of, same)) if name not in partly])
    # The entry of a module compares only its type and mode. Its parameters have their own entries.
    about = "type and mode of " if rest and set(kinds) == {"module"} else ""
    return ", ".join(texts) or about + rest


def is_compared(fact: Mapping[str, Any]) -> bool:
    """Return whether the contents of an entry were compared, or at least its repr."""
    return fact.get("skipped") in (None, BEYOND_REPR)


def notes_on(same: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return notes on equal entries: those with NaN, and why some were not compared."""
    notes = []
    if nan := [entry for entry, fact in same.items() if fact.get("nan")]:
        notes.append(f"NaN on all ranks in {list_names(nan)}")
    skipped: dict[str, list[str]] = {}
    for entry, fact in same.items():
        if "skipped" in fact:
            skipped.setdefault(fact["skipped"], []).append(entry)
    if skipped:
        texts = (f"{len(entries)} {why} ({list_names(entries, 2)})" for why, entries in skipped.items())
        notes.append(f"not compared: {', '.join(texts)}")
    return notes


def may_differ(entries: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each reason for which entries may differ, and do.

    Example:
        >>> may_differ({"FSDP does not synchronize buffers": ["model.mean", "model.var"]})
        ['model.mean, model.var may differ: FSDP does not synchronize buffers']
    """
    return [f"{list_names(names, 3)} may differ: {reason}" for reason, names in entries.items()]


def missing_on(ranks: Sequence[int]) -> str:
    return f"missing on {name_ranks(ranks)}"


def join_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def list_names(names: Sequence[str], most: int = MOST_NAMES) -> str:
    return ", ".join([*map(printable, names[:most]), *["..."] * (len(names) > most)])


def format_count(n: int) -> str:
    return str(n) if n < 10_000 else next(f"{n / size:.1f} {unit}" for size, unit in _UNITS if n >= size)
