"""The ranks that get a line of the user."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.run.debug.commands import parse_command

_MESHES = {
    0: {"dp": [0], "tp": [0]},
    1: {"dp": [0], "tp": [1]},
    2: {"dp": [1], "tp": [0]},
    3: {"dp": [1], "tp": [1], "odd": [0, 1]},
}


@pytest.mark.parametrize(
    ("line", "ranks", "text"),
    [
        ("p x", None, "p x"),
        ("", None, ""),
        ("@2 p x", [2], "p x"),
        ("  @2  p x", [2], "p x"),
        ("@0-1 n", [0, 1], "n"),
        ("@all c", [0, 1, 2, 3], "c"),
        ("@::2 p x @ y", [0, 2], "p x @ y"),
        ("@2", [2], ""),
        ("@tp=1 p x", [1, 3], "p x"),
        ("@dp=1,tp=0 p x", [2], "p x"),
    ],
)
def test_a_line_names_ranks(line, ranks, text):
    assert parse_command(line, 4, _MESHES) == (ranks, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("@7 n", "rank 7 does not exist; the ranks are 0 to 3"),
        ("@x n", "'x' in the rank set 'x' must have a form such as"),
        ("@pp=1 n", "no device mesh of the stopped ranks has the dimension 'pp': the dimensions are dp, odd, tp"),
        ("@odd=1 n", "several device meshes have the dimension 'odd', and rank 3 is 0 and 1 in them"),
        ("@tp=5 n", "@tp=5 selects no stopped rank"),
        ("@tp=x n", "'tp=x' in @tp=x must have a form such as tp=1"),
    ],
)
def test_wrong_ranks_are_explained(line, message):
    with pytest.raises(UsageError) as error:
        parse_command(line, 4, _MESHES)
    assert str(error.value).startswith(message)


def test_without_a_mesh_the_message_says_so():
    with pytest.raises(UsageError, match="no variable there is a DeviceMesh"):
        parse_command("@tp=1 n", 4, {0: {}, 1: {}})
