"""Compare the charts of random histories in a browser with the recording, for each way in which a view gets rows.

The feed is that of a session, and the page is the bundle in Chromium. The tests read the data of the chart from the
page, and one test reads its pixels. tests/browser/test_curves.py does the same in JupyterLab with ranks.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from ddp_notebook.observe.recording import Recording
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import METRIC
from ddp_notebook.widgets import bundles
from ddp_notebook.widgets.feed import browser_requests
from ddp_notebook.widgets.feed.feed import Feed
from ddp_notebook.widgets.feed.messages import FeedMessage
from ddp_notebook.widgets.still import saved_page as still_page
from tests.browser import chromium
from tests.widgets.test_summary import recorded

NAMES = ("loss", "accuracy")
PAGE = """<!doctype html><meta charset="utf-8"><body><script type="module">
const text = await (await fetch(MODULE)).text();
const { mount } = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
window.open_view = (name, canSend, compact) => {
  const el = document.createElement("div");
  el.style.width = "1000px";
  document.body.append(el);
  const view = { el, run: 0 };
  const take = (messages) => messages.forEach(([header, data]) => view.deliver(header, [bytes(data)]));
  const source = { start: (deliver) => { view.deliver = deliver; } };
  if (canSend) source.send = async (message) => take(await window.kernel(name, JSON.stringify(message)));
  view.close = mount(el, source, { compact });
  view.take = take;
  (window.views ??= {})[name] = view;
};
window.monitor = (name) => [...views[name].el.querySelectorAll("*")].find((one) => one.ddpMonitor).ddpMonitor;
window.ready = true;
</script>"""


class Kernel:
    """A growing recording, its feed, and the views on a page that get its messages."""

    def __init__(self, browser_page: Page, world_size: int) -> None:
        self.page = browser_page
        self.recording = Recording(world_size)
        self.feed = Feed(self.recording)
        self.now_ns = self.feed.start_ns
        self.views: list[str] = []
        self.unsent: dict[str, FeedMessage] = {}  # a delta for each view that has not received it yet
        self.cell = 0
        self.texts = {at + 1: name for at, name in enumerate(NAMES)}

    def head(self, state: str = "running") -> dict[str, Any]:
        return {"state": state, "cell": self.cell, "title": "ranks"}

    def log(self, rank: int, name: str, steps: Any, values: Any) -> None:
        rows = np.zeros(len(steps), METRIC)
        rows["rank"], rows["name"], rows["cell"] = rank, NAMES.index(name) + 1, self.cell
        rows["step"], rows["value"], rows["is_given"] = steps, values, self.is_given
        rows["time_ns"] = self.now_ns + np.arange(len(rows))
        self.recording._feed(Batch(rank=rank, stream=rank + 1, texts=self.texts, tables={"metric": rows}))

    def begin(self, cell: int, is_given: bool = False) -> None:
        """Begin a cell. `is_given` is True if the cell passes the steps to `log`."""
        self.cell, self.is_given = cell, is_given
        self.recording.prompts[cell] = f"In [{cell + 2}]"

    def tick(self, seconds: float = 0.1, state: str = "running") -> None:
        """Send one delta, as the publisher's thread does ten times a second."""
        self.now_ns += int(seconds * 1e9)
        if (message := self.feed.delta(self.now_ns, self.head(state))) is not None:
            self.unsent = dict.fromkeys(self.views, message)
            for name in self.views:
                if (unsent := self.unsent.pop(name, None)) is not None:
                    self.send(name, unsent)

    def settle(self) -> None:
        """End the cell, and send the rows that wait for room."""
        self.tick(state="idle")
        while self.feed.has_news():
            self.tick(state="idle")

    def open(self, name: str, *, compact: bool = False) -> None:
        self.page.evaluate("([name, compact]) => open_view(name, true, compact)", [name, compact])
        self.views.append(name)
        self.send(name, self.feed.snapshot(self.now_ns, self.head()))

    def send(self, name: str, *messages: FeedMessage) -> None:
        self.page.evaluate("([name, messages]) => views[name].take(messages)", [name, packed(messages)])

    def answer(self, name: str, message: str) -> list[Any]:
        """Answer a view. The page may send a request before a delta has reached another view: messages keep their
        order."""
        content = json.loads(message)
        before = [self.unsent.pop(name)] if name in self.unsent else []
        if content["kind"] == "hello":
            return packed([*before, self.feed.snapshot(self.now_ns, self.head())])
        if content["kind"] == "ask":
            return packed([*before, browser_requests.answer(content, self.feed, self.now_ns)])
        return packed(before)


