"""Sets of ranks by name: `tp=1` and `dp=0,tp=1` by the dimensions of the user's meshes, `host=gpu2` by the hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ddp_notebook.errors import SessionBrokenError, UsageError
from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.messages.mesh_messages import ListMeshes
from ddp_notebook.records.names import listed
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.rank_requests import Questions

HOST = "host"
_ANSWER_S = 2.0
_NUMBERS = re.compile(r"-?\d{1,9}|\d{1,9}-\d{1,9}")
_CONDITION = re.compile(r"\s*([^=,\s]+)\s*=\s*([^=,\s]+)\s*")
Coordinates = Mapping[
    int, Sequence[Sequence[Any]]
]  # keys are ranks, values the results of `rank.variables.meshes.coordinates`


class NamedRanks:
    """Finds the ranks of a set by name.

    Args:
        cluster: the ranks and their hosts.
        questions: sends requests to the ranks.
    """

    def __init__(self, cluster: Cluster, questions: Questions) -> None:
        self._cluster = cluster
        self._questions = questions

    def parse(self, asked: str, known: Coordinates = MappingProxyType({})) -> list[int]:
        """Return the ranks that fulfil all conditions, in order.

        Args:
            asked: conditions, separated by commas.
            known: coordinates of ranks that need not be requested.

        Raises:
            UsageError: a name or value does not exist, or two meshes give other ranks.
            SessionBrokenError: a rank does not answer.
        """
        hosts = {rank: self._cluster.placement.hosts[rank] for rank in self._cluster.ranks}
        return select(asked, hosts, lambda: self._coordinates(known))

    def _coordinates(self, known: Coordinates) -> Coordinates:
        alive = [rank for rank in self._cluster.alive if rank not in known]
        answers = self._questions.ask_for(alive, lambda n: ListMeshes(request=n), _ANSWER_S)
        if silent := [rank for rank in alive if rank not in answers]:
            raise SessionBrokenError(
                f"{list_ranks(silent)} did not report meshes within {_ANSWER_S:g} s; give the ranks as numbers"
            )
        of_others = {rank: answer.facts.get("meshes", []) for rank, answer in answers.items()}
        return dict(sorted({**known, **of_others}.items()))


def select(asked: str, hosts: Mapping[int, str], ask: Callable[[], Coordinates]) -> list[int]:
    """Return the ranks that fulfil all conditions of a set by name.

    Args:
        asked: conditions, separated by commas.
        hosts: host of each rank.
        ask: returns the coordinates of the ranks.

    Raises:
        UsageError: see `NamedRanks.parse`.

    Example:
        >>> mesh = {rank: [["mesh", ["dp", "tp"], [rank // 2, rank % 2]]] for rank in range(4)}
        >>> select("tp=1", {}, lambda: mesh), select("dp=1,tp=0", {}, lambda: mesh)
        ([1, 3], [2])
        >>> select("host=b", {0: "a", 1: "b"}, dict)
        [1]
    """
    coordinates: Coordinates | None = None
    chosen: set[int] | None = None
    for part in asked.split(","):
        if (found := _CONDITION.fullmatch(part)) is None:
            raise UsageError(
                f"{part.strip()!r} in the rank set {asked!r} must have a form such as tp=1, dp=0-1 or host=NAME; "
                "names and numbers of ranks cannot be mixed"
            )
        name, value = found.groups()
        if coordinates is None and (name != HOST or value not in hosts.values()):
            coordinates = ask()
        ranks = _fulfilling(name, value, hosts, coordinates or {})
        chosen = ranks if chosen is None else chosen & ranks
    if not chosen:
        raise UsageError(f"{asked!r} selects no rank: no rank fulfils all of these conditions")
    return sorted(chosen)


def _fulfilling(name: str, value: str, hosts: Mapping[int, str], coordinates: Coordinates) -> set[int]:
    """Return the ranks that fulfil one condition."""
    sizes: dict[str, int] = {}  # size of the dimension in each mesh that has it
    for meshes in coordinates.values():
        for mesh, names, place in meshes:
            if name in names:
                sizes[mesh] = max(sizes.get(mesh, 0), place[names.index(name)] + 1)
    if not sizes:
        if name == HOST:
            return _on_host(value, hosts)
        known = sorted({one for meshes in coordinates.values() for _, names, _ in meshes for one in names} | {HOST})
        raise UsageError(f"no mesh in a variable of the ranks has a dimension {name!r}; the names are {listed(known)}")
    by_mesh: dict[str, tuple[int, ...]] = {}
    for mesh, size in sizes.items():
        wanted = _values(name, value, size)
        by_mesh[mesh] = tuple(
            rank
            for rank, meshes in coordinates.items()
            if any(one == mesh and name in names and place[names.index(name)] in wanted for one, names, place in meshes)
        )
    if len(set(by_mesh.values())) > 1:
        meanings = "; ".join(f"{list_ranks(ranks)} by {mesh}" for mesh, ranks in by_mesh.items())
        raise UsageError(f"{name}={value} has several meanings: {meanings}; give the ranks as numbers")
    return set(next(iter(by_mesh.values())))


def _on_host(value: str, hosts: Mapping[int, str]) -> set[int]:
    found = {rank for rank, host in hosts.items() if host == value}
    if not found:
        names = list(dict.fromkeys(hosts.values()))
        raise UsageError(f"no rank is on the host {value!r}; the hosts are {listed(names)}")
    return found


def _values(name: str, value: str, size: int) -> range:
    """Return the coordinates of a condition: `1`, `-1` or `0-2`."""
    if not _NUMBERS.fullmatch(value):
        raise UsageError(f"{name}={value} must have a number, such as {name}=1 or {name}=0-1")
    first, _, last = (value, "", value) if value.startswith("-") else value.partition("-")
    low, high = int(first), int(last or first)
    if low < 0:
        low = high = low + size
    if not 0 <= low <= high < size:
        raise UsageError(f"{name}={value} does not exist: {name} has the coordinates 0 to {size - 1}")
    return range(low, high + 1)
