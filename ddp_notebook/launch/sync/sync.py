"""Send a folder to all hosts that do not share it, in parallel, and describe the result."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ddp_notebook.errors import HostError
from ddp_notebook.launch.host.files import NOTE
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.sync.selection import SyncFilter, choose, resolved
from ddp_notebook.launch.sync.upload import HostUpload, fix_of
from ddp_notebook.messages.hosts import (
    DiscardRequest,
    FileErrorReply,
    FolderReply,
    FolderRequest,
    MarkRequest,
    NamesReply,
    NamesRequest,
)
from ddp_notebook.records import units
from ddp_notebook.records.marker import a_name, marked
from ddp_notebook.records.names import printable

_T = TypeVar("_T")
_LOOK_S = 0.1
_GIVE_UP_S = 2.0  # time for threads to end after an interrupt


class StoppedError(Exception):
    """The stop button was pressed, or the work failed for another host."""


class Crew:
    """Runs a task on all hosts in parallel; stops all at the first error, or if `check` raises an exception.

    Args:
        check: called often, in the caller's thread; an exception from it ends the work.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._stop = threading.Event()

    def check(self) -> None:
        """Raise an error if the work must end. The threads call it often.

        Raises:
            StoppedError: the work must end.
        """
        if self._stop.is_set():
            raise StoppedError

    def work(
        self, hosts: Sequence[Host], work: Callable[[Host], _T], tell: Callable[[], None] = lambda: None
    ) -> dict[str, _T]:
        """Run a task for each host in parallel, and wait for all.

        Args:
            hosts: their names are the keys of the result.
            work: gets a host, in a thread.
            tell: called several times a second, in the caller's thread.

        Raises:
            the first exception of `work` or of the crew's `check`.
        """
        results: dict[str, _T] = {}
        errors: list[BaseException] = []

        def run(host: Host) -> None:
            try:
                results[host.name] = work(host)
            except BaseException as error:
                errors.append(error)
                self._stop.set()

        threads = [threading.Thread(target=run, args=(host,), name="ddp-sync", daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    self._check()
                    tell()
        except BaseException:
            self._stop.set()
            until = time.monotonic() + _GIVE_UP_S
            for thread in threads:  # a thread may be blocked by a broken link; the end of its host ends it
                thread.join(max(0.0, until - time.monotonic()))
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, StoppedError)), errors[0])
        return results


_SHOWN = 5  # names


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """Result of an upload. Its `repr` describes it in lines.

    Attributes:
        folder: the local folder.
        folders: its path on each host, by host name.
        sent: the files that were sent to each host.
        lines: the description.
    """

    folder: Path
    folders: dict[str, str]
    sent: dict[str, list[str]]
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(map(printable, self.lines))


