"""The defaults file: read when ranks are started. An error names the wrong line.

[start]                       # options of %ddp_start; options on the line win
backend = "gloo"
timeout_s = 300
python = "/envs/train/bin/python"
env = { NCCL_DEBUG = "WARN" }

[hosts]                       # names for --hosts
lab = ["gpu1:8", "gpu2:8"]
rack = "node[01-16]"

[slurm]                       # arguments of sbatch, placed before those of --slurm
account = "physics"
partition = "a100"
exclusive = true

[ssh]
command = "ssh -F /etc/ssh/cluster_config"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.option_kinds import OFF
from ddp_notebook.launch.options import TABLE
from ddp_notebook.records import shortages

VARIABLE = "DDP_NOTEBOOK_CONFIG"  # path of another file
_NAME = "ddp_notebook.toml"
# Options of a start that may be in the file: their types, and an example of each.
_START: Mapping[str, tuple[tuple[type, ...], str]] = {
    option.name: (option.kind.toml_types, option.in_file) for option in TABLE if option.in_file
}
_SSH: Mapping[str, tuple[tuple[type, ...], str]] = {"command": ((str,), 'command = "ssh -F FILE"')}
_HOSTS = 'lab = ["gpu1:8", "gpu2:8"], or lab = "gpu[1-2]:8"'
_SLURM = 'account = "physics", gpus-per-node = 8, exclusive = true'
_AT_LINE = re.compile(r" \(at line (\d+), column \d+\)$")
_AT_END = " (at end of document)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Content of the file; empty if the file does not exist.

    Attributes:
        path: of the file; None if there is none.
        text: of the file.
        start: options by their names in `start`.
        hosts: hosts for each name that `--hosts` accepts.
        slurm: arguments of sbatch, by their long names.
        ssh: command to run instead of ssh; "" for ssh.
    """

    path: Path | None = None
    text: str = ""
    start: Mapping[str, Any] = field(default_factory=dict)
    hosts: Mapping[str, str | list[str]] = field(default_factory=dict)
    slurm: Mapping[str, str | int | bool] = field(default_factory=dict)
    ssh: str = ""

    def refuse(self, section: str, key: str, why: str) -> NoReturn:
        """Raise UsageError for a line.

        Args:
            section: of the line.
            key: its first word; "" for the section's own line.
            why: the reason, with a correct form.
        """
        line = _line_of(self.text, section, key)
        raise UsageError(f"{self.path}, line {line}: {why}")


def path() -> Path:
    """Return the path of the file, which may not exist."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / _NAME


def read() -> Defaults:
    """Read the file.

    Raises:
        UsageError: it cannot be read, or a line is wrong; the error names the line and a correct form.
    """
    where = path()
    try:
        text = where.read_text(encoding="utf-8")
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise UsageError(f"{VARIABLE} must be an existing file, got {where}; correct it or unset it") from None
        return Defaults()
    except (OSError, UnicodeDecodeError) as error:
        if why := shortages.sentences("this process", shortages.kinds(error)):
            raise UsageError(f"{where} cannot be read: {'; '.join(why)}") from error
        raise UsageError(f"{where} cannot be read: {error}; correct it, or set {VARIABLE} to another file") from error
    return parse(text, where)


def parse(text: str, where: Path) -> Defaults:
    """Parse the text of the file.

    Args:
        text: of the file, in TOML.
        where: path of the file.

    Raises:
        UsageError: a line is wrong.

    Example:
        >>> parse('[hosts]\\nlab = "gpu[1-4]"', Path("site.toml")).hosts
        {'lab': 'gpu[1-4]'}
        >>> parse('[start]\\nbackends = "gloo"', Path("site.toml"))
        Traceback (most recent call last):
        ddp_notebook.errors.UsageError: site.toml, line 2: [start] has no 'backends'; it may have backend, env, ...
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_not_toml(str(error), text, where)) from error
    read = Defaults(path=where, text=text)
    sections = ("start", "hosts", "slurm", "ssh")
    for name, section in found.items():
        if name not in sections:
            known = ", ".join(f"[{one}]" for one in sections)
            read.refuse("", name, f"unknown section {name!r}; the sections are {known}")
        if not isinstance(section, dict):
            read.refuse("", name, f"{name!r} is a section: write [{name}] on a line of its own, and its options below")
    start, hosts, slurm, ssh = (found.get(name, {}) for name in sections)
    _check(read, "start", start, _START)
    _check(read, "ssh", ssh, _SSH)
    for key, value in hosts.items():
        if not (isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))):
            read.refuse("hosts", key, f"{key} must name hosts; write it as {_HOSTS}")
    for key, value in slurm.items():
        if not isinstance(value, str | int):  # bool is a subclass of int
            read.refuse("slurm", key, f"{key} is not an argument of sbatch; write it as {_SLURM}")
    for name, value in start.get("env", {}).items():
        if not isinstance(value, str | int | float):
            read.refuse("start", "env", f"env sets {name} to {value!r}; write it as {_START['env'][1]}")
    for key, (types, form) in _START.items():  # the only text for a numeric option is "off"
        if int in types and isinstance(start.get(key), str) and start[key] != OFF:
            read.refuse("start", key, f"{key} is {start[key]!r}; write it as {form}")
    return Defaults(path=where, text=text, start=start, hosts=hosts, slurm=slurm, ssh=ssh.get("command", ""))


def _check(
    read: Defaults, section: str, given: Mapping[str, Any], known: Mapping[str, tuple[tuple[type, ...], str]]
) -> None:
    for key, value in given.items():
        if key not in known:
            read.refuse(section, key, f"[{section}] has no {key!r}; it may have {', '.join(known)}")
        types, form = known[key]
        if type(value) not in types:  # not isinstance: bool is a subclass of int
            read.refuse(section, key, f"{key} is {value!r}; write it as {form}")


def _not_toml(words: str, text: str, where: Path) -> str:
    """Return the error of tomllib, with the line number in the form of the other errors."""
    at = _AT_LINE.search(words)
    line = int(at[1]) if at else max(1, len(text.splitlines()))
    said = _AT_LINE.sub("", words).removesuffix(_AT_END)
    written = text.splitlines()[line - 1].strip() if text.splitlines()[line - 1 :] else ""
    return f'{where}, line {line}: {written!r} is not valid TOML: {said}; put text in quotes, as in backend = "gloo"'


def _line_of(text: str, section: str, key: str) -> int:
    """Return the line number of a key; that of its section if the key is written in another form.

    Args:
        text: of the file, which is valid TOML.
        section: of the key; "" if the key is itself a section.
        key: to be found.
    """
    header, path = re.compile(r"\s*\[\s*(.+?)\s*\]"), ".".join(filter(None, [section, key]))
    first_word = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w-])+(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-])+)*)\s*=""")
    now, of_section = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        found = None
        if head := header.match(line):
            found = now = _bare(head[1])
        elif word := first_word.match(line):
            found = f"{now}.{_bare(word[1])}".lstrip(".")
        if found is None:
            continue
        if found == path or found.startswith(f"{path}."):
            return number
        if found == section:
            of_section = number
    return of_section


def _bare(key: str) -> str:
    """Return a key without its quotes and spaces."""
    return re.sub(r"""["']|\s*(?=\.)|(?<=\.)\s*""", "", key)
