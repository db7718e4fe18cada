"""tools/plain_english.py finds late subjects and long sentences in docstrings and comments."""

from __future__ import annotations

import pytest

from tools.plain_english import findings

_LONG = " ".join(["word"] * 41)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Return the rank."""', []),
        ('"""What the rank does."""', ["starts with 'What'"]),
        ("x = 1  # of the notebook\n# Of a rank.\n", ["starts with 'Of'"]),
        (f"# {_LONG}.\n", ["a sentence of 41 words: word word word word word word word word ..."]),
        (f'"""Return x.\n\n{_LONG[: len(_LONG) // 2]}. {_LONG[: len(_LONG) // 2]}."""', []),
        (f'"""Contents.\n\nname   {_LONG}\n"""', []),  # a row of a table
        (f'def f():\n    """Return x.\n\n    Args:\n        x: {_LONG}\n    """', []),
        ("# noqa: What\n", []),
    ],
)
def test_findings(source, found):
    assert [why for _, why in findings(source)] == found
