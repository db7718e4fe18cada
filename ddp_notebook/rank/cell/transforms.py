"""Transformation of a cell's text by IPython, before it is compiled.

Plain Python code is left unchanged. IPython searches its own syntax with Python's tokenizer, which is written in
Python. On each rank this would take longer than most one-line cells.

Line numbers stay those of the editor. IPython drops leading empty lines and joins continued lines of a command, so all
lines below would have too small numbers.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from IPython.core import prefilter
from IPython.core.autocall import IPyAutocall
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.macro import Macro

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import re

# A line that starts like a command, like `/f x` or like a prompt, or a blank line, which IPython empties.
_COMMAND = re.compile(r"\n[^\S\n]*(?:[%!,;/]|\.\.\.)|\n[ \t]+(?:\n|\Z)")
_ASSIGNED = re.compile(r"=\s*[%!]")  # `files = !ls`
_FIRST_WORD = re.compile(r"[\w.*]*")
_CALLED = IPyAutocall | Macro  # a line that consists of such a name, such as `exit`, calls the object


def install(shell: Any) -> None:
    """Make a shell's `transform_cell` preserve line numbers. `%%time` and `%%capture` use it too."""
    transform = shell.transform_cell
    plain = Plain(shell)

    def transform_cell(raw_cell: str) -> str:
        if plain.is_left(raw_cell):
            return raw_cell if raw_cell[-1] == "\n" else f"{raw_cell}\n"
        lines = raw_cell.splitlines()
        empty = sum(1 for _ in takewhile(lambda line: not line.strip(), lines))
        return "\n" * (empty % max(1, len(lines))) + str(transform(raw_cell))

    shell.transform_cell = transform_cell
    manager = shell.input_transformer_manager
    manager.token_transformers = [_keeping_lines(kind) for kind in getattr(manager, "token_transformers", [])]
    plain.accept()


def _keeping_lines(kind: type) -> type:
    """Return a transformer of commands (`!ls`, `x = %magic`) that adds empty lines for joined ones."""

    def transform(self: Any, lines: list[str]) -> list[str]:
        changed: list[str] = kind.transform(self, lines)  # type: ignore[attr-defined]  # a `TokenTransformBase`
        below = self.start_line + 1
        return [*changed[:below], *["\n"] * (len(lines) - len(changed)), *changed[below:]]

    return type(kind.__name__, (kind,), {"transform": transform})


class Plain:
    """Detects cells that a shell would leave unchanged.

    Args:
        shell: new IPython shell. Transformations added later are noticed.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._manager = shell.input_transformer_manager
        self._lines = shell.prefilter_manager
        self._checkers = list(self._lines.checkers)
        self._magics = shell.magics_manager.magics["line"]
        self._lazy_magics = getattr(shell.magics_manager, "lazy_magics", {})
        self._is_known = (
            type(self._manager) is TransformerManager
            and _steps(self._manager) == _steps(TransformerManager())
            and all(type(checker).__module__ == prefilter.__name__ for checker in self._checkers)
        )
        self.accept()

    def accept(self) -> None:
        """Accept the shell's current transformations as equivalent to those of IPython for unchanged cells."""
        self._cleanup, self._begins, self._commands = map(list, _steps(self._manager))

    def is_left(self, code: str) -> bool:
        """Return whether the shell leaves this code unchanged.

        May return False for code that it would leave unchanged.
        """
        manager, shell = self._manager, self._shell
        if (
            not self._is_known
            or manager.cleanup_transforms != self._cleanup
            or manager.line_transforms != self._begins
            or manager.token_transformers != self._commands
            or shell.input_transformers_post
            or may_have_commands(code)
        ):
            return False
        return "\n" in code[:-1] or self._is_plain_line(code)

    def _is_plain_line(self, line: str) -> bool:
        """Return whether IPython leaves a single line unchanged. It also checks the first word of a single line."""
        found = _FIRST_WORD.match(line)
        word = "" if found is None else found[0]
        return not (
            self._lines.transformers
            or self._lines.checkers != self._checkers
            or word in self._magics
            or word in self._lazy_magics
            or isinstance(self._shell.user_ns.get(word), _CALLED)
            or self._shell.autocall
        )


def may_have_commands(code: str) -> bool:
    """Return whether this code may contain IPython syntax or empty lines that IPython drops.

    Example:
        >>> may_have_commands("for x in range(3):\\n    print(x % 2, x != 1)")
        False
        >>> may_have_commands("if x:\\n    !ls")
        True
    """
    lines = code if code.endswith("\n") else f"{code}\n"
    return (
        lines[0].isspace()
        or "?" in code
        or ">>>" in code
        or "In [" in code
        or _COMMAND.search(f"\n{code}") is not None
        or _ASSIGNED.search(code) is not None
        or len(lines.splitlines()) != lines.count("\n")  # some lines have other line ends
    )


def _steps(manager: Any) -> tuple[list[Any], list[Any], list[Any]]:
    return manager.cleanup_transforms, manager.line_transforms, manager.token_transformers
