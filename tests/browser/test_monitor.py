"""The live monitor in JupyterLab and in Notebook 7, with four real ranks.

It draws the recorded data while a cell runs, it can interrupt the cell, and a picture stays.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error, expect

from tests.browser.jupyterlab import SCREENSHOTS, JupyterLab, open_notebook
from tests.browser.marimo_app import Marimo
from tests.browser.test_jupyterlab import write_notebook

START, MONITOR, SET_UP, TRAIN, COMPARE, HANG, STOP, AGAIN, UNDER, END = range(10)
LOGGED = 80
_IS_COMPLETE = (
    f"Object.values(state.panels.loss?.lines ?? {{}}).length == 4 && Object.values(state.panels.loss.lines)"
    f".every(({{ values }}) => values.filter(Number.isFinite).length == {LOGGED})"
)

CELLS = [
    "%load_ext ddp_notebook\n%ddp_start 4 --backend gloo --hang-after 2",
    # On a busy machine JupyterLab may need longer than usual to show a view, which then becomes HTML.
    "from ddp_notebook.widgets import frontend_probe, view_placement\n"
    "frontend_probe.ANSWER_S = view_placement.ANSWER_S = 60.0\n"
    "%ddp_monitor",
    "%%on_all_ranks\n"
    "import time\n"
    "from torch.nn.parallel import DistributedDataParallel\n"
    "model = DistributedDataParallel(\n"
    "    torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]), bucket_cap_mb=0.05\n"
    ")\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "%%on_all_ranks\n"
    "import pathlib\n"
    f"for step in range({LOGGED}):\n"
    f"    while step == {LOGGED // 2} and not pathlib.Path('go_on').exists(): time.sleep(0.01)\n"
    "    optimizer.zero_grad()\n"
    "    loss = model(torch.randn(64, 128)).square().mean()\n"
    "    loss.backward()\n"
    "    if rank == 1: time.sleep(0.01)\n"
    "    optimizer.step()\n"
    "    log(loss=loss)\n"
    "    time.sleep(0.08)\n"
    "x = torch.arange(6.0).reshape(2, 3) * (rank + 1)\n"
    "x[1, 2] = float('nan')\n"
    "dist.all_reduce(x)",
    "import json\n"
    "import ddp_notebook\n"
    "recording = ddp_notebook.current().recording\n"
    "loss = recording.metrics['loss']\n"
    "last = recording.steps()[-1].step\n"
    "steps = [one for one in recording.steps() if one.step == last]\n"
    "call = recording.collectives('all_reduce', rank=3)[-1]\n"
    "print(json.dumps({\n"
    "    'loss': {rank: loss.of_rank(rank)[1].tolist() for rank in range(4)},\n"
    "    'step': last, 'per_step': recording.runs()[-1].per_step,\n"
    "    'ms': sum(one.duration_ns for one in steps) / 4e6,\n"
    "    'waiting_ms': sum(one.waiting_ns for one in steps) / 4e6,\n"
    "    'buckets': [(one.nbytes, (one.end_ns - one.issue_ns) / 1e6) for one in steps[0].buckets],\n"
    "    'input': call.input.first.tolist(), 'output': call.output.first.tolist(), 'number': call.number,\n"
    "}))",
    "%%on_all_ranks\nif rank != 2: dist.barrier()\nelse: time.sleep(60)",
    "%ddp_stop",
    "%ddp_start 2 --backend gloo",
    f"%%on_all_ranks\nimport time\nfor step in range({LOGGED}): log(loss=1 / (step + 1)); time.sleep(0.05)",
    "%ddp_stop",
]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(600)  # chromium may have to be installed first
@pytest.mark.parametrize("app", ["jupyterlab", pytest.param("notebook", marks=pytest.mark.long)])
def test_the_monitor(tmp_path, app):
    path = tmp_path / "monitor.ipynb"
    write_notebook(path, CELLS)
    with open_notebook(path, app=app) as lab:
        for cell in (START, MONITOR):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        view = View(lab, ".ddpm:not(.ddpm-compact)")
        lab.run_cell(SET_UP)
        lab.wait_until_done(SET_UP)

        lab.run_cell(TRAIN)
        view.wait_for("state.panels.loss?.x.length > 5")
        assert is_running(lab, TRAIN), "lines come while the cell runs"
        small = lab.page.locator(".ddpm-compact")
        leads = small.locator(".ddpm-neighbour")
        view.scroll_until(lambda: leads.inner_text() == "Shown live in the monitor of In [2]")
        expect(small.locator("canvas").first).to_be_hidden()
        small.scroll_into_view_if_needed()
        lab.page.evaluate("() => document.querySelector('.ddpm:not(.ddpm-compact)').style.display = 'none'")
        expect(small.locator("canvas").first).to_be_visible(timeout=20_000)  # the large view is not visible
        lab.page.evaluate("() => document.querySelector('.ddpm:not(.ddpm-compact)').style.display = ''")
        view.scroll_until(small.locator("canvas").first.is_hidden)
        (tmp_path / "go_on").touch()
        begun = len(view.state()["panels"]["loss"]["x"])
        view.wait_for(f"state.panels.loss.x.length > {begun + 10}")
        assert is_running(lab, TRAIN)
        lab.wait_until_done(TRAIN)
        lab.run_cell(COMPARE)
        lab.wait_until_done(COMPARE)
        it_is_what_was_recorded(view, json.loads(lab.text(COMPARE)))
        assert view.state()["missed"] == 0
        assert "rate exceeded" not in lab.page.content()
        for theme in ("light", "dark"):
            use_theme(lab, theme)
            view.wait_for(f"state.theme == '{theme}'")
            every_panel_is_accessible(view, SCREENSHOTS / f"monitor_{app}_{theme}.png")
        use_theme(lab, "light")

        a_second_view_catches_up(lab, view, app)
        a_hang_is_shown_and_interrupted(lab, view)
        for cell in (STOP, AGAIN):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        expect(lab.page.locator(".ddpm")).to_have_count(0)
        lab.run_cell(UNDER)
        compact = View(lab)
        compact.wait_for("state.panels.loss?.x.length > 5")
        assert is_running(lab, UNDER), "it comes by itself, while the cell runs"
        assert columns(compact, 360) == 1 and columns(compact, 800) == 2
        lab.wait_until_done(UNDER)
        lab.run_cell(END)
        lab.wait_until_done(END)
        the_picture_stays(lab, path)


def columns(compact: View, width: int) -> int:
    """Return the number of charts per row if the compact view had this width, in CSS pixels."""
    style = f"""root => {{
        const body = root.querySelector(".ddpm-body"), isAlone = body.classList.contains("ddpm-alone");
        root.style.width = "{width}px";
        body.classList.remove("ddpm-alone");
        const found = getComputedStyle(body).gridTemplateColumns.split(" ").length;
        root.style.width = "";
        body.classList.toggle("ddpm-alone", isAlone);
        return found;
    }}"""
    return int(compact.root.evaluate(style))


class View:
    """The first monitor on the page, or the first one of a selector."""

    def __init__(self, lab: JupyterLab | Marimo, selector: str = ".ddpm") -> None:
        self.page = lab.page
        self.root = lab.page.locator(selector).first
        expect(self.root).to_be_visible(timeout=20_000)

    def state(self) -> dict[str, Any]:
        """Return the drawn state."""
        found: dict[str, Any] = self.root.evaluate("root => root.ddpMonitor.state()")
        return found

    def wait_for(self, condition: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait for a condition on `state`, in JavaScript. Only visible views are drawn."""
        self._scroll_to()
        until = time.monotonic() + timeout_s
        while not self.root.evaluate(f"root => {{ const state = root.ddpMonitor.state(); return {condition}; }}"):
            assert time.monotonic() < until, f"not within {timeout_s:g} s: {condition}; {self.state()}"
            time.sleep(0.05)
        return self.state()

    def scroll_until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Scroll to the view until a condition holds."""
        until = time.monotonic() + timeout_s
        while True:
            self._scroll_to()
            if condition():
                return
            assert time.monotonic() < until, f"not within {timeout_s:g} s, with the view scrolled to"
            self.page.wait_for_timeout(200)

    def _scroll_to(self, timeout_s: float = 30.0) -> None:
        """Scroll to the view. JupyterLab may replace its element at the same time.

        JupyterLab scrolls to the next cell when output grows, and removes cells far above it from the page.
        """
        until = time.monotonic() + timeout_s
        while True:
            try:
                self.root.scroll_into_view_if_needed(timeout=1000)  # in ms
                return
            except Error:
                if time.monotonic() > until:
                    raise
            for panel in self.page.locator(".jp-WindowedPanel-outer").all():
                panel.evaluate("panel => panel.scrollTo(0, 0)")

    def open(self, panel: str) -> None:
        self.root.get_by_role("tab", name=panel).click()


def is_running(lab: JupyterLab, cell: int) -> bool:
    return "*" in lab.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-InputPrompt").inner_text()


def near(drawn: float, recorded: float) -> bool:
    """Compare with a tolerance, because messages contain fewer digits."""
    return math.isclose(drawn, recorded, rel_tol=0.01, abs_tol=0.02)


def it_is_what_was_recorded(view: View, recorded: dict[str, Any]) -> None:
    lines = view.wait_for(_IS_COMPLETE)["panels"]["loss"]["lines"]
    for rank in range(4):
        drawn = lines[f"rank {rank}"]["values"]
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(drawn, recorded["loss"][str(rank)], strict=True))

    view.open("Gradient sync")
    sync = view.wait_for(f"state.panels.sync?.chosen?.step == {recorded['step']}")["panels"]["sync"]
    view.wait_for(f"state.notes.includes('In [4]: {recorded['per_step']} (mean of steps')")  # once a second
    bar = sync["bars"][-1]
    assert near(bar["duration"], recorded["ms"])
    assert any(near(part, recorded["waiting_ms"]) for part in bar["parts"])
    buckets = sync["buckets"]["buckets"]
    assert [one["nbytes"] for one in buckets] == [nbytes for nbytes, _ in recorded["buckets"]]
    for one, (_, took_ms) in zip(buckets, recorded["buckets"], strict=True):
        assert near(one["end"] - one["start"], took_ms)

    view.open("Tensors")
    tensors = view.wait_for(f"state.panels.tensors?.collective?.number == {recorded['number']}")["panels"]["tensors"]
    assert [tile["rank"] for tile in tensors["tiles"]] == [0, 1, 2, 3]
    for side, name in enumerate(("input", "output")):
        drawn = tensors["tiles"][3]["sides"][side]
        values = [math.nan if one is None else one for one in drawn["values"]]
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, recorded[name], strict=True))
        assert drawn["written"][5] == "NaN"

    view.open("Timeline")
    timeline = view.wait_for("state.panels.timeline?.rectangles > 0")["panels"]["timeline"]
    assert timeline["rows"] == 4
    view.wait_for(f"state.panels.timeline.steps === {LOGGED} && state.panels.timeline.missing.length === 0")
    view.open("Ranks")
    ranks = view.wait_for("state.panels.ranks?.rows.length == 4")["panels"]["ranks"]["rows"]
    assert [row["last"].partition(" #")[0] for row in ranks] == ["all_reduce"] * 4
    view.wait_for(f"state.panels.ranks.rows[3].last.startsWith('all_reduce #{recorded['number']},')")  # once a second


def use_theme(lab: JupyterLab, theme: str) -> None:
    """Change the theme like JupyterLab's settings, without reloading its style sheets."""
    lab.page.evaluate(
        "theme => { document.body.dataset.jpThemeLight = String(theme == 'light');"
        "for (const [name, value] of Object.entries(theme == 'light' ? {} :"
        " {'--jp-layout-color0': '#111', '--jp-layout-color1': '#111', '--jp-content-font-color0': '#fff',"
        " '--jp-content-font-color1': '#fff', '--jp-ui-font-color1': '#fff'}))"
        " document.body.style.setProperty(name, value);"
        "if (theme == 'light') document.body.removeAttribute('style'); }",
        theme,
    )


