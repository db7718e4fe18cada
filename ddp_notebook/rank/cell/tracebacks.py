"""Tracebacks of a cell: which of them ends it and which is part of its output, how long they may be, and how the stop
button ends their formatting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
)
from ddp_notebook.rank.cell.magic_errors import MagicErrors
from ddp_notebook.rank.cell.truncation import bounded
from ddp_notebook.stdlib import asyncio, contextlib, threading

_RUNNER = __file__.replace("tracebacks.py", "runner.py")
_MOST_FRAMES = 200  # of one exception; repeated calls on one line count once, as IPython shows them


class Tracebacks:
    """The tracebacks of one rank. Replaces the shell's `showtraceback`.

    Args:
        shell: the kernel's, whose `showtraceback` it replaces.
        where: knows which files are cells, and is told that the cell has failed.
        is_running: tells whether a cell runs.
        is_stopped: tells whether it is being stopped, so that its traceback is of no interest.
        explain: tells of an error what it comes of, as a note; "" if that is nothing known.
    """

    def __init__(
        self,
        shell: Any,
        where: CurrentLine,
        is_running: Callable[[], bool],
        is_stopped: Callable[[], bool],
        explain: Callable[[BaseException], str],
    ) -> None:
        self.of_cell: list[str] = []  # lines: of errors in displays that fail the cell, then of the error that ended it
        self.display_error: tuple[str, str] | None = (
            None  # name and message of an error in a display that fails the cell
        )
        self.failure: BaseException | None = None  # by which the cell has failed, before anybody stopped it
        self.is_formatting = False
        self.is_hidden = False  # an interrupt, from the code of the cell: it has to be raised once more
        self._was_stopped = False  # what is being formatted: the rest of that is ours
        self._said: tuple[BaseException, str] | None = None  # the error that ended the cell, and its message
        self.of_magics = MagicErrors(shell, where.cells.__contains__)
        self._shell = shell
        self._where = where
        self._is_running = is_running
        self._is_stopped = is_stopped
        self._explain = explain
        self._main = threading.main_thread().ident
        self._left_out = 0  # frames of what is being formatted
        self._format = shell.showtraceback
        shell.showtraceback = self._show

    def begin(self) -> None:
        """A cell begins."""
        self.of_cell = []
        self.display_error = None
        self.failure = None
        self.is_hidden = False
        self._said = None
        self._shell._last_traceback_during_displayhook = False

    def show_escaped(self) -> None:
        """Show the error that is being handled and that IPython has not shown."""
        try:
            self._show()
        except BaseException:  # it cannot be shown; its name is sent all the same
            return

    def show_interrupt(self) -> None:
        """Show the KeyboardInterrupt that is being handled. (An interrupted cell shows none.)"""
        self._format()

    def what_ended(self, failure: BaseException | None) -> BaseException | None:
        """What has ended the cell: the error by which it has failed, also where a stop came upon IPython while it dealt
        with that."""
        is_stop = isinstance(failure, KeyboardInterrupt | FormattingStopped) or (
            # Python 3.11 at times raises this instead if a signal's handler raises while C code formats a traceback.
            isinstance(failure, SystemError) and "error return without exception set" in known_words(failure)
        )
        if self.failure is None or failure is None or not is_stop:
            return failure
        failure.__traceback__ = None  # its frames hold variables
        return self.failure

    def words_of(self, failure: BaseException) -> str:
        """The message of the error that ended the cell. Runs no code of the user's: nobody could stop it here."""
        return self._said[1] if self._said is not None and self._said[0] is failure else known_words(failure)

    def text_to_show(self, content: dict[str, Any]) -> str:
        """Take a traceback that IPython shows. Returns the text to show instead, or "" if it is sent at the end of the
        cell: for the error that ended it, and for one in a display if the kernel lets the cell fail because of it.
        IPython does not call `_show` for syntax errors."""
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
        """Called at an interrupt in this frame. The signal is repeated until this has had an effect: a bare `except` on
        the way may catch it. So it may come once more while `_show` takes note of the first one, where it would get
        past it, and the cell would look as if it had been stopped and had not failed."""
        if not self._was_stopped and (frame is None or frame.f_code is not Tracebacks._show.__code__):
            raise FormattingStopped

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show a traceback, unless the cell was stopped: one line tells that for all ranks, and formatting a traceback
        that nobody sees takes 0.1 s."""
        if threading.get_ident() != self._main:
            self._format(exc_tuple, *args, **kwargs)
            return
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if self._is_stopped():
            # `Output.__exit__` of ipywidgets shows any exception, and hides it from the code around
            self.is_hidden = isinstance(error, KeyboardInterrupt | asyncio.CancelledError) and not self._ends_cell()
            return
        if error is None:
            self._format(exc_tuple, *args, **kwargs)
            return
        if self.of_magics.will_raise():
            return
        self.of_magics.hide_frames(error)
        isolation.end_traceback_at_user(error)
        error.__traceback__ = _without_runner(error.__traceback__)
        if exc_tuple is not None:
            exc_tuple = type(error), error, error.__traceback__
        self._left_out = _leave_out_frames(error)
        ends_cell = self._ends_cell()
        if ends_cell and not isinstance(error, KeyboardInterrupt):
            self.failure = self.failure or error
            self._where.failed = first_line(error)
        try:
            self.is_formatting = True
            with reserve.lent():  # the cell may have left no descriptor and no memory for this
                self._show_whole(error, ends_cell, exc_tuple, *args, **kwargs)
        except FormattingStopped:
            self._was_stopped = True
            if not ends_cell:  # nothing has ended yet
                raise KeyboardInterrupt from None
            self.of_cell += [first_line(error), "its traceback was not formatted to the end: stop was pressed"]
        finally:
            self.is_formatting = self._was_stopped = False
            self._where.failed = ""
            self._left_out = 0

    def _show_whole(self, error: BaseException, ends_cell: bool, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # from an object that refuses to be looked at
            if (note := self._explain(error)) and note not in notes_of(error):
                error.add_note(note)
        try:
            self._format(*args, **kwargs)
            if ends_cell:
                self._said = error, message_with_note(error)
        except Exception:  # from the error's `__str__`, which ipykernel calls; IPython's formatting tolerates it
            if not ends_cell:
                raise
            self._said = error, f"<{type(error).__name__}.__str__ failed>"
            lines = self._shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
            self.of_cell += bounded("\n".join(lines)).split("\n")

    def _ends_cell(self) -> bool:
        """Whether the error that is shown now ends the cell. Code of a cell that is still under way may have displayed
        something that fails, or have run another cell; callbacks of `shell.events` fail by themselves."""
        frame: FrameType | None = sys._getframe(1)
        if threading.get_ident() != self._main or not self._is_running():
            return False
        while frame is not None:
            if frame.f_code.co_filename in self._where.cells or frame.f_code is EventManager.trigger.__code__:
                return False
            frame = frame.f_back
        return True


def _leave_out_frames(error: BaseException | None) -> int:
    """Keep only the outermost and the innermost frames of very deep tracebacks. Returns how many are left out. If two
    functions call each other 9000 times, IPython formats every frame, which takes half a minute."""
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
    """Return the traceback from the first frame below the functions that run the cell: they say nothing about it."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == _RUNNER:
        traceback = traceback.tb_next
    return traceback


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
