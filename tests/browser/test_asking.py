"""Guesses in Chromium: a result stays hidden until a guess, also when its cell has run first."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook
from tests.browser.test_jupyterlab import write_notebook

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(300)]


def test_a_guess_shows_the_result_of_a_cell_that_has_run(tmp_path):
    path = tmp_path / "ask.ipynb"
    result = "lessons.result('04/world-size', 'drawn below', lambda: picture('a picture', height=1.5)[0])"
    cells = [
        "from ddp_notebook import lessons\nfrom ddp_notebook.display import picture",
        "lessons.ask('04/world-size')",
        result,
        "lessons.ask('04/backend')",
        "lessons.result('04/backend')",
    ]
    write_notebook(path, cells)

    with open_notebook(path) as lab:
        lab.run_all()
        lab.wait_for_text(2, "Guess first")
        lab.wait_for_text(4, "Guess first")
        assert lab._cell(2).locator("img").count() == 0

        ask = lab._cell(1)
        ask.get_by_placeholder("such as 12").fill("3 * 8")
        ask.get_by_role("button", name="Guess").click()
        lab.wait_for_text(2, "right: 24")
        expect(lab._cell(2).locator("img")).to_be_visible()
        lab.wait_for_text(2, "drawn below")

        ask = lab._cell(3)
        ask.get_by_role("button", name="Guess").click()
        expect(ask.get_by_role("status")).to_contain_text("missing: GPU tensors")
        ask.get_by_role("button", name="Show me").click()
        lab.wait_for_text(4, "The answer is GPU tensors, a process per GPU: nccl")

        lab.page.set_viewport_size({"width": 800, "height": 900})
        for cell in (1, 3):
            area = lab._cell(cell).locator(".jp-OutputArea-output .ddp-ask").bounding_box()
            for control in lab._cell(cell).locator(".ddp-ask input, .ddp-ask select, .ddp-ask button").all():
                box = control.bounding_box()
                assert box and area and box["x"] + box["width"] <= area["x"] + area["width"] + 1
    answers = json.loads((tmp_path / "my_answers.json").read_text())["answers"]
    assert answers["04/world-size"]["guesses"][0]["is_right"] and answers["04/backend"]["is_shown"]
