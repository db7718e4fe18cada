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
        ("4", "rank 4 does not exist; the ranks are 0 to 3"),
        ("-5", "rank -5 does not exist; the ranks are 0 to 3"),
        ("0-7", "rank 0-7 does not exist; the ranks are 0 to 3"),
        ([0, 9], "rank 9 does not exist; the ranks are 0 to 3"),
        ([0.5], "ranks must be whole numbers from 0 to 3, got 0.5"),
        ("0;1", "'0;1' in the rank set '0;1' must have a form such as all, 2, -1, 0-3 or ::2"),
        ("0,,1", "'' in the rank set '0,,1' must have a form such as all, 2, -1, 0-3 or ::2"),
        (
            "__import__('os')",
            "\"__import__('os')\" in the rank set \"__import__('os')\" must have a form such as all, 2, -1, 0-3 or ::2",
        ),
        ("3-1", "'3-1' in the rank set '3-1' runs backwards; write 1-3"),
        ("::0", "'::0' in the rank set '::0' must have a step other than 0"),
        ("9:", "'9:' selects no rank; the ranks are 0 to 3"),
        ([], "[] selects no rank; the ranks are 0 to 3"),
        (range(10**12), "rank 4 does not exist; the ranks are 0 to 3"),
        (itertools.count(), "rank 4 does not exist; the ranks are 0 to 3"),
        (itertools.repeat(0), "a rank set must have at most 65,536 entries; the ranks are 0 to 3"),
        ("0-3000000000", "rank 0-3000000000 does not exist; the ranks are 0 to 3"),
        (
            "0-" + "9" * 5000,
            f"'0-{'9' * 198}...' in the rank set '0-{'9' * 198}...' must have a form such as all, 2, -1, 0-3 or ::2",
        ),
        ("all," * 100_000, f"'{('all,' * 15)}'... is too long for a rank set; the ranks are 0 to 3"),
        (2.5, "ranks must be a number, several numbers, or text such as '0,2-3', got 2.5"),
        (b"0", "ranks must be a number, several numbers, or text such as '0,2-3', got b'0'"),
    ],
)
def test_a_wrong_set_is_told_with_its_fix(asked, message):
    began = time.monotonic()
    with pytest.raises(UsageError) as told:
        parse_ranks(asked, 4)
    assert str(told.value) == message and time.monotonic() - began < 2