def packed(messages: Any) -> list[Any]:
    return [[one.header, base64.b64encode(one.data).decode()] for one in messages]


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.executable(), args=list(chromium.ARGUMENTS))
        try:
            shown = browser.new_page(viewport={"width": 1100, "height": 900})
            shown.on("console", lambda message: said.append(message.text))
            shown.on("pageerror", lambda error: said.append(str(error)))
            module = base64.b64encode(bundles.monitor().encode()).decode()
            shown.set_content(PAGE.replace("MODULE", json.dumps(f"data:text/javascript;base64,{module}")))
            shown.wait_for_function("window.ready")
            shown.expose_function("kernel", lambda name, message: _kernels[-1].answer(name, message))
            yield shown
        finally:
            browser.close()
    assert said == []


_kernels: list[Kernel] = []  # the last one answers the page


@pytest.fixture
def make_kernel(browser_page):
    def make(world_size: int) -> Kernel:
        _kernels.append(Kernel(browser_page, world_size))
        return _kernels[-1]

    yield make
    browser_page.evaluate(
        "Object.values(window.views ?? {}).forEach((one) => { one.close(); one.el.remove(); }); window.views = {}"
    )


def drawn(shown: Page, name: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the points of the metric's chart after all replies have arrived and all rows are drawn.

    The browser notifies a view with a delay that it is visible.
    """
    until = time.monotonic() + timeout_s
    while True:
        shown.evaluate("(name) => views[name].el.scrollIntoView()", name)
        shown.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        state: dict[str, Any] = shown.evaluate(
            "(name) => { const { panels: { loss }, due } = monitor(name).state();"
            " return { ...loss, due, lines: Object.entries(loss.lines).map(([key, one]) => [key, { ...one, values:"
            " one.values.map((value) => value === undefined ? 'none' : value === null ? 'no number' : value) }]) }; }",
            name,
        )
        if not state["asked"] and not state["due"]:
            return state
        assert time.monotonic() < until, state["notes"]
        time.sleep(0.05)


def truth(recording: Recording, name: str, cells: list[int]) -> dict[int, tuple[Any, Any]]:
    """Return the steps and values of a run by rank, in a stable order by step. Values are float32 as in messages."""
    rows = recording.rows("metric")
    rows = rows[np.isin(rows["cell"], cells) & (rows["name"] == NAMES.index(name) + 1)]
    found = {}
    for rank in np.unique(rows["rank"]).tolist():
        own = rows[rows["rank"] == rank]
        own = own[np.argsort(own["step"], kind="stable")]
        found[rank] = own["step"].astype(float), own["value"].astype(np.float32).astype(float)
    return found


def check(state: dict[str, Any], recording: Recording, cells: list[int], prefix: str = "") -> bool:
    """Check that the lines equal the recording, or that the panel states how many points are missing.

    Return True if points are missing.
    """
    true = truth(recording, state["metric"], cells)
    assert true, "nothing was logged"
    notes = [note for note in state["notes"] if "drawn" in note]
    of_rank = {rank: one for key, one in state["lines"] if key.startswith(f"{prefix}rank") for rank in one["ranks"]}
    assert of_rank.keys() == true.keys()
    logged = sum(len(steps) for steps, _ in true.values())
    x = np.array(state["x"], float)
    ends = np.array(state["ends"], float)
    begins = np.array([x[ends == end].min() for end in ends])  # a stretch has two points with the same end
    for rank, (steps, values) in true.items():
        line = of_rank[rank]["values"]
        at = np.array([place for place, value in enumerate(line) if value != "none"], int)
        shown = np.array([np.nan if line[place] == "no number" else line[place] for place in at.tolist()], float)
        if not notes:
            assert x[at].tolist() == steps.tolist(), f"rank {rank}: the steps"
            is_number = np.isfinite(values)
            assert np.array_equal(np.isnan(shown), ~is_number)
            assert shown[is_number].tolist() == values[is_number].tolist(), f"rank {rank}: the values"
            continue
        check_thinned(x[at], begins[at], ends[at], shown, steps, values)
    if not prefix:
        assert state["logged"] == logged
    if notes:
        ratio = state["logged"] / state["drawn"]
        count = f"1 of {float(f'{ratio:.2g}'):,.10g}" if ratio >= 2 else f"{state['drawn']:,} of {state['logged']:,}"
        assert notes[0].startswith(f"{count} points drawn"), (notes, ratio)
    else:
        assert state["drawn"] == state["logged"]
    return bool(notes)


def check_thinned(x: Any, begins: Any, ends: Any, shown: Any, steps: Any, values: Any) -> None:
    """Check that every drawn value was logged in its stretch, and that no stretch hides a more extreme value."""
    finite = np.isfinite(values)
    for begin, end, value in zip(begins, ends, shown, strict=True):
        if np.isfinite(value):
            within = (steps >= begin) & (steps <= end)
            assert value in values[within], f"{value} at {begin} to {end} was not logged"
    steps, values = steps[finite], values[finite]
    shown_steps, shown = x[np.isfinite(shown)], shown[np.isfinite(shown)]
    assert (shown.min(), shown.max()) == (values.min(), values.max())
    span = max(steps[-1] - steps[0], 1)
    stretch = float((ends - begins).max())  # longer than a short run that is drawn over a long one
    assert max(shown_steps[0] - steps[0], steps[-1] - shown_steps[-1]) <= max(span / 20, stretch)
    width = max(0.05 * span, 2 * stretch)
    for begin in np.linspace(steps[0], steps[-1], 12):
        own = values[(steps >= begin) & (steps <= begin + width)]
        around = shown[(shown_steps >= begin - width) & (shown_steps <= begin + 2 * width)]
        if len(own):
            assert around.min() <= own.min() and around.max() >= own.max(), f"a peak at {begin} is not drawn"


def history(kernel: Kernel, random: np.random.Generator, *, floods: bool) -> Iterator[str]:
    """Run cells that log at random. Yield the name of the last event, so that views can be opened in between."""
    world_size = kernel.recording.world_size
    step = 0
    for _ in range(int(random.integers(1, 5))):
        goes_on = step > 0 and random.random() < 0.3
        kernel.begin(kernel.cell + int(random.integers(1, 3)), is_given=bool(random.random() < 0.7))
        first = step if goes_on else 0
        count = int(random.choice([1, 2, 7, 64, 65, 400] + ([3000, 9000] if floods else [])))
        every = int(random.choice([1, 1, 3]))
        logged = [name for name in NAMES if random.random() < 0.7] or ["loss"]
        at = 0
        while at < count:
            more = min(count - at, int(random.integers(1, max(2, count // 3))))
            steps = first + every * np.arange(at, at + more)
            for rank in random.permutation(world_size).tolist():
                for name in logged:
                    values = np.exp(-steps / 300) + random.normal(0, 0.1, more) + rank
                    values[random.random(more) < 0.002] = random.choice([np.nan, np.inf, 50.0])
                    kernel.log(rank, name, steps, values)
            at += more
            kernel.tick(float(random.choice([0.1, 0.1, 0.5])))
            yield "during"
        step = first + every * count
        kernel.settle()
        yield "after"


def runs_of(recording: Recording, name: str) -> list[list[int]]:
    """Return the cells of each run, computed from the rows without the code under test."""
    rows = recording.rows("metric")
    rows = rows[rows["name"] == NAMES.index(name) + 1]
    reach, given = defaultdict(list), set()
    for cell, step, is_given in rows[["cell", "step", "is_given"]].tolist():
        reach[cell].append(step)
        if is_given:
            given.add(cell)
    found: list[list[int]] = []
    for cell in sorted(reach):
        if found and {cell, found[-1][-1]} <= given and min(reach[cell]) > max(reach[found[-1][-1]]):
            found[-1].append(cell)
        else:
            found.append([cell])
    return found


def a_random_history(kernel: Kernel, seed: int) -> list[bool]:
    """Check views that were opened before, during and after the cells, and a small one. They draw the newest run."""
    random = np.random.default_rng(seed)
    shown = kernel.page
    kernel.open("before")
    for what in history(kernel, random, floods=random.random() < 0.4):
        if what == "during" and len(kernel.views) < 2 and random.random() < 0.2:
            kernel.open("during")
    kernel.settle()
    kernel.open("after")
    kernel.open("small", compact=True)
    kernel.page.evaluate("() => open_view('saved', false, false)")
    kernel.send("saved", still_page.message(kernel.recording))
    thinned = []
    for view in [*kernel.views, "saved"]:
        state = drawn(shown, view)
        runs = runs_of(kernel.recording, state["metric"])
        thinned.append(check(state, kernel.recording, runs[-1]))
    state = drawn(shown, "after")
    runs = runs_of(kernel.recording, state["metric"])
    if len(runs) > 1:  # select an earlier run, then draw it under the newest
        chosen = int(random.integers(0, len(runs) - 1))
        choose = "([name, cells]) => monitor(name).store.choose({ runs: new Set(cells) })"
        for view in ("after", "before"):
            shown.evaluate(choose, [view, [runs[chosen][0]]])
            check(drawn(shown, view), kernel.recording, runs[chosen])
        shown.evaluate(choose, ["after", [runs[chosen][0], runs[-1][0]]])
        state = drawn(shown, "after")
        for name, cells in zip(state["runs"], (runs[chosen], runs[-1]), strict=True):
            check(state, kernel.recording, cells, prefix=f"{name} ")
    return thinned


@pytest.mark.parametrize("seed", range(4))
def test_what_is_drawn_of_a_random_history_is_the_recording(make_kernel, seed):
    a_random_history(make_kernel(1 + seed % 4), seed)


@pytest.mark.long
def test_what_is_drawn_of_many_random_histories_is_the_recording(make_kernel, browser_page):
    thinned: list[bool] = []
    for seed in range(100, 220):
        thinned += a_random_history(make_kernel(1 + seed % 8), seed)
        browser_page.evaluate("Object.values(views).forEach((one) => { one.close(); one.el.remove(); }); views = {}")
    assert 0.05 < np.mean(thinned) < 0.95, "both kinds were seen"


def test_64_steps_after_a_cell_with_20000_values_are_all_drawn(make_kernel):
    """It was drawn as one dot."""
    kernel = make_kernel(2)
    for cell, count in ((1, 20_000), (2, 64)):
        kernel.begin(cell)
        for rank in range(2):
            kernel.log(rank, "loss", np.arange(count), np.sin(np.arange(count) / 9) + rank)
    kernel.settle()
    kernel.open("after")
    state = drawn(kernel.page, "after")
    assert not check(state, kernel.recording, [2])
    assert len(state["x"]) == 64 and state["runs"] == ["In [4]"]
    kernel.page.evaluate("monitor('after').store.choose({ runs: new Set([1]) })")
    state = drawn(kernel.page, "after")
    assert check(state, kernel.recording, [1]) and state["runs"] == ["In [3]"]


def test_the_panel_names_the_only_run_that_logged(make_kernel):
    kernel = make_kernel(2)
    kernel.open("before")
    assert kernel.page.locator(".ddpm-none").is_visible() and not kernel.page.locator(".ddpm-chart").is_visible()
    kernel.begin(1)
    kernel.log(0, "loss", np.arange(9), np.arange(9))
    kernel.settle()
    drawn(kernel.page, "before")
    named = kernel.page.locator(".ddpm-only")
    assert named.inner_text() == "Run: In [3]"
    kernel.begin(2)  # logs nothing
    kernel.settle()
    drawn(kernel.page, "before")
    assert named.inner_text() == "Run: In [3], the only one with logged values"
    kernel.log(0, "accuracy", np.arange(9), np.arange(9))
    kernel.settle()
    assert drawn(kernel.page, "before")["metric"] == "accuracy", "of the newest run"
    assert named.inner_text() == "Run: In [4]"
    kernel.page.get_by_label("Metric").select_option("loss")
    assert drawn(kernel.page, "before")["metric"] == "loss"
    assert named.inner_text() == "Run: In [3], the only one with this metric"
    kernel.log(0, "loss", np.arange(9), np.arange(9))
    kernel.settle()
    kernel.begin(3)
    kernel.log(0, "accuracy", np.arange(9), np.arange(9))
    kernel.settle()
    drawn(kernel.page, "before")
    assert kernel.page.locator("summary", has_text="Run: ").inner_text() == "Run: In [4] (newest with this metric)"


@pytest.mark.parametrize("logs", [True, False])
def test_a_small_view_leaves_out_an_empty_panel(make_kernel, logs):
    kernel = make_kernel(2)
    if logs:
        kernel.begin(1)
        kernel.log(0, "loss", np.arange(9), np.arange(9))
        kernel.settle()
    else:
        kernel.recording = recorded(world_size=2, steps=12)
        kernel.feed = Feed(kernel.recording, is_live=False)
    kernel.open("small", compact=True)
    view = kernel.page.locator(".ddpm-compact")
    expect(view.locator(".ddpm-loss")).to_be_visible(visible=logs)
    expect(view.locator(".ddpm-sync")).to_be_visible(visible=not logs)
    width = view.locator(".ddpm-loss" if logs else ".ddpm-sync").bounding_box()["width"]
    assert width > 900, "the other one has all of the room"


def test_the_pixels_are_the_curve(make_kernel):
    kernel = make_kernel(1)
    kernel.begin(1)
    values = np.cumsum(np.random.default_rng(5).normal(0, 1, 200))
    kernel.log(0, "loss", np.arange(200), values)
    kernel.settle()
    kernel.open("after")
    state = drawn(kernel.page, "after")
    box, (x0, x1), (y0, y1) = (state["chart"][name] for name in ("box", "x", "y"))
    colour = tuple(int(state["lines"][0][1]["colour"][at : at + 2], 16) for at in (1, 3, 5))
    url = kernel.page.evaluate("views.after.el.querySelector('.u-wrap canvas').toDataURL()")
    whole = np.array(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA"), int)
    left, top = round(box["left"]), round(box["top"])
    image = whole[top : top + round(box["height"]), left : left + round(box["width"])]
    is_line = (np.abs(image[..., :3] - colour).max(axis=-1) < 60) & (image[..., 3] > 120)
    width = image.shape[1]
    for column in range(3, width - 3, 3):
        steps = [x0 + (x1 - x0) * (column + off) / width for off in np.linspace(-3, 3, 13)]
        own = np.interp(steps, np.arange(200), values)
        rows = [box["height"] * (1 - (value - y0) / (y1 - y0)) for value in own]
        inked = np.flatnonzero(is_line[:, column])
        assert len(inked), f"nothing is drawn at step {steps[6]:.1f}"
        assert min(rows) - 4 <= inked.min() and inked.max() <= max(rows) + 4, f"at step {steps[6]:.1f}"
