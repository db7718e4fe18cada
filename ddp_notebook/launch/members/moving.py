"""Where ranks go whose host was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ddp_notebook.launch.devices import Gpu, visible
from ddp_notebook.launch.placement import RANK_MIB, Placement

T = TypeVar("T")
_Place = tuple[float, str, str, str]  # how much its host has to do, host, device, name of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a host has, and its machine has."""

    machine: str
    cores: int
    memory_mib: int
    gpus: tuple[Gpu, ...]

    @classmethod
    def of(cls, machine: str, facts: Mapping[str, Any], env: Mapping[str, str]) -> Room:
        """As its server told.

        Args:
            env: variables that ranks have on top of those of the host.
        """
        setting = {**facts["env"], **env}.get("CUDA_VISIBLE_DEVICES")
        gpus = visible([Gpu(**gpu) for gpu in facts["gpus"]], setting)
        return cls(machine=machine, cores=facts["cores"], memory_mib=facts["memory_mib"], gpus=tuple(gpus))


def move(placement: Placement, ranks: Sequence[int], rooms: Mapping[str, Room]) -> tuple[Placement, list[str]]:
    """Place ranks anew, those of one host together or not at all. Ranks that stay keep their local rank.

    Args:
        ranks: to be moved.
        rooms: of the hosts that are there, by name.

    Returns:
        The new placement, and the hosts for whose ranks there is no room elsewhere.

    Example:
        >>> two = Placement(
        ...     backend="gloo", hosts=("a", "b"), machines=("a", "b"), devices=("cpu",) * 2, names=("CPU",) * 2,
        ...     cuda_visible_devices=None, threads=1,
        ... )
        >>> moved, left = move(two, [0], {"b": Room(machine="b", cores=2, memory_mib=4096, gpus=())})
        >>> moved.hosts, [moved.local_rank(rank) for rank in (0, 1)], left
        (('b', 'b'), [1, 0], [])
    """
    left = []
    for host in dict.fromkeys(placement.hosts[rank] for rank in ranks):
        moved: Placement | None = placement
        for rank in ranks:
            if placement.hosts[rank] == host and moved is not None:
                moved = _moved(moved, rank, rooms)
        if moved is None:
            left.append(host)
        else:
            placement = moved
    return placement, left


def _moved(placement: Placement, rank: int, rooms: Mapping[str, Room]) -> Placement | None:
    """With one rank where most is free; None: nothing is."""
    places = [place for host in rooms for place in _places(placement, rank, host, rooms)]
    if not places:
        return None
    _, host, device, name = min(places)
    machine = rooms[host].machine
    local_ranks = [placement.local_rank(other) for other in range(placement.world_size)]
    return replace(
        placement,
        hosts=_with(placement.hosts, rank, host),
        machines=_with(placement.machines, rank, machine),
        devices=_with(placement.devices, rank, device),
        names=_with(placement.names, rank, name),
        local_ranks=_with(local_ranks, rank, placement.machines.count(machine)),
    )


def _places(placement: Placement, rank: int, host: str, rooms: Mapping[str, Room]) -> list[_Place]:
    room = rooms[host]
    count = placement.machines.count(room.machine)
    if (count + 1) * RANK_MIB > room.memory_mib:
        return []
    if placement.devices[rank] == "cpu":
        return [(count / room.cores, host, "cpu", "CPU")]
    pairs = list(zip(placement.hosts, placement.devices, strict=True))
    are_shared = len(set(pairs)) < len(pairs)
    users = Counter(  # by machine and GPU: hosts of one machine may see the same
        (rooms[its].machine, rooms[its].gpus[int(device.removeprefix("cuda:"))].uuid)
        for its, device in pairs
        if its in rooms
    )
    places = []
    for index, gpu in enumerate(room.gpus):
        used = users[room.machine, gpu.uuid]
        if are_shared or not used:
            places.append((used + count / len(room.gpus), host, f"cuda:{index}", gpu.name))
    return places


def _with(values: Sequence[T], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
