"""Kinds of options: how a value is written on a line and in the defaults file, and which values are accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.transports import host_list, ports
from ddp_notebook.records.words import OF_EACH_RANK

WEEK_S = 7 * 24 * 3600.0
OFF = "off"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An option with one text as its value.

    Attributes:
        metavar: the value in usage lines.
    """

    metavar: str = ""

    @property
    def toml_types(self) -> tuple[type, ...]:
        """The types that a value of the defaults file may have."""
        return (str,)

    def argparse(self) -> dict[str, Any]:
        """Return keywords of `ArgumentParser.add_argument`."""
        return {"metavar": self.metavar}

    def read(self, flag: str, text: Any) -> Any:
        """Convert the text that argparse has read.

        Args:
            flag: the option as written on the line.
            text: a string, or a list of strings.

        Raises:
            ValueError: the text cannot be converted; the message names the flag.
        """
        return text

    def from_toml(self, value: Any) -> Any:
        """Convert a value of the defaults file."""
        return value

    def merged(self, default: Any, given: Any) -> Any:
        """Return the value if both the defaults file and the line have one."""
        return given

    def check(self, flag: str, value: Any) -> None:
        """Raise UsageError for a value outside the limits.

        Args:
            flag: the option as written on the line.
            value: converted, or given by a script.
        """

    def write(self, flag: str, value: Any) -> str:
        """Return the option as written on the line.

        Args:
            flag: the option as written on the line.
            value: None if the option is absent.
        """
        return f"no {flag}" if value is None else f"{flag} {self.text(value)}".rstrip()

    def text(self, value: Any) -> str:
        """Return a value as written on the line."""
        return str(value)

    @property
    def limits(self) -> str:
        """The accepted values in words, for the documentation; "" if every text is accepted."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Flag(Kind):
    """An option without a value."""

    @property
    def toml_types(self) -> tuple[type, ...]:
        return (bool,)

    def argparse(self) -> dict[str, Any]:
        return {"action": "store_true", "default": None}

    def write(self, flag: str, value: Any) -> str:
        return flag if value else f"no {flag}"


@dataclass(frozen=True, kw_only=True)
class OnOff(Kind):
    """An option whose value is `on` or `off`."""

    metavar: str = "on|off"

    @property
    def toml_types(self) -> tuple[type, ...]:
        return (bool,)

    def argparse(self) -> dict[str, Any]:
        return {"metavar": self.metavar, "choices": ("on", OFF)}

    def read(self, flag: str, text: Any) -> Any:
        return text == "on"

    def text(self, value: Any) -> str:
        return "on" if value else OFF


@dataclass(frozen=True, kw_only=True)
class ChoiceKind(Kind):
    """One of a fixed set of words.

    Attributes:
        values: the words.
        what: name of the choice, for the error.
    """

    values: tuple[str, ...]
    what: str

    def argparse(self) -> dict[str, Any]:
        return {"metavar": "|".join(self.values)}

    def check(self, flag: str, value: Any) -> None:
        if value not in self.values:
            raise UsageError(f"unknown {self.what} {value!r}; choose one of {', '.join(self.values)}")

    @property
    def limits(self) -> str:
        return " or ".join(f"`{value}`" for value in self.values)


@dataclass(frozen=True, kw_only=True)
class NumberKind(Kind):
    """A number with a unit.

    Attributes:
        unit: in the plural.
        example: a usual value.
        least: the smallest value; it is excluded if it is 0 and `is_positive` is set.
        most: the largest value.
        is_positive: 0 is refused.
        may_be_off: `off`, or None in a script, is accepted as well.
        note: end of the error.
        const: the value if the option stands without one; None if it needs one.
    """

    unit: str
    example: float
    least: float = 0.0
    most: float = math.inf
    is_positive: bool = False
    may_be_off: bool = False
    note: str = ""
    const: float | None = None

    def argparse(self) -> dict[str, Any]:
        metavar = f"{self.metavar}|{OFF}" if self.may_be_off else self.metavar
        return {"metavar": metavar} | ({} if self.const is None else {"nargs": "?", "const": f"{self.const:g}"})

    @property
    def toml_types(self) -> tuple[type, ...]:
        return (int, float, str) if self.may_be_off else (int, float)

    def read(self, flag: str, text: Any) -> Any:
        if self.may_be_off and text == OFF:
            return None
        try:
            return float(text)
        except ValueError:
            off = " or off" if self.may_be_off else ""
            raise ValueError(f"{flag} must be a number of {self.unit}{off}, got {text!r}") from None

    def from_toml(self, value: Any) -> Any:
        return None if value == OFF else float(value)

    def check(self, flag: str, value: Any) -> None:
        if value is None and self.may_be_off:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and self.least <= value <= self.most and not (self.is_positive and value == 0)):
            got = f"{value:g}" if isinstance(value, float) else repr(value)
            off = ", or off" if self.may_be_off else ""
            raise UsageError(f"{flag} must be {self.limits}, e.g. {flag} {self.example:g}{off}, got {got}{self.note}")

    def write(self, flag: str, value: Any) -> str:
        return f"{flag} {OFF}" if value is None and self.may_be_off else super().write(flag, value)

    def text(self, value: Any) -> str:
        return f"{value:g}"

    @property
    def limits(self) -> str:
        least = f"a positive number of {self.unit}" if self.is_positive else f"a number of {self.unit}"
        if not self.is_positive:
            least += f" from {self.least:g} up"
        if self.most == math.inf:
            return least
        return f"{least}, at most {'a week' if self.most == WEEK_S else f'{self.most:g}'}"


@dataclass(frozen=True, kw_only=True)
class RanksKind(Kind):
    """A number of ranks, written without a flag."""

    metavar: str = "N"

    def argparse(self) -> dict[str, Any]:
        return {"metavar": self.metavar, "nargs": "?"}

    def read(self, flag: str, text: Any) -> Any:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"N must be a whole number of ranks, got {text!r}") from None

    def check(self, flag: str, value: Any) -> None:
        if value is None:
            return
        if type(value) is not int:
            raise UsageError(f"world_size must be a positive integer, e.g. start(2), got {value!r}")
        if value < 1:
            raise UsageError(f"N must be at least 1, as in %ddp_start 2, got {value}")
        if value > host_list.MOST:
            raise UsageError(f"a session has at most {host_list.MOST:,} ranks, got N = {value}")

    def write(self, flag: str, value: Any) -> str:
        return "N not given" if value is None else f"{value} rank{'s' * (value != 1)}"

    @property
    def limits(self) -> str:
        return f"1 to {host_list.MOST:,}"


@dataclass(frozen=True, kw_only=True)
class Gpus(Kind):
    """GPUs by number or UUID, or the words `each` and `none`."""

    metavar: str = "3,4|each|none"

    def check(self, flag: str, value: Any) -> None:
        if value is not None and not value:
            raise UsageError(
                f"{flag} must name at least one GPU, by its number within CUDA_VISIBLE_DEVICES, e.g. {flag} 0,1"
            )

    def text(self, value: Any) -> str:
        return ",".join(value)


@dataclass(frozen=True, kw_only=True)
class Environment(Kind):
    """Environment variables."""

    metavar: str = "K=V"

    @property
    def toml_types(self) -> tuple[type, ...]:
        return (dict,)

    def argparse(self) -> dict[str, Any]:
        return {"metavar": self.metavar, "nargs": "+", "action": "extend"}

    def read(self, flag: str, text: Any) -> Any:
        found: dict[str, str] = {}
        for word in text:
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise ValueError(f"{flag} takes NAME=VALUE, not {word!r} (the number of ranks comes first)")
            found[name] = value
        return found

    def merged(self, default: Any, given: Any) -> Any:
        return {**default, **given}

    def check(self, flag: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"env must map names to values, e.g. env={{'OMP_NUM_THREADS': '2'}}, got {value!r}")
        if fixed := [name for name in value if name in OF_EACH_RANK]:
            raise UsageError(f"env sets {', '.join(fixed)}, which every rank gets from the session; leave it out")

    def write(self, flag: str, value: Any) -> str:
        return super().write(flag, value or None)

    def text(self, value: Any) -> str:
        return " ".join(f"{name}={text}" for name, text in value.items())


@dataclass(frozen=True, kw_only=True)
class HostList(Kind):
    """Hosts, each with an optional number of ranks."""

    metavar: str = "NAME[:N],..."

    def check(self, flag: str, value: Any) -> None:
        if (total := sum(count or 1 for count in value.values())) > host_list.MOST:
            raise UsageError(f"a session has at most {host_list.MOST:,} ranks, and {flag} asks for {total:,}")

    def text(self, value: Any) -> str:
        return ",".join(host if count is None else f"{host}:{count}" for host, count in value.items())


@dataclass(frozen=True, kw_only=True)
class Ports(Kind):
    """A range of ports."""

    metavar: str = "FIRST-LAST"

    def check(self, flag: str, value: Any) -> None:
        if value is not None:
            ports.parse(value)


@dataclass(frozen=True, kw_only=True)
class SaveFolder(Kind):
    """A folder, written as `save DIR`."""

    def argparse(self) -> dict[str, Any]:
        return {"metavar": ("save", "DIR"), "nargs": 2}

    def read(self, flag: str, text: Sequence[str]) -> Any:
        action, folder = text
        if action != "save":
            raise ValueError(f"{flag} must be save DIR, got {action} {folder}")
        return folder

    def text(self, value: Any) -> str:
        return f"save {value}"


@dataclass(frozen=True, kw_only=True)
class ArgumentsKind(Kind):
    """Arguments for another command, passed on unchanged.

    Attributes:
        may_be_empty: the option may stand without arguments.
    """

    metavar: str = "ARGS"
    may_be_empty: bool = False

    def argparse(self) -> dict[str, Any]:
        return {"metavar": self.metavar} | ({"nargs": "?", "const": ""} if self.may_be_empty else {})
