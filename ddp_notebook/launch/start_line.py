"""The line of `%ddp_start`: its parser, made from the table of options, with the defaults of the site."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.defaults import file
from ddp_notebook.launch.defaults.file import Defaults
from ddp_notebook.launch.options import (
    BY_NAME,
    ELSEWHERE,
    GENERAL,
    LOCAL,
    TABLE,
    Keep,
    Option,
    Slurm,
    Ssh,
    StartOptions,
)
from ddp_notebook.launch.transports import host_list
from ddp_notebook.line_parser import LineParser


def expand_hosts(asked: Mapping[str, int | None], defaults: Defaults) -> dict[str, int | None]:
    """Return the requested hosts, with names from the defaults file replaced by their hosts.

    Args:
        asked: hosts with their numbers of ranks; None if not given. A number at a name applies to each of its hosts.
        defaults: of the site.

    Raises:
        UsageError: a name does not stand for hosts, or a host occurs twice.

    Example:
        >>> expand_hosts({"lab": None, "login": 1}, Defaults(hosts={"lab": "gpu[1-2]:8"}))
        {'gpu1': 8, 'gpu2': 8, 'login': 1}
    """
    hosts: dict[str, int | None] = {}
    named: dict[str, str] = {}  # host -> the name that stands for it
    for name, count in asked.items():
        members = hosts_of_name(name, defaults) if name in defaults.hosts else {name: None}
        for member, its in members.items():
            if member in hosts:
                group_name = name if name in defaults.hosts else named[member]
                raise UsageError(f"--hosts {','.join(asked)} has {member} twice; {group_name} includes it already")
            hosts[member], named[member] = its if count is None else count, name
        if len(hosts) > host_list.MOST:
            raise UsageError(f"--hosts must name at most {host_list.MOST:,} hosts")
    return hosts


def hosts_of_name(name: str, defaults: Defaults) -> dict[str, int | None]:
    """Return the hosts that a name of the defaults file stands for.

    Raises:
        UsageError: they cannot be parsed; the error names the line.
    """
    try:
        return host_list.parse(defaults.hosts[name])
    except UsageError as error:
        defaults.refuse("hosts", name, str(error).removeprefix("--hosts: ").replace("--hosts", name, 1))


def slurm_line(asked: str, defaults: Defaults) -> str:
    """Return arguments of sbatch: those of the defaults file, then the given ones, which take precedence.

    Returns "" if none were given: then the existing allocation is used.

    Example:
        >>> slurm_line("-N2", Defaults(slurm={"account": "physics", "exclusive": True, "gpus-per-node": 8}))
        '--account=physics --exclusive --gpus-per-node=8 -N2'
    """
    if not asked:
        return asked
    words = [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        for name, value in defaults.slurm.items()
        if value is not False
    ]
    return " ".join([*words, asked])


_KEEP = BY_NAME["keep.hours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLine:
    """Parsed line of `%ddp_start`.

    Attributes:
        options: with the defaults of the site.
        checks: compare the hosts and start nothing.
        note: one sentence that lists the defaults of the site; "" if none was used.
    """

    options: StartOptions
    checks: bool = False
    note: str = ""


def read(line: str) -> StartLine:
    """Read the line of `%ddp_start`, with the defaults of the site.

    Raises:
        UsageError: an option is wrong, or a line of the defaults file; the message says how to write it.
    """
    defaults = file.read()
    _check_defaults(defaults)
    options, checks = _parse(line, defaults)
    return StartLine(options=options, checks=checks, note=_note(options, parse(line), defaults))


def parse(line: str) -> StartOptions:
    """Read the line of `%ddp_start` without the defaults of the site.

    Raises:
        UsageError: an option is wrong; the message says how to write it.

    Example:
        >>> parse("2 --gpus 3,4 --env A=1 B=2").env
        {'A': '1', 'B': '2'}
    """
    return _parse(line, Defaults())[0]


def with_defaults(options: StartOptions, defaults: Defaults | None = None) -> StartOptions:
    """Replace host names of the defaults file by their hosts, and add its arguments for Slurm.

    Args:
        options: of a script or a line.
        defaults: None: those of the file.

    Raises:
        UsageError: the file is wrong, or its hosts have another number of ranks than asked for.
    """
    defaults = file.read() if defaults is None else defaults
    if isinstance(options.hosts, Ssh):
        hosts = expand_hosts(options.hosts.ranks, defaults)
        host_list.check_sum(hosts, options.world_size)
        return replace(options, hosts=replace(options.hosts, hosts=hosts))
    if isinstance(options.slurm, Slurm):
        arguments = slurm_line(options.slurm.arguments, defaults)
        return replace(options, slurm=replace(options.slurm, arguments=arguments))
    return options


@functools.cache
def start_line() -> LineParser:
    """Return the declaration of the line of `%ddp_start`."""
    parser = LineParser("%ddp_start", "%ddp_start 4", "%ddp_start --hosts gpu1,gpu[3-5]:8 --sync .")
    groups: dict[str, Any] = {GENERAL: parser}
    for option in TABLE:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        name = option.flag if option.flag.startswith("--") else option.dest
        groups[option.group].add_argument(name, help=option.help, **option.kind.argparse())
    parser.add_argument("--check", action="store_true", help="start nothing; compare the hosts and show mismatches")
    return parser


def _parse(line: str, defaults: Defaults) -> tuple[StartOptions, bool]:
    """Return the options, and whether the line has --check."""
    declared = start_line()
    given = declared.parse_line(line)
    values: dict[Option, Any] = {}
    for option in TABLE:
        text = getattr(given, option.dest)
        if text is not None:
            try:
                values[option] = option.kind.read(option.flag, text)
            except ValueError as error:
                declared.error(str(error))
    is_here = not any(BY_NAME[name] in values for name in ELSEWHERE)
    for name, value in defaults.start.items():
        option = BY_NAME[name]
        if is_here and LOCAL not in option.ways:
            continue
        converted = option.kind.from_toml(value)
        values[option] = option.kind.merged(converted, values[option]) if option in values else converted
    return with_defaults(_options(values), defaults), given.check


def _options(values: Mapping[Option, Any]) -> StartOptions:
    """Build the options of a start from values by their declaration.

    Raises:
        UsageError: options exclude each other, or a value is outside its limits.
    """
    by_owner: dict[type, dict[str, Any]] = {}
    for option, value in values.items():
        by_owner.setdefault(option.owner, {})[option.field] = value
    own = by_owner.pop(StartOptions, {})
    kept = by_owner.pop(Keep, None)
    if kept is not None:
        if _KEEP not in values:
            option = next(one for one in values if one.owner is Keep)
            written = option.kind.write(option.flag, values[option])
            raise UsageError(f"{option.flag} requires --keep, e.g. --keep 12 {written}")
        own["keep"] = Keep(**kept)
    asked = [name for name in ELSEWHERE if BY_NAME[name] in values]
    shared = {option.field: value for option, value in values.items() if option.ways == ELSEWHERE}
    if not asked:
        for option in values:
            if LOCAL not in option.ways:
                raise UsageError(f"{option.flag} works only with other machines; {option.advice}")
    for name in asked:
        option = BY_NAME[name]
        own[name] = option.owner(**{option.field: values[option]}, **shared)
    return StartOptions(**own)


def _check_defaults(defaults: Defaults) -> None:
    """Raise UsageError for a line of the file with a value outside its limits."""
    for name, value in defaults.start.items():
        option = BY_NAME[name]
        values = {option: option.kind.from_toml(value)}
        try:
            _options(values if LOCAL in option.ways else values | {BY_NAME["hosts"]: "any"})
        except UsageError as error:
            defaults.refuse("start", name, str(error))
    for name in defaults.hosts:
        hosts_of_name(name, defaults)


def _note(options: StartOptions, alone: StartOptions, defaults: Defaults) -> str:
    """Return a sentence that lists what the defaults of the site have changed.

    Args:
        options: with the defaults.
        alone: the options of the line alone.
        defaults: of the site.
    """
    used = [one.written(options) for one in TABLE if one.value(options) != one.value(alone)]
    used += [f"by {defaults.ssh}"] * bool(defaults.ssh and options.hosts)
    return f"defaults of {defaults.path}: {', '.join(used)}" if used else ""
