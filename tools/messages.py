"""Collect the messages of errors from the source, and compare them with docs/reference/messages.md.

    python tools/messages.py            prints the messages that the page lacks, and those that it has in vain
    python tools/messages.py --add      adds a row for each missing message, with empty columns to be filled in

The page lists each message with its cause and its fix. A test fails if it lacks one.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "messages.md"
# Errors that another part of this package handles, or that only a fault of this package raises.
_INTERNAL = {
    *("AssertionError", "AttributeError", "CodecError", "ConnectionError", "EOFError", "HelpRequested", "ImportError"),
    *("IndexError", "KeyError", "LookupError", "NotImplementedError", "OSError", "StopIteration", "SystemExit"),
    *("StoreRefusedError", "TooLargeError", "WrongFileError", "_Refused", "_Missing"),
}
# Folders and files whose errors report a fault of the protocol between our own processes.
_PROTOCOL = ("messages/", "wire/buffers.py", "wire/marks.py", "records/codec.py")
_ROW = re.compile(r"^\| (?P<message>.*?) \| (?P<cause>.*?) \| (?P<fix>.*?) \|$", re.MULTILINE)
_SHORTEST = 12  # characters; shorter literals are parts of messages


def of_source(source: str) -> Iterator[str]:
    """Yield the literal message of each raised error of a Python source, with values as `{name}`.

    Example:
        >>> list(of_source('raise UsageError(f"no such rank: {rank}")'))
        ['no such rank: {rank}']
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            text = " ".join(_text(node.exc.args[0]).split())
            if name not in _INTERNAL and len(re.sub(r"\{.*?\}", "", text)) >= _SHORTEST:
                yield text


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.FormattedValue(value=ast.Name(id=name)):
            return f"{{{name}}}"
        case ast.FormattedValue(value=ast.Attribute(attr=name)):
            return f"{{{name}}}"
        case ast.FormattedValue() | ast.Starred():
            return "{...}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left) or "{...}") + (_text(right) or "{...}")
    return ""


def collect() -> dict[str, list[str]]:
    """Return the messages by module, such as "launch.placement"."""
    found = {}
    for path in sorted((ROOT / "ddp_notebook").rglob("*.py")):
        if path.relative_to(ROOT / "ddp_notebook").as_posix().startswith(_PROTOCOL):
            continue
        if messages := list(dict.fromkeys(of_source(path.read_text()))):
            found[".".join(path.relative_to(ROOT / "ddp_notebook").with_suffix("").parts)] = messages
    return found


def cell(text: str) -> str:
    """Return a message as a cell of a Markdown table."""
    return f"`{text.replace('`', chr(39))}`".replace("|", "\\|")


def listed() -> dict[str, tuple[str, str]]:
    """Return cause and fix by the cell of the message on the page."""
    rows = _ROW.findall(PAGE.read_text()) if PAGE.exists() else []
    return {message: (cause, fix) for message, cause, fix in rows if message.startswith("`")}


def page() -> str:
    """Return the page with a row for each message of the source, which keeps the causes and fixes of today."""
    known = listed()
    parts = [
        "# Errors and their causes\n\nEvery error message of the source, by module. Values are in braces. "
        "[Troubleshooting](../guide/troubleshooting.md)\nexplains the messages that users meet most.\n"
    ]
    for module, messages in collect().items():
        rows = "\n".join(f"| {cell(one)} | {' | '.join(known.get(cell(one), ('', '')))} |" for one in messages)
        parts.append(f"## {module}\n\n| message | cause | fix |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def problems() -> list[str]:
    """Return a line for each message that is missing, not in the source any more, or without a cause or a fix."""
    wanted = {cell(one) for messages in collect().values() for one in messages}
    have = listed()
    found = [f"missing: {one}" for one in sorted(wanted - have.keys())]
    found += [f"not in the source: {one}" for one in sorted(have.keys() - wanted)]
    return found + [f"cause or fix is empty: {one}" for one, columns in have.items() if not all(columns)]


def main() -> int:
    """Print the problems, or add rows for missing messages. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--add", action="store_true", help="write the page with a row for each message")
    if parser.parse_args().add:
        PAGE.write_text(page())
    found = problems()
    print("\n".join(found) if found else f"{len(listed())} messages are listed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
