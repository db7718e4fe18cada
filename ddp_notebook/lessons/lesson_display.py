"""Displays lessons: as a widget while ranks run and a front end is open, otherwise as a picture and a text.

A saved notebook keeps the last content of a display, and a widget without its kernel is only "model not found". So a
picture replaces the widget when the session ends. Without a front end, the picture is shown from the start.
"""

from __future__ import annotations

import base64
import html
import io
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_notebook.display import has_front_end
from ddp_notebook.errors import MissingBuildError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.lesson import Lesson
    from ddp_notebook.lessons.lesson_widget import LessonView


_shown: weakref.WeakKeyDictionary[Any, tuple[LessonView, Any]] = (
    weakref.WeakKeyDictionary()
)  # the last view of each lesson


class DisplayedLesson:
    """A lesson that is displayed if it is the last line of a cell."""

    def _ipython_display_(self: Lesson) -> None:
        display(self)


def display(lesson: Lesson) -> None:
    """Display a lesson in the output of the cell. A picture replaces its earlier display.

    Raises:
        MissingBuildError: The JavaScript was not built.
    """
    from IPython.display import display as show

    if not has_front_end():
        show(static(lesson), raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        return
    from ddp_notebook.lessons.lesson_widget import LessonView

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
        lesson._runner.session.ranks.when_stopped(partial(_freeze, lesson))


def show_picture(figure: Figure, words: str) -> None:
    """Show a figure. A front end without pictures shows the words instead."""
    from IPython.display import display as show

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200)
    width, height = (round(100 * inches) for inches in figure.get_size_inches())  # sharp on high-resolution screens
    data = {"text/plain": words, "image/png": base64.b64encode(png.getvalue()).decode()}
    show(data, metadata={"image/png": {"width": width, "height": height}}, raw=True)  # type: ignore[no-untyped-call,unused-ignore]


def static(lesson: Lesson) -> dict[str, Any]:
    """Return the picture and the text of a lesson."""
    return {"text/plain": repr(lesson), "image/png": base64.b64encode(_png(lesson)).decode()}


def _png(lesson: Lesson) -> bytes:
    data = io.BytesIO()
    lesson.picture().savefig(data, format="png", dpi=110)
    return data.getvalue()


def _image(lesson: Lesson) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(_png(lesson)).decode()}" style="max-width:100%">'


def _words(text: str) -> str:
    return f'<div role="status" style="border-left:4px solid currentColor;padding:4px 12px">{html.escape(text)}</div>'


def _freeze(lesson: Lesson) -> None:
    """Replace the last view of a lesson by a picture."""
    if lesson not in _shown:
        return
    view, handle = _shown.pop(lesson)
    if handle is not None:
        handle.update(static(lesson), raw=True)
    view.close()
