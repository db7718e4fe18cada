"""Messages for completion and help in cells of ranks. Their reply is `Checked`.

notebook -> rank
----------------
ListNames      names that may follow at the cursor
DescribeName   type, signature and docstring of a name
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_notebook.messages.encoding import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNames(Message):
    """Request `Checked` with "names": pairs of name and type. Without "names", the rank does not know the value.

    Args:
        kind: "variables", "attributes" (of a path), "keys" (of a dict), "modules" (below a package) or "exports" (names
            in a module, for `from module import`).
        path: the expression before the dot or the bracket: "model.layers[0]". For "modules" and "exports" the module.
            For "variables" the function around the cursor, whose parameters are listed, too; "" if there is none.
        assigned: names that the lines above the cursor set: name, how ("call", "value", "module", "export", "function",
            "class" or "other") and the path of the called function, of the value or of the module.
    """

    request: int
    kind: str
    path: str = ""
    assigned: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeName(Message):
    """Request `Checked` with "text", the help of a path. Without "text", the rank does not know the value.

    Args:
        path, assigned: see `ListNames`.
        detail: 1 adds the source, as `??` does.
    """

    request: int
    path: str
    detail: int = 0
    assigned: list[list[str]] = field(default_factory=list)
