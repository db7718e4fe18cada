"""The widget of a lesson: its JavaScript, its state, and the requests of the browser."""

from __future__ import annotations

import logging
import math
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from ddp_notebook.display import read_bundle
from ddp_notebook.errors import DDPNotebookError

if TYPE_CHECKING:
    from ddp_notebook.lessons.lesson import Lesson

BUNDLE = Path(__file__).with_name("static") / "lessons.js"


_WITHOUT = ". Without it there is this picture, and everything that the lesson's methods do"


_log = logging.getLogger(__name__)


class LessonView(anywidget.AnyWidget):
    """One lesson on the page.

    A button sends a request as a message. The kernel handles it when it is idle, so after the running cell. The browser
    shows that it waits until the kernel reports that it has started.

    Args:
        lesson: Lesson to show and control.

    Raises:
        MissingBuildError: The JavaScript was not built.
    """

    state = traitlets.Dict().tag(sync=True)  # `Lesson.state`; saved in the notebook if widget states are saved

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson
        self._extra: dict[str, Any] = {}
        super().__init__(_esm=read_bundle(BUNDLE, "the lessons", _WITHOUT), state=_plain(lesson.state()))
        self.on_msg(self._on_message)

    def __repr__(self) -> str:
        return f"<LessonView of {self._lesson!r}>"

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        """Handle a request of the browser: `{"do": "run", "request": 3, ...}`."""
        if not isinstance(content, dict) or not isinstance(content.get("do"), str):
            return
        request = content.get("request")
        self.send({"kind": "began", "request": request})
        error = ""
        try:
            self._lesson.act(content)
        except DDPNotebookError as caught:
            error = str(caught)
        except Exception as caught:
            _log.exception("the lesson could not do %s", content)
            error = traceback.format_exception_only(caught)[-1].strip()
        self.state = _plain({**self._lesson.state(), "error": error, "answered": request})


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy numbers to numbers, infinities and NaN to strings, keys to strings."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
