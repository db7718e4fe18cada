"""Output of several ranks on a page: in the order of the ranks, next to each other if there is enough space."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect

from tests.browser.jupyterlab import open_notebook

LOAD, LINES, FIGURES, TABLES, BARS = range(5)
RANKS = 4

CELLS = [
    f"%load_ext ddp_notebook\n%ddp_start {RANKS} --backend gloo",
    "%%on_all_ranks\nfor k in range(8): print(f'epoch 0 step {k} loss {0.7 / (k + 1) + rank / 100:.3f}')",
    "%%on_all_ranks\n%matplotlib inline\nimport matplotlib.pyplot as plt, time\ntime.sleep(0.7 * (3 - rank))\n"
    "plt.plot([rank, 1, 2]); plt.title(f'rank {rank}'); plt.show()",
    "%%on_all_ranks\nimport pandas\npandas.DataFrame({'rank': [rank], 'loss': [rank / 10]})",
    "%%on_all_ranks\nfrom tqdm.notebook import tqdm\ntime.sleep(0.7 * (3 - rank))\n"
    "for _ in tqdm(range(10 * (rank + 1)), desc=f'rank {rank}'): pass",
    "%ddp_stop",
]
# Four slots per line if there is enough space, else two, else one.
_IN_LINES = """() => {
    const row = document.querySelector('.ddp-slots');
    const tops = [...row.children].map((slot) => slot.offsetTop);
    const perLine = row.clientWidth > 1010 ? 4 : row.clientWidth > 510 ? 2 : 1;
    return tops.filter((top) => top === tops[0]).length === perLine && new Set(tops).size === 4 / perLine;
}"""


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(900)  # chromium may have to be installed first
@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_output_of_late_ranks_stands_in_the_order_of_ranks(tmp_path, app):
    with open_notebook(write(tmp_path), app=app) as lab:
        lab.page.set_viewport_size({"width": 1400, "height": 1000})
        for cell in range(BARS + 1):
            lab.run_cell(cell)
            lab.wait_until_done(cell, 120)
        assert lab.text(LINES).splitlines()[3] == "[0-3] epoch 0 step 3 loss 0.175 | 0.185 | 0.195 | 0.205"
        slots = lab.page.locator(".ddp-slots").first.locator("> div")
        expect(slots).to_have_count(RANKS)
        assert [text.split()[0] for text in slots.all_inner_texts()] == [f"[{rank}]" for rank in range(RANKS)]
        tables = lab.page.locator(".ddp-slots").nth(1).locator("table")
        assert [table.split()[-1] for table in tables.all_inner_texts()] == ["0.0", "0.1", "0.2", "0.3"]
        bars = lab.page.locator(".jp-Cell").nth(BARS).locator(".widget-html-content")
        names = [text.replace("\u2007", " ") for text in bars.all_inner_texts() if text.startswith("rank")]
        assert [name[:6] for name in names] == [f"rank {rank}" for rank in range(RANKS)]
        for width in (1700, 1400, 800):
            lab.page.set_viewport_size({"width": width, "height": 1000})
            lab.page.wait_for_function(_IN_LINES)
            images = slots.locator("img")
            widths = [box["width"] for image in images.all() if (box := image.bounding_box()) is not None]
            assert len(widths) == RANKS and min(widths) > 150


def write(folder: Path) -> Path:
    """Write a notebook with these cells."""
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [new_code_cell(source) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "output.ipynb")
    return folder / "output.ipynb"
