"""How lessons show themselves: as a widget while ranks run and somebody looks, as a picture and a text afterwards.

A saved notebook keeps what a display last had, and without its kernel a widget is only "model not found". So a widget
gives way to a picture when the session ends, and without a front end the picture is there from the start.
"""

from __future__ import annotations

import base64
import html
import io
import logging
import math
import traceback
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from ddp_notebook.display import has_front_end, read_bundle
from ddp_notebook.errors import DDPNotebookError, MissingBuildError

if TYPE_CHECKING:
    from ddp_notebook.lessons.lesson import Lesson


BUNDLE = Path(__file__).with_name("static") / "lessons.js"
_WITHOUT = ". Without it there is this picture, and everything that the lesson's methods do"
_log = logging.getLogger(__name__)


class LessonView(anywidget.AnyWidget):
    """One lesson on the page.

    A button sends its wish as a message. The kernel handles it when it is idle, so after a cell that runs; until it
    has heard that the kernel began, the browser says that it waits.

    Args:
        lesson: what is drawn and driven.

    Raises:
        MissingBuildError: the JavaScript was not built.
    """

    state = traitlets.Dict().tag(sync=True)  # `Lesson.state`; saved with the notebook if the states of widgets are

    def __init__(self, lesson: Lesson) -> None:
        self._lesson = lesson
        self._extra: dict[str, Any] = {}
        super().__init__(_esm=read_bundle(BUNDLE, "the lessons", _WITHOUT), state=_plain(lesson.state()))
        self.on_msg(self._on_message)

    def __repr__(self) -> str:
        return f"<LessonView of {self._lesson!r}>"

    def _on_message(self, _: Any, content: Any, __: Any) -> None:
        """The browser wants something: `{"do": "run", "request": 3, ...}`."""
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
    """As JSON has it: NumPy's numbers as numbers, infinities and NaN as text, keys as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


_shown: weakref.WeakKeyDictionary[Any, tuple[LessonView, Any]] = (
    weakref.WeakKeyDictionary()
)  # the last view of each lesson


class DisplayedLesson:
    """A lesson that displays itself where it is the last line of a cell."""

    def _ipython_display_(self: Lesson) -> None:
        display(self)


def display(lesson: Lesson) -> None:
    """Display a lesson in the output of the cell. An earlier display of it becomes a picture.

    Raises:
        MissingBuildError: the JavaScript was not built.
    """
    from IPython.display import display as show

    if not has_front_end():
        show(static(lesson), raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        return

    try:
        view = LessonView(lesson)
    except MissingBuildError as error:
        show({**static(lesson), "text/html": _words(str(error)) + _image(lesson)}, raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        return
    live = view._repr_mimebundle_()
    data = live[0] if isinstance(live, tuple) else live
    handle = show({**static(lesson), **(data or {})}, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
    was_shown = lesson in _shown
    _freeze(lesson)
    _shown[lesson] = view, handle
    if not was_shown:
        lesson._runner.session.when_stopped(partial(_freeze, lesson))


def static(lesson: Lesson) -> dict[str, Any]:
    """The picture and the text."""
    return {"text/plain": repr(lesson), "image/png": base64.b64encode(_png(lesson)).decode()}


def _png(lesson: Lesson) -> bytes:
    data = io.BytesIO()
    lesson.picture().savefig(data, format="png", dpi=110)
    return data.getvalue()


def _image(lesson: Lesson) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(_png(lesson)).decode()}" style="max-width:100%">'


def _words(text: str) -> str:
    return f'<div role="status" style="border-left:4px solid #d9822b;padding:4px 12px">{html.escape(text)}</div>'


def _freeze(lesson: Lesson) -> None:
    """Its last view gives way to a picture."""
    if lesson not in _shown:
        return
    view, handle = _shown.pop(lesson)
    if handle is not None:
        handle.update(static(lesson), raw=True)
    view.close()
