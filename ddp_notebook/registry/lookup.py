"""Lookup of kept sessions and torchrun jobs to which a notebook can attach."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ddp_notebook.errors import UsageError
from ddp_notebook.records.units import duration
from ddp_notebook.registry import entries
from ddp_notebook.registry.entries import Entry

SESSION = "session"  # kinds of entries: the keeper of a session,
TORCHRUN = "torchrun"  # and a rank of a torchrun job
_HOW = (
    "%ddp_start 4 --keep starts ranks that outlive their notebook, torchrun ... -m ddp_notebook.attach train.py and "
    "%ddp_torchrun ... train.py a job"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachTarget:
    """Kept session, or torchrun job with its ranks on this machine."""

    kind: str
    key: str  # the same for all entries of this session or job, and unique
    name: str
    entries: tuple[Entry, ...]  # oldest first

    @property
    def stem(self) -> str:
        """Return the name without its unique suffix: "train" for "train-3f2a"."""
        return self.name.rpartition("-")[0]

    @property
    def is_here(self) -> bool:
        """Return whether it was started in the current directory."""
        try:
            here = os.getcwd()
        except OSError:  # the current directory was removed
            return False
        return any(one.about.get("directory") == here for one in self.entries)

    def __str__(self) -> str:
        """Describe the session or job in one line."""
        since = f"for {duration(time.time() - self.entries[0].began_s)}"
        if self.kind == SESSION:
            return f"{self.name}: kept ranks {since}, {self.entries[0].about.get('directory', '?')}"
        from ddp_notebook.registry.torchrun import summary

        return f"{self.name}: {summary([one.about for one in self.entries])} {since}"


def everything() -> list[AttachTarget]:
    """Return all sessions and jobs of this user on this machine, oldest first.

    Raises:
        UsageError: the folder of entries belongs to another user, or other users can access it.
    """
    by_key: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries.entries():
        if entry.kind in (SESSION, TORCHRUN):
            by_key.setdefault((entry.kind, str(entry.about.get("key", entry.path))), []).append(entry)
    return [
        AttachTarget(kind=kind, key=key, name=some[-1].name, entries=tuple(some))
        for (kind, key), some in by_key.items()
    ]


def find(name: str = "", kind: str = "") -> AttachTarget:
    """Return the session or job with this name.

    Args:
        name: full name, or the stem if it is unique. "" selects the kept session that was started in the current
            directory, or the only session or job.
        kind: required kind; "" for any.

    Raises:
        UsageError: no match, or several. The message lists them with the commands to attach.
    """
    there = [one for one in everything() if kind in ("", one.kind)]
    named = [one for one in there if one.name == name] or [one for one in there if name in ("", one.stem)]
    if not name and len(named) > 1:
        here = [one for one in named if one.kind == SESSION and one.is_here]
        named = here if len(here) == 1 else named
    if len(named) == 1:
        return named[0]
    if named:
        lines = "\n".join(f"  %ddp_attach {one}" for one in named)
        raise UsageError(f"several are running{f' that match {name!r}' if name else ''}; choose one:\n{lines}")
    what = f"cannot attach to {name!r}: it has ended, or the name is wrong" if name else "nothing to attach to"
    others = f"running are {', '.join(one.name for one in there)}" if there else _HOW
    raise UsageError("\n".join([f"{what}; {others}", *entries.strangers()]))
