"""Cells that are Python as they stand. IPython looks for its own syntax with Python's tokenizer, which is written in
Python: on each rank that takes longer than what most cells of a line do."""

from __future__ import annotations

import re
from typing import Any

from IPython.core import prefilter
from IPython.core.autocall import IPyAutocall
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.macro import Macro

# A line that begins as a command does, as `/f x`, or as a prompt; or one of blanks, which IPython empties.
_COMMAND = re.compile(r"\n[^\S\n]*(?:[%!,;/]|\.\.\.)|\n[ \t]+(?:\n|\Z)")
_ASSIGNED = re.compile(r"=\s*[%!]")  # `files = !ls`
_FIRST_WORD = re.compile(r"[\w.*]*")
_CALLED = IPyAutocall | Macro  # a line of nothing but its name, such as `exit`


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
