"""Destinations of output: that of the main thread, or one cell, even after its end."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from ddp_notebook.errors import COLORS
from ddp_notebook.run.notebook_kernel import has_front_end, ipython, is_marimo, kernel


class DisplayTarget(Protocol):
    """Destination of text and displays."""

    can_update: bool  # a shown display can be changed
    is_captured: bool  # text does not go to the front end, as under %%capture, and must stay text

    @property
    def is_live(self) -> bool:
        """Return whether a user can see it now. False if a program runs the notebook."""

    def write(self, stream: str, text: str) -> None:
        """Show text of "stdout" or "stderr"."""

    def flush(self, stream: str) -> None:
        """Flush the written text."""

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        """Show a MIME bundle, or update the display with this id."""

    def clear(self, wait: bool) -> None:
        """Remove all output; with `wait` only when new output arrives."""

    def fail(self, error: BaseException) -> None:
        """Show an error like a cell that ends with it."""


class ThreadTarget:
    """Destination of this thread's output: the running cell, the terminal, or an object that captures it."""

    def __init__(self) -> None:
        self.can_update = kernel() is not None  # a terminal cannot change shown text
        self.is_captured = _is_captured()

    @property
    def is_live(self) -> bool:
        return has_front_end()

    def write(self, stream: str, text: str) -> None:
        getattr(sys, stream).write(text)

    def flush(self, stream: str) -> None:
        getattr(sys, stream).flush()

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        from IPython.display import publish_display_data

        more: dict[str, Any] = {}
        if display_id is not None:
            more = {"transient": {"display_id": display_id}, "update": update}
        publish_display_data(data, metadata, **more)

    def clear(self, wait: bool) -> None:
        from IPython.display import clear_output

        clear_output(wait)

    def fail(self, error: BaseException) -> None:
        text = "\n".join(_traceback_of(error)) + "\n"
        self.write("stderr", text if ipython() or is_marimo() else COLORS.sub("", text))  # a script may write to a log
        self.flush("stderr")


class MarimoTarget(ThreadTarget):
    """Destination under the marimo cell that has started this thread.

    marimo routes the `print` of the notebook's module to this cell, but not text written to `sys.stdout`.
    """

    def write(self, stream: str, text: str) -> None:
        vars(sys.modules["__main__"]).get("print", print)(text, end="", flush=True)


class CellTarget:
    """Destination under the cell that has created it, from any thread, even after the cell's end.

    Messages name the request of their cell, and front ends show them there. nbclient only accepts them until the cell
    ends.

    Args:
        running: the kernel.
    """

    can_update = True
    is_captured = False

    def __init__(self, running: Any) -> None:
        self._kernel = running
        self._parent = running.get_parent()
        self.is_live = has_front_end()

    def write(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text}, f"stream.{stream}")

    def flush(self, stream: str) -> None:
        """Do nothing: all text was sent immediately."""

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        kind = "update_display_data" if update else "display_data"
        transient = {} if display_id is None else {"display_id": display_id}
        self._send(kind, {"data": data, "metadata": metadata, "transient": transient}, "display_data")

    def clear(self, wait: bool) -> None:
        self._send("clear_output", {"wait": wait}, "clear_output")

    def fail(self, error: BaseException) -> None:
        if not self.is_live:  # the cell waits, and raises the error itself
            return
        content = {"ename": type(error).__name__, "evalue": str(error), "traceback": _traceback_of(error)}
        self._send("error", content, "error")

    def _send(self, kind: str, content: dict[str, Any], topic: str) -> None:
        socket = self._kernel.iopub_socket  # sends in its own thread
        self._kernel.session.send(socket, kind, content, parent=self._parent, ident=topic.encode())


class DisplayHandle:
    """A display that is shown at the first update, with the needed part of the interface of IPython handles.

    Args:
        target: destination of the display.
        display_id: unique id of the display.
    """

    def __init__(self, target: DisplayTarget, display_id: str) -> None:
        self._target = target
        self._display_id = display_id
        self._is_shown = False

    def update(self, data: dict[str, Any], *, raw: bool = True) -> None:
        """Show a MIME bundle, or replace the shown one with it."""
        assert raw
        self._target.publish(data, {}, self._display_id, update=self._is_shown)
        self._is_shown = True


def of_this_cell() -> DisplayTarget:
    """Return the destination for later output of another thread that belongs to the running cell."""
    running = kernel()
    if running is not None and all(hasattr(running, name) for name in ("get_parent", "iopub_socket", "session")):
        return CellTarget(running)
    return MarimoTarget() if is_marimo() else ThreadTarget()


def _is_captured() -> bool:
    """Return whether text of this thread goes elsewhere than to the kernel's streams."""
    streams = getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)
    return streams is not None and not all(isinstance(one, streams) for one in (sys.stdout, sys.stderr))


def _traceback_of(error: BaseException) -> list[str]:
    """Return the lines that a notebook shows for an error."""
    render = getattr(error, "_render_traceback_", None)
    if render is not None:
        return list(render())
    if (shell := ipython()) is None:
        return [f"{type(error).__name__}: {error}"]
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return lines
