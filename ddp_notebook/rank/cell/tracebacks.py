"""Tracebacks of a cell.

Decides which traceback ends the cell or is part of its output, limits their length, and handles interrupts while they
are formatted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from sys import _getframe, exc_info
from types import FrameType, TracebackType
from typing import Any

from IPython.core.events import EventManager

from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell import isolation
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.cell.exceptions import (
    FormattingStopped,
    chain,
    first_line,
    known_words,
    message_with_note,
    notes_of,
    with_type,
    words,
)
from ddp_notebook.rank.cell.magic_errors import MagicErrors
from ddp_notebook.rank.cell.truncation import bounded
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, contextlib, threading

_RUNNER = __file__.replace("tracebacks.py", "runner.py")
_MOST_FRAMES = 200  # maximum frames of one exception; repeated calls on one line count once, as in IPython


class Tracebacks:
    """Tracebacks of one rank. Replaces the shell's `showtraceback`.

    Args:
        shell: shell of the kernel.
        where: knows the files of cells, and gets the error of a failed cell.
        is_running: returns whether a cell runs.
        is_stopped: returns whether the cell is being stopped, so that its traceback need not be shown.
        explain: returns a note about the cause of an error; "" if the cause is unknown.
    """

    def __init__(
        self,
        shell: Any,
        where: CurrentLine,
        is_running: Callable[[], bool],
        is_stopped: Callable[[], bool],
        explain: Callable[[BaseException], str],
    ) -> None:
        self.of_cell: list[str] = []  # lines of errors in displays that fail the cell, then of the error that ended it
        self.display_error: tuple[str, str] | None = (
            None  # name and message of an error in a display that fails the cell
        )
        self.failure: BaseException | None = None  # error with which the cell failed before it was stopped
        self.is_formatting = False
        self.is_hidden = False  # the interrupt was suppressed in the cell's code and must be raised again
        self._was_stopped = False  # formatting was aborted; the remaining errors are internal
        self._said: tuple[BaseException, str] | None = None  # the error that ended the cell, and its message
        self.of_magics = MagicErrors(shell, where.cells.__contains__)
        self._shell = shell
        self._where = where
        self._is_running = is_running
        self._is_stopped = is_stopped
        self._explain = explain
        self._main = threading.main_thread().ident
        self._left_out = 0  # number of omitted frames in the current traceback
        self._format = shell.showtraceback
        shell.showtraceback = self._show

    def begin(self) -> None:
        """Reset the state at the start of a cell."""
        self.of_cell = []
        self.display_error = None
        self.failure = None
        self.is_hidden = False
        self._said = None
        self._shell._last_traceback_during_displayhook = False

    def show_escaped(self) -> None:
        """Show the current error, which IPython has not shown."""
        try:
            self._show()
        except BaseException:  # it cannot be shown; its name is still sent
            return

    def show_interrupt(self) -> None:
        """Show the current KeyboardInterrupt. (An interrupted cell shows none.)"""
        self._format()

    def what_ended(self, failure: BaseException | None) -> BaseException | None:
        """Return the error that ended the cell.

        This is the original failure, even if a stop interrupted the handling of that failure in IPython.
        """
        is_stop = isinstance(failure, KeyboardInterrupt | FormattingStopped) or (
            # Python 3.11 sometimes raises this if a signal handler raises while C code formats a traceback.
            isinstance(failure, SystemError) and "error return without exception set" in known_words(failure)
        )
        if self.failure is None or failure is None or not is_stop:
            return failure
        failure.__traceback__ = None  # its frames hold variables
        return self.failure

    def words_of(self, failure: BaseException) -> str:
        """Return the message of the error that ended the cell, without running user code.

        User code could not be interrupted here.
        """
        if self._said is not None and self._said[0] is failure:
            return self._said[1]
        return message_with_note(failure, known_words(failure))

    def text_to_show(self, content: dict[str, Any]) -> str:
        """Process a traceback that IPython shows.

        IPython does not call `_show` for syntax errors.

        Returns:
            The text to show now. "" for tracebacks that are sent at the end of the cell: of the error that ended it, or
            of an error in a display if the kernel then fails the cell.
        """
        if threading.get_ident() == self._main and self.of_magics.will_raise():
            return ""
        text = bounded("\n".join(content["traceback"]))
        if self._left_out:
            text += f"\n[... {self._left_out:,} frames in the middle of this traceback are left out ...]"
        if self._ends_cell():
            self.of_cell += text.split("\n")
            return ""
        shell = self._shell  # ipykernel 7.2 and later fail the cell, and set this
        if getattr(shell, "_last_traceback_during_displayhook", False) and threading.get_ident() == self._main:
            shell._last_traceback_during_displayhook = False
            self.of_cell += text.split("\n")
            self.display_error = content["ename"], bounded(content["evalue"])
            return ""
        return f"{text}\n"

    def stop_formatting(self, frame: FrameType | None) -> None:
        """Abort the formatting of a traceback at an interrupt in this frame.

        The signal is repeated until it has an effect, because a bare `except` may catch the exception. A repeated
        signal must not raise while `_show` handles the first one. It would escape `_show`, and the failed cell would
        look like an interrupted one.
        """
        if not self._was_stopped and (frame is None or frame.f_code is not Tracebacks._show.__code__):
            raise FormattingStopped

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show a traceback, unless the cell was stopped.

        For stopped cells, one line covers all ranks, and formatting a traceback would take 0.1 s.
        """
        if threading.get_ident() != self._main:
            self._format(exc_tuple, *args, **kwargs)
            return
        error = exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if self._is_stopped():
            # `Output.__exit__` of ipywidgets shows any exception and suppresses it for the surrounding code
            self.is_hidden = isinstance(error, KeyboardInterrupt | asyncio.CancelledError) and not self._ends_cell()
            return
        if error is None:
            self._format(exc_tuple, *args, **kwargs)
            return
        if self.of_magics.will_raise():
            return
        ends_cell = self._ends_cell()
        if ends_cell and not isinstance(error, KeyboardInterrupt):
            self.failure = self.failure or error
            self._where.failed = first_line(error)
        try:
            self.is_formatting = True
            with reserve.lent():  # the cell may have exhausted descriptors or memory
                self._add_note(error)  # before frames are removed: the cause may be in them
                self.of_magics.hide_frames(error)
                isolation.end_traceback_at_user(error)
                error.__traceback__ = _without_runner(error.__traceback__)
                if exc_tuple is not None:
                    exc_tuple = type(error), error, error.__traceback__
                self._left_out = _leave_out_frames(error)
                self._show_whole(error, ends_cell, exc_tuple, *args, **kwargs)
        except FormattingStopped:
            self._was_stopped = True
            if not ends_cell:  # the cell has not ended yet
                raise KeyboardInterrupt from None
            self.of_cell += [first_line(error), "its traceback was not formatted to the end: stop was pressed"]
        finally:
            self.is_formatting = self._was_stopped = False
            self._where.failed = ""
            self._left_out = 0

    def _add_note(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # raised by an uncooperative user object
            if (note := self._explain(error)) and note not in notes_of(error):
                error.add_note(note)

    def _show_whole(self, error: BaseException, ends_cell: bool, *args: Any, **kwargs: Any) -> None:
        try:
            self._format(*args, **kwargs)
            if ends_cell:
                self._said = error, message_with_note(error)
        except Exception:  # raised by `__str__` of the error, which ipykernel calls; IPython tolerates it
            if not ends_cell:
                raise
            self._said = error, words(error)
            try:
                lines = self._shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
            except Exception:  # a cell has replaced a function that IPython needs
                lines = [with_type(error)]
            self.of_cell += bounded("\n".join(lines)).split("\n")

    def _ends_cell(self) -> bool:
        """Return whether the current error ends the cell.

        It does not if code of the running cell displays a failing object or runs another cell, or in a callback of
        `shell.events`.
        """
        frame: FrameType | None = _getframe(1)
        if threading.get_ident() != self._main or not self._is_running():
            return False
        while frame is not None:
            if frame.f_code.co_filename in self._where.cells or frame.f_code is EventManager.trigger.__code__:
                return False
            frame = frame.f_back
        return True


def _leave_out_frames(error: BaseException | None) -> int:
    """Remove the middle frames of very deep tracebacks. Return the number of removed frames.

    For two functions that call each other 9000 times, IPython would format every frame, which takes half a minute.
    """
    left_out = 0
    for one in chain(error):
        frames = list(_frames(one.__traceback__))
        lines = [(frame.tb_frame.f_code, frame.tb_lineno) for frame in frames]
        if sum(line != before for line, before in zip(lines[1:], lines, strict=False)) > _MOST_FRAMES:
            half = _MOST_FRAMES // 2
            frames[half - 1].tb_next = frames[-half]
            left_out += len(frames) - 2 * half
    return left_out


def _without_runner(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of the functions that run the cell."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _RUNNER:
        traceback = traceback.tb_next
    return traceback


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
