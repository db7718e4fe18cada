"""Times, sizes, shares and values have the same text in Python and in the browser: both read these examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_notebook.records import units

EXAMPLES = json.loads((Path(__file__).parent / "data" / "units.json").read_text(encoding="utf-8"))
FORMATTERS = {
    "times_ms": lambda value: units.ms(value * 1e6),
    "sizes_bytes": units.size,
    "shares": units.percent,
    "values": units.three_figures,
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_number_is_written_as_in_the_browser(kind):
    assert [FORMATTERS[kind](value) for value, _ in EXAMPLES[kind]] == [text for _, text in EXAMPLES[kind]]
