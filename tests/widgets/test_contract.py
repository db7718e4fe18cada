"""Tables, codes, limits and colours that the browser's JavaScript repeats from Python are the same in both.

The tests read the JavaScript as text. Each pattern must match in exactly one file of its folder.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddp_notebook
from ddp_notebook.observe.figures.palette import ACTIONS, FILLS, LINES
from ddp_notebook.records.schema import DTYPES, SIDES, SPAN, SPANS, STATES
from ddp_notebook.widgets.feed import table_rows, tables
from ddp_notebook.widgets.feed.tables import FEED_TABLES, KINDS, TEXTS
from ddp_notebook.widgets.still.saved_page import MOST

_JS = Path(ddp_notebook.__file__).parent / "widgets" / "js"
_TYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "F64": "<f8"}
_ARRAYS = {
    "Uint8Array": "u1",
    "Int8Array": "i1",
    "Uint16Array": "u2",
    "Int16Array": "i2",
    "Uint32Array": "u4",
    "Int32Array": "i4",
    "Float32Array": "f4",
    "Float64Array": "f8",
}
_OWN = {"span": ["latest", "replaced"]}  # columns that are not sent


def in_javascript(pattern: str) -> re.Match[str]:
    """Return the only match in the JavaScript files."""
    sources = [file.read_text(encoding="utf-8") for file in sorted(_JS.rglob("*.js"))]
    found = [match for source in sources for match in re.finditer(pattern, source, re.DOTALL)]
    assert len(found) == 1, f"{len(found)} places match {pattern}"
    return found[0]


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r'"([^"]*)"', text))


def names(text: str) -> set[str]:
    """Return the names in a destructuring such as `{ rank, name: words }`."""
    return {part.partition(":")[0].strip() for part in text.split(",") if part.strip()}


def columns_of(table: str) -> set[str]:
    return set(FEED_TABLES[table].names or ())


# ---- tables


@pytest.mark.parametrize("table", ["step", "bucket", "span", "value"])
def test_a_table_of_the_browsers(table):
    """Its columns and types are those of the message, and its number of rows is the limit of a page."""
    found = in_javascript(rf"\b{table}: new Table\(\s*\[(.*?)\n      \],\s*(\d+),")
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


def test_the_tables_that_the_browser_does_not_keep_as_such():
    """The browser stores metrics as series, and ranks and tensors in other forms. The columns that it names must
    exist."""
    for table in ("metric", "course"):
        assert names(in_javascript(rf"const \{{([^}}]*)\}} = {table}\.columns;")[1]) == columns_of(table)
    ranks = in_javascript(r"for \(const name of \[([^\]]*)\]\) row\[name\] = this\.text")[1]
    assert set(words(ranks)) == set(TEXTS["rank"])
    whole = in_javascript(r"const \{([^}]*)\} = rows\.whole\.columns;")[1]
    assert names(whole) <= columns_of("whole")
    known = set(re.findall(r"\btables\.(\w+)\)", in_javascript(r"if \(tables\.metric \|\|.*?\n  \}")[0]))
    assert known | {"metric", "whole"} == set(FEED_TABLES)


def test_every_metric_has_room_in_the_browser():
    assert f"Math.floor({MOST['metric']} / " in in_javascript(r"const limit = Math\.min\([^;]*;")[0]


def test_parts_of_a_step_add_up_to_it_in_the_browser_too():
    """Forward and backward contain the exposed and waiting times inside them, so the bars leave them out."""
    parts = words(in_javascript(r"export const PARTS = \[(.*?)\]")[1])
    assert set(parts) == set(tables.PARTS) - {"forward", "backward"}


def test_the_types_that_a_message_may_have():
    types = dict(re.findall(r"(\w\d): (\w+),", in_javascript(r"const TYPES = \{(.*?)\};")[1]))
    assert types == {dtype: array for array, dtype in _ARRAYS.items()}
    columns = [dtype[name].base for dtype in FEED_TABLES.values() for name in dtype.names or ()]
    assert {dtype.str[1:] for dtype in (*columns, *tables.UNSIGNED)} <= set(types)
    greatest = dict(re.findall(r"(\w\d): (0x\w+)", in_javascript(r"const GREATEST = \{(.*?)\}")[1]))
    assert {name: int(number, 16) for name, number in greatest.items()} == {
        dtype.str[1:]: np.iinfo(dtype).max for dtype in tables.UNSIGNED
    }


# ---- codes


def test_codes():
    assert words(in_javascript(r"\bKINDS = \[(.*?)\]")[1]) == KINDS
    assert KINDS[:9] == SPANS[:9]
    own = np.zeros(len(SPANS), SPAN)
    own["kind"] = np.arange(len(SPANS))
    drawn = [KINDS[kind] for kind in table_rows.spans(own, 0)["kind"]]
    assert drawn == [kind for kind in SPANS[:9] if kind != "pipeline"] + ["input", "forward", "block"]
    codes = re.findall(r"(\w+) = (\d+)", in_javascript(r"export const (ISSUED = .*?);")[1])
    assert len(codes) > 1
    for name, code in codes:
        assert STATES[int(code)] == name.lower()


def test_each_kind_of_span_has_a_lane():
    lanes = in_javascript(r"const LANE_OF = \[(.*?)\]")[1].replace(" ", "").split(",")
    assert len(lanes) == len(KINDS)
    by_kind = dict(zip(KINDS, lanes, strict=True))
    assert {kind for kind, lane in by_kind.items() if lane == "COMMUNICATION"} == {
        *("collective", "send", "recv", "remote call")
    }
    assert {kind for kind, lane in by_kind.items() if lane == "CELL"} == {"cell"}


def test_sides_and_types_of_tensors():
    sides = words(in_javascript(r"const SIDES = \[(.*?)\]")[1])
    assert len(sides) == 2 and all(SIDES[at].startswith(short) for at, short in enumerate(sides))
    short = re.findall(r"(\w+): \"", in_javascript(r"const SHORT = \{(.*?)\}")[1])
    assert short and set(short) <= set(DTYPES)


# ---- colours


def test_figures_have_the_monitors_colours():
    """The monitor's colours are those of a light page. Figures stand on light and dark pages, so they have their own
    colours for `waiting` and `rest`."""
    light = in_javascript(r"const LIGHT = \{(.*?)\n\};")[1]
    monitor = dict(re.findall(r'"?\b(\w[\w ]*)"?: "(#\w+)"', light))
    for meaning in ("input", "compute", "overlapped", "hidden", "exposed", "optimizer"):
        assert FILLS[meaning].face.lower() == monitor[meaning], meaning
    for kind in ("forward", "backward", "input gradient", "weight gradient"):
        assert ACTIONS[kind].face.lower() == monitor[kind], kind
    ranks = re.search(r"ranks: \[(.*?)\]", light)
    assert ranks is not None and words(ranks[1]) == tuple(line.lower() for line in LINES)


# ---- colours differ for any colour vision

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
_VISION = {
    "all cones": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_LEAST_APART = 10.0  # distance in CIE Lab; 2.3 is just noticeable


def seen(colour: str, vision: str) -> Any:
    """Return a colour in CIE Lab as this type of colour vision perceives it."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = _XYZ @ np.clip(np.array(_VISION[vision]) @ linear, 0, 1) / np.array([0.9505, 1, 1.089])
    cubic = np.where(xyz > 0.008856, np.cbrt(np.maximum(xyz, 1e-9)), 7.787 * xyz + 16 / 116)
    return np.array([116 * cubic[1] - 16, 500 * (cubic[0] - cubic[1]), 200 * (cubic[1] - cubic[2])])


@pytest.mark.parametrize("vision", _VISION)
@pytest.mark.parametrize("theme", ["LIGHT", "DARK"])
def test_colours_that_stand_side_by_side_are_told_apart(theme, vision):
    text = in_javascript(rf"const {theme} = \{{.*?fill: \{{(.*?)\n  \}}")[1]
    fills = dict(re.findall(r'"?(\w[\w ]*)"?: "(#\w+)"', text))
    panels = (
        ("input", "compute", "exposed", "optimizer", "rest"),
        ("backward", "hidden", "exposed"),
        ("forward", "backward", "weight gradient", "optimizer", "input", "block", "communication", "execution", "cell"),
    )
    for panel in panels:
        for one, other in itertools.combinations(panel, 2):
            apart = float(np.linalg.norm(seen(fills[one], vision) - seen(fills[other], vision)))
            assert apart > _LEAST_APART, f"{one} and {other}: {apart:.1f}"
    assert fills["exposed"] == fills["communication"], "one thing has one colour in all panels"