def every_panel_is_accessible(view: View, screenshot: Any) -> None:
    for panel in ("Loss", "Gradient sync", "Timeline", "Tensors", "Ranks"):
        view.open(panel)
        view.wait_for(f"Object.keys(state.panels)[0] == '{ {'Gradient sync': 'sync'}.get(panel, panel.lower()) }'")
        view.root.screenshot(path=screenshot.with_stem(f"{screenshot.stem}_{panel.split()[0].lower()}"))
        found = Axe().run(view.page, context=".ddpm")
        assert found.violations_count == 0, found.generate_report()


def a_second_view_catches_up(lab: JupyterLab, view: View, app: str) -> None:
    """A reopened tab, and in JupyterLab a second view of the same output next to the first."""
    view.open("Loss")
    before = view.wait_for(_IS_COMPLETE)
    if app == "jupyterlab":
        view.root.locator(".ddpm-title").click(button="right")
        lab.page.locator(".lm-Menu-item", has_text="Create New View for Cell Output").click()
        expect(lab.page.locator(".ddpm")).to_have_count(2)
        second = View(lab)
        second.root = lab.page.locator(".ddpm").last
        after = second.wait_for(_IS_COMPLETE)
        assert after["panels"]["loss"]["lines"] == before["panels"]["loss"]["lines"]
        lab.page.locator(".lm-TabBar-tab", has_text="Output View").locator(".lm-TabBar-tabCloseIcon").click()
        expect(lab.page.locator(".ddpm")).to_have_count(1)


