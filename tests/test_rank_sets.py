"""The grammar of rank sets."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.run.rank_sets import parse_ranks


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ("all", [0, 1, 2, 3]),
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        (2, [2]),
        ([3, 1], [1, 3]),
        (np.array([3, 1]), [1, 3]),
        (range(2), [0, 1]),
        ("0,2-3", [0, 2, 3]),
        (" 0 , 2 - 3".replace(" - ", "-"), [0, 2, 3]),
        ("-1", [3]),
        ("0,-1", [0, 3]),
        ("::2", [0, 2]),
        ("1:", [1, 2, 3]),
        (":2", [0, 1]),
        ("-2:", [2, 3]),
        ("::-1", [0, 1, 2, 3]),
        ("0,0,0-1", [0, 1]),
        ("all,0", [0, 1, 2, 3]),
    ],
)
def test_a_set_names_ranks(asked, ranks):
    assert parse_ranks(asked, 4) == ranks


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("4", "there is no rank 4; the ranks are 0 to 3"),
        ("-5", "there is no rank -5; the ranks are 0 to 3"),
        ("0-7", "there is no rank 0-7; the ranks are 0 to 3"),
        ([0, 9], "there is no rank 9; the ranks are 0 to 3"),
        ([0.5], "0.5 is not a rank: ranks are whole numbers from 0 to 3"),
        ("0;1", "'0;1' in the rank set '0;1' is none of: all, 2, -1, 0-3, ::2"),
        ("0,,1", "'' in the rank set '0,,1' is none of: all, 2, -1, 0-3, ::2"),
        (
            "__import__('os')",
            "\"__import__('os')\" in the rank set \"__import__('os')\" is none of: all, 2, -1, 0-3, ::2",
        ),
        ("3-1", "'3-1' in the rank set '3-1' runs backwards; write 1-3"),
        ("::0", "'::0' in the rank set '::0' has a step of 0"),
        ("9:", "'9:' names no rank; the ranks are 0 to 3"),
        ([], "[] names no rank; the ranks are 0 to 3"),
        (range(10**12), "there is no rank 4; the ranks are 0 to 3"),
        (itertools.count(), "there is no rank 4; the ranks are 0 to 3"),
        (itertools.repeat(0), "a set of ranks has at most 65,536 entries; the ranks are 0 to 3"),
        ("0-3000000000", "there is no rank 0-3000000000; the ranks are 0 to 3"),
        ("0-" + "9" * 5000, f"'0-{'9' * 198}...' in the rank set '0-{'9' * 198}...' is none of: all, 2, -1, 0-3, ::2"),
        ("all," * 100_000, f"'{('all,' * 15)}'... is too long for a set of ranks; the ranks are 0 to 3"),
        (2.5, "2.5 names no ranks; give a number, several, or text such as '0,2-3'"),
        (b"0", "b'0' names no ranks; give a number, several, or text such as '0,2-3'"),
    ],
)
def test_a_wrong_set_is_told_with_its_fix(asked, message):
    began = time.monotonic()
    with pytest.raises(UsageError) as told:
        parse_ranks(asked, 4)
    assert str(told.value) == message and time.monotonic() - began < 2
