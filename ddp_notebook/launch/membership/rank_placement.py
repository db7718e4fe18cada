"""Placement of ranks whose host was lost, and of ranks that a resize adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.devices import Gpu, visible
from ddp_notebook.launch.placement import RANK_MIB, Placement

T = TypeVar("T")
_Place = tuple[float, str, str, str]  # load of the host, host, device, name of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCapacity:
    """Capacity of a host and of its machine."""

    machine: str
    cores: int  # cores that the host's processes may use
    machine_cores: int
    memory_mib: int
    gpus: tuple[Gpu, ...]

    @classmethod
    def of(cls, machine: str, facts: Mapping[str, Any], env: Mapping[str, str]) -> HostCapacity:
        """Build from the facts of a host server.

        Args:
            machine: of the host.
            facts: reply of the host server.
            env: variables that ranks get on top of the environment of the host.
        """
        setting = {**facts["env"], **env}.get("CUDA_VISIBLE_DEVICES")
        gpus = visible([Gpu(**gpu) for gpu in facts["gpus"]], setting)
        return cls(
            machine=machine,
            cores=facts["cores"],
            machine_cores=facts["machine_cores"],
            memory_mib=facts["memory_mib"],
            gpus=tuple(gpus),
        )


def move(placement: Placement, ranks: Sequence[int], rooms: Mapping[str, HostCapacity]) -> tuple[Placement, list[str]]:
    """Move ranks to other hosts; the ranks of one host all move or all stay. Ranks that stay keep their local rank.

    Args:
        placement: the current one.
        ranks: to be moved.
        rooms: capacity of the reachable hosts, by name.

    Returns:
        The new placement, and the hosts whose ranks fit nowhere else.

    Example:
        >>> two = Placement(
        ...     backend="gloo", hosts=("a", "b"), machines=("a", "b"), devices=("cpu",) * 2, names=("CPU",) * 2,
        ...     cuda_visible_devices=None, threads=1,
        ... )
        >>> moved, left = move(
        ...     two, [0], {"b": HostCapacity(machine="b", cores=2, machine_cores=2, memory_mib=4096, gpus=())}
        ... )
        >>> moved.hosts, [moved.local_rank(rank) for rank in (0, 1)], left
        (('b', 'b'), [1, 0], [])
    """
    before, left = placement, []
    for host in dict.fromkeys(placement.hosts[rank] for rank in ranks):
        moved: Placement | None = placement
        for rank in ranks:
            if placement.hosts[rank] == host and moved is not None:
                moved = _moved(moved, rank, rooms)
        if moved is None:
            left.append(host)
        else:
            placement = moved
    if placement != before:
        placement = replace(placement, threads=_threads(placement, rooms))
    return placement, left


def resized(
    placement: Placement, stay: Sequence[int], world_size: int, rooms: Mapping[str, HostCapacity], *, may_share: bool
) -> Placement:
    """Return a placement of `world_size` ranks: kept ranks do not move, and new ranks go to the least loaded hosts.

    Args:
        placement: the current one.
        stay: ranks to keep, in the order of their new numbers, which begin with 0.
        world_size: the new number of ranks.
        rooms: capacity of the reachable hosts, by name.
        may_share: whether ranks may share a GPU.

    Raises:
        UsageError: the ranks do not fit; the message says how many do.

    Example:
        >>> two = Placement(
        ...     backend="gloo", hosts=("a", "b"), machines=("a", "b"), devices=("cpu",) * 2, names=("CPU",) * 2,
        ...     cuda_visible_devices=None, threads=1,
        ... )
        >>> room = HostCapacity(machine="b", cores=4, machine_cores=4, memory_mib=4096, gpus=())
        >>> now = resized(two, [1], 2, {"b": room}, may_share=False)
        >>> now.hosts, [now.local_rank(rank) for rank in (0, 1)], now.threads
        (('b', 'b'), [0, 1], 2)
    """
    hosts, machines, devices, names = (
        tuple(values[rank] for rank in stay)
        for values in (placement.hosts, placement.machines, placement.devices, placement.names)
    )
    on_cpu = placement.devices[0] == "cpu"
    while len(hosts) < world_size:
        now = replace(placement, hosts=hosts, machines=machines, devices=devices, names=names, local_ranks=())
        places = [place for host in rooms for place in _places(now, on_cpu, host, rooms, may_share)]
        if not places:
            has = f"the hosts have {'memory' if on_cpu else 'GPUs'} for {len(hosts)} ranks, not for {world_size}"
            fix = "" if on_cpu else ", or %ddp_start --share-gpus, which lets ranks share GPUs over gloo"
            raise UsageError(f"{has}: %ddp_resize {len(hosts)}{fix}")
        _, host, device, name = min(places)
        hosts, machines = (*hosts, host), (*machines, rooms[host].machine)
        devices, names = (*devices, device), (*names, name)
    now = replace(placement, hosts=hosts, machines=machines, devices=devices, names=names, local_ranks=())
    shares_gpus = placement.shares_gpus or (not on_cpu and len(set(zip(hosts, devices, strict=True))) < len(hosts))
    return replace(now, threads=_threads(now, rooms), shares_gpus=shares_gpus)


def _threads(placement: Placement, rooms: Mapping[str, HostCapacity]) -> int:
    """Return the threads of each rank, as at a start: the user's setting, else an equal share of the cores."""
    if placement.threads_asked:
        return placement.threads
    shares = []
    for host in dict.fromkeys(placement.hosts):
        if (room := rooms.get(host)) is None:  # the host was lost, and its ranks fit nowhere else
            continue
        is_bound = room.cores < room.machine_cores  # the launcher has bound the host to its share of the cores
        count = placement.hosts.count(host) if is_bound else placement.machines.count(room.machine)
        shares.append(max(1, room.cores // count))
    return min(shares, default=placement.threads)


def _moved(placement: Placement, rank: int, rooms: Mapping[str, HostCapacity]) -> Placement | None:
    """Return the placement with one rank on the least loaded host; None if it fits nowhere."""
    on_cpu = placement.devices[rank] == "cpu"
    places = [place for host in rooms for place in _places(placement, on_cpu, host, rooms)]
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


def _places(
    placement: Placement, on_cpu: bool, host: str, rooms: Mapping[str, HostCapacity], may_share: bool = False
) -> list[_Place]:
    room = rooms[host]
    count = placement.machines.count(room.machine)
    if (count + 1) * RANK_MIB > room.memory_mib:
        return []
    if on_cpu:
        return [(count / room.cores, host, "cpu", "CPU")]
    pairs = list(zip(placement.hosts, placement.devices, strict=True))
    are_shared = may_share or len(set(pairs)) < len(pairs)
    users = Counter(  # key: machine and GPU, since hosts of one machine may see the same GPU
        (rooms[its].machine, rooms[its].gpus[int(device.rpartition(":")[2])].uuid)
        for its, device in pairs
        if its in rooms
    )
    places = []
    for index, gpu in enumerate(room.gpus):
        used = users[room.machine, gpu.uuid]
        if are_shared or not used:
            places.append((used + count / len(room.gpus), host, f"{gpu.kind}:{index}", gpu.name))
    return places


def _with(values: Sequence[T], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
