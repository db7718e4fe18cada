"""Curves in JupyterLab with real ranks: the browser draws what was recorded, for each way to open a view.

The notebook contains a picture of the curves before the session ends.
"""

from __future__ import annotations

import json
import time
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import SCREENSHOTS, JupyterLab, open_notebook
from tests.browser.test_jupyterlab import write_notebook
from tests.browser.test_monitor import View, use_theme

START, EARLY, TRAIN, AFTER, FLOOD, TRUTH, PAGE, ATTACH, STOP = range(9)
STEPS = 64
CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 2 --backend gloo",
    "%%on_all_ranks\nimport math, time\nfor k in range(400): log(loss=math.sin(k), accuracy=k / 400)",
    "%%on_all_ranks\n"
    f"for step in range({STEPS}):\n"
    "    log(loss=1 / (step + 1) + rank + step % 8 / 50)\n"
    "    time.sleep(0.03)",
    "%ddp_monitor",
    "%%on_all_ranks\nfor step in range(6000): log(loss=math.cos(step / 200) + step % 8 / 50 + rank)\ntime.sleep(2.5)",
    "import json, ddp_notebook\n"
    "loss = ddp_notebook.current().recording.metrics['loss']\n"
    "of = lambda cell, rank: [(int(s), float(v)) for s, v, c, r in zip(loss.steps, loss.values, loss.cells, loss.ranks)"
    " if (c, r) == (cell, rank)]\n"
    "cells = sorted(set(loss.cells.tolist()))\n"
    "print(json.dumps([[of(cell, rank) for rank in range(2)] for cell in cells]))",
    "ddp_notebook.current().recording.save_html('curves.html')",
    "from ddp_notebook.widgets import Monitor\nMonitor(ddp_notebook.current())",
    "%ddp_stop",
]


def curve(view: View, timeout_s: float = 20.0) -> dict[str, Any]:
    """Return the drawn points of the chart when no request for more is open."""
    view.open("Loss")
    found: dict[str, Any] = view.wait_for("state.panels.loss?.x.length > 1 && !state.panels.loss.asked", timeout_s)
    return found["panels"]["loss"]


def is_the_recording(drawn: dict[str, Any], run: list[list[list[float]]]) -> None:
    """Check that all points of each rank are drawn, or the lowest and highest of neighbours with a note."""
    notes = [note for note in drawn["notes"] if "drawn" in note]
    lines = {rank: line["values"] for line in drawn["lines"].values() for rank in line["ranks"]}
    assert len(lines) == 2
    for rank, points in enumerate(run):
        shown = [(x, y) for x, y in zip(drawn["x"], lines[rank], strict=True) if y is not None]
        if not notes:
            assert [step for step, _ in shown] == [step for step, _ in points]
            assert [y for _, y in shown] == pytest.approx([value for _, value in points], rel=1e-6)
        else:
            values = [value for _, value in points]
            assert min(y for _, y in shown) == pytest.approx(min(values), rel=1e-6)
            assert max(y for _, y in shown) == pytest.approx(max(values), rel=1e-6)
            assert len(shown) > 400 and notes[0].startswith("1 of ")
            begins: dict[float, float] = {}  # start of each group of neighbours, by its end
            for x, end, y in zip(drawn["x"], drawn["ends"], lines[rank], strict=True):
                begin = begins.setdefault(end, x)
                near = [value for step, value in points if begin <= step <= end]
                assert y is None or any(abs(value - y) < 1e-6 for value in near), (
                    f"{y} was not logged, {begin} to {end}"
                )
    assert drawn["logged"] == sum(map(len, run))


@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_monitor_that_is_opened_after_the_cell_draws_its_run(tmp_path):
    """Typical for new users: an earlier cell has logged, and half of the points were drawn."""
    path = tmp_path / "curves.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path) as lab:
        for cell in (START, EARLY, TRAIN, AFTER, TRUTH):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        early, run = json.loads(lab.text(TRUTH))
        view = View(lab)
        view.root = lab.page.locator(".ddpm:not(.ddpm-compact)").first
        drawn = curve(view)
        is_the_recording(drawn, run)
        assert drawn["runs"] == ["In [3]"] and len(drawn["x"]) == STEPS
        view.root.screenshot(path=SCREENSHOTS / "curves.png")
        view.root.get_by_text("Run: In [3]").click()
        view.root.get_by_label("In [2]", exact=True).check()
        view.root.get_by_label("In [3]", exact=True).uncheck()
        view.page.keyboard.press("Escape")
        drawn = curve(view)
        assert drawn["runs"] == ["In [2]"]
        is_the_recording(drawn, early)
        assert drawn["unit"] == "value", "no optimizer has stepped"
        view.root.get_by_text("Run: In [2]").click()
        view.root.get_by_label("In [3]", exact=True).check()
        view.page.keyboard.press("Escape")
        both = curve(view)
        places = {one["label"]: one["x"] for one in both["labels"]}
        assert places["In [3] rank 0"] < places["In [2]"] / 2, "the label of the shorter run stands at its end"
        assert both["readout"].count(f"(value {STEPS - 1})") == 2 and "\N{EN DASH}" not in both["readout"]
        view.root.screenshot(path=SCREENSHOTS / "overlay.png")
        a_picture_is_saved_and_shown(lab, path)


