"""How lessons show themselves: as a widget while ranks run and somebody looks, as a picture and a text ever after.

A saved notebook keeps what a display last had. A widget there would be "model not found" without its kernel; so it
gives way to a picture when the session ends, and where nobody can click there is the picture from the start.
"""

from __future__ import annotations

import base64
import io
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ddp_notebook.errors import MissingBuildError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.session import Runner
    from ddp_notebook.lessons.view import View

_LOOK_S = 0.3
_log = logging.getLogger(__name__)


class Lesson(Protocol):
    """What can be shown."""

    _runner: Runner

    def picture(self) -> Figure: ...


def display(lesson: Lesson) -> None:
    """Display a lesson where the cell's output goes.

    Raises:
        MissingBuildError: the JavaScript was not built.
    """
    from IPython.display import display as show

    if not has_front_end():
        show(static(lesson), raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        return
    from ddp_notebook.lessons.view import View

    try:
        view = View(lesson)
    except MissingBuildError as error:
        show({**static(lesson), "text/html": _words(str(error)) + _image(lesson)}, raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        return
    live = view._repr_mimebundle_()
    data = live[0] if isinstance(live, tuple) else live
    handle = show({**static(lesson), **(data or {})}, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
    _live.add(lesson, view, handle)


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
    import html

    return f'<div role="status" style="border-left:4px solid #d9822b;padding:4px 12px">{html.escape(text)}</div>'


def has_front_end() -> bool:
    """Whether somebody looks. What runs a notebook by itself (nbclient, papermill, nbconvert) says that nobody can
    type; there is no other sign of it."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel: Any = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    content = (kernel.get_parent() or {}).get("content") or {}
    return bool(content.get("allow_stdin", True))


class _Live:
    """What is on the page; becomes static when its session ends."""

    def __init__(self) -> None:
        self._shown: list[tuple[Lesson, View, Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, lesson: Lesson, view: View, handle: Any) -> None:
        with self._lock:
            self._shown.append((lesson, view, handle))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="ddp-lessons", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                over = [one for one in self._shown if not one[0]._runner.session.is_running]
                self._shown = [one for one in self._shown if one not in over]
            for lesson, view, handle in over:
                try:
                    if handle is not None:
                        handle.update(static(lesson), raw=True)
                    view.close()
                except Exception:
                    _log.exception("a lesson could not be made static")
            with self._lock:
                if not self._shown:
                    self._thread = None
                    return


_live = _Live()
