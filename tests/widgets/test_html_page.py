"""The monitor as HTML: its text is right, it is small and fast, and no text of a user becomes markup."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from ddp_notebook.observe.figures.palette import FILLS, STEP_PARTS
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import METRIC
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.tables import empty
from ddp_notebook.widgets.html import metric_curves, page, rank_table, step_bars
from ddp_notebook.widgets.html.axes import Axes
from ddp_notebook.widgets.html.rank_table import RankRow
from ddp_notebook.widgets.html.series import SLOTS, Series
from ddp_notebook.widgets.html.sources import PageState, Sources
from ddp_notebook.widgets.html.view import PERIOD_S, HtmlView
from ddp_notebook.widgets.live_status import LiveStatus
from ddp_notebook.widgets.publisher import Publisher
from ddp_notebook.widgets.simulated.simulation import simulate
from tests.observe.batches import Rank
from tests.observe.test_figures import logged

NASTY = "<script>alert('x')</script>&\"rate\" %s {0} </style>"


class Page(HTMLParser):
    """A parsed page: every element is closed. Texts are kept with the element that contains them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for within, text in self.texts if within == tag]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def looked_at(recording: Recording, cell: int | None = None, **head: Any) -> PageState:
    """Return the state of the page for a live recording."""
    feed = Feed(recording, cell)
    present = LiveStatus(feed, None, "the ranks")
    feed.delta(feed.end_ns, present.head(), present.look(0.0))
    return Sources(feed).look({**present.head(), **head})


def steps(durations_ms, rank=0, first=0):
    """Return rows of steps that computed all the time."""
    rows = empty("step", len(durations_ms))
    rows["rank"], rows["step"] = rank, first + np.arange(len(rows))
    rows["duration"] = rows["compute"] = durations_ms
    return rows


def steps_of_all_parts(durations_ms, rank):
    """Return rows of steps with equal parts. A part of the computing overlaps with an all_reduce."""
    rows = steps(durations_ms, rank)
    for part in STEP_PARTS:
        rows[part] = rows["duration"] / len(STEP_PARTS)
    rows["compute"] += rows["overlapped"]
    return rows


# ---- a page


@pytest.fixture(scope="module")
def recorded():
    return simulate(world_size=4, steps=60, straggler=2)


def test_it_says_what_the_recording_holds(recorded):
    found = Page(page.of_recording(recorded, None, "4 ranks, gloo", "k"))

    assert ("b", "4 ranks, gloo") in found.texts and ("span", "recorded") in found.texts
    loss, step = found.of("title")
    of_ranks = [recorded.metrics["loss"].of_rank(rank)[1] for rank in range(4)]
    begin, end = (np.mean([values[at] for values in of_ranks]) for at in (0, -1))
    assert loss == f"loss {begin:.2f} → {end:.3f}; by step, of each rank"
    assert re.match(r"what the last 30 steps took: 3 % input, \d+ % compute", step)
    run = recorded.runs()[-1]
    assert ("b", run.per_step) in found.texts and run.definition in found.of("figcaption")[-1]
    assert [one["role"] for one in found.named("svg")] == ["img", "img"]
    assert [one.get("scope") for one in found.named("th")].count("row") == 4
    head = [text for tag, text in found.texts if tag == "th"]
    assert head == [
        "Rank",
        "loss",
        "Last step",
        "Step time, last 48",
        "Waiting",
        "Memory",
        "GPU memory",
        "0",
        "1",
        "2",
        "3",
    ]
    assert found.of("caption") == ["The ranks"]
    waiting = [float(text.split()[0]) for text in found.of("td") if text.endswith(" %")]
    assert waiting.index(min(waiting)) == 2, "the slow rank waits for nobody"


def test_the_parts_are_those_of_the_recordings_steps(recorded):
    _, parts = step_bars.means(looked_at(recorded, 2).steps)
    found = recorded.steps(cell=2)

    assert len(parts) == 30 and parts.shape[1] == len(STEP_PARTS)
    for step in (0, 29):
        own = [one for one in found if one.step == step]
        assert parts[step].sum() == pytest.approx(np.mean([one.duration_ns for one in own]) / 1e6, rel=1e-3)
        waiting = parts[step, STEP_PARTS.index("waiting")]
        assert waiting == pytest.approx(np.mean([one.waiting_ns for one in own]) / 1e6, rel=1e-3, abs=1e-3)


def test_nothing_recorded_is_said():
    found = Page(page.of_recording(Recording(2), None, "2 ranks", "k"))
    assert "nothing was logged, and no step has ended" in found.of("div")
    assert found.named("svg") == [] and [text for tag, text in found.texts if tag == "th"][1:] == ["0", "1"]


