"""Every widget of the lessons in a column of 800 pixels: letters of 9 pixels, no text over text, at most a screen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from ddp_notebook.lessons.algorithms.plans import ALGORITHMS
from ddp_notebook.lessons.messages.message_scenes import STORIES as SCENES
from ddp_notebook.lessons.questions.catalogue import QUESTIONS
from ddp_notebook.lessons.remote.scenes import STORIES as PROGRAMS
from tests.browser.jupyterlab import JupyterLab, open_notebook
from tests.browser.readable import TALLEST_PX, WIDTH_PX, findings
from tests.browser.test_jupyterlab import write_notebook

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(900)]

START = "%load_ext ddp_notebook\nfrom ddp_notebook import lessons\n%ddp_start 4 --gpus none"
FRAME = f"e => {{ e.style.width = e.style.maxWidth = '{WIDTH_PX}px'; }}"


def opened(tmp_path: Path, cells: list[str]) -> Path:
    path = tmp_path / "lessons.ipynb"
    write_notebook(path, [START, *cells, "%ddp_stop"])
    return path


def run(lab: JupyterLab, cell: int) -> None:
    lab.run_cell(cell)
    lab.wait_until_done(cell, timeout_s=120)


def framed(root: Locator) -> Locator:
    """Give a widget the width of a page, and wait until it is drawn."""
    expect(root).to_be_visible(timeout=20_000)
    root.evaluate(FRAME)
    root.page.wait_for_timeout(50)  # the widget may draw again for the new width
    root.scroll_into_view_if_needed()
    return root


class Views:
    """Collects the findings of all views of the widgets."""

    def __init__(self) -> None:
        self.findings: dict[str, list[str]] = {}

    def look(self, name: str, root: Locator, tallest_px: float = TALLEST_PX) -> None:
        if folder := os.environ.get("DDP_NOTEBOOK_TEST_VIEWS"):  # for the eye
            root.screenshot(path=f"{folder}/{name.replace('/', '_').replace(' ', '_')}.png")
        if found := findings(root, tallest_px=tallest_px):
            self.findings[name] = found


def idle(root: Locator) -> None:
    expect(root).to_have_attribute("aria-busy", "false", timeout=30_000)


def test_the_lessons_with_a_drawing_are_readable(tmp_path):
    """Lessons are measured when they open, and after they have run."""
    cells = ["lessons.collective('all_reduce')", "lessons.algorithm('ring all_reduce')"]
    cells += ["lessons.point_to_point('blocking')", "lessons.rpc('calls')", "lessons.product()", "lessons.mesh()"]
    path = opened(tmp_path, cells)
    with open_notebook(path) as lab:
        for cell in range(len(cells) + 1):
            run(lab, cell)
        explorer, stepper, scene, remote, product, mesh = (
            framed(lab._cell(cell).locator(".ddpl")) for cell in range(1, len(cells) + 1)
        )
        views = Views()
        for name, root in zip(cells, (explorer, stepper, scene, remote, product, mesh), strict=True):
            views.look(name, root)

        explorer.get_by_role("button", name="Run on the ranks").click()
        idle(explorer)
        views.look("collective after", explorer)
        for name in ALGORITHMS:
            stepper.get_by_label("algorithm", exact=True).select_option(name)
            idle(stepper)
            stepper.get_by_role("button", name="Step ▶").click()
            idle(stepper)
            views.look(name, stepper)
        for name in SCENES:
            scene.get_by_label("scene", exact=True).select_option(name)
            idle(scene)
            views.look(f"scene {name}", scene)
        for name in PROGRAMS:
            remote.get_by_label("program", exact=True).select_option(name)
            idle(remote)
            remote.get_by_role("radio").first.check()
            remote.get_by_role("button", name="Run on the ranks").click()
            idle(remote)
            remote.get_by_role("button", name="Reveal").click()
            views.look(f"program {name}", remote)
        product.get_by_role("radio").first.check()
        product.get_by_role("button", name="Run on the ranks").click()
        idle(product)
        views.look("product after", product)
        mesh.get_by_role("radio").first.check()
        mesh.get_by_role("button", name="Train on the ranks").click()
        idle(mesh)
        views.look("mesh after", mesh)
        run(lab, len(cells) + 1)
    assert views.findings == {}


def test_sliders_and_other_outputs_are_readable(tmp_path):
    """The sliders of two lessons, the programs of lesson 27, a plan, and the table of progress."""
    cells = [
        "lessons.inside_ddp(bucket_cap_mb=1).sliders()",
        "lessons.pipeline().sliders()",
        "lessons.bug(1)",
        "lessons.plan(shard=16)",
        "lessons.progress()",
    ]
    path, views = opened(tmp_path, cells), Views()
    with open_notebook(path, env={"DDP_NOTEBOOK_ANSWERS": "shown"}) as lab:
        for cell in range(len(cells) + 1):
            run(lab, cell)
        for cell in range(1, len(cells) + 1):
            # the table of progress has a row for each lesson, so it may be higher than a screen
            root = framed(lab._cell(cell).locator(".jp-Cell-outputArea"))
            views.look(cells[cell - 1], root, 1200 if "progress" in cells[cell - 1] else TALLEST_PX)
        run(lab, len(cells) + 1)
    assert views.findings == {}


def _parts(names: list[str], size: int) -> list[list[str]]:
    return [names[at : at + size] for at in range(0, len(names), size)]


def test_all_questions_are_readable(tmp_path):
    asked = [name for name, question in QUESTIONS.items() if question.is_asked]
    cells = ["\n".join(f"lessons.ask({name!r})" for name in some) for some in _parts(asked, 40)]
    path = opened(tmp_path, cells)  # JupyterLab shows the first 50 outputs of a cell
    with open_notebook(path) as lab:
        for cell in range(len(cells) + 1):
            run(lab, cell)
        boxes = lab.page.locator(".ddp-ask")
        expect(boxes).to_have_count(len(asked), timeout=30_000)
        views = Views()
        for name, box in zip(asked, boxes.all(), strict=True):
            views.look(name, framed(box))
        run(lab, len(cells) + 1)
    assert views.findings == {}
