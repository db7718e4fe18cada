"""The lines of magics: options as on a command line, and errors that say how to write the line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection
from typing import NoReturn, TypeVar

from ddp_notebook.errors import UsageError

_Number = TypeVar("_Number", int, float)
_MAY_BEGIN_WITH_A_MINUS = ("--ranks", "--slurm", "--mpi")  # their values


class LineParser(argparse.ArgumentParser):
    """An argument parser for the line of a magic.

    Args:
        usage: how to write the line; its first word is the magic.
    """

    def __init__(self, usage: str) -> None:
        super().__init__(prog=usage.split()[0], add_help=False, allow_abbrev=False)
        self.usage_line = usage

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nusage: {self.usage_line}")

    def parse_line(self, line: str) -> argparse.Namespace:
        """The options on a line.

        Raises:
            UsageError: says what is wrong, and how to write the line.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{error}: {line!r}")
        return self.parse_args(_with_signed_values(words, self._option_string_actions))

    def number(self, kind: type[_Number], name: str, text: str, what: str) -> _Number:
        """The number that an option was given.

        Args:
            what: what it counts, for the error.
        """
        try:
            return kind(text)
        except ValueError:
            self.error(f"{name} is {text!r}, which is no {what}")


def _with_signed_values(words: list[str], own: Collection[str]) -> list[str]:
    """Write `--ranks -2:` as `--ranks=-2:`: argparse takes a value that begins with a minus for an option.

    Args:
        words: of the line.
        own: the options that the line may have.
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _MAY_BEGIN_WITH_A_MINUS and word.partition("=")[0] not in own:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