def a_hang_is_shown_and_interrupted(lab: JupyterLab, view: View) -> None:
    view.open("Ranks")
    lab.run_cell(HANG)
    view.wait_for("state.alarm.includes('rank 2')", timeout_s=30)
    view.root.get_by_role("button", name="Interrupt ranks").click()
    lab.wait_for_text(HANG, "KeyboardInterrupt", timeout_s=10)
    lab.wait_until_done(HANG)


def the_picture_stays(lab: JupyterLab, path: Any) -> None:
    expect(lab.page.locator(".ddpm")).to_have_count(0, timeout=10_000)
    lab.page.keyboard.press("Control+s")
    expect(lab.page.locator(".jp-mod-dirty")).to_have_count(0)
    until = time.monotonic() + 10
    while True:
        notebook = nbformat.read(path, nbformat.NO_CONVERT)
        outputs = notebook.cells[MONITOR].outputs + notebook.cells[TRAIN].outputs + notebook.cells[UNDER].outputs
        data = [one["data"] for one in outputs if "image/png" in one.get("data", {})]
        if len(data) == 3:
            break
        assert time.monotonic() < until, data
        time.sleep(0.1)
    trained = f"In [4]: 4 ranks, {LOGGED} steps, loss"
    for one, text in zip(data, (trained, trained, "In [9]: 2 ranks, loss 1.00 -> 0.0125"), strict=True):
        assert "application/vnd.jupyter.widget-view+json" not in one
        assert one["text/plain"].startswith(text), one["text/plain"]
    lab.page.reload()
    pictures = lab.page.locator(".jp-RenderedImage img")
    expect(pictures).to_have_count(3, timeout=30_000)
    assert "model not found" not in lab.page.content().lower()


