"""Detect outputs that are out of date: a key is a hash of all their sources."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def key_of(*parts: str | bytes) -> str:
    """Return a key of these texts and of the code of the package.

    Example:
        >>> key_of("a notebook") == key_of("a notebook"), key_of("a notebook") == key_of("another one")
        (True, False)
    """
    digest = hashlib.sha256(f"Python {sys.version_info[:2]} {_code()}".encode())
    for part in parts:
        digest.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return digest.hexdigest()[:32]


def is_made(made: Iterable[Path], key: str) -> bool:
    """Return whether these files exist and were made from the sources of this key."""
    files = list(made)
    stamp = _stamp(files[0])
    return all(one.is_file() for one in files) and stamp.is_file() and stamp.read_text() == key


def set_made(first: Path, key: str) -> None:
    """Store the key of a file and of the files that were made with it."""
    _stamp(first).write_text(key)


def _stamp(path: Path) -> Path:
    return path.with_name(f".{path.name}.key")


@functools.cache
def _code() -> str:
    """Return a hash of the package's code without comments and docstrings, whose changes need no new notebooks."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "ddp_notebook").rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
                node
            ):
                node.body = node.body[1:]
        digest.update(f"{path.relative_to(ROOT)} {ast.dump(tree)}".encode())
    return digest.hexdigest()


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None
