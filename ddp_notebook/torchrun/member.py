"""One rank's process, seen from the notebook: its connection and its last message."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass, field

from ddp_notebook.errors import UsageError
from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.first_messages import Admitted, ObserveScript, Refused, Replaced
from ddp_notebook.messages.processes import Address
from ddp_notebook.messages.ranks import CellDone
from ddp_notebook.registry import unix_sockets
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.torchrun import RankEntry

_FILE = re.compile(r"^\[[^\]]*:\d+\] ?")
_MOST_CHARS = 120  # limit of an error message
_ANSWER_S = 3.0  # time limit for a rank to answer a connection


class RefusedError(UsageError):
    """A rank rejects this notebook. The message names the reason and a fix."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One process of one rank. Its identity on the wire differs from that of the rank's next process."""

    entry: Entry
    place: RankEntry
    line: socket.socket = field(init=False)  # connection to the process; each side notices the end of the other by it
    has_joined: bool = False  # its agent sends messages: torch is imported
    done: CellDone | None = None  # result of its script
    how_it_went: str = field(default="", init=False)  # "" while the process runs
    cause_order: int = field(default=3, init=False)  # the lowest number of all ranks marks the cause

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def identity(self) -> str:
        return f"{self.entry.name}/{self.entry.pid}"

    @property
    def is_there(self) -> bool:
        return not self.how_it_went

    def go(self, why: str = "") -> None:
        """Record that the process has ended, or has closed its connection to this notebook.

        Args:
            why: the reason; "": use its last message, if there was one.
        """
        done = self.done
        if why:
            self.how_it_went = why
        elif done is None:
            self.how_it_went = "its process ended without a message, for example by a signal"
            self.cause_order = 1  # torchrun also sends a signal to the others after a rank has failed
        elif done.status == "ok":
            self.how_it_went = "ended the script"
        else:
            self.how_it_went = f"{done.ename}: {_brief(done.evalue)}" + (f", at {done.place}" if done.place else "")
            self.cause_order = 0 if done.operation is None else 2
        self.line.close()


def come_in(member: Member, address: Address, number: int, *, takes: bool) -> None:
    """Connect to a rank's process.

    Args:
        member: the rank's process.
        address: for its agent to connect to.
        number: of the attempt.
        takes: take over from another notebook.

    Raises:
        RefusedError: another notebook is connected, or the process has another version.
        OSError: it does not answer, or has ended.
    """
    place = member.place
    line = unix_sockets.connect(member.entry.door, _ANSWER_S)
    try:
        who = f"the notebook of process {os.getpid()}"
        unix_sockets.send_line(line, ObserveScript(wire=VERSION, who=who, takes=takes, address=address, round=number))
        reply = unix_sockets.hear(line, Admitted, Refused)
        if isinstance(reply, Refused):
            raise RefusedError(
                f"rank {place.rank} of job {place.name!r} refused the connection: {reply.why}; "
                f"%ddp_attach {place.name} --take-over attaches this notebook instead"
            )
        line.settimeout(0.0)
    except BaseException:
        line.close()
        raise
    member.line = line


def place_of(entry: Entry) -> RankEntry:
    """Return the rank of an entry.

    Raises:
        RefusedError: the entry is from another version.
    """
    with contextlib.suppress(TypeError):
        place = RankEntry.from_json(entry.about)
        if place.wire == VERSION:
            return place
    raise RefusedError(
        f"job {entry.name!r} (process {entry.pid}) runs ddp_notebook {entry.version}, which this kernel's version "
        "cannot read: attach from an environment with that version, or start the job with this one"
    )


def _brief(message: str) -> str:
    """Return the first sentence of an error message, without a file name before it: gloo's, for example, has advice
    after it.
    """
    first = _FILE.sub("", message.strip()).partition("\n")[0].partition(". ")[0]
    return first if len(first) <= _MOST_CHARS else f"{first[:_MOST_CHARS]} ..."


def why_closed(line: socket.socket) -> str:
    """Return the notebook that has taken over a rank's connection; "" if the connection was closed."""
    try:
        line.settimeout(_ANSWER_S)
        return f"{unix_sockets.hear(line, Replaced).by} is attached to it now"
    except OSError:
        return ""
