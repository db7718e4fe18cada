"""Parser for the lines of magics. Each option is declared once, for usage, help, completion and errors."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from ddp_notebook.errors import UsageError

_Number = TypeVar("_Number", int, float)
_MAY_BEGIN_WITH_A_MINUS = ("--ranks", "--slurm", "--mpi")  # options whose values may start with a minus
_HELP = ("-h", "--help")
_LONGEST_USAGE = 95  # characters; above that, the usage line lists no optional arguments
_WIDEST_NAME = 21  # characters of the left column of a help text
WIDTH = 78  # characters per line of help; JupyterLab shows as many on a page of 800 pixels


class HelpRequested(Exception):
    """Raised by `LineParser.parse_line` if the line has `--help`."""


class LineParser(argparse.ArgumentParser):
    """Declaration and parser of a magic's line.

    Args:
        magic: name with the percent signs.
        examples: lines shown in the help.
        values: returns the completions of a positional argument.

    Example:
        >>> parser = LineParser("%ddp_demo", "%ddp_demo 2 --fast")
        >>> _ = parser.add_argument("count", metavar="N", nargs="?", help="number of runs")
        >>> _ = parser.add_argument("--fast", action="store_true", help="skip the checks")
        >>> parser.usage_line
        '%ddp_demo [N] [--fast]'
    """

    def __init__(self, magic: str, *examples: str, values: Callable[[], Iterable[str]] = tuple) -> None:
        super().__init__(prog=magic, add_help=False, allow_abbrev=False)
        self.examples = examples
        self.values = values
        self.add_argument(*_HELP, nargs=0, action=_RaiseHelp, help="show this help")

    @property
    def usage_line(self) -> str:
        """Syntax of the line."""
        declared = [action for action in self._actions if not isinstance(action, _RaiseHelp)]
        line = " ".join([self.prog, *map(_syntax, declared)])
        if len(line) <= _LONGEST_USAGE:
            return line
        needed = [_syntax(action) for action in declared if not action.option_strings or action.required]
        return " ".join([self.prog, *needed, "[option ...]"])

    def help_text(self, description: str) -> str:
        """Return the help: usage, description, a line for each argument and option, and examples.

        Args:
            description: what the magic does.
        """
        names = {action: _syntax(action, bare=True) for action in self._actions}
        width = min(_WIDEST_NAME, max(map(len, names.values())))
        paragraphs = [textwrap.fill(" ".join(one.split()), WIDTH) for one in description.split("\n\n")]
        lines = [f"usage: {self.usage_line}", "", "\n\n".join(paragraphs)]
        for group in self._action_groups:
            if not group._group_actions:
                continue
            lines += ["", f"{group.title}:"]
            for action in group._group_actions:
                # argparse needs doubled percent signs
                name, text = names[action], (action.help or "").replace("%%", "%")
                lines.append(f"  {name:{width}}  {text}" if len(name) <= width else f"  {name}\n{'':{width + 4}}{text}")
        if self.examples:
            lines += ["", f"example{'s' * (len(self.examples) > 1)}:", *(f"  {one}" for one in self.examples)]
        return "\n".join(lines)

    def completions(self, words: list[str]) -> list[str]:
        """Return the words that may follow on the line.

        Args:
            words: the complete words of the line after the magic.

        Example:
            >>> LineParser("%ddp_demo").completions([])
            ['--help']
        """
        options = self._option_string_actions
        if words and (last := options.get(words[-1])) is not None and last.nargs != 0:
            alternatives = _alternatives(last)
            if alternatives or last.nargs != "?":
                return alternatives
        used = {options[word] for word in words if word in options}
        unused = [action for action in self._actions if action not in used]
        names = [action.option_strings[-1] for action in unused if action.option_strings and not action.required]
        fixed = [value for action in unused if not action.option_strings for value in _alternatives(action)]
        return [*fixed, *self.values(), *sorted(names)]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\nusage: {self.usage_line}\n%ddp_help {self.prog.lstrip('%')} explains each option")

    def option(self, name: str) -> argparse.Action | None:
        """Return the option with this name, or None if the line has no such option."""
        return self._option_string_actions.get(name)

    def parse_line(self, line: str, defaults: Mapping[str, Any] | None = None) -> argparse.Namespace:
        """Parse a line.

        Args:
            line: the line without the magic.
            defaults: values by `dest` that replace the declared defaults.

        Raises:
            UsageError: the line is invalid; the message shows the mistake and the syntax.
            HelpRequested: the line contains `--help`.
        """
        try:
            words = shlex.split(line)
        except ValueError as error:
            self.error(f"{error}: {line!r}")
        given, unknown = self.parse_known_args(
            _with_signed_values(words, self._option_string_actions), argparse.Namespace(**(defaults or {}))
        )
        if unknown:
            close = [self._close_to(word) for word in unknown]
            meant = f"; did you mean {', '.join(filter(None, close))}?" if any(close) else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return given

    def _close_to(self, word: str) -> str:
        """Return the option that a mistyped word is closest to, or ""."""
        if not word.startswith("-"):
            return ""
        name = word.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7)
        return close[0] if close and close[0] not in _HELP else ""

    def number(self, kind: type[_Number], name: str, text: str, what: str) -> _Number:
        """Return the value of an option as a number.

        Args:
            what: description of the number for the error, such as "number of seconds".
        """
        try:
            return kind(text)
        except ValueError:
            article = "an" if what[0] in "aeiou" else "a"
            self.error(f"{name} must be {article} {what}, got {text!r}")


def line_of(build: Callable[[], LineParser]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a magic with the declaration of its line, for `--help`, `%magic?` and completion.

    Args:
        build: returns the declaration; all calls return the same object.

    Example:
        >>> @line_of(functools.cache(lambda: LineParser("%ddp_demo", "%ddp_demo")))
        ... def ddp_demo(self, line):
        ...     "Show something."
        >>> print(ddp_demo.getdoc())
        usage: %ddp_demo
        <BLANKLINE>
        Show something.
        <BLANKLINE>
        options:
          --help  show this help
        <BLANKLINE>
        example:
          %ddp_demo
    """

    def decorate(magic: Callable[..., None]) -> Callable[..., None]:
        def help_text() -> str:
            return build().help_text(inspect.getdoc(magic) or "")

        @functools.wraps(magic)
        def with_help(self: Any, line: str, *cell: Any) -> None:
            try:
                if line.strip() in _HELP:  # first, because the line may be code
                    raise HelpRequested
                magic(self, line, *cell)
            except HelpRequested:
                print(help_text())

        with_help.getdoc = help_text  # type: ignore[attr-defined]  # IPython shows it for `%magic?`
        with_help.parser = build  # type: ignore[attr-defined]
        return with_help

    return decorate


