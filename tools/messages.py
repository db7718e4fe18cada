"""Collect the messages that users see from the source, and compare them with docs/reference/messages.md.

    python tools/messages.py            prints the messages that the page lacks, and those that the source lacks
    python tools/messages.py --add      adds a row for each missing message, with empty columns to be filled in

The page lists each message with its cause and its fix. A test fails if it lacks one.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_notebook"
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

# Everything else that users can read: the literals of at least this many words, of which values are not counted.
_FEWEST_WORDS = 5
# Subject by the folders and files that show its messages. The first match counts; a file without a match fails.
SUBJECTS = {
    "interrupted magics and calls": ("run/interrupted.py", "run/progress.py", "__init__.py"),
    "stop button and hangs": (
        *("run/cells/watch.py", "run/cells/interrupt.py", "run/cells/abandoned_cells.py", "run/output/card.py"),
        *("run/groups/diagnosis.py", "run/groups/probe.py", "run/groups/rank_states.py", "run/groups/rpc_waits.py"),
        *("run/groups/rank_states.py", "rank/group/release.py", "rank/group/connections", "rank/cell/children.py"),
        *("rank/script/free_waits.py", "run/divergence", "launch/process.py", "launch/processes.py"),
    ),
    "dead ranks, healing and survivable loops": (
        *("run/groups", "run/survive", "run/faults", "rank/survive", "rank/faults.py", "survive_loop.py"),
        *("launch/membership", "launch/preemption.py", "launch/host/kill_causes.py", "records/shortages.py"),
        *("rank/shortage.py", "registry/private.py"),
    ),
    "more or fewer ranks": ("run/resize", "rank/resize", "messages/resize_messages.py"),
    "warnings before a cell is sent, and hints": ("run/lint", "run/hints.py", "run/call_arguments.py"),
    "comparison of calls": ("rank/group/guard",),
    "findings about training steps": ("run/findings", "rank/findings", "records/words.py"),
    "comparison of ranks": ("run/consistency", "rank/variables"),
    "models": ("rank/sharding", "run/sharding"),
    "recording": (
        *("rank/record", "run/record", "observe/intake.py", "observe/observer.py", "observe/files.py", "record.py"),
    ),
    "report": ("observe",),
    "monitor": ("widgets",),
    "values and files": ("run/values", "run/files", "wire/safe.py"),
    "RPC": ("rank/rpc",),
    "files of this user": ("registry",),
    "jobs": ("run/jobs",),
    "attached and kept sessions": ("run/kept", "launch/keep", "attach.py", "attach_commands.py"),
    "torchrun jobs": ("torchrun", "rank/script", "launch/elastic"),
    "cells": ("run", "rank", "errors.py"),
    "files sent to other hosts": ("launch/sync",),
    "session.client": ("launch/client.py", "launch/client_calls.py"),
    "starts with Slurm, MPI and ipyparallel": ("launch/starters",),
    "%ddp_start --check": ("launch/preflight", "launch/host/preflight_checks.py"),
    "ssh": ("launch/transports",),
    "start, hosts and connections": ("launch", "wire", "records"),
    "commands": ("session.py", "session_commands.py", "magics.py", "line_parser.py", "__main__.py"),
}
# Folders and files without messages: lessons, labels of figures, HTML, names of operations. Errors of torch are on
# another page (`tools/docs/reference.py`).
_NO_MESSAGES = (
    *("lessons", "messages/", "observe/figures", "observe/trace", "run/lint/groups.py", "records/meaning.py"),
    *("run/output/slots.py", "run/magic_lines.py", "launch/options.py", "widgets/simulated", "rank/torch_errors"),
)
# Calls with texts for help, descriptions of pictures, patterns, or logs that are off by default.
_NO_MESSAGE_CALLS = {
    *("add_argument", "_option", "LineParser", "ArgumentParser", "compile", "filterwarnings", "info", "debug"),
    *("startswith", "endswith", "removeprefix", "NumberKind", "Switch"),
}
_CODE = re.compile(
    r"<\w+[ >:]|\w\(.*'.*\)\.|import \w+[;,]|^import |import main|#!/|\$\(|exec |:none|:left|deg,|__import__|^\("
    r"|^lab = |^account = |Traceback|^for .* in .*:$"
)
_WITHOUT_TEXT = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.alias)  # nodes that contain no text
# Texts of other programs, with which the source compares their output.
_OF_OTHER_PROGRAMS = {
    "Default process group has not been initialized",
    "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.",
    "RPCErr:1:RPC ran for more than set timeout ({:.0f} ms) and will now be marked with an error",
    "compile> returned NULL without setting",
    "error return without exception set",
    "has changed and you have requested strict checking",
    "unable to open the hostfile",
    "No module named 'ddp_notebook.",
    "No space left on device",
}
_HEAD = """# Messages and their causes

Every message of the source that users can see, with its cause and its fix. Values are in braces.
[Troubleshooting](../guide/troubleshooting.md) explains the messages that users meet most.

