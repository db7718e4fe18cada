"""Lines of a cell keep the numbers that they have in the editor. IPython drops empty lines before the code, and joins
the lines of a command that are continued by a backslash, so all lines below would have too small a number."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from ddp_notebook.rank.cell.plain import Plain


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
