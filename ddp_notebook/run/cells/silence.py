"""Hosts that are not heard, and processes that are stopped or hang, while a cell runs: what is said of them, and the
time that must not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Reached(Protocol):
    """A host that lives, as far as is known."""

    @property
    def name(self) -> str: ...
    @property
    def silent_s(self) -> float: ...
    @property
    def unheard(self) -> str: ...


class Halt(NamedTuple):
    """A process that is stopped, or does not answer."""

    name: str  # of the process
    sentence: str  # about it, with the remedy that loses least


class Silence:
    """Follows the hosts of a session during a cell.

    Args:
        hosts: returns those that were not lost.
        say: shows a sentence.
    """

    def __init__(self, hosts: Callable[[], Sequence[Reached]], say: Callable[[str], None]) -> None:
        self._hosts = hosts
        self._say = say
        self._since: dict[str, float] = {}  # by the names of those that are not heard
        self._counted_s = 0.0  # until when

    @property
    def is_heard(self) -> bool:
        """Whether all hosts were heard at the last look."""
        return not self._since

    def look(self) -> float:
        """Say what has changed since the last look. Returns the seconds that have passed meanwhile in which a host was
        not heard: no grace and no limit is to run then."""
        now, hosts = time.monotonic(), {host.name: host for host in self._hosts()}
        was_heard = self.is_heard
        for name, host in hosts.items():
            if host.unheard and name not in self._since:
                self._since[name] = now - host.silent_s
                self._say(host.unheard)
        for name, since in list(self._since.items()):
            if name not in hosts or not hosts[name].unheard:
                del self._since[name]
                if name in hosts:  # else it was lost, and the cell's error says so
                    self._say(f"{name} is back after {now - since:.0f} s")
        if was_heard and self.is_heard:
            return 0.0
        began, self._counted_s = min(self._since.values(), default=now) if was_heard else self._counted_s, now
        return now - began


class Halts:
    """Follows the processes of a session during a cell: each that is stopped, or does not answer, is named once.

    Args:
        look: returns a sentence for each of them that is no rank of the cell, without a wait.
        say: shows a sentence.
    """

    def __init__(self, look: Callable[[], Sequence[Halt]], say: Callable[[str], None]) -> None:
        self._look = look
        self._say = say
        self._said: set[str] = set()  # names of processes

    def look(self) -> None:
        """Say what has changed since the last look."""
        halts = self._look()
        for halt in halts:
            if halt.name not in self._said:
                self._say(halt.sentence)
        self._said = {halt.name for halt in halts}
