"""The pages of docs/guide: every cell runs on two ranks, and each page has the required form."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from tests.guide.pages import PAGES, README, blocks
from tests.kernels import NotebookKernel

_CELL_S = 90.0
_LINES = 150
_FIRST_SCREEN = 25  # lines
_IN_MAKE_TEST = {"quickstart"}  # each takes about 10 s
_RUN = [
    pytest.param(page, id=page.stem, marks=() if page.stem in _IN_MAKE_TEST else pytest.mark.long)
    for page in PAGES
    if any(block.runs for block in blocks(page))
]
_RUN += [pytest.param(README, id="README", marks=pytest.mark.long)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_begins_with_an_example(page):
    lines = page.read_text().splitlines()
    assert len(lines) <= _LINES and lines[0].startswith("# ")
    if page.stem not in ("index", "faq", "limits", "troubleshooting"):
        assert any(line.startswith("```") for line in lines[:_FIRST_SCREEN])


@pytest.mark.processes
@pytest.mark.parametrize("page", _RUN)
def test_the_cells_of_a_page_run(page, tmp_path):
    with closing(NotebookKernel(env={**os.environ, "DDP_NOTEBOOK_RANKS": "2"}, cwd=str(tmp_path))) as kernel:
        for block in blocks(page):
            if block.runs:
                reply = kernel.run(block.code, _CELL_S)
                wanted = "error" if block.raises else "ok"
                assert reply.status == wanted, f"{block.code}\n{reply.stdout[-1000:]}{reply.stderr}{reply.traceback}"
