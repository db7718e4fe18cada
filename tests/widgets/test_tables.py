"""Tables keep their values in messages, and need few bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ddp_notebook.widgets.feed.budget import DrawingBudget
from ddp_notebook.widgets.feed.tables import FEED_TABLES, empty, pack
from tests.widgets.unpacking import unpack


def random_rows(table, count=500, seed=1):
    random = np.random.default_rng(seed)
    rows = empty(table, count)
    for name in rows.dtype.names or ():
        kind, shape = rows[name].dtype.kind, rows[name].shape
        if kind == "f":
            rows[name] = np.round(random.uniform(-100, 100_000, shape), 4)
            if rows[name].ndim == 1:
                rows[name][random.random(count) < 0.2] = np.nan
        else:
            rows[name] = random.integers(0, 60_000 if rows[name].dtype.itemsize > 1 else 255, shape)
    if table == "value":
        rows["count"] = 32
    return rows


def travelled(tables):
    header, data = pack(tables)
    return unpack({"tables": json.loads(json.dumps(header, allow_nan=False))}, data), header, data


@pytest.mark.parametrize("table", FEED_TABLES)
def test_every_table_comes_out_as_it_went_in(table):
    rows = random_rows(table)
    found, _, _ = travelled({table: rows})

    for name in rows.dtype.names or ():
        error = 6e-5 if rows[name].dtype.itemsize == 8 else 0  # half of 0.1 us, in ms
        np.testing.assert_allclose(found[table][name], rows[name], rtol=0, atol=error, err_msg=name)


def test_what_is_the_same_everywhere_takes_no_bytes():
    rows = empty("step", 100)
    rows["input"], rows["forward"] = 1.5, np.nan
    found, header, data = travelled({"step": rows})

    assert data == b""
    assert dict(column for column in header["step"]["columns"] if len(column) == 2)["forward"] is None
    assert found["step"]["input"].tolist() == [1.5] * 100
    assert np.isnan(found["step"]["forward"]).all()


def test_infinite_and_whole_values_are_kept():
    rows = empty("value", 3)
    rows["low"], rows["high"], rows["numel"] = -np.inf, [np.inf, 1.0, np.nan], [1, 1e12, 7]
    found, _, _ = travelled({"value": rows})

    assert found["value"]["low"].tolist() == [-np.inf] * 3
    np.testing.assert_array_equal(found["value"]["high"], rows["high"])
    assert found["value"]["numel"].tolist() == [1, 1e12, 7]


def test_times_are_exact_to_a_tenth_of_a_microsecond_after_a_day():
    rows = empty("span", 2)
    rows["start"], rows["end"] = [86_400_000.0001, 86_400_000.0004], [np.nan, 86_400_050.1234]
    found, header, _ = travelled({"span": rows})

    np.testing.assert_allclose(found["span"]["start"] - 86_400_000, [0.0001, 0.0004], atol=6e-5)
    assert np.isnan(found["span"]["end"]).tolist() == [True, False]
    dtypes = {column[0]: column[1] for column in header["span"]["columns"] if len(column) > 2}
    assert dtypes["start"] == "u1"


def test_a_table_without_rows_is_left_out():
    assert pack({"metric": empty("metric")}) == ({}, b"")


# ---- what is left out


def test_all_is_shown_where_it_fits():
    thinning = DrawingBudget(1000)
    for second in range(5):
        numbers = np.arange(10) + 10 * second
        thinning.adapt(numbers, nbytes=900, seconds=1.0)
        assert thinning.keep(numbers).all()


def test_a_flood_is_thinned_at_once_and_stays_below_the_limit():
    thinning = DrawingBudget(1000)
    shown = 0
    for tick in range(100):  # 10 s with 64 000 bytes each
        numbers = np.arange(64) + 64 * tick
        thinning.adapt(numbers, nbytes=6400, seconds=0.1)
        shown += 100 * int(thinning.keep(numbers).sum())
    assert shown / 10 <= 1000
    assert shown / 10 > 400
    assert thinning.every == 64


def test_a_rate_change_keeps_each_step_on_all_ranks_or_on_none():
    thinning = DrawingBudget(1000)
    thinning.adapt(np.arange(4), nbytes=100, seconds=0.1)
    before = thinning.keep(np.arange(100))
    thinning.adapt(np.arange(96, 100), nbytes=400, seconds=0.5)  # a rank's part of steps 96 to 99 was sent before

    assert thinning.every == 1
    thinning.adapt(np.arange(100, 110), nbytes=1500, seconds=0.5)
    assert thinning.every > 1
    assert (thinning.keep(np.arange(100)) == before).all(), "what was decided stays"
    later = np.arange(110, 200)
    assert (thinning.keep(later) == (later % thinning.every == 0)).all()


def test_it_shows_more_again_when_less_comes():
    thinning = DrawingBudget(1000, every=64)
    for tick in range(60):
        thinning.adapt(np.array([tick]), nbytes=10, seconds=0.1)
    assert thinning.every == 1