def test_a_hang_is_said(recorded):
    why = "not arrived at all_reduce #5: rank 2 is at cell line 7"
    found = Page(page.draw(looked_at(recorded, state="stuck", why=why), "k"))
    assert f"No progress: {why}" in found.of("b") and ("span", "hangs") in found.texts
    assert "The stop button ends the cell; every variable is kept." in found.of("div")


def test_two_pages_on_one_page_of_a_browser_share_no_id(recorded):
    one, other = (page.of_recording(recorded, None, "", key) for key in "ab")
    ids = [set(re.findall(r' id="([^"]*)"', html)) for html in (one, other)]
    assert ids[0] and not ids[0] & ids[1]
    assert all(f"url(#{name})" in html for html, names in zip((one, other), ids, strict=True) for name in names)


def test_it_loads_nothing_and_needs_no_script(recorded):
    html = page.of_recording(recorded, None, "", "k")
    assert not re.search(r"<script|<link|<img|https?:|@import|url\((?!#)| on\w+=", html)


# ---- names of users


def test_what_users_write_is_text():
    recording = logged({0: [2.0, 1.0], 1: [2.0, 1.5]}, name=NASTY)
    shown = looked_at(recording, state="stuck", why=NASTY, title=NASTY)
    rows = [RankRow(rank=rank, state=NASTY, line=NASTY, waits_for=NASTY) for rank in range(2)]
    shown = PageState(**{**{name: getattr(shown, name) for name in PageState.__slots__}, "ranks": rows, "cell": NASTY})
    html = page.draw(shown, "k")

    found = Page(html)
    assert {tag for tag, _ in found.tags} <= {
        *("section", "style", "div", "b", "span", "figure", "figcaption", "svg", "title", "path", "text", "circle"),
        *("ul", "li", "i", "table", "caption", "thead", "tbody", "tr", "th", "td"),
    }
    assert html.count("<style>") == html.count("</style>") == 1 and "<script" not in html
    assert any(NASTY[:15] in text for text in found.of("td"))


# ---- size and time


def many(world_size: int, count: int, name: str = "loss") -> Recording:
    """Return a recording of ranks that log different values for `count` steps."""
    recording = Recording(world_size)
    for rank in range(world_size):
        rows = np.zeros(count, METRIC)
        rows["rank"], rows["name"], rows["cell"], rows["step"] = rank, 1, 2, np.arange(count)
        rows["value"] = (
            2.3 * np.exp(-np.arange(count) / count * 4) * (1 + 0.2 * np.random.default_rng(rank).random(count))
        )
        recording._feed(Batch(rank=rank, stream=rank + 1, texts={1: name}, tables={"metric": rows}))
    return recording


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 8, 9, 64])
def test_it_is_small_and_quick_with_5000_steps(world_size):
    recording = many(world_size, 5000)
    feed = Feed(recording)
    sources = Sources(feed)
    head = {
        "state": "running",
        "cell": 2,
        "title": f"{world_size} ranks",
        "why": "",
        "label": "In [2]",
        "training": None,
    }
    rng = np.random.default_rng(0)
    rows = np.concatenate([steps_of_all_parts(rng.random(60) * 40 + 20, rank) for rank in range(world_size)])
    shown = sources.look(head)
    with_steps = {name: getattr(shown, name) for name in PageState.__slots__} | {"steps": rows}
    html = page.draw(PageState(**with_steps), "k")
    assert len(html.encode()) <= page.MOST_BYTES
    found = Page(html)
    assert len(found.named("svg")) == 2
    rows_shown = [one.get("scope") for one in found.named("th")].count("row")
    assert rows_shown >= min(world_size, 8), "charts become smaller before ranks are left out"

    began_s = time.process_time()
    for _ in range(5):
        page.draw(sources.look(head), "k")
    assert (time.process_time() - began_s) / 5 < 0.1, "2 to 6 ms were measured on a quiet machine"


def test_long_texts_of_64_ranks_do_not_make_it_large():
    texts: dict[str, Any] = {"state": "silent", "line": "<&>" * 200, "waits_for": "<\"'&>" * 200}
    rows = [RankRow(rank=rank, metric=0.5, step=10**9, step_ms=5.0, waiting=0.5, **texts) for rank in range(64)]
    shown = looked_at(many(64, 300, name="&" * 500), why="&" * 5000, state="stuck", title="&" * 100)
    shown = PageState(**{**{name: getattr(shown, name) for name in PageState.__slots__}, "ranks": rows})

    html = page.draw(shown, "k")
    assert len(html.encode()) <= page.MOST_BYTES
    found = Page(html)
    assert [text for tag, text in found.texts if tag == "th"][-1].endswith(" others")


# ---- the course of a metric


