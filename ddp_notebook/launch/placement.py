"""Device of each rank, and the backend of the group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.devices import Gpu, changed_variables, find, visible
from ddp_notebook.launch.environment import threads_asked, threads_per_rank
from ddp_notebook.launch.options import NO_GPUS, ONE_EACH, StartOptions
from ddp_notebook.launch.transports import host_list
from ddp_notebook.launch.transports.base import LOCAL
from ddp_notebook.records.units import size

_MAX_DEFAULT_CPU_RANKS = 4
RANK_MIB = 100  # private memory of an idle rank is about 65 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Host and device of each rank. Ranks of one host are consecutive until a host is lost, see `rank_placement`."""

    backend: str
    hosts: tuple[str, ...]  # host name of each rank, see `launch.transports`
    machines: tuple[str, ...]  # machine of each rank; a machine may have several hosts
    devices: tuple[str, ...]  # per rank: "cuda:0", "cpu"
    names: tuple[str, ...]  # per rank: "NVIDIA H200", "CPU"
    cuda_visible_devices: str | None  # the same for all ranks; LOCAL_RANK selects. None if not set
    threads: int  # per rank
    threads_asked: bool = False  # set by the user: kept when the number of ranks changes
    local_ranks: tuple[int, ...] = ()  # per rank; () if they follow the rank order
    shares_gpus: bool = False  # several ranks may use one GPU

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def group_world_size(self) -> int:
        """The number of machines: torchrun's GROUP_WORLD_SIZE."""
        return len(set(self.machines))

    @property
    def names_of_machines(self) -> tuple[str, ...]:
        """The machine of each rank, named by its first host; () if all ranks are on one machine.

        Example:
            >>> two = Placement(
            ...     backend="gloo", hosts=("a", "a:1", "b"), machines=("a 10.0.0.1", "a 10.0.0.1", "b 10.0.0.2"),
            ...     devices=("cpu",) * 3, names=("CPU",) * 3, cuda_visible_devices=None, threads=1,
            ... )
            >>> two.names_of_machines
            ('a', 'a', 'b')
        """
        if self.group_world_size == 1:
            return ()
        return tuple(self.hosts[self.machines.index(machine)] for machine in self.machines)

    def group_rank(self, rank: int) -> int:
        """Return the number of the rank's machine: torchrun's GROUP_RANK.

        Example:
            >>> two = Placement(
            ...     backend="gloo", hosts=("a", "b", "b"), machines=("a", "b", "b"), devices=("cpu",) * 3,
            ...     names=("CPU",) * 3, cuda_visible_devices=None, threads=1,
            ... )
            >>> two.group_rank(2), two.local_rank(2), two.local_world_size(2)
            (1, 1, 2)
        """
        return list(dict.fromkeys(self.machines)).index(self.machines[rank])

    def local_rank(self, rank: int) -> int:
        """Return the number of the rank among the ranks of its machine."""
        return self.local_ranks[rank] if self.local_ranks else self.machines[:rank].count(self.machines[rank])

    def local_world_size(self, rank: int) -> int:
        """Return the number of ranks on the rank's machine."""
        return self.machines.count(self.machines[rank])


def place(
    options: StartOptions, facts: Mapping[str, Any], env: Mapping[str, str], host: str = LOCAL, *, taken: int = 0
) -> Placement:
    """Place all ranks on one host.

    Args:
        options: of the start.
        facts: reply of the host server: "gpus", "cores", "backends", "torch".
        env: the environment of the ranks.
        host: its name.
        taken: number of ranks that already use its GPUs, from other hosts on the same machine with the same GPUs.

    Raises:
        UsageError: it does not fit; the message names the reason and a fix.
    """
    installed, setting = [Gpu(**gpu) for gpu in facts["gpus"]], env.get("CUDA_VISIBLE_DEVICES")
    gpus = _choose_gpus(options, installed, setting)
    is_nvidia = bool(installed) and not installed[0].told_by_torch
    if any(gpu.told_by_torch for gpu in gpus):
        _check_devices_of_torch(gpus, taken + (options.world_size or 0), changed_variables(facts["env"], env))
    world_size = options.world_size or len(gpus) or max(2, min(_MAX_DEFAULT_CPU_RANKS, facts["cores"]))
    backend = _choose_backend(options, gpus, taken + world_size, facts)
    if gpus and not options.share_gpus:
        _check_one_gpu_each(len(gpus), taken + world_size)
    _check_memory(world_size, facts["memory_mib"])
    positions = [(taken + rank) % len(gpus) for rank in range(world_size)] if gpus else []
    return Placement(
        backend=backend,
        hosts=(host,) * world_size,
        machines=(host,) * world_size,
        devices=tuple(_device(gpus, position) for position in positions) or ("cpu",) * world_size,
        names=tuple(gpus[position].name for position in positions) or ("CPU",) * world_size,
        cuda_visible_devices=",".join(gpu.uuid for gpu in gpus) if options.gpus and is_nvidia else None,
        threads=threads_per_rank(env, facts["cores"], world_size),
        threads_asked=threads_asked(env) > 0,
        shares_gpus=options.share_gpus and taken + world_size > len(gpus) > 0,
    )