def sync(
    folder: str,
    hosts: Sequence[Host],
    *,
    overwrite: bool = False,
    also: Sequence[str] = (),
    is_large: bool = False,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Synced:
    """Send the changed files of a folder to hosts. No file is deleted on a host.

    Args:
        folder: the notebook's.
        hosts: their facts must be available.
        overwrite: also replace files that are newer on the host.
        also: names or patterns of files to send although their names suggest keys.
        is_large: allow more than 1 GB or 20,000 files.
        check: called often; an exception from it ends the upload. No incomplete file is left.
        progress: called repeatedly with the progress, after a carriage return.

    Raises:
        UsageError: the folder does not exist or is too large, or git cannot list its ignored files.
        HostError: a host has ended or cannot store the files; the message names a fix.
    """
    whole = resolved(folder)
    crew = Crew(check)
    with marked(whole) as marker:
        settled = crew.work(hosts, lambda host: _settle(host, str(whole), marker, crew))
    folders = {name: reply.folder for name, reply in settled.items()}
    apart = [host for host in hosts if not settled[host.name].is_shared]
    twins = _twins(apart, folders, crew)
    choice = choose(whole, also=also, is_large=is_large) if apart else SyncFilter(whole)
    sendings = {
        host.name: HostUpload(host, folders[host.name], choice, overwrite=overwrite, check=crew.check)
        for host in apart
        if host.name not in twins
    }
    takers = [host for host in apart if host.name in sendings]

    def tell() -> None:
        sent, nbytes = (sum(getattr(one, name) for one in sendings.values()) for name in ("sent_bytes", "nbytes"))
        progress(f"\r{units.size(sent)} of {units.size(max(sent, nbytes))} sent")

    crew.work(takers, lambda host: sendings[host.name].run(), tell)
    return Synced(
        folder=whole,
        folders=folders,
        sent={host.name: sendings[host.name].sent if host in takers else [] for host in hosts},
        lines=tuple(_lines(choice, hosts, folders, twins, sendings)),
    )


# ---- hosts that share a folder


def _settle(host: Host, folder: str, marker: str, crew: Crew) -> FolderReply:
    request = FolderRequest(path=folder, marker=marker)
    reply = host.reply(host.ask(request), request, check=crew.check)
    if isinstance(reply, FileErrorReply):
        words = fix_of(reply.number, reply.error)
        raise HostError(f"cannot create {reply.path} on {host.label}, the folder for {folder}: {words}")
    assert isinstance(reply, FolderReply)
    if (is_of := reply.is_of) is not None:
        where = reply.folder
        its = f"has the files of {is_of}" if is_of else "has files that no sync has sent"
        raise HostError(
            f"{host.label} cannot create {folder}, and its folder {where} {its}, which a sync would replace: move it "
            f"away, or allow the sync on {host.label}: echo > {shlex.quote(f'{where}/{NOTE}')}"
        )
    return reply


def _twins(hosts: Sequence[Host], folders: dict[str, str], crew: Crew) -> dict[str, str]:
    """Return hosts that share their folder with another host, which gets the files. An example is a cluster's home
    folder.
    """
    if len(hosts) < 2:
        return {}
    markers = {host.name: a_name() for host in hosts}

    def mark(host: Host) -> None:
        request = MarkRequest(folder=folders[host.name], name=markers[host.name])
        host.reply(host.ask(request), request, check=crew.check)

    def look(host: Host) -> list[str]:
        request = NamesRequest(folder=folders[host.name], names=list(markers.values()))
        return host.request(request, NamesReply, check=crew.check).names

    try:
        crew.work(hosts, mark)
        seen = crew.work(hosts, look)
    finally:
        for host in hosts:
            host.ask(DiscardRequest())
    firsts = {
        host.name: next((name for name, marker in markers.items() if marker in seen[host.name]), "") for host in hosts
    }
    return {name: first for name, first in firsts.items() if first not in ("", name)}


# ---- in words


def _lines(
    choice: SyncFilter,
    hosts: Sequence[Host],
    folders: dict[str, str],
    twins: dict[str, str],
    sendings: dict[str, HostUpload],
) -> Iterator[str]:
    labels = {host.name: host.label for host in hosts}
    for host in hosts:
        where = folders[host.name]
        if host.name in twins:
            yield f"{host.label}: has {where} from {labels[twins[host.name]]}, which shares it"
        elif (sending := sendings.get(host.name)) is None:
            yield f"{host.label}: shares {where}, nothing was sent"
        else:
            yield f"{host.label}: {_of_one(sending, where, choice.folder)}"
    for name, sending in sendings.items():
        if sending.plan.newer:
            yield (
                f"newer on {labels[name]} and not changed: {_some(sending.plan.newer)}; %ddp_sync --overwrite "
                "sends those from here"
            )
        if sending.plan.in_the_way:
            yield (
                f"not a file on {labels[name]}, and not changed: {_some(sending.plan.in_the_way)}; move it away on "
                "that host"
            )
        if sending.plan.behind:
            yield (
                f"in a folder that is a link on {labels[name]}, and not sent: {_some(sending.plan.behind)}; "
                "move the link away on that host"
            )
        if sending.changing:
            yield f"changed while they were read, and not sent to {labels[name]}: {_some(sending.changing)}"
    if choice.keys:
        first = choice.keys[0]
        yield (
            f"not sent, because files with such names usually contain keys: {_some(choice.keys)}; %ddp_sync --also "
            f"{first} sends one"
        )
    if choice.leading_out:
        yield f"not sent, because these links lead out of the folder: {_some(choice.leading_out)}"
    if choice.unreadable:
        yield f"not sent, because you may not read them: {_some(choice.unreadable)}"


def _of_one(sending: HostUpload, where: str, folder: Path) -> str:
    elsewhere = "" if where == str(folder) else f" ({folder} cannot be created there)"
    if not sending.sent:
        return f"nothing to send to {where}{elsewhere}; already there: {sending.plan.there:,}"
    there = f"; already there: {sending.plan.there:,}" if sending.plan.there else ""
    sent = f"{units.files(len(sending.sent), sending.sent_bytes)} sent to {where}{elsewhere}"
    return f"{sent} in {sending.took_s:.1f} s{there}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