def test_a_course_is_the_lowest_and_highest_of_equal_stretches():
    course = Series(world_size=2)
    values = np.random.default_rng(1).random(1000)
    for begin in range(0, 1000, 37):  # parts of each rank, as they arrive
        part = np.arange(begin, min(begin + 37, 1000))
        for rank in (0, 1):
            course.add(np.full(len(part), rank), part, values[part] + rank, cell=1)

    assert course.width == 16 and len(course.steps) == 63 <= SLOTS
    for rank in (0, 1):
        at, shown = course.points(rank)
        assert shown == pytest.approx(values[at.astype(int)] + rank), "no value is made up"
        for slot in range(63):
            own = shown[at // 16 == slot]
            stretch = values[16 * slot : 16 * slot + 16] + rank
            assert own.min() == stretch.min() and own.max() == stretch.max()
        assert {0, 999} <= set(at.tolist())
    assert course.means[0, 0] == pytest.approx(values[:16].mean())
    assert (course.begin[0, 1], course.end[1]) == (values[0], values[-1] + 1)
    drawn = Page(metric_curves.chart("loss", course, {}))
    assert f"1 of {2000 / course.drawn:.1f} points drawn: the lowest and the highest of neighbours" in drawn.of("li")


def test_a_course_of_128_steps_is_drawn_whole():
    course = looked_at(logged({0: np.sin(np.arange(128))})).courses["loss"]
    steps, values = course.points(0)
    assert steps.tolist() == list(range(128)) and values.tolist() == pytest.approx(np.sin(np.arange(128)).tolist())
    assert not any("drawn" in words for words in Page(metric_curves.chart("loss", course, {})).of("li"))


def test_a_series_begins_at_its_first_step_and_adds_earlier_ones():
    course = Series(world_size=2)
    course.add(np.array([0, 0]), np.array([10_000, 10_010]), np.array([1.0, 2.0]), cell=1)
    course.add(np.array([1]), np.array([9_995]), np.array([3.0]), cell=1)

    assert [[one.tolist() for one in course.points(rank)] for rank in (0, 1)] == [
        [[10_000, 10_010], [1.0, 2.0]],
        [[9_995], [3.0]],
    ]
    course.add(np.array([1]), np.array([9_000]), np.array([4.0]), cell=1)
    assert course.width > 2 and course.steps[0] < 9_000 + course.width and course.means[1, 0] == 4.0
    assert course.points(1)[0].tolist() == [9_000, 9_995]


def test_a_cell_continues_a_series_or_begins_one_at_step_zero():
    course = Series(world_size=1)
    zero = np.zeros(3, int)
    course.add(zero, np.arange(3), np.full(3, 9.0), cell=1, is_given=True)
    course.add(zero, np.arange(3, 6), np.full(3, 8.0), cell=2, is_given=True)
    assert course.points(0)[1].tolist() == [9.0] * 3 + [8.0] * 3
    course.add(zero, np.arange(3), np.full(3, 1.0), cell=3, is_given=True)
    assert course.points(0)[1].tolist() == [1.0] * 3
    course.add(zero, np.arange(3), np.full(3, 7.0), cell=2, is_given=True)
    assert course.points(0)[1].tolist() == [1.0] * 3, "a late row of an earlier run"


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_a_cell_whose_steps_were_counted_continues_no_other(first, second):
    course = Series(world_size=1)
    course.add(np.zeros(3, int), np.arange(3), np.full(3, 9.0), cell=1, is_given=first)
    course.add(np.zeros(3, int), np.arange(9, 12), np.full(3, 8.0), cell=2, is_given=second)
    assert course.points(0)[1].tolist() == [8.0] * 3


def test_a_late_row_of_an_earlier_cell_of_the_same_run_is_drawn():
    course = Series(world_size=2)
    course.add(np.zeros(3, int), np.arange(3), np.full(3, 9.0), cell=1, is_given=True)
    course.add(np.zeros(3, int), np.arange(3, 6), np.full(3, 8.0), cell=2, is_given=True)
    course.add(np.ones(3, int), np.arange(3), np.full(3, 7.0), cell=1, is_given=True)
    assert course.points(1)[1].tolist() == [7.0] * 3


def test_the_page_notes_how_many_metrics_are_not_drawn():
    recording = Recording(1)
    for number in range(40):
        logged({0: [1.0]}, name=f"x{number}", into=recording)
    shown = looked_at(recording)
    assert len(shown.courses) == 32 and shown.notes == ["the first 32 metrics are drawn; 8 more are not"]


def test_what_is_no_number_is_named():
    course = looked_at(logged({0: [2.0, 1.0, 0.5], 1: [2.0, np.nan, np.inf]})).courses["loss"]
    found = Page(metric_curves.chart("loss", course, {}))
    assert found.of("title")[0].startswith("loss nan from step 1 on rank 1")
    assert "nan from step 1" in found.of("b")
    alone = looked_at(logged({0: [np.nan]})).courses["loss"]
    assert "no value is a number" in Page(metric_curves.chart("loss", alone, {})).of("text")


def test_ranks_with_the_same_course_share_a_line():
    course = looked_at(logged({rank: [2.0, 1.0] for rank in range(16)})).courses["loss"]
    found = Page(metric_curves.chart("loss", course, {}))
    assert found.of("li") == ["all ranks "] and len([p for p in found.named("path") if p["class"] == "line"]) == 1


def test_a_large_range_is_drawn_on_a_logarithmic_axis():
    course = looked_at(logged({0: [100.0, 1.0, 0.01]})).courses["loss"]
    assert {"0.01", "1", "100"} <= set(Page(metric_curves.chart("loss", course, {})).of("text"))


# ---- the bars


def test_a_first_step_that_is_much_longer_is_cut_off_and_named():
    drawn = Page(step_bars.chart(steps([900.0] + [10.0] * 30), "k"))
    assert "↑ 900 ms" in drawn.of("text")
    [label] = [one for one in drawn.named("text") if one.get("text-anchor") == "start"]
    tops = [int(y) for path in drawn.named("path") for y in re.findall(r"M\d+ (\d+)h", path["d"] or "")]
    assert int(label["y"] or 0) < min(top for top in tops if top > 0), "no bar is behind the label"
    heights = [int(h) for h in re.findall(r"v(\d+)h", drawn.named("path")[3]["d"] or "")]
    assert len(heights) == 31 and min(heights) > 100, "the others are seen"


def test_only_the_last_steps_are_drawn_and_waiting_is_outlined():
    rows = steps([10.0] * 200)
    rows["compute"], rows["waiting"] = 6.0, 4.0
    drawn = Page(step_bars.chart(rows, "k"))
    assert "the last 48 steps" in drawn.of("title")[0] and "the last 48 steps:" in drawn.of("li")
    [waiting] = [one for one in drawn.named("path") if one.get("stroke") == FILLS["waiting"].edge and "fill" in one]
    assert len(re.findall("M", waiting["d"] or "")) == step_bars.MOST_BARS
    assert drawn.of("b")[-2:] == ["60 %", "40 %"]


# ---- the ranks


def test_of_many_ranks_the_slowest_have_a_row():
    rows = [RankRow(rank=rank, step_ms=50.0, waiting=0.4, rss=1e9) for rank in range(64)]
    rows[37] = RankRow(rank=37, step_ms=50.0, waiting=0.0, rss=1e9)
    rows[5] = RankRow(rank=5, state="died", line="killed by SIGKILL")
    found = Page(rank_table.table(rows, ""))
    named = [text for tag, text in found.texts if tag == "th"]
    assert {"5", "37", "56 others"} <= set(named) and len(found.named("tr")) == 10
    assert found.of("td")[-4:] == ["50.0 ms", "40 %", "1.0 GB", "\N{EN DASH}"], "the others' medians"


# ---- when it is redrawn


class Display:
    """A replacement for the result of `display(display_id=True)`."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def update(self, data: dict[str, Any], raw: bool) -> None:
        assert raw
        self.shown.append(data)


def test_it_is_redrawn_for_new_rows_and_at_most_twice_a_second():
    recording = Recording(1)
    feed = Feed(recording)
    publisher = Publisher(feed, LiveStatus(feed, None, "1 rank"))
    place = Display()
    view = HtmlView(recording, None, "1 rank", publisher, place)
    rank = Rank(0)
    now_s = time.monotonic()
    try:
        assert len(place.shown) == 1, "at once"
        for at in range(40):  # 4 s
            recording._feed(rank.batch(rank.row("metric", name="loss", value=1 / (at + 1), step=at)))
            view.on_news(publisher.snapshot())
            view.look(now_s + at / 10)
        assert 7 <= len(place.shown) - 1 <= 8
        count = len(place.shown)
        view.on_news(publisher.snapshot())
        view.look(now_s + 10)
        view.look(now_s + 10 + PERIOD_S)
        assert len(place.shown) <= count + 1, "what is drawn is what was drawn"
        view.freeze(recording, None)
        assert "recorded" in place.shown[-1]["text/html"]
        assert place.shown[-1]["text/plain"] == "cell 0: 1 rank, loss 1.00 -> 0.0250"
        view.look(now_s + 100)
        assert "recorded" in place.shown[-1]["text/html"]
    finally:
        publisher.close()


def test_a_long_label_of_a_tick_has_its_unit_on_the_next_line():
    """The frame leaves no space for more than six characters."""
    short, long = (str(Axes(x=(0, 1), y=(0, most)).frame("step", [], "ms")) for most in (600, 1200))
    assert ">600 ms</text>" in short and ">1000</text>" in long and ">ms</text>" in long
