"""Parse the hosts of `--hosts`: `gpu1,gpu2`, `gpu[1-4]:8`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddp_notebook.errors import UsageError

MOST = 4096  # limit of hosts and ranks; a larger number is a mistake in a range
_ENTRY = re.compile(r"(?P<name>[^\s:,\[\]]*(?:\[[0-9,-]+\][^\s:,\[\]]*)?)(?::(?P<count>[0-9]{1,18}))?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_LONGEST = 65536  # characters of an entry
_HOW = "write names of your ~/.ssh/config, each with a number of ranks if you like: gpu1,gpu[3-5]:8"


def parse(hosts: str | Sequence[str]) -> dict[str, int | None]:
    """Return the hosts with their numbers of ranks; None for a host without a number.

    Raises:
        UsageError: there are no hosts, duplicates, more than 4,096 hosts, or the text cannot be parsed.

    Example:
        >>> parse("login,gpu[01-03]:8")
        {'login': None, 'gpu01': 8, 'gpu02': 8, 'gpu03': 8}
    """
    given: object = hosts
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise UsageError(f"--hosts must name hosts, got {hosts!r:.60}; {_HOW}")
    entries = _split(hosts) if isinstance(hosts, str) else [str(one).strip() for one in hosts]
    found: dict[str, int | None] = {}
    for entry in filter(None, entries):
        read = _ENTRY.fullmatch(entry) if len(entry) <= _LONGEST else None
        if read is None or not read["name"] or read["name"].startswith("-"):  # ssh would treat it as an option
            raise UsageError(f"--hosts must name hosts, got {short(entry)}; {_HOW}")
        count = None if read["count"] is None else int(read["count"])
        if count == 0:
            raise UsageError(
                f"--hosts: a host must have at least 1 rank, got {entry!r}; leave it out, or write {read['name']}:1"
            )
        if count is not None and count > MOST:
            raise UsageError(f"--hosts: {short(entry)} asks for {count} ranks; a session has at most {MOST:,}")
        for name in _expanded(read["name"], entry, MOST - len(found)):
            if name in found:
                raise UsageError(f"--hosts names {name} twice; write it once with the sum of its ranks: {name}:2")
            found[name] = count
    if not found:
        raise UsageError(f"--hosts must name at least one host; {_HOW}")
    return found


def check_sum(asked: Mapping[str, int | None], world_size: int | None) -> None:
    """Check the number of ranks against the numbers of the hosts. Hosts without a number share the rest equally.

    Raises:
        UsageError: the numbers do not match.
    """
    if world_size is None:
        return
    counts = [count for count in asked.values() if count is not None]
    left, sharing = world_size - sum(counts), len(asked) - len(counts)
    if sharing and (left < sharing or left % sharing):
        example = ",".join(f"{host}:2" for host in list(asked)[:2])
        raise UsageError(
            f"{world_size} {'rank does' if world_size == 1 else 'ranks do'} not divide among {', '.join(asked)} as "
            f"asked; N is the sum of all: write how many each host gets, e.g. --hosts {example}"
        )
    if not sharing and left:
        said = ", ".join(f"{count} on {host}" for host, count in asked.items())
        raise UsageError(
            f"{world_size} rank{'s' * (world_size != 1)}, but --hosts has {sum(counts)}: {said}; N is the sum of all: "
            "leave it out, or change the numbers after the hosts"
        )


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    entries, is_within = [""], False
    for part in re.split(r"([\[\],])", text):
        if part == "," and not is_within:
            entries.append("")
        else:
            entries[-1] += part
            is_within = part == "[" or (is_within and part != "]")
    return [entry.strip() for entry in entries]


def short(text: str) -> str:
    """Quote a text for an error, without its middle if it is long."""
    return repr(text if len(text) <= 100 else f"{text[:60]}...{text[-20:]}")


def _expanded(name: str, entry: str, most: int) -> list[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        if most < 1:
            raise _too_many(entry)
        return [name]
    numbers, _, tail = rest.partition("]")
    found: list[str] = []
    for part in numbers.split(","):
        read = _RANGE.fullmatch(part)
        if read is None or int(read[2] or read[1]) < int(read[1]):
            raise UsageError(f"--hosts: {short(part)} in {short(entry)} is not a range of numbers; {_HOW}")
        if int(read[2] or read[1]) - int(read[1]) >= most - len(found):
            raise _too_many(entry)
        width = len(read[1])
        found += [f"{head}{n:0{width}}{tail}" for n in range(int(read[1]), int(read[2] or read[1]) + 1)]
    return found


def _too_many(entry: str) -> UsageError:
    return UsageError(f"--hosts must name at most {MOST:,} hosts, and {short(entry)} exceeds that; {_HOW}")