REMOTE = [
    "%load_ext ddp_notebook\n%ddp_start 3 --backend gloo",
    "%ddp_monitor",
    "%%on_all_ranks\n"
    "import time\n"
    "from torch.distributed import rpc\n"
    "def ask(to):\n"
    "    time.sleep(0.02)\n"
    "    return rpc.rpc_sync(to, answer)\n"
    "def answer():\n"
    "    time.sleep(0.03)\n"
    "    return torch.ones(1000)\n"
    "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)\n"
    "if rank == 0:\n"
    "    for _ in range(3):\n"
    "        rpc.rpc_sync('worker1', ask, args=('worker2',))\n"
    "        time.sleep(0.01)\n"
    "    rpc.rpc_sync('worker2', torch.add, args=(torch.ones(2), 1))\n"
    "rpc.shutdown()",
    "recording = ddp_notebook.current().recording\nrecording.save_html('calls.html')",
    "%ddp_stop",
]


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(600)
def test_remote_calls_are_arrows_between_ranks(tmp_path):
    """In JupyterLab with both themes, and on the saved page."""
    path = tmp_path / "calls.ipynb"
    write_notebook(path, ["import ddp_notebook\n" + REMOTE[0], *REMOTE[1:]])
    with open_notebook(path) as lab:
        for cell in range(4):
            lab.run_cell(cell)
            lab.wait_until_done(cell)
        view = View(lab)
        for theme in ("light", "dark"):
            use_theme(lab, theme)
            view.wait_for(f"state.theme == '{theme}'")
            the_calls_are_seen(view, SCREENSHOTS / f"remote_{theme}.png")
            found = Axe().run(view.page, context=".ddpm")
            assert found.violations_count == 0, found.generate_report()
        use_theme(lab, "light")
        lab.run_cell(4)
        lab.wait_until_done(4)
        view.page.goto(f"file://{tmp_path / 'calls.html'}")
        view.root = view.page.locator(".ddpm").first
        expect(view.root).to_be_visible(timeout=20_000)
        the_calls_are_seen(view, SCREENSHOTS / "remote_page.png")


