"""What is to be done about each file, by what is there already on a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddp_notebook.launch.sync.choice import SyncEntry
from ddp_notebook.messages.hosts import FoundFile

_EXECUTABLE = 0o111


@dataclass(slots=True)
class Plan:
    """About some files of one host."""

    send: list[SyncEntry] = field(default_factory=list)
    ask: list[tuple[SyncEntry, FoundFile]] = field(default_factory=list)  # of one size, and of different times
    newer: list[str] = field(default_factory=list)  # what is there is newer, and stays
    in_the_way: list[str] = field(default_factory=list)  # what is there is no file
    behind: list[str] = field(default_factory=list)  # a folder on the way there is a link
    there: int = 0  # files that are the same

    def add(self, entries: Sequence[SyncEntry], found: Sequence[FoundFile | None], *, overwrite: bool) -> None:
        """Plan by size and time. Those in `ask` are left to whoever compares their content.

        Args:
            entries: what is here.
            found: what has their names there.
            overwrite: also what is newer there.
        """
        for entry, its in zip(entries, found, strict=True):
            if its is None:
                self.send.append(entry)
            elif its.kind == "behind":
                self.behind.append(entry.path)
            elif its.kind == "other":
                self.in_the_way.append(entry.path)
            elif entry.link or its.kind == "link":
                self.add_compared(entry, its, is_same=entry.link == its.link, overwrite=overwrite)
            elif entry.size == its.size and entry.mtime_ns != its.mtime_ns:
                self.ask.append((entry, its))
            else:
                self.add_compared(entry, its, is_same=entry.size == its.size, overwrite=overwrite)

    def add_compared(self, entry: SyncEntry, its: FoundFile, *, is_same: bool, overwrite: bool) -> None:
        """Plan what to do about a file that is there too.

        Args:
            entry: what is here.
            its: what is there.
            is_same: the content is the same.
            overwrite: also what is newer there.
        """
        if is_same and (entry.link or (entry.mode ^ its.mode) & _EXECUTABLE == 0):
            self.there += 1
        elif is_same or overwrite or its.mtime_ns <= entry.mtime_ns:
            self.send.append(entry)
        else:
            self.newer.append(entry.path)
