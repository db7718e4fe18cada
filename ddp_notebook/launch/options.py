"""What `%ddp_start` and `ddp_notebook.start` were asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.defaults import file, names
from ddp_notebook.launch.defaults.file import Defaults
from ddp_notebook.launch.keep import limits
from ddp_notebook.launch.keep.limits import Keep
from ddp_notebook.launch.ways import host_list, ports
from ddp_notebook.launch.ways.base import LEASE_S as LEASE_S
from ddp_notebook.records.words import OF_EACH_RANK
from ddp_notebook.run.lines import LineParser

_SHORTEST_LEASE_S = 4.0  # a host that is not heard is told after 3
_LONGEST_S = 7 * 24 * 3600.0  # "at most a week" in the errors
MOST_RANKS = host_list.MOST
Backend = Literal["auto", "nccl", "gloo", "mpi"]
LiveMode = Literal["auto", "html", "off"]
BACKENDS = get_args(Backend)
NO_GPUS, ONE_EACH = ("none",), ("each",)  # what `gpus` may be beside names
LIVE = get_args(LiveMode)
_ELSEWHERE = ("hosts", "slurm", "mpi", "profile", "client")  # one of them at most


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How a session is to be started. Checks itself.

    Args:
        world_size: number of ranks; None: one per GPU, or on a machine without any min(4, cores), at least 2.
        backend: "auto" is nccl with one GPU per rank, else gloo.
        gpus: numbers within CUDA_VISIBLE_DEVICES, or UUIDs; "0,1" or a sequence; None: all. "none": ranks on the CPU
            though there are GPUs; "each": the same unless there is a GPU for each rank.
        share_gpus: allow more ranks than GPUs: over gloo, or over NCCL if the backend says so.
        env: variables on top of the notebook's own.
        timeout_s: how long the start may take, in seconds.
        grace_s: how long the others go on when a rank has failed, in seconds; None: until they end by themselves.
        hang_after_s: how long a rank waits in an operation before the cell says who waits for whom; None: for ever.
        guard: compare what all ranks call before the user's own collectives; None: with gloo only.
        heal: begin the next cell with replacing ranks that have died, as `%ddp_heal` would.
        hosts: machines that ssh reaches, by names of ~/.ssh/config, each with its number of ranks if that is said:
            "gpu1,gpu[3-5]:8" or a sequence; None: the notebook's own.
        slurm: what `sbatch` is to be told, as it is: "-N2 --gpus-per-node=8"; "": the allocation that
            the notebook is in.
        mpi: what `mpirun` is to be told, as it is: "--hostfile hosts".
        profile: name of a profile of ipyparallel's, whose launcher starts the ranks' hosts.
        client: which running cluster of ipyparallel's is to have them: "profile=NAME" or "cluster_id=ID".
        python: the interpreter there; None: the notebook's. A host that ssh reaches takes python3 if it has no file at
            that path, or if that one lacks torch or ddp_notebook.
        sync: a folder whose files are sent to hosts that do not share it, before ranks start in it; None: none.
        sync_large: it may have more than 1 GB or 20,000 files.
        lease_s: how long a host may be unreachable until it is lost, and ends what was started on it, in seconds.
        ports: "40000-40100": where something of a session listens for other machines, it does so on these, as far as
            that can be said: gloo and NCCL take whatever port the system hands out. None: so does all.
        keep_h: the ranks outlive the notebook, for so many hours while no notebook is attached; None: they end with it.
        keep_output_mb: megabytes of the output of each rank that are kept while no notebook is attached.
        on_preempt: a folder, for `save DIR`: SIGTERM or SIGUSR1 to the kernel, to the keeper of a kept session or to a
            task of a job, or a file `preempt` in that folder, lets loops of `survive` write their state there and end.
            None: such signals do what they always do.
        keep_recording_mb: megabytes of the recording of all ranks that are kept in files.
        live: "auto": a view of it appears under a cell that logs or synchronises gradients, where there is a front end;
            as HTML where the front end shows no widgets. "html": as HTML in any case. "off": none comes by itself.
        fold: merge lines of several ranks that are equal or differ only in numbers. False: each line of each rank is
            shown by itself, when it arrives.

    Raises:
        UsageError: a value that cannot be.
    """

    world_size: int | None = None
    backend: str = "auto"
    gpus: str | Sequence[str | int] | None = None
    share_gpus: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    grace_s: float | None = 3.0
    hang_after_s: float | None = 10.0
    guard: bool | None = None
    heal: bool = False
    live: str = "auto"
    fold: bool = True
    hosts: str | Sequence[str] | Mapping[str, int | None] | None = None
    slurm: str | None = None
    mpi: str | None = None
    profile: str | None = None
    client: str | None = None
    python: str | None = None
    sync: str | os.PathLike[str] | None = None
    sync_large: bool = False
    lease_s: float = LEASE_S
    ports: str | None = None
    keep_h: float | None = None
    keep_output_mb: float = limits.OUTPUT_MB
    keep_recording_mb: float = limits.RECORDING_MB
    on_preempt: str | None = None

    def __post_init__(self) -> None:
        if self.world_size is not None and type(self.world_size) is not int:
            raise UsageError(f"world_size must be a positive integer, e.g. start(2), got {self.world_size!r}")
        if self.gpus is not None:  # scripts may give numbers, and one string as on the magic's line
            gpus = self.gpus.split(",") if isinstance(self.gpus, str) else self.gpus
            object.__setattr__(self, "gpus", tuple(name for gpu in gpus if (name := str(gpu).strip())))
        if self.hosts is not None and not isinstance(self.hosts, Mapping):
            object.__setattr__(self, "hosts", host_list.parse(self.hosts))
        asked = [f"--{name}" for name in _ELSEWHERE if getattr(self, name) is not None]
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)}: ranks are started in one way; choose one of them")
        if asked and self.gpus is not None:
            raise UsageError(f"--gpus goes with one machine; with {asked[0]} write --env CUDA_VISIBLE_DEVICES=0,1")
        if not asked and self.python is not None:
            raise UsageError("--python goes with other machines; ranks on this one have the notebook's own Python")
        if self.ports is not None:
            ports.parse(self.ports)
            if not asked:
                raise UsageError("--ports goes with other machines; ranks on this one listen on loopback only")
        if self.sync is not None:
            object.__setattr__(self, "sync", os.fspath(self.sync))
            if not asked:
                raise UsageError("--sync goes with other machines; ranks on this one see the notebook's files")
        elif self.sync_large:
            raise UsageError("--sync-large goes with --sync; name the folder too, e.g. --sync . --sync-large")
        if not isinstance(self.env, Mapping):
            raise UsageError(f"env is {self.env!r}; give names and values, e.g. env={{'OMP_NUM_THREADS': '2'}}")
        object.__setattr__(self, "env", {str(name): str(value) for name, value in self.env.items()})
        if fixed := [name for name in self.env if name in OF_EACH_RANK]:
            raise UsageError(f"env sets {', '.join(fixed)}, which every rank gets from the session; leave it out")
        if self.world_size is not None and self.world_size < 1:
            raise UsageError(f"N must be at least 1, as in %ddp_start 2, got {self.world_size}")
        if self.world_size is not None and self.world_size > MOST_RANKS:
            raise UsageError(f"a session has at most {MOST_RANKS:,} ranks, got N = {self.world_size}")
        if (total := sum(count or 1 for count in self.ranks_of_hosts.values())) > MOST_RANKS:
            raise UsageError(f"a session has at most {MOST_RANKS:,} ranks, and --hosts asks for {total:,}")
        if self.backend not in BACKENDS:
            raise UsageError(f"unknown backend {self.backend!r}; choose one of {', '.join(BACKENDS)}")
        if self.live not in LIVE:
            raise UsageError(f"unknown live mode {self.live!r}; choose one of {', '.join(LIVE)}, as in --live html")
        if not (_is_number(self.timeout_s) and 0 < self.timeout_s <= _LONGEST_S):
            raise UsageError(
                f"--timeout must be a positive number of seconds, at most a week, e.g. --timeout 60, "
                f"got {_written(self.timeout_s)}"
            )
        for name, seconds in (("--grace", self.grace_s), ("--hang-after", self.hang_after_s)):
            is_time = seconds is None or (_is_number(seconds) and 0 <= seconds <= _LONGEST_S)
            if not is_time or (name == "--hang-after" and seconds == 0):  # every wait would be a hang
                least = "a positive number of seconds" if name == "--hang-after" else "a number of seconds from 0 up"
                raise UsageError(
                    f"{name} must be {least}, at most a week, e.g. {name} 5, or off, got {_written(seconds)}"
                )
        if not (_is_number(self.lease_s) and _SHORTEST_LEASE_S <= self.lease_s <= _LONGEST_S):
            raise UsageError(
                f"--lease must be a number of seconds from {_SHORTEST_LEASE_S:g} up, at most a week, e.g. --lease 60, "
                f"got {_written(self.lease_s)}"
            )
        if self.keep_h is not None and asked and asked != ["--hosts"]:
            raise UsageError(
                f"--keep goes with this machine and with --hosts; what {asked[0]} starts ends with its notebook, or "
                "with its job: leave one of them out"
            )
        limits.check(self.keep_h, self.keep_output_mb, self.keep_recording_mb, _LONGEST_S / 3600)
        if self.gpus is not None and not self.gpus:
            raise UsageError("--gpus names no GPU; give numbers within CUDA_VISIBLE_DEVICES, e.g. --gpus 0,1")

    @property
    def is_here(self) -> bool:
        """Whether the ranks are to be on the notebook's machine."""
        return all(getattr(self, name) is None for name in _ELSEWHERE)

    @property
    def keep(self) -> Keep | None:
        """How the session is kept; None: it ends with its notebook."""
        if self.keep_h is None:
            return None
        return Keep(
            alone_s=self.keep_h * 3600,
            idle_s=limits.idle_s(),
            output_bytes=round(self.keep_output_mb * 1e6),
            recording_bytes=round(self.keep_recording_mb * 1e6),
        )

    @property
    def port_range(self) -> range:
        """The ports that were asked for, or any."""
        return ports.ANY if self.ports is None else ports.parse(self.ports)

    @property
    def ranks_of_hosts(self) -> dict[str, int | None]:
        """The hosts by name, in the order of their ranks, with how many each is to have; None: it was not said."""
        return dict(self.hosts) if isinstance(self.hosts, Mapping) else {}

    def with_defaults(self, defaults: Defaults | None = None) -> StartOptions:
        """The same, with the hosts that names of the site's file stand for, and its arguments for Slurm.

        Args:
            defaults: of the site; None: those of its file.

        Raises:
            UsageError: the file, or what a name of it stands for, is wrong; or its hosts are to have more or fewer
                ranks than was asked for.
        """
        defaults = file.read() if defaults is None else defaults
        hosts = names.expand(self.ranks_of_hosts, defaults) if self.hosts is not None else None
        if hosts is not None:
            host_list.check_sum(hosts, self.world_size)
        slurm = None if self.slurm is None else names.slurm_line(self.slurm, defaults)
        return replace(self, hosts=hosts, slurm=slurm)

    def differing(self, running: StartOptions) -> list[str]:
        """List the options that running ranks were started with and that differ from these. The limit of the start
        does not count, and if these options name no number of ranks, any number fits.

        Args:
            running: the options of the running ranks.

        Example:
            >>> StartOptions(world_size=2).differing(StartOptions(world_size=4, timeout_s=60))
            ['world_size']
        """
        asked = replace(self, timeout_s=running.timeout_s, world_size=self.world_size or running.world_size)
        names = [one.name for one in fields(self) if getattr(running, one.name) != getattr(asked, one.name)]
        # Ranks are numbered in the order of their hosts, which the comparison of two mappings ignores.
        is_other_order = list(running.ranks_of_hosts) != list(asked.ranks_of_hosts)
        return ["hosts", *names] if is_other_order and "hosts" not in names else names

    def written(self, name: str) -> str:
        """Return an option as on the line of `%ddp_start`.

        Args:
            name: of the field.

        Example:
            >>> StartOptions(grace_s=None).written("grace_s"), StartOptions().written("env")
            ('--grace off', 'no --env')
        """
        value = getattr(self, name)
        if name == "world_size":
            return "N not given" if value is None else f"{value} rank{'s' * (value != 1)}"
        option = "--" + name.removesuffix("_s").removesuffix("_h").removesuffix("_mb").replace("_", "-")
        if name in ("guard", "fold") and value is not None:
            return f"{option} {'on' if value else 'off'}"
        if value is None and name in ("grace_s", "hang_after_s"):
            return f"{option} off"
        if value is None or value is False or value == {}:
            return f"no {option}"
        if value is True:
            return option
        if name == "hosts":
            value = _written_hosts(self.ranks_of_hosts)
        elif name == "env":
            value = " ".join(f"{variable}={text}" for variable, text in value.items())
        elif name == "gpus":
            value = ",".join(value)
        elif name == "on_preempt":
            value = f"save {value}"
        elif isinstance(value, float):
            value = f"{value:g}"
        return f"{option} {value}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A line of `%ddp_start`."""

    options: StartOptions
    checks: bool = False  # only: nothing is to be started
    note: str = ""  # which defaults of the site it was given, in a sentence