def the_calls_are_seen(view: View, screenshot: Any) -> None:
    view.open("Timeline")
    view.root.get_by_role("button", name="Show everything").click()
    state = view.wait_for("state.panels.timeline?.arrows.length == 14")["panels"]["timeline"]
    loose = [one for one in state["arrows"] if one["isLoose"]]
    assert len(loose) == 2, "there and back, of the operator"
    first = min(state["arrows"], key=lambda one: one["x0"])
    assert first["y0"] < first["y1"], "from rank 0 down"
    box = view.root.locator("canvas").last.bounding_box()
    assert box is not None
    view.page.mouse.move(box["x"] + first["x0"] + 2, box["y"] + first["y0"] - 3)
    state = view.wait_for("state.panels.timeline.underPointer")["panels"]["timeline"]
    assert state["underPointer"][0] == "rank 0: rpc_sync of ask, run by rank 1"
    assert all(words in state["underPointer"][1] for words in ("until it began", "running", "back"))
    assert len([one for one in state["arrows"] if one["isChosen"]]) == 2
    expect(view.root.get_by_text("runs a remote call")).to_be_visible()
    view.root.screenshot(path=screenshot)
    view.page.mouse.down()
    view.page.mouse.up()
    view.page.mouse.move(0, 0)
    is_alone = "state.panels.timeline.chosenCall && !state.panels.timeline.underPointer"  # the latter as it is drawn
    state = view.wait_for(is_alone)["panels"]["timeline"]
    assert state["chosenCall"][0] == "rank 0: rpc_sync of ask, run by rank 1"
    assert len([one for one in state["arrows"] if one["isChosen"]]) == 2
    view.root.screenshot(path=screenshot.with_name(f"{screenshot.stem}_chosen.png"))
    view.root.locator(".ddpm-timeline").last.focus()
    view.page.keyboard.press(".")
    view.wait_for("state.panels.timeline.chosenCall[0].startsWith('rank 1: rpc_sync of answer')")
    view.page.keyboard.press("Enter")
    length = "state.panels.timeline.window[1] - state.panels.timeline.window[0]"
    view.wait_for(f"{length} > 50 && {length} < 200")  # the call fills a third of it
    view.page.keyboard.press("Escape")
    view.wait_for("state.panels.timeline.chosenCall === null")