def _check_devices_of_torch(gpus: Sequence[Gpu], ranks: int, changed: Sequence[str]) -> None:
    """Check devices that torch has listed, not nvidia-smi.

    Args:
        gpus: the chosen devices, at least one.
        ranks: the number of ranks on them, as far as it was given.
        changed: environment variables that hide devices and that have changed since torch listed them.

    Raises:
        UsageError: the list is out of date, or there are too few devices.
    """
    if changed:
        raise UsageError(
            f"{', '.join(changed)} has changed since torch listed the devices; set it before the kernel starts, or "
            "restart the kernel"
        )
    if gpus[0].kind != "cuda" and ranks > len(gpus):
        raise UsageError(
            f"{ranks} ranks on {_count(len(gpus), 'device')} of type {gpus[0].kind}: ranks "
            f"cannot share them. Start at most {len(gpus)}, or add --gpus none for ranks on the CPU"
        )


def _check_one_gpu_each(gpus: int, ranks: int) -> None:
    """Raise UsageError if ranks would have to share GPUs."""
    if ranks > gpus:
        raise UsageError(
            f"{ranks} ranks on {_count(gpus, 'GPU')}: NCCL refuses two ranks on one GPU "
            f"('Duplicate GPU detected'). Start at most {gpus}, or add --share-gpus to let ranks share "
            "them over gloo, or --gpus none for ranks on the CPU"
        )


def _check_memory(world_size: int, memory_mib: int) -> None:
    """Raise UsageError if so many ranks need more memory than the host has."""
    if world_size * RANK_MIB > memory_mib:
        raise UsageError(
            f"{world_size} ranks need some {size(world_size * RANK_MIB << 20)} of memory, and this host has "
            f"{size(memory_mib << 20)}; start at most {memory_mib // RANK_MIB}"
        )