class _RaiseHelp(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> None:
        raise HelpRequested


def _syntax(action: argparse.Action, *, bare: bool = False) -> str:
    """Return the syntax of an argument or option.

    Args:
        bare: without the brackets of optional parts.
    """
    names = action.metavar or action.dest.upper()
    name = names if isinstance(names, str) else " ".join(names)
    of_nargs: Mapping[object, str] = {0: "", "?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}
    value = of_nargs.get(action.nargs, name)
    if not action.option_strings:
        return name if bare else value
    if action.required:  # written without its name, see `%%on_ranks`
        return name
    text = f"{action.option_strings[-1]} {value}".rstrip()
    return text if bare else f"[{text}]"


def _alternatives(action: argparse.Action) -> list[str]:
    """Return the fixed values that an argument may have: `auto`, `html` and `off` for "auto|html|off"."""
    names = action.metavar if isinstance(action.metavar, str) else ""
    return [value for value in names.split("|") if value.isalpha() and value.islower()] if "|" in names else []


def read_expression(parser: LineParser, line: str) -> tuple[str | None, str]:
    """Return the value of `--ranks`, or None, and the rest of the line as an expression.

    Args:
        parser: declaration of the line, for error messages.

    Raises:
        UsageError: the expression is missing, or the line has another option.

    Example:
        >>> parser = LineParser("%ddp_peek", "%ddp_peek x")
        >>> read_expression(parser, "--ranks 0,2 x[-1] - 1"), read_expression(parser, "history[-5:]")
        (('0,2', 'x[-1] - 1'), (None, 'history[-5:]'))
        >>> read_expression(parser, "x[-1] - 1 --ranks -1:")
        ('-1:', 'x[-1] - 1')
    """
    ranks, expression = None, line.strip()
    if option := re.match(r"--ranks[ =](\S+)\s*", expression):
        ranks, expression = option[1], expression[option.end() :]
    elif option := re.search(r"\s+--ranks[ =]([^\s'\")\]}]+)$", expression):
        ranks, expression = option[1], expression[: option.start()]
    if not expression or expression.startswith("--"):
        parser.error("an expression is missing, such as history[-5:]")
    return ranks, expression


def _with_signed_values(words: list[str], own: Collection[str]) -> list[str]:
    """Rewrite `--ranks -2:` as `--ranks=-2:`, because argparse would treat the value as an option.

    Args:
        words: words of the line.
        own: options that the line may have.
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _MAY_BEGIN_WITH_A_MINUS and word.partition("=")[0] not in own:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def refuse_arguments(magic: str, line: str) -> None:
    """Check that a magic's line is empty.

    Raises:
        UsageError: the line is not empty.
    """
    if line.strip():
        other = ", or %ddp_stop and %ddp_start with other options" if magic == "%ddp_restart" else ""
        raise UsageError(f"{magic} takes no {line.strip()!r}; write {magic} alone{other}")
