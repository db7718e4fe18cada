"""Check the English of docstrings and comments: no sentence above 40 words, and a subject or a verb at the start.

    python tools/plain_english.py PATH ...    prints each finding as path:line, and fails if there is one

`make lint` runs it. CONTRIBUTING.md has the rules for writing, which a program cannot check.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_MOST_WORDS = 40  # of a sentence
# A text that begins so has its subject late, or none. "Whether" and "how" may follow a verb: "Return whether ...".
_BAD_STARTS = re.compile(
    r"(What|Who|Whom|Whose|Whoever|Whatever|Whether|Of|Those|Likewise|The same)\b(?! (does|do|is|are)\b[^.]*\?)"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=:)\s+(?=[A-Z`])|\n\s*\n")
_SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Source|Yields)\b.*:", re.MULTILINE)
_NO_PROSE = re.compile(r"^\s{4}|^\s*([-*|]|\d+\.|>>>)|\S {2,}\S")  # code, items of lists, rows of tables
_FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pragma|doctest|mypy|ruff|fmt|!|----)|^#!|^# -\*-")


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for each text of a Python source that breaks a rule.

    Example:
        >>> list(findings('def f():\\n    "What it is."\\n'))
        [(2, "starts with 'What'")]
    """
    for line, text in [*_docstrings(source), *_comments(source)]:
        if start := _BAD_STARTS.match(text):
            yield line, f"starts with {start[1]!r}"
        for sentence in _SENTENCE_END.split(_prose(text)):
            count = len(sentence.split())
            if count > _MOST_WORDS:
                yield line, f"a sentence of {count} words: {' '.join(sentence.split()[:8])} ..."


def _prose(text: str) -> str:
    """Return the part of a docstring before its sections, without lists, tables and indented code."""
    section = _SECTION.search(text)
    text = text if section is None else text[: section.start()]
    lines = [line for line in text.splitlines() if not _NO_PROSE.search(line)]
    return "\n".join(lines)


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments; lines of comments that follow each other are one text."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _FOR_TOOLS.match(token.string):
            continue
        line, is_whole = token.start[0], token.line.lstrip().startswith("#")
        text = token.string.lstrip("#").strip()
        if block and is_whole and line == last + 1:
            block.append(text)
        else:
            if block:
                yield begin, "\n".join(block)
            block, begin = [text], line
        last = line if is_whole else -1
    if block:
        yield begin, "\n".join(block)


def main(paths: list[str]) -> int:
    """Print the findings. Return 1 if there is one."""
    files = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    found = [f"{file}:{line}: {why}" for file in files for line, why in findings(file.read_text())]
    print("\n".join(found) if found else f"{len(files)} files: the English of docstrings and comments keeps the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