## Errors

Texts of raised errors, by module.
"""
_NOTES_HEAD = """## Warnings, notes and advice

The other texts of the source of at least five words, by subject: printed lines, warnings, hang cards, hints before a
cell, the sentences of `%ddp_report` and `%ddp_check`, and logged errors. A text that begins with a punctuation mark, or
without a subject, is part of a line with another message. Not listed are texts of less than five words, help texts of
options ([options](options.md)), labels of figures, texts of lessons, and texts of PyTorch and other programs.
"""


def of_source(source: str | ast.AST) -> Iterator[str]:
    """Yield the literal message of each raised error of a Python source, with values as `{name}`.

    Example:
        >>> list(of_source('raise UsageError(f"no such rank: {rank}")'))
        ['no such rank: {rank}']
    """
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = _words(node.exc.args[0])
            if _class(node.exc) not in _INTERNAL and len(re.sub(r"\{.*?\}", "", text)) >= _SHORTEST:
                yield text


def notes_of_source(source: str | ast.AST) -> Iterator[str]:
    """Yield each other text of at least five words that users can read: no docstring, help text or code.

    Example:
        >>> list(notes_of_source('note(f"rank {rank} has not answered for {seconds} s")'))
        ['rank {rank} has not answered for {seconds} s']
    """
    yield from _notes(_parsed(source))


def _notes(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return
        case ast.Raise(exc=ast.Call() as call) if _class(call) in _INTERNAL:
            return
        case ast.Raise(exc=ast.Call(args=[first, *rest], keywords=keywords)) if _words(first):  # the first is an error
            parts: list[ast.AST] = [*_values(first), *rest, *keywords]
        case ast.Call() if _class(node) in _NO_MESSAGE_CALLS:
            return
        case ast.JoinedStr() | ast.Constant(value=str()) | ast.BinOp(op=ast.Add()) if text := _words(node):
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\{.*?\}", " ", text))
            if len(words) >= _FEWEST_WORDS and text.count(" ") >= _FEWEST_WORDS - 2 and not _CODE.search(text):
                yield text
            parts = _values(node)
        case _:
            parts = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _WITHOUT_TEXT)]
    for part in parts:
        yield from _notes(part)


def _values(text: ast.expr) -> list[ast.AST]:
    """Return the expressions inside a text. They may contain further texts."""
    match text:
        case ast.JoinedStr(values=values):
            return [value for value in values if isinstance(value, ast.FormattedValue)]
        case ast.BinOp(left=left, right=right):
            return [*_values(left), *_values(right)]
        case ast.Constant():
            return []
    return [text]


def _class(call: ast.Call) -> str:
    """Return the last part of a called name, such as "UsageError" or "add_argument"."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _words(node: ast.expr) -> str:
    return " ".join(_text(node).split())


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


def _parsed(source: str | ast.AST) -> ast.AST:
    return ast.parse(source) if isinstance(source, str) else source


@functools.cache
def _sources() -> dict[str, ast.AST]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def errors() -> dict[str, list[str]]:
    """Return the messages of raised errors by module, such as "launch.placement"."""
    found = {}
    for name, source in _sources().items():
        if not name.startswith(_PROTOCOL) and (messages := list(dict.fromkeys(of_source(source)))):
            found[name.removesuffix(".py").replace("/", ".")] = messages
    return found


def notes() -> dict[str, list[str]]:
    """Return the other messages by subject."""
    found: dict[str, dict[str, None]] = {subject: {} for subject in SUBJECTS}
    raised = {one for messages in errors().values() for one in messages}
    for name, source in _sources().items():
        if not name.startswith(_NO_MESSAGES) or name == "messages/resize_messages.py":
            for text in notes_of_source(source):
                if text not in raised and text not in _OF_OTHER_PROGRAMS:
                    found[subject_of(name)][text] = None
    return {subject: list(texts) for subject, texts in found.items() if texts}


def subject_of(name: str) -> str:
    """Return the subject of the messages in a file, whose path is relative to the package.

    Example:
        >>> subject_of("run/cells/watch.py")
        'stop button and hangs'
    """
    for subject, places in SUBJECTS.items():
        if any(name == place or name.startswith(f"{place}/") for place in places):
            return subject
    raise ValueError(f"{name} has messages and belongs to no subject; add it to SUBJECTS in tools/messages.py")


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
    parts = [_HEAD]
    for title, messages in [*errors().items(), ("", []), *notes().items()]:
        if not title:
            parts.append(_NOTES_HEAD)
            continue
        rows = "\n".join(f"| {cell(one)} | {' | '.join(known.get(cell(one), ('', '')))} |" for one in messages)
        parts.append(f"### {title}\n\n| message | cause | fix |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def problems() -> list[str]:
    """Return a line for each message that is missing, not in the source any more, or without a cause or a fix."""
    wanted = {cell(one) for table in (errors(), notes()) for messages in table.values() for one in messages}
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