def save(lab: JupyterLab) -> None:
    """Press Ctrl+S in the notebook. The widget handles the keyboard itself while it has the focus."""
    lab.page.locator(".jp-Notebook .jp-Cell").first.locator(".jp-InputPrompt").click()
    lab.page.keyboard.press("Control+s")


def a_picture_is_saved_and_shown(lab: JupyterLab, path: Any) -> None:
    """A picture is saved before the session ends, because a widget shows nothing without its kernel."""
    until = time.monotonic() + 20
    while True:
        save(lab)
        cell = nbformat.read(path, nbformat.NO_CONVERT).cells[AFTER]
        data = [one["data"] for one in cell.outputs if "image/png" in one.get("data", {})]
        if data:
            break
        assert time.monotonic() < until, cell.outputs
        time.sleep(0.3)
    assert data[0]["text/plain"].startswith("In [3]: 2 ranks, loss ")
    assert lab.page.locator(".ddpm-still").is_hidden(), "a live monitor stands there"


def without_its_kernel_the_picture_is_seen(lab: JupyterLab) -> None:
    """The notebook is opened again after the kernel of its widgets has ended."""
    save(lab)
    expect(lab.page.locator(".jp-mod-dirty")).to_have_count(0)
    kernels = lab.page.evaluate(
        "async (token) => { const headers = { Authorization: `token ${token}` };"
        " const all = await (await fetch('/api/sessions', { headers })).json();"
        " for (const { id } of all) await fetch(`/api/sessions/${id}`, { method: 'DELETE', headers });"
        " return all.length; }",
        lab.server.token,
    )
    assert kernels == 1
    lab.page.reload()
    expect(lab.page.locator(".ddpm-still img").first).to_be_visible(timeout=60_000)
    expect(lab.page.locator(".ddpm")).to_have_count(0)
    gone = lab.page.get_by_text("model not found")
    for place in range(gone.count()):
        expect(gone.nth(place)).to_be_hidden()
    lab.screenshot(SCREENSHOTS / "curves_saved.png")


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_way_to_a_view_draws_the_recording(tmp_path):
    path = tmp_path / "curves.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path) as lab:
        for cell in (START, EARLY, AFTER, TRAIN):  # opened before the cell
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        lab.run_cell(TRUTH)
        lab.wait_until_done(TRUTH)
        _, run = json.loads(lab.text(TRUTH))
        view = View(lab)
        view.root = lab.page.locator(".ddpm:not(.ddpm-compact)").first
        is_the_recording(curve(view), run)
        lab.run_cell(FLOOD)  # opened before it, and one more while it runs
        view.wait_for("state.panels.loss?.logged > 1000")
        lab.wait_until_done(FLOOD)
        for cell in (TRUTH, PAGE):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        flood = json.loads(lab.text(TRUTH))[-1]
        view.wait_for("state.panels.loss.logged == 12000")
        is_the_recording(curve(view), flood)
        lab.run_cell(ATTACH)  # created by the user
        lab.wait_until_done(ATTACH)
        second = View(lab)
        second.root = lab.page.locator(".ddpm:not(.ddpm-compact)").last
        is_the_recording(curve(second), flood)
        save(lab)
        expect(lab.page.locator(".jp-mod-dirty")).to_have_count(0)
        lab.page.reload()
        again = lab.page.locator(".ddpm:not(.ddpm-compact)").first
        expect(again).to_be_visible(timeout=60_000)
        reloaded = View(lab)
        reloaded.root = again
        is_the_recording(curve(reloaded), flood)
        for theme in ("light", "dark"):
            use_theme(lab, theme)
            for width in (800, 1400):
                lab.page.set_viewport_size({"width": width, "height": 1000})
                reloaded.wait_for(f"state.theme == '{theme}'")
                lab.screenshot(SCREENSHOTS / f"curves_{theme}_{width}.png")
        without_its_kernel_the_picture_is_seen(lab)
        lab.page.goto(f"file://{tmp_path / 'curves.html'}")
        saved = View(lab)
        saved.root = lab.page.locator(".ddpm").first
        is_the_recording(curve(saved), flood)
