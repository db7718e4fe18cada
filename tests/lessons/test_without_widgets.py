"""Lessons in a front end that draws no widgets, such as an editor without ipywidgets: pictures and texts."""

from __future__ import annotations

import base64
from contextlib import closing

import pytest

from tests.kernels import NotebookKernel

WIDGET = "application/vnd.jupyter.widget-view+json"
VIEWS = (
    'lessons.collective("all_reduce")',
    'lessons.algorithm("ring all_reduce")',
    'lessons.point_to_point("race")',
    'lessons.product("Shard(1)", "Shard(0)")',
    "lessons.mesh()",
    'lessons.rpc("calls")',
)


@pytest.mark.long
@pytest.mark.processes
def test_each_view_has_a_picture_and_a_text(tmp_path):
    """Answers are kept in the folder of the kernel."""
    with closing(NotebookKernel(cwd=str(tmp_path))) as kernel:
        begun = kernel.run("%load_ext ddp_notebook\n%ddp_start 2\nfrom ddp_notebook import lessons")
        assert begun.status == "ok", begun.traceback
        for view in VIEWS:
            reply = kernel.run(view)
            assert reply.status == "ok", reply.traceback
            shown = [data for data in reply.displays if "image/png" in data]
            assert shown and base64.b64decode(shown[-1]["image/png"]).startswith(b"\x89PNG"), view
            assert len(shown[-1]["text/plain"]) > 20, view
            assert all("image/png" in data for data in reply.displays if WIDGET in data), view
        [asked] = kernel.run('lessons.ask("04/boxes")').displays
        assert "lessons.ask('04/boxes'" in asked["text/plain"], "the way to answer"
        assert "Your guess is kept: 1." in kernel.run('lessons.ask("04/boxes", 1)').stdout
        kernel.run("%ddp_stop")
