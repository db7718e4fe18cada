"""The options of a start: name, type, default, limits, help and the ways of starting that accept each.

Each option is declared once, as a field of a dataclass below. The line of `%ddp_start` and its help
(`launch/start_line`), the defaults file (`launch/defaults`) and a page of the documentation are made from `TABLE`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.option_kinds import (
    WEEK_S,
    ArgumentsKind,
    ChoiceKind,
    Environment,
    Flag,
    Gpus,
    HostList,
    Kind,
    NumberKind,
    OnOff,
    Ports,
    RanksKind,
    SaveFolder,
)
from ddp_notebook.launch.transports import host_list, ports
from ddp_notebook.launch.transports.base import LEASE_S as LEASE_S

MOST_RANKS = host_list.MOST
Backend = Literal["auto", "nccl", "gloo", "mpi"]
LiveMode = Literal["auto", "html", "off"]
NO_GPUS, ONE_EACH = ("none",), ("each",)  # values of `gpus` that are not names
_SHORTEST_LEASE_S = 4.0  # a silent host is reported after 3 s
_MOST_MB = 1e6
_KEEP_HOURS, _OUTPUT_MB, _RECORDING_MB = 24.0, 64.0, 1000.0
_IDLE_HOURS = 12.0
_IDLE = "DDP_NOTEBOOK_KEEP_IDLE_H"

_REQUIRED = object()
GENERAL = "options"
FAILURES = "failures"
OTHER_MACHINES = "ranks on other machines"
KEPT = "ranks that outlive the notebook"
LOCAL = "local"  # the way of starting without hosts, slurm, mpi, profile or client
ELSEWHERE = ("hosts", "slurm", "mpi", "profile", "client")


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """The declaration of one option.

    Attributes:
        name: in messages: the keyword of `start`, or the field of a class such as `Ssh`.
        field: of the dataclass.
        flag: on the line of `%ddp_start`; "N" for the number of ranks.
        kind: how a value is written, and its limits.
        default: the value if it is not given; None for an option that selects a way of starting, and for --keep.
        help: one line for the help text, with % doubled for argparse.
        group: heading in the help text.
        owner: the dataclass that has the field.
        ways: the ways of starting that accept the option.
        advice: end of the error for any other way; it may contain {way}.
        in_file: how the option is written in the defaults file; "" if it may not be there.
    """

    name: str
    field: str
    flag: str
    kind: Kind
    default: Any
    help: str
    group: str
    owner: type
    ways: tuple[str, ...]
    advice: str
    in_file: str

    @property
    def dest(self) -> str:
        """The name of the value that argparse reads."""
        return self.flag.removeprefix("--").replace("-", "_") if self.flag.startswith("--") else self.name

    def value(self, options: StartOptions) -> Any:
        """Return the value in some options; the default if they lack the class of the option."""
        owners = (options, options.keep, options.elsewhere)
        found = [one for one in owners if isinstance(one, self.owner)]
        return getattr(found[0], self.field) if found else self.default

    def written(self, options: StartOptions) -> str:
        """Return the option as written on the line of `%ddp_start`.

        Example:
            >>> BY_NAME["grace_s"].written(StartOptions(grace_s=None)), BY_NAME["env"].written(StartOptions())
            ('--grace off', 'no --env')
        """
        return self.kind.write(self.flag, self.value(options))


def _option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    flag: str,
    group: str = GENERAL,
    ways: tuple[str, ...] = (LOCAL, *ELSEWHERE),
    advice: str = "",
    in_file: str = "",
) -> Any:
    """Return a dataclass field with the declaration of an option."""
    declared = dict(flag=flag, kind=kind, help=help, group=group, ways=ways, advice=advice, in_file=in_file)
    if default is dict:
        return field(default_factory=dict, metadata=declared)
    if default is _REQUIRED:
        return field(metadata=declared)
    return field(default=default, metadata=declared)


def _check(owner: Any) -> None:
    """Check the values of a dataclass with declared options."""
    for one in fields(owner):
        if one.metadata:
            one.metadata["kind"].check(one.metadata["flag"], getattr(owner, one.name))


def _seconds(**limits: Any) -> NumberKind:
    return NumberKind(metavar="S", unit="seconds", most=WEEK_S, **limits)


def _megabytes(example: float) -> NumberKind:
    return NumberKind(metavar="MB", unit="megabytes", most=_MOST_MB, is_positive=True, example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elsewhere:
    """Ranks on other machines.

    Args:
        python: path of the interpreter on the hosts; None: the notebook's own. A host that ssh reaches takes python3
            if it has no file at that path, or if that one lacks torch or ddp_notebook.
        sync: a folder to send to hosts that do not share it, before ranks start in it; None: none.
        sync_large: allow a folder of more than 1 GB or 20,000 files.
        lease_s: seconds after which an unreachable host counts as lost and ends its ranks; 4 s to a week.
        ports: "40000-40100": listen for other machines on these ports only. Gloo and NCCL take any free port.
            None: any free port.

    Raises:
        UsageError: a value is outside its limits.
    """

    python: str | None = _option(
        None,
        ArgumentsKind(metavar="PATH"),
        "Python interpreter on the hosts",
        flag="--python",
        group=OTHER_MACHINES,
        ways=ELSEWHERE,
        advice="ranks on this one have the notebook's own Python",
        in_file='python = "/envs/train/bin/python"',
    )
    sync: str | os.PathLike[str] | None = _option(
        None,
        ArgumentsKind(metavar="DIR"),
        "first send this folder to hosts that do not share it",
        flag="--sync",
        group=OTHER_MACHINES,
        ways=ELSEWHERE,
        advice="ranks on this one read the notebook's files",
    )
    sync_large: bool = _option(
        False,
        Flag(),
        "with --sync: also more than 1 GB or 20,000 files",
        flag="--sync-large",
        group=OTHER_MACHINES,
        ways=ELSEWHERE,
        advice="ranks on this one read the notebook's files",
    )
    lease_s: float = _option(
        LEASE_S,
        _seconds(least=_SHORTEST_LEASE_S, example=60),
        f"a silent host is lost after S seconds ({LEASE_S:g})",
        flag="--lease",
        group=OTHER_MACHINES,
        ways=ELSEWHERE,
        advice="this one is never unreachable",
        in_file="lease_s = 30",
    )
    ports: str | None = _option(
        None,
        Ports(),
        "listen for other machines on these ports only",
        flag="--ports",
        group=OTHER_MACHINES,
        ways=ELSEWHERE,
        advice="ranks on this one listen on loopback only",
        in_file='ports = "40000-40100"',
    )

    def __post_init__(self) -> None:
        if self.sync is not None:
            if not isinstance(self.sync, str | os.PathLike):
                raise UsageError(f"--sync must be a folder, e.g. --sync ., got {self.sync!r:.60}")
            object.__setattr__(self, "sync", os.fspath(self.sync))
        elif self.sync_large:
            raise UsageError("--sync-large requires --sync, e.g. --sync . --sync-large")
        _check(self)


@dataclass(frozen=True, slots=True)
class Ssh(_Elsewhere):
    """Ranks on hosts that ssh reaches.

    Args:
        hosts: names of ~/.ssh/config, each with an optional number of ranks: "gpu1,gpu[3-5]:8", or a sequence.
        python, sync, sync_large, lease_s, ports: see `ddp_notebook.start`.

    Example:
        >>> ddp_notebook.Ssh("gpu1:8,gpu2:8", python="/envs/train/bin/python", lease_s=60).hosts
        {'gpu1': 8, 'gpu2': 8}
    """

    hosts: str | Sequence[str] | Mapping[str, int | None] = _option(
        _REQUIRED,
        HostList(),
        "start ranks over ssh, N on each host",
        flag="--hosts",
        group=OTHER_MACHINES,
        ways=("hosts",),
    )

    def __post_init__(self) -> None:
        if not isinstance(self.hosts, Mapping):
            object.__setattr__(self, "hosts", host_list.parse(self.hosts))
        _Elsewhere.__post_init__(self)

    @property
    def ranks(self) -> dict[str, int | None]:
        """The number of ranks by host, in the order of the ranks; None if it was not given."""
        assert isinstance(self.hosts, Mapping)
        return dict(self.hosts)


@dataclass(frozen=True, slots=True)
class Slurm(_Elsewhere):
    """Ranks in a Slurm job.

    Args:
        arguments: for `sbatch`, unchanged: "-N2 --gpus-per-node=8"; "": the allocation of the notebook.
        python, sync, sync_large, lease_s, ports: see `ddp_notebook.start`.
    """

    arguments: str = _option(
        _REQUIRED,
        ArgumentsKind(may_be_empty=True),
        "start ranks with sbatch; no ARGS: in this allocation",
        flag="--slurm",
        group=OTHER_MACHINES,
        ways=("slurm",),
    )


@dataclass(frozen=True, slots=True)
class Mpi(_Elsewhere):
    """Ranks that `mpirun` starts.

    Args:
        arguments: for `mpirun`, unchanged: "--hostfile hosts".
        python, sync, sync_large, lease_s, ports: see `ddp_notebook.start`.
    """

    arguments: str = _option(
        _REQUIRED, ArgumentsKind(), "start ranks with mpirun", flag="--mpi", group=OTHER_MACHINES, ways=("mpi",)
    )


@dataclass(frozen=True, slots=True)
class Profile(_Elsewhere):
    """Ranks that the launcher of an ipyparallel profile starts.

    Args:
        name: of the profile.
        python, sync, sync_large, lease_s, ports: see `ddp_notebook.start`.
    """

    name: str = _option(
        _REQUIRED,
        ArgumentsKind(metavar="NAME"),
        "start ranks with an ipyparallel profile's launcher",
        flag="--profile",
        group=OTHER_MACHINES,
        ways=("profile",),
    )


@dataclass(frozen=True, slots=True)
class Client(_Elsewhere):
    """Ranks in the engines of a running ipyparallel cluster.

    Args:
        cluster: "profile=NAME" or "cluster_id=ID".
        python, sync, sync_large, lease_s, ports: see `ddp_notebook.start`.
    """

    cluster: str = _option(
        _REQUIRED,
        ArgumentsKind(metavar="profile=NAME"),
        "start ranks in the engines of an ipyparallel cluster",
        flag="--client",
        group=OTHER_MACHINES,
        ways=("client",),
    )


_WAYS: dict[str, type[_Elsewhere]] = {"hosts": Ssh, "slurm": Slurm, "mpi": Mpi, "profile": Profile, "client": Client}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Ranks that outlive the notebook.

    Args:
        hours: how long the ranks live while no notebook is attached; at most a week.
        output_mb: megabytes of the output of each rank that are kept while no notebook is attached.
        recording_mb: megabytes of the recording of all ranks that are kept in files.

    Raises:
        UsageError: a value is outside its limits.

    Example:
        >>> ddp_notebook.Keep(hours=12).alone_s
        43200
    """

    hours: float = _option(
        _KEEP_HOURS,
        NumberKind(
            metavar="HOURS",
            unit="hours",
            most=WEEK_S / 3600,
            is_positive=True,
            example=12,
            note=" (the number of ranks comes first)",
            const=_KEEP_HOURS,
        ),
        f"keep ranks for HOURS without a notebook ({_KEEP_HOURS:g})",
        flag="--keep",
        group=KEPT,
        ways=(LOCAL, "hosts"),
        advice="ranks of {way} end with their notebook or job: leave one of them out",
    )
    output_mb: float = _option(
        _OUTPUT_MB,
        _megabytes(64),
        f"output kept of each rank without a notebook ({_OUTPUT_MB:g})",
        flag="--keep-output",
        group=KEPT,
        ways=(LOCAL, "hosts"),
    )
    recording_mb: float = _option(
        _RECORDING_MB,
        _megabytes(1000),
        f"recording kept of all ranks ({_RECORDING_MB:g})",
        flag="--keep-recording",
        group=KEPT,
        ways=(LOCAL, "hosts"),
    )

    def __post_init__(self) -> None:
        _check(self)
        _ = self.idle_s

    @property
    def alone_s(self) -> float:
        """Seconds that the ranks live while no notebook is attached."""
        return self.hours * 3600

    @property
    def idle_s(self) -> float:
        """Seconds that an idle session lives without a notebook: 12 hours unless DDP_NOTEBOOK_KEEP_IDLE_H is set.

        Raises:
            UsageError: the variable is not a positive number.
        """
        hours = os.environ.get(_IDLE, "") or str(_IDLE_HOURS)
        try:
            if (idle_s := float(hours) * 3600) > 0:
                return idle_s
        except ValueError:
            pass
        raise UsageError(f"{_IDLE} must be a positive number of hours, such as 12, got {hours}")

    @property
    def output_bytes(self) -> int:
        """Bytes of text and displays that are kept of each rank."""
        return round(self.output_mb * 1e6)

    @property
    def recording_bytes(self) -> int:
        """Bytes of the files with the recording of all ranks."""
        return round(self.recording_mb * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of a session. See `ddp_notebook.start`.

    Raises:
        UsageError: a value is outside its limits, or options exclude each other.
    """

    world_size: int | None = _option(None, RanksKind(), "number of ranks; default: 1 per GPU, or 2-4 on CPUs", flag="N")
    backend: str = _option(
        "auto",
        ChoiceKind(values=get_args(Backend), what="backend"),
        "auto (default): nccl with one GPU per rank, or gloo",
        flag="--backend",
        in_file='backend = "gloo"',
    )
    gpus: str | Sequence[str | int] | None = _option(
        None,
        Gpus(),
        "these GPUs; each: if there are enough; none: CPUs",
        flag="--gpus",
        ways=(LOCAL,),
        advice="with {way} write --env CUDA_VISIBLE_DEVICES=0,1",
    )
    share_gpus: bool = _option(False, Flag(), "allow more ranks than GPUs", flag="--share-gpus")
    env: Mapping[str, str] = _option(
        dict,
        Environment(),
        "environment variables of the ranks",
        flag="--env",
        in_file='env = { NCCL_DEBUG = "WARN" }',
    )
    timeout_s: float = _option(
        120.0,
        _seconds(is_positive=True, example=60),
        "limit of the start in seconds (120)",
        flag="--timeout",
        in_file="timeout_s = 300",
    )
    live: str = _option(
        "auto",
        ChoiceKind(values=get_args(LiveMode), what="live mode"),
        "small live view under cells: widget or HTML (auto)",
        flag="--live",
        in_file='live = "auto"',
    )
    fold: bool = _option(
        True, OnOff(), "merge lines of ranks (on); off: in order of arrival", flag="--fold", in_file="fold = true"
    )
    grace_s: float | None = _option(
        3.0,
        _seconds(may_be_off=True, example=5),
        "stop the other ranks S seconds after a failure (3)",
        flag="--grace",
        group=FAILURES,
        in_file='grace_s = 3, or "off"',
    )
    hang_after_s: float | None = _option(
        10.0,
        _seconds(may_be_off=True, is_positive=True, example=5),
        "show which ranks wait for which after S seconds (10)",
        flag="--hang-after",
        group=FAILURES,
        in_file='hang_after_s = 10, or "off"',
    )
    guard: bool | None = _option(
        None,
        OnOff(),
        "compare calls before collectives; default: with gloo",
        flag="--guard",
        group=FAILURES,
        in_file="guard = true",
    )
    quiet_findings: bool = _option(
        False,
        Flag(),
        "findings about training only in %%ddp_report",
        flag="--quiet-findings",
        in_file="quiet_findings = true",
    )
    heal: bool = _option(
        False,
        Flag(),
        "replace dead ranks before each cell, as %%ddp_heal",
        flag="--heal",
        group=FAILURES,
        in_file="heal = true",
    )
    on_preempt: str | None = _option(
        None,
        SaveFolder(),
        "at SIGTERM or SIGUSR1, survive loops save and end",
        flag="--on-preempt",
        group=FAILURES,
    )
    hosts: str | Sequence[str] | Mapping[str, int | None] | Ssh | None = None
    slurm: str | Slurm | None = None
    mpi: str | Mpi | None = None
    profile: str | Profile | None = None
    client: str | Client | None = None
    keep: Keep | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None:  # scripts may give numbers, and one string as on the magic's line
            gpus = self.gpus.split(",") if isinstance(self.gpus, str) else self.gpus
            object.__setattr__(self, "gpus", tuple(name for gpu in gpus if (name := str(gpu).strip())))
        if isinstance(self.env, Mapping):
            object.__setattr__(self, "env", {str(name): str(value) for name, value in self.env.items()})
        for name, kind in _WAYS.items():
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                object.__setattr__(self, name, kind(value))  # type: ignore[call-arg]  # each has one positional field
        if self.keep is not None and not isinstance(self.keep, Keep):
            raise UsageError(f"keep must be a ddp_notebook.Keep, e.g. keep=Keep(hours=12), got {self.keep!r}")
        _check(self)
        asked = [f"--{name}" for name in ELSEWHERE if getattr(self, name) is not None]
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)} cannot be combined; choose one of them")
        given = {BY_NAME["gpus"]: self.gpus, BY_NAME["keep.hours"]: self.keep}
        for option, value in given.items():
            if value is not None and self.way not in option.ways:
                there = "this machine and with --hosts" if "hosts" in option.ways else "one machine"
                raise UsageError(f"{option.flag} works only with {there}; {option.advice.format(way=asked[0])}")

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON, for a keeper."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> StartOptions:
        """Return the options from the result of `to_json`.

        Example:
            >>> import json
            >>> options = StartOptions(world_size=2, hosts=Ssh("a:1,b:1", sync="."), keep=Keep(hours=2))
            >>> StartOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
            True
        """
        kinds: dict[str, type[Any]] = {**_WAYS, "keep": Keep}
        nested = {name: kinds[name](**value) for name, value in given.items() if name in kinds and value is not None}
        return cls(**{**given, **nested})

    @property
    def way(self) -> str:
        """The way of starting: "local", or the name of a field."""
        return next((name for name in ELSEWHERE if getattr(self, name) is not None), LOCAL)

    @property
    def elsewhere(self) -> Ssh | Slurm | Mpi | Profile | Client | None:
        """The options for ranks on other machines; None for ranks on the machine of the notebook."""
        return None if self.way == LOCAL else getattr(self, self.way)

    @property
    def is_here(self) -> bool:
        """True if the ranks are on the machine of the notebook."""
        return self.way == LOCAL

    @property
    def port_range(self) -> range:
        """The ports to listen on for other machines."""
        elsewhere = self.elsewhere
        return ports.ANY if elsewhere is None or elsewhere.ports is None else ports.parse(elsewhere.ports)

    @property
    def ranks_of_hosts(self) -> dict[str, int | None]:
        """The number of ranks by host, in the order of the ranks; empty without hosts."""
        return self.hosts.ranks if isinstance(self.hosts, Ssh) else {}

    def differing(self, running: StartOptions) -> list[Option]:
        """List the options that running ranks were started with and that differ from these.

        The time limit of the start is ignored. If these options have no number of ranks, any number fits.

        Args:
            running: the options of the running ranks.

        Example:
            >>> [one.name for one in StartOptions(world_size=2).differing(StartOptions(world_size=4, timeout_s=60))]
            ['world_size']
        """
        asked = replace(self, timeout_s=running.timeout_s, world_size=self.world_size or running.world_size)
        # Ranks are numbered in the order of their hosts, which the comparison of two mappings ignores.
        is_other_order = list(running.ranks_of_hosts) != list(asked.ranks_of_hosts)
        return [
            one for one in TABLE if one.value(running) != one.value(asked) or (one.name == "hosts" and is_other_order)
        ]


def _declared(owner: type, prefix: str = "") -> list[Option]:
    return [
        Option(name=prefix + one.name, field=one.name, owner=owner, default=_default(one), **one.metadata)
        for one in fields(owner)
        if one.metadata
    ]


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default


def _of_way(name: str, way: type[_Elsewhere]) -> Option:
    """Return the declaration of the only option that belongs to this way of starting alone."""
    inherited = {one.name for one in fields(_Elsewhere)}
    (own,) = (one for one in _declared(way) if one.name not in inherited)
    return replace(own, name=name)


TABLE: tuple[Option, ...] = (
    *_declared(StartOptions),
    *(_of_way(name, way) for name, way in _WAYS.items()),
    *_declared(_Elsewhere),
    *(replace(one, default=None) if one.flag == "--keep" else one for one in _declared(Keep, "keep.")),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in TABLE}