def read(line: str) -> Asked:
    """Read the line of `%ddp_start`, with the defaults of the site.

    Raises:
        UsageError: says which option is wrong and how the line is to be written, or which line of the site's file.
    """
    defaults = file.read()
    _check_defaults(defaults)
    options, checks = _parse(line, defaults)
    return Asked(options=options, checks=checks, note=_note(options, parse(line), defaults))


def parse(line: str) -> StartOptions:
    """Read the line of `%ddp_start`, for itself.

    Raises:
        UsageError: says which option is wrong and how the line is to be written.

    Example:
        >>> parse("2 --gpus 3,4 --env A=1 B=2").env
        {'A': '1', 'B': '2'}
    """
    return _parse(line, Defaults())[0]


@functools.cache
def start_line() -> LineParser:
    """Return the declaration of the line of `%ddp_start`."""
    parser = LineParser("%ddp_start", "%ddp_start 4", "%ddp_start --hosts gpu1,gpu[3-5]:8 --sync .")
    add = parser.add_argument
    add("world_size", metavar="N", nargs="?", help="number of ranks; default: 1 per GPU, or 2-4 on CPUs")
    backends, live = "|".join(BACKENDS), "|".join(LIVE)
    add("--backend", metavar=backends, default="auto", help="auto (default): nccl with one GPU per rank, or gloo")
    add("--gpus", metavar="3,4|each|none", help="these GPUs; each: if there are enough; none: CPUs")
    add("--share-gpus", action="store_true", help="allow more ranks than GPUs")
    add("--env", metavar="K=V", nargs="+", action="extend", default=[], help="environment variables of the ranks")
    add("--timeout", metavar="S", default="120", help="limit of the start in seconds (120)")
    add("--live", metavar=live, default="auto", help="small live view under cells: widget or HTML (auto)")
    folded = "merge lines of ranks (on); off: in order of arrival"
    add("--fold", choices=("on", "off"), metavar="on|off", default="on", help=folded)
    add("--check", action="store_true", help="start nothing; compare the hosts and show mismatches")

    add = parser.add_argument_group("failures").add_argument
    add("--grace", metavar="S|off", default="3", help="stop the other ranks S seconds after a failure (3)")
    add("--hang-after", metavar="S|off", default="10", help="show which ranks wait for which after S seconds (10)")
    add("--guard", choices=("on", "off"), metavar="on|off", help="compare calls before collectives; default: with gloo")
    add("--heal", action="store_true", help="replace dead ranks before each cell, as %%ddp_heal")
    add("--on-preempt", nargs=2, metavar=("save", "DIR"), help="at SIGTERM or SIGUSR1, survive loops save and end")

    add = parser.add_argument_group("ranks on other machines").add_argument
    add("--hosts", metavar="NAME[:N],...", help="start ranks over ssh, N on each host")
    add("--slurm", metavar="ARGS", nargs="?", const="", help="start ranks with sbatch; no ARGS: in this allocation")
    add("--mpi", metavar="ARGS", help="start ranks with mpirun")
    add("--profile", metavar="NAME", help="start ranks with an ipyparallel profile's launcher")
    add("--client", metavar="profile=NAME", help="start ranks in the engines of an ipyparallel cluster")
    add("--python", metavar="PATH", help="Python interpreter on the hosts")
    add("--sync", metavar="DIR", help="first send this folder to hosts that do not share it")
    add("--sync-large", action="store_true", help="with --sync: also more than 1 GB or 20,000 files")
    add("--lease", metavar="S", default=f"{LEASE_S:g}", help=f"a silent host is lost after S seconds ({LEASE_S:g})")
    add("--ports", metavar="FIRST-LAST", help="listen for other machines on these ports only")

    add = parser.add_argument_group("ranks that outlive the notebook").add_argument
    hours, output, recording = (f"{one:g}" for one in (limits.HOURS, limits.OUTPUT_MB, limits.RECORDING_MB))
    add("--keep", metavar="HOURS", nargs="?", const=hours, help=f"keep ranks for HOURS without a notebook ({hours})")
    add("--keep-output", metavar="MB", default=output, help=f"output kept of each rank without a notebook ({output})")
    add("--keep-recording", metavar="MB", default=recording, help=f"recording kept of all ranks ({recording})")
    return parser


