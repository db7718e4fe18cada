"""What IPython makes of a cell's text before it is compiled.

Nothing, where nothing in it is IPython's: it looks for its own syntax with Python's tokenizer, which is written in
Python, and on each rank that takes longer than what most cells of a line do.

And lines keep the numbers that they have in the editor. IPython drops empty lines before the code, and joins the lines
of a command that are continued by a backslash, so all lines below would have too small a number.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from IPython.core import prefilter
from IPython.core.autocall import IPyAutocall
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.macro import Macro

from ddp_notebook.stdlib import re

# A line that begins as a command does, as `/f x`, or as a prompt; or one of blanks, which IPython empties.
_COMMAND = re.compile(r"\n[^\S\n]*(?:[%!,;/]|\.\.\.)|\n[ \t]+(?:\n|\Z)")
_ASSIGNED = re.compile(r"=\s*[%!]")  # `files = !ls`
_FIRST_WORD = re.compile(r"[\w.*]*")
_CALLED = IPyAutocall | Macro  # a line of nothing but its name, such as `exit`


def install(shell: Any) -> None:
    """Let a shell's `transform_cell` keep the number of lines. `%%time` and `%%capture` use it too."""
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
    """A transformer of commands (`!ls`, `x = %magic`) that adds empty lines for those that it has joined."""

    def transform(self: Any, lines: list[str]) -> list[str]:
        changed: list[str] = kind.transform(self, lines)  # type: ignore[attr-defined]  # a `TokenTransformBase`
        below = self.start_line + 1
        return [*changed[:below], *["\n"] * (len(lines) - len(changed)), *changed[below:]]

    return type(kind.__name__, (kind,), {"transform": transform})


class Plain:
    """Knows which cells a shell leaves as they are.

    Args:
        shell: as IPython made it. What is added to it later is noticed.
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
        """The shell's transformations of now change no cell that the ones of IPython's would leave."""
        self._cleanup, self._begins, self._commands = map(list, _steps(self._manager))

    def is_left(self, code: str) -> bool:
        """Whether the shell leaves this code as it is. False also of some that it would leave, such as a question."""
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
        """Of a single line IPython also asks what its first word is."""
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
    """Whether IPython may find something of its own in this code, or empty lines that it leaves out.

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
        or len(lines.splitlines()) != lines.count("\n")  # some end in another way
    )


def _steps(manager: Any) -> tuple[list[Any], list[Any], list[Any]]:
    return manager.cleanup_transforms, manager.line_transforms, manager.token_transformers
