"""The table of docs/security.md: each row contains an existing test, or the reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

from tests.security.attack import table

_ROOT = Path(__file__).parents[2]


def test_each_row_names_an_existing_test_or_a_reason():
    assert len(table()) > 10
    for opened_by, *_, test in table():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", test)
        assert named or test.startswith("none: "), f"{opened_by}: {test}"
        for file, name in named:
            assert f"def {name}(" in (_ROOT / file).read_text(), f"{opened_by}: {file} has no {name}"