def place_on_hosts(
    options: StartOptions,
    facts: Mapping[str, Mapping[str, Any]],
    machines: Mapping[str, str],
    shares: Mapping[str, int] | None = None,
) -> Placement:
    """Place the ranks on several hosts. The ranks of one host are consecutive.

    Args:
        options: of the start.
        facts: replies of the host servers, by name, in rank order.
        machines: machine of each host, by host name. Tasks on one machine share it.
        shares: relative numbers of ranks by host, and the actual numbers if the user gave none.

    Raises:
        UsageError: it does not fit on one of them, or they do not fit together.
    """
    counts = _counts(options, facts, machines, shares or {})
    beside = Counter(machines.values())
    taken: Counter[tuple[str, ...]] = Counter()  # ranks placed so far, by machine and visible GPUs
    placed = []
    for host, of_host in facts.items():
        try:
            env = {**of_host["env"], **options.env}
            cores = of_host["cores"]
            if cores == of_host["machine_cores"]:  # else the launcher has bound the task to its share of the cores
                cores = max(1, cores // beside[machines[host]])
            its = {**of_host, "cores": cores}
            seen = (machines[host], *_seen(of_host, options))
            one = place(replace(options, world_size=counts[host]), its, env, host, taken=taken[seen])
            taken[seen] += one.world_size
            placed.append(one)
        except UsageError as error:
            raise UsageError(f"{host}: {error}") from error
    backends = {one.hosts[0]: one.backend for one in placed}
    if len(set(backends.values())) > 1:
        said = ", ".join(f"{backend} on {host}" for host, backend in backends.items())
        raise UsageError(f"all hosts must use the same backend, got {said}; choose one, e.g. --backend gloo")
    return Placement(
        backend=placed[0].backend,
        hosts=tuple(host for one in placed for host in one.hosts),
        machines=tuple(machines[host] for one in placed for host in one.hosts),
        devices=tuple(device for one in placed for device in one.devices),
        names=tuple(name for one in placed for name in one.names),
        cuda_visible_devices=None,
        threads=min(one.threads for one in placed),
        threads_asked=any(one.threads_asked for one in placed),
        shares_gpus=any(one.shares_gpus for one in placed),
    )


def _seen(facts: Mapping[str, Any], options: StartOptions) -> list[str]:
    """Return the GPUs that ranks of a host see, by UUID."""
    setting = {**facts["env"], **options.env}.get("CUDA_VISIBLE_DEVICES")
    return [gpu.uuid for gpu in visible([Gpu(**gpu) for gpu in facts["gpus"]], setting)]


def _counts(
    options: StartOptions,
    facts: Mapping[str, Mapping[str, Any]],
    machines: Mapping[str, str],
    shares: Mapping[str, int],
) -> Mapping[str, int | None]:
    """Return the number of ranks of each host; None: one per GPU or by the number of cores."""
    if shares and (options.world_size or 0) % sum(shares.values()) == 0:
        times = (options.world_size or 0) // sum(shares.values()) or 1
        return {host: share * times for host, share in shares.items()}
    asked, total = options.ranks_of_hosts or dict.fromkeys(facts, None), options.world_size
    if total is None and options.hosts is None:
        return _counts_of_tasks(options, facts, machines)
    if total is None:
        return asked
    if options.hosts is not None:
        host_list.check_sum(asked, total)
    return _divide(total, asked)


def _counts_of_tasks(
    options: StartOptions, facts: Mapping[str, Mapping[str, Any]], machines: Mapping[str, str]
) -> dict[str, int]:
    """Return the number of ranks of each task of a launcher, such as Slurm.

    A task alone on its machine has one rank per GPU. A task alongside others, or without a GPU, is one rank, since the
    launcher was given the number of tasks.
    """
    tasks = Counter(machines.values())  # by machine
    return {
        host: max(1, len(_seen(of_host, options))) if tasks[machines[host]] == 1 else 1
        for host, of_host in facts.items()
    }


def _divide(total: int, asked: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the number of ranks of each host, with equal shares for hosts without a number.

    Example:
        >>> _divide(7, {"a": 3, "b": None, "c": None})
        {'a': 3, 'b': 2, 'c': 2}
    """
    open_ones = [host for host, count in asked.items() if count is None]
    left = total - sum(count or 0 for count in asked.values())
    share, rest = divmod(left, len(open_ones)) if open_ones else (0, left)
    if rest or left < 0 or (open_ones and share == 0):
        raise UsageError(
            f"{total} {'rank does' if total == 1 else 'ranks do'} not divide among {', '.join(asked)} as asked; "
            f"N is the sum of all: ask for a multiple of {len(asked)}, or leave N out"
        )
    return {**asked, **dict.fromkeys(open_ones, share)}


def _choose_gpus(options: StartOptions, installed: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    seen = visible(installed, setting)
    if options.gpus is None:
        return seen
    if options.gpus in (NO_GPUS, ONE_EACH):
        return seen if options.gpus == ONE_EACH and (options.world_size or 0) <= len(seen) else []
    asked = [str(name) for name in options.gpus]
    if any(gpu.told_by_torch for gpu in seen):
        raise UsageError(
            f"--gpus {','.join(asked)} works only with NVIDIA GPUs, and this host has {seen[0].name}: set "
            "HIP_VISIBLE_DEVICES, ZE_AFFINITY_MASK or the like before the kernel starts"
        )
    if not seen:
        hidden = f" (CUDA_VISIBLE_DEVICES={setting} hides {_count(len(installed), 'GPU')})" if installed else ""
        raise UsageError(f"--gpus {','.join(asked)}: this host shows no GPU{hidden}; leave --gpus out")
    chosen: list[Gpu] = []
    for name in asked:
        gpu = find(seen, name)
        if gpu is None:
            raise UsageError(
                f"--gpus {','.join(asked)}: GPU {name!r} does not exist; "
                f"choose within CUDA_VISIBLE_DEVICES from 0 to {len(seen) - 1}, or a UUID from `nvidia-smi -L`"
            )
        if gpu in chosen:
            raise UsageError(f"--gpus {','.join(asked)} names GPU {name!r} twice")
        chosen.append(gpu)
    return chosen


def _choose_backend(options: StartOptions, gpus: Sequence[Gpu], world_size: int, facts: Mapping[str, Any]) -> str:
    built: Sequence[str] = facts["backends"]
    if options.backend == "auto":
        of_devices = facts.get("device_backend") or "nccl"
        return of_devices if gpus and world_size <= len(gpus) and of_devices in built else "gloo"
    if options.backend not in built:
        source = (
            ", which no PyTorch wheel has (only a build from source with mpicc and USE_MPI=1)"
            if options.backend == "mpi"
            else ""
        )
        raise UsageError(
            f"this torch ({facts['torch']}) is built without {options.backend}{source}; "
            f"it has {', '.join(built)}: use --backend {built[0] if built else 'auto'}"
        )
    if options.backend == "mpi":
        raise UsageError(
            "mpi needs ranks started by mpirun, and these are forked by a host server; use --backend gloo. "
            "mpi4py works if mpirun starts each rank: %ddp_start --mpi '-np 4'"
        )
    if options.backend == "nccl" and not gpus:
        raise UsageError("nccl needs GPUs, and this host shows none; use --backend gloo")
    if options.backend == "nccl" and world_size > len(gpus) and not options.share_gpus:
        raise UsageError(
            f"{world_size} ranks on {_count(len(gpus), 'GPU')}: NCCL refuses two ranks on one GPU "
            f"('Duplicate GPU detected'). Start at most {len(gpus)}, or add --share-gpus, which makes "
            "NCCL treat each rank as a separate host: slow, but good for tests"
        )
    return options.backend


def _device(gpus: Sequence[Gpu], position: int) -> str:
    """Return the device's name on a rank, which sees only the chosen GPUs."""
    return f"{gpus[position].kind}:{position}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
