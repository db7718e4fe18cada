"""The ranks that get a line of the user."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.run.debug.commands import parse_command
from ddp_notebook.run.rank_sets import parse_ranks


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
    ],
)
def test_a_line_names_ranks(line, ranks, text):
    assert parse_command(line, lambda asked: parse_ranks(asked, 4)) == (ranks, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("@7 n", "rank 7 does not exist; the ranks are 0 to 3"),
        ("@x n", "'x' in the rank set 'x' must have a form such as"),
    ],
)
def test_wrong_ranks_are_explained(line, message):
    with pytest.raises(UsageError) as error:
        parse_command(line, lambda asked: parse_ranks(asked, 4))
    assert str(error.value).startswith(message)
