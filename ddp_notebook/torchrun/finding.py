"""The jobs of torchrun's that are there, and which one a name means."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.errors import UsageError
from ddp_notebook.records.words import list_ranks
from ddp_notebook.registry import entries
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.torchrun import Place
from ddp_notebook.wire.events import VERSION

KIND = "torchrun"
_HOW = "torchrun ... -m ddp_notebook.attach train.py starts one, and %ddp_torchrun ... train.py one from here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A job, as its ranks' entries tell it."""

    key: str
    name: str
    ranks: tuple[tuple[Entry, Place], ...]

    def __str__(self) -> str:
        """A line for who is to choose."""
        _, place = self.ranks[-1]
        here = sorted({place.rank for _, place in self.ranks})
        which = "" if len(here) == place.world_size else f", here {list_ranks(here)}"
        words = " ".join([place.script, *place.arguments])
        return f"{self.name}: {words}, {place.world_size} rank{'s' * (place.world_size != 1)}{which}"


def find(name: str = "") -> Found:
    """The job of this name.

    Args:
        name: the whole of it, or its beginning; "": the only one.

    Raises:
        UsageError: there is none, or several; says which.
    """
    found = jobs()
    named = [job for job in found if job.name == name] or [job for job in found if job.name.startswith(name)]
    if not named:
        there = f"there is {', '.join(job.name for job in found)}" if found else "none is there"
        which = f"named {name!r} " if name else ""
        raise UsageError(
            "\n".join([f"no job of torchrun's {which}runs here: {there}; {_HOW}", *entries.strangers(KIND)])
        )
    if len(named) > 1:
        lines = "\n".join(f"  {job}" for job in named)
        raise UsageError(f"several jobs are there; say which: %ddp_attach {named[-1].name}\n{lines}")
    return named[0]


def jobs() -> list[Found]:
    """Those of this user on this machine, the oldest first.

    Raises:
        UsageError: the folder of entries cannot be trusted.
    """
    by_key: dict[str, list[tuple[Entry, Place]]] = {}
    for entry, place in ranks():
        by_key.setdefault(place.key, []).append((entry, place))
    return [Found(key=key, name=some[-1][1].name, ranks=tuple(some)) for key, some in by_key.items()]


def ranks() -> list[tuple[Entry, Place]]:
    """The ranks of all jobs, the oldest process first.

    Raises:
        UsageError: the folder of entries cannot be trusted, or an entry is another version's.
    """
    try:
        found = entries.entries(KIND)
    except entries.RegistryError as error:
        raise UsageError(str(error)) from None
    return [(entry, _place(entry)) for entry in found]


def _place(entry: Entry) -> Place:
    try:
        place = Place.from_json(entry.about)
        if place.wire == VERSION:
            return place
    except TypeError:
        pass
    raise UsageError(
        f"job {entry.name!r} (process {entry.pid}) runs with ddp_notebook {entry.version}, which this version does not "
        "understand: attach from an environment with that one, or start the job with this one"
    )