def _parse(line: str, defaults: Defaults) -> tuple[StartOptions, bool]:
    """The options, and whether they are only to be checked."""
    declared = start_line()
    given = declared.parse_line(line, _as_on_a_line(defaults))
    if all(getattr(given, name) is None for name in _ELSEWHERE):
        for name in ("python", "ports"):
            if getattr(given, name) == defaults.start.get(name):
                setattr(given, name, None)  # the site's, for other machines
    if given.on_preempt is not None and given.on_preempt[0] != "save":
        declared.error(f"--on-preempt {given.on_preempt[0]}: the only action is save DIR")
    n = given.world_size
    options = StartOptions(
        world_size=None if n is None else declared.number(int, "N", n, "whole number of ranks"),
        backend=given.backend,
        gpus=given.gpus,
        share_gpus=given.share_gpus,
        env=dict(_assignment(declared, word) for word in given.env),
        timeout_s=declared.number(float, "--timeout", given.timeout, "number of seconds"),
        grace_s=_seconds_or_off(declared, "--grace", given.grace),
        hang_after_s=_seconds_or_off(declared, "--hang-after", given.hang_after),
        guard=None if given.guard is None else given.guard == "on",
        heal=given.heal,
        live=given.live,
        fold=given.fold == "on",
        hosts=given.hosts,
        slurm=given.slurm,
        mpi=given.mpi,
        profile=given.profile,
        client=given.client,
        python=given.python,
        sync=given.sync,
        sync_large=given.sync_large,
        lease_s=declared.number(float, "--lease", given.lease, "number of seconds"),
        ports=given.ports,
        keep_h=None if given.keep is None else declared.number(float, "--keep", given.keep, "number of hours"),
        keep_output_mb=declared.number(float, "--keep-output", given.keep_output, "number of megabytes"),
        on_preempt=None if given.on_preempt is None else given.on_preempt[1],
        keep_recording_mb=declared.number(float, "--keep-recording", given.keep_recording, "number of megabytes"),
    )
    return options.with_defaults(defaults), given.check


