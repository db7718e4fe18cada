"""Every message of docs/guide/troubleshooting.md is one of the source, and a test provokes it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.guide.pages import FOLDER

ROOT = FOLDER.parents[1]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", (FOLDER / "troubleshooting.md").read_text(), re.MULTILINE)
_FEWEST = 40


@functools.cache
def literals() -> str:
    """All string literals of the package, one behind the other."""
    parts = []
    for file in (ROOT / "ddp_notebook").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        parts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\0".join(parts)


@functools.cache
def expected() -> str:
    """The sources of all other tests, without line breaks within literals and without escapes of patterns."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name != Path(__file__).name]
    joined = "\n".join(re.sub(r'"\s*\n\s*[rf]*"', "", file.read_text()) for file in files)
    return re.sub(r"\\([.()\[\]*+?%])", r"\1", joined)


def test_enough_messages_are_listed():
    assert len(set(MESSAGES)) == len(MESSAGES) >= _FEWEST


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message):
    assert message in literals()


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_provoked_in_a_test(message):
    assert message in expected()
