"""What the file's names of hosts and its arguments for Slurm make of what was asked for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.defaults.file import Defaults
from ddp_notebook.launch.ways import host_list


def expand(asked: Mapping[str, int | None], defaults: Defaults) -> dict[str, int | None]:
    """The hosts that were asked for, with those that a name of the file stands for in its place.

    Args:
        asked: hosts with their numbers of ranks; None: it was not said. A number at a name is that of each host.
        defaults: of the site.

    Raises:
        UsageError: a name stands for what is no host, or a host comes twice.

    Example:
        >>> expand({"lab": None, "login": 1}, Defaults(hosts={"lab": "gpu[1-2]:8"}))
        {'gpu1': 8, 'gpu2': 8, 'login': 1}
    """
    hosts: dict[str, int | None] = {}
    named: dict[str, str] = {}  # by host, what has named it
    for name, count in asked.items():
        members = group(name, defaults) if name in defaults.hosts else {name: None}
        for member, its in members.items():
            if member in hosts:
                group_name = name if name in defaults.hosts else named[member]
                raise UsageError(f"--hosts {','.join(asked)} has {member} twice; {group_name} stands for it too")
            hosts[member], named[member] = its if count is None else count, name
        if len(hosts) > host_list.MOST:
            raise UsageError(f"--hosts names more than {host_list.MOST:,} hosts, which is the limit")
    return hosts


def group(name: str, defaults: Defaults) -> dict[str, int | None]:
    """The hosts that a name of the file stands for.

    Raises:
        UsageError: they cannot be read; says which line.
    """
    try:
        return host_list.parse(defaults.hosts[name])
    except UsageError as error:
        defaults.refuse("hosts", name, str(error).removeprefix("--hosts: ").replace("--hosts", name, 1))


def slurm_line(asked: str, defaults: Defaults) -> str:
    """Arguments of sbatch: those of the file, then those that were asked for, of which Slurm takes the last. None where
    none were asked for: then it is an allocation that is there already.

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