def _as_on_a_line(defaults: Defaults) -> dict[str, object]:
    """What the parser is to take where the line says nothing."""
    words: dict[str, object] = {name.removesuffix("_s"): value for name, value in defaults.start.items()}
    words |= {name: str(value) for name, value in words.items() if type(value) in (int, float)}
    for name in {"guard", "fold"} & words.keys():
        words[name] = "on" if words[name] else "off"
    if "env" in words:
        words["env"] = [f"{name}={value}" for name, value in defaults.start["env"].items()]
    return words


def _check_defaults(defaults: Defaults) -> None:
    """Raise UsageError for a line of the file that asks for what cannot be."""
    for name, value in defaults.start.items():
        given: dict[str, Any] = {name: None if value == "off" else value}
        try:
            StartOptions(hosts="any", **given)
        except UsageError as error:
            defaults.refuse("start", name, str(error))
    for name in defaults.hosts:
        names.group(name, defaults)


def _note(options: StartOptions, alone: StartOptions, defaults: Defaults) -> str:
    """What the defaults of the site have changed, in a line; "": nothing."""
    changed = {
        one.name: getattr(options, one.name)
        for one in fields(options)
        if getattr(options, one.name) != getattr(alone, one.name)
    }
    if "hosts" in changed:
        changed["hosts"] = _written_hosts(options.ranks_of_hosts)
    said = [f"{name} {value}" for name, value in changed.items()]
    said += [f"by {defaults.ssh}"] * bool(defaults.ssh and options.hosts)
    return f"defaults of {defaults.path}: {', '.join(said)}" if said else ""


def _written_hosts(hosts: Mapping[str, int | None]) -> str:
    return ",".join(host if n is None else f"{host}:{n}" for host, n in hosts.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _seconds_or_off(parser: LineParser, name: str, text: str) -> float | None:
    return None if text == "off" else parser.number(float, name, text, "number of seconds or off")


def _assignment(parser: LineParser, word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        parser.error(f"--env takes NAME=VALUE, not {word!r} (the number of ranks comes first)")
    return name, value
