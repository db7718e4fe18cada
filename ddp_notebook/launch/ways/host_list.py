"""What `--hosts` names: `gpu1,gpu2`, `gpu[1-4]:8`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddp_notebook.errors import UsageError

_ENTRY = re.compile(r"(?P<name>[^\s:,\[\]]*(?:\[[\d,-]+\][^\s:,\[\]]*)?)(?::(?P<count>\d+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_HOW = "write names of your ~/.ssh/config, each with a number of ranks if you like: gpu1,gpu[3-5]:8"


def parse(hosts: str | Sequence[str]) -> dict[str, int | None]:
    """The hosts by name, with the number of ranks that each is to have; None: it was not said.

    Raises:
        UsageError: it names none, one twice, or cannot be read.

    Example:
        >>> parse("login,gpu[01-03]:8")
        {'login': None, 'gpu01': 8, 'gpu02': 8, 'gpu03': 8}
    """
    entries = _split(hosts) if isinstance(hosts, str) else [str(one).strip() for one in hosts]
    found: dict[str, int | None] = {}
    for entry in filter(None, entries):
        read = _ENTRY.fullmatch(entry)
        if read is None or not read["name"] or read["name"].startswith("-"):  # ssh would take it for an option
            raise UsageError(f"--hosts: {entry!r} names no host; {_HOW}")
        count = None if read["count"] is None else int(read["count"])
        if count == 0:
            raise UsageError(f"--hosts: {entry!r} asks for no rank; leave the host out, or write {read['name']}:1")
        for name in _expanded(read["name"], entry):
            if name in found:
                raise UsageError(f"--hosts names {name} twice; write it once with the sum of its ranks: {name}:2")
            found[name] = count
    if not found:
        raise UsageError(f"--hosts names no host; {_HOW}")
    return found


def check_sum(asked: Mapping[str, int | None], world_size: int | None) -> None:
    """Refuse a number of ranks that the hosts cannot have together: those of which it is not said share the rest.

    Raises:
        UsageError: it is none of theirs.
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
            f"{world_size} rank{'s' * (world_size != 1)}, and --hosts says {sum(counts)}: {said}; N is the sum of all: "
            "leave it out, or write other numbers behind the hosts"
        )


def _split(text: str) -> list[str]:
    """At the commas that are not within brackets."""
    return [entry.strip() for entry in re.split(r",(?![^\[]*\])", text)]


def _expanded(name: str, entry: str) -> list[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    numbers, _, tail = rest.partition("]")
    found = []
    for part in numbers.split(","):
        read = _RANGE.fullmatch(part)
        if read is None or int(read[2] or read[1]) < int(read[1]):
            raise UsageError(f"--hosts: {part!r} in {entry!r} is no range of numbers; {_HOW}")
        width = len(read[1])
        found += [f"{head}{n:0{width}}{tail}" for n in range(int(read[1]), int(read[2] or read[1]) + 1)]
    return found
