"""What the JavaScript in the browser has copied from Python: tables, codes, limits and colours are the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ddp_notebook
from ddp_notebook.observe.figures.drawing import FILLS
from ddp_notebook.records.schema import SPANS, STATES
from ddp_notebook.widgets.feed.tables import FEED_TABLES, KINDS
from ddp_notebook.widgets.still.page import MOST

_JS = Path(ddp_notebook.__file__).parent / "widgets" / "js"
_TYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "F64": "<f8"}
_OWN = {"span": ["latest", "replaced"]}  # columns that do not travel


def _source(name: str) -> str:
    return (_JS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("table", ["step", "bucket", "span", "value"])
def test_a_table_of_the_browsers(table):
    """Its columns with their types, and how many rows it keeps, which a page has at most."""
    found = re.search(rf"{table}: new Table\(\s*\[(.*?)\n      \],\s*(\d+),", _source("tables.js"), re.DOTALL)
    assert found is not None
    columns = []
    for name, dtype, width, part in re.findall(r'\["(\w+)", (\w+)(?:, (\d+))?\]|part\("(\w+)"\)', found[1]):
        columns.append(
            (part, "<f4") if part else (name, _TYPES[dtype], (int(width),)) if width else (name, _TYPES[dtype])
        )
    own = _OWN.get(table, [])
    kept = [column for column in columns if column[0] not in own]
    assert np.dtype(kept) == FEED_TABLES[table]
    assert len(columns) - len(kept) == len(own)
    assert int(found[2]) == MOST[table]


def test_metrics_and_codes():
    kinds = re.search(r"KINDS = \[(.*?)\]", _source("tables.js"))
    assert kinds is not None and tuple(re.findall(r'"(\w+)"', kinds[1])) == KINDS
    assert KINDS[: len(SPANS)] == SPANS
    assert f"Math.floor({MOST['metric']} / " in _source("intake.js")
    codes = re.search(r"export const (ISSUED = .*);", _source("lanes.js"))
    assert codes is not None
    for name, code in re.findall(r"(\w+) = (\d+)", codes[1]):
        assert STATES[int(code)] == name.lower()


def test_figures_have_the_monitors_colours():
    """On a light page. Figures stand on pages of either kind, so what `waiting` and `rest` are there is their own."""
    light = re.search(r"const LIGHT = \{.*?fill: \{(.*?)\}", _source("colours.js"), re.DOTALL)
    assert light is not None
    monitor = dict(re.findall(r'(\w+): "(#\w+)"', light[1]))
    for meaning in ("input", "compute", "overlapped", "exposed", "optimizer"):
        assert FILLS[meaning].face.lower() == monitor[meaning], meaning
