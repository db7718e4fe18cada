"""State and requests of the browser, and the static output of lessons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import MissingBuildError, UsageError
from ddp_notebook.lessons import lesson_display, lesson_widget
from ddp_notebook.run.notebook_kernel import has_front_end


def plain(lesson: Any) -> dict[str, Any]:
    return json.loads(json.dumps(lesson_widget._plain(lesson.state())))


def test_an_explorer_is_driven_by_messages(ranks):
    explorer = lessons.collective("all_reduce")
    explorer.act({"do": "configure", "options": {"op": "broadcast", "root": 1, "sizes": 2}})
    explorer.act({"do": "run", "inputs": {"1": [5, 6]}, "prediction": {"0": [5, None], str(ranks - 1): [5, 7]}})

    state = plain(explorer)

    assert state["line"] == "dist.broadcast(x, src=1)"
    assert state["result"]["0"] == [5.0, 6.0]
    assert state["prediction"]["0"] == [5.0, "nan"]
    assert state["right"]["0"] == [True, False] and state["right"][str(ranks - 1)] == [True, False]
    assert state["agrees"] is True
    with pytest.raises(UsageError, match="rank 0 must have 2 elements for broadcast, got 3"):
        explorer.act({"do": "run", "inputs": {"0": [1, 2, 3]}})


def test_a_stepper_counts_only_its_own_bytes(ranks):
    stepper = lessons.algorithm("ring all_reduce")
    stepper.act({"do": "step"})
    lessons.point_to_point("tags")  # sends something in the meantime
    stepper.act({"do": "compare"})
    state = plain(stepper)
    assert state["agrees"] is True and state["taken"] == state["steps"]
    assert state["states"][-1]["links"] == state["theory"]
    assert state["states"][0]["links"] == []
    stepper.act({"do": "restart"})
    assert plain(stepper)["taken"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lessons.collective,
        lessons.algorithm,
        lambda: lessons.point_to_point("tags"),
        lessons.product,
        lambda: lessons.product().run(),
        lessons.mesh,
        lambda: lessons.mesh().run(),
    ],
)
def test_a_picture_and_a_text_stay(ranks, make):
    lesson = make()
    kept = lesson_display.static(lesson)
    assert set(kept) == {"text/plain", "image/png"}
    assert kept["text/plain"] == repr(lesson)
    assert not has_front_end()


def test_a_page_that_was_not_built_says_how(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(lesson_widget, "BUNDLE", tmp_path / "lessons.js")
    with pytest.raises(MissingBuildError, match=r"build it with `pip install -e \.` or `python hatch_build\.py`"):
        lesson_widget.LessonView(lessons.collective("all_reduce"))
