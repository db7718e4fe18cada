"""Read the text before the cursor: which names may follow, and which names the lines above set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PATH = r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[(?:-?\d+|'[^'\\\n]*'|\"[^\"\\\n]*\")\])*"
_ATTRIBUTE = re.compile(rf"(?<![\w.\])])({_PATH})\.(\w*)$")
_CALLED = re.compile(rf"(?<![\w.\])])({_PATH})$")
_KEY = re.compile(rf"(?<![\w.\])])({_PATH})\[((?:'[^'\\\n]*|\"[^\"\\\n]*|-?\d*))$")
_NAME = re.compile(r"(?<![.\w])([^\W\d]\w*|)$")
_ARGUMENT = re.compile(r"[(,]\s*\w*$")  # the beginning of an argument
_IMPORT = re.compile(r"^\s*(?:import(?:\s+[\w., ]*,)?|from)\s+((?:\w+\.)*)(\w*)$")
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+(?:\(?[\w, ]*[, ])?(\w*)$")
_TEXT = re.compile(r"'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|#[^\n]*\n", re.DOTALL)
_OPEN_TEXT = re.compile(r"['\"#]")
_SHELL = re.compile(r"^\s*[%!?]")
# Statements above the cursor that set names.
_ASSIGNMENT = re.compile(rf"^\s*([^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)\s*(?:await\s+)?({_PATH})?(\(|\s*$)?")
_DEFINITION = re.compile(r"^\s*(?:async\s+)?(def|class)\s+([^\W\d]\w*)")
_TARGETS = re.compile(r"^\s*(?:async\s+)?(?:for\s+([\w, ]+)\s+in\b|with\b.*\bas\s+(\w+)|((?:\w+\s*,\s*)+\w+)\s*=(?!=))")
_MOST_CHARS = 100_000  # only the last ones of a longer cell are read
_MOST_BACK = 2000
_LONGEST_PATH = 300
_MOST_ASSIGNED = 500


@dataclass(frozen=True, slots=True)
class Cursor:
    """Names that may follow at the cursor.

    Args:
        kind, path: see `ListNames`.
        begun: the part of the name before the cursor.
        quote: the quote before a key; "": none was typed.
    """

    kind: str
    path: str = ""
    begun: str = ""
    quote: str = ""


def read_cursor(before: str) -> Cursor | None:
    """Return the names that may follow after a text. None: no names of Python may follow, as in a string.

    Example:
        >>> read_cursor("y = model.layers[0].we")
        Cursor(kind='attributes', path='model.layers[0]', begun='we', quote='')
        >>> read_cursor("print('lo")
    """
    before = before[-_MOST_CHARS:]
    line = before[before.rfind("\n") + 1 :]
    if _SHELL.match(line):
        return None
    if key := _KEY.search(line):
        begun = key[2]
        quote = begun[0] if begun[:1] in ("'", '"') else ""
        if not _is_in_text(before[: len(before) - len(begun)]):
            return Cursor("keys", key[1], begun, quote)
    if _is_in_text(before):
        return None
    if found := _FROM.match(line):
        return Cursor("exports", found[1], found[2])
    if found := _IMPORT.match(line):
        return Cursor("modules", found[1].rstrip("."), found[2])
    if found := _ATTRIBUTE.search(line):
        return Cursor("attributes", found[1], found[2])
    found = _NAME.search(line)
    if found is not None:
        is_argument = _ARGUMENT.search(before) is not None
        return Cursor("variables", _called(before, len(before), is_direct=True) if is_argument else "", found[1])
    return Cursor("attributes", "", re.split(r"\W", line)[-1])


def _is_in_text(before: str) -> bool:
    """Return whether a text ends inside a string or a comment."""
    return bool(_OPEN_TEXT.search(_TEXT.sub("", before)))


def assigned_above(before: str) -> list[list[str]]:
    """Return the names that the lines above the cursor set, see `ListNames`.

    Example:
        >>> assigned_above("import torch.nn as nn\\nhead = nn.Linear(2, 1)\\nhead.")
        [['nn', 'module', 'torch.nn'], ['head', 'call', 'nn.Linear']]
    """
    found: dict[str, list[str]] = {}
    for line in before[-_MOST_CHARS:].split("\n")[:-1]:
        for name, how, path in _set_by(line):
            found.pop(name, None)
            found[name] = [name, how, path]
    return list(found.values())[-_MOST_ASSIGNED:]


def _set_by(line: str) -> Iterator[tuple[str, str, str]]:
    """Yield the names that a line sets: name, how and path."""
    if definition := _DEFINITION.match(line):
        yield definition[2], "function" if definition[1] == "def" else "class", ""
    elif line.lstrip().startswith(("import ", "from ")):
        yield from _imported(line)
    elif targets := _TARGETS.match(line):
        for name in re.findall(r"[^\W\d]\w*", next(filter(None, targets.groups()))):
            yield name, "other", ""
    elif assignment := _ASSIGNMENT.match(line):
        name, path, end = assignment.groups()
        if path and end is not None:
            yield name, "call" if end == "(" else "value", path
        else:
            yield name, "other", ""


def _imported(line: str) -> Iterator[tuple[str, str, str]]:
    words = line.split("#")[0].split(";")[0]
    if found := re.match(r"\s*from\s+([\w.]+)\s+import\s+(.*)", words):
        for one in found[2].strip(" ()").split(","):
            if names := re.fullmatch(r"\s*(\w+)(?:\s+as\s+(\w+))?\s*", one):
                yield names[2] or names[1], "export", f"{found[1]}.{names[1]}"
    elif found := re.match(r"\s*import\s+(.*)", words):
        for one in found[1].split(","):
            if names := re.fullmatch(r"\s*([\w.]+)(?:\s+as\s+(\w+))?\s*", one):
                root = names[1].partition(".")[0]
                yield (names[2], "module", names[1]) if names[2] else (root, "module", root)


def name_at(code: str, position: int) -> str:
    """Return the path to describe at a position: the called function if the position is in its arguments, or else the
    name at the position. "" if there is none.

    Example:
        >>> name_at("y = model.step(x, sca", 21), name_at("model.layers[0].weight", 3)
        ('model.step', 'model')
    """
    if called := _called(code, position):
        return called
    end = position
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    found = _CALLED.search(code[max(0, end - _LONGEST_PATH) : end])
    return found[1] if found else ""


def _called(code: str, position: int, *, is_direct: bool = False) -> str:
    """Return the path of the function in whose arguments a position is; "" if there is none.

    Args:
        is_direct: the position must not be inside a list, a dict or an index.
    """
    depth = 0
    for at in range(position - 1, max(-1, position - _MOST_BACK), -1):
        if code[at] in ")]}":
            depth += 1
        elif code[at] in "([{":
            depth -= 1
            if depth < 0 and code[at] == "(":
                called = _CALLED.search(code[max(0, at - _LONGEST_PATH) : at])
                if called or is_direct:
                    return called[1] if called else ""
            elif depth < 0 and is_direct:
                return ""
            depth = max(depth, 0)
    return ""
