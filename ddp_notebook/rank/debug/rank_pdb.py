"""pdb on a rank: each command is a request to the notebook, which shows one prompt for all stopped ranks."""

from __future__ import annotations

import pdb
import sys
from bdb import Breakpoint
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ddp_notebook.messages.ranks import InputReply
from ddp_notebook.rank.cell.current_line import OURS, CurrentLine
from ddp_notebook.rank.cell.isolation import INTERACTION
from ddp_notebook.records.words import in_function
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, threading

# Modules in which stepping does not stop: they run cells, and observe the user's code.
_SKIPPED = (
    *("IPython.*", "ipykernel.*", "ipyparallel.*", "ddp_notebook.*", "asyncio.*", "tornado.*", "traitlets.*"),
    *("contextlib", "codeop", "ast"),
)
_SHELL = "IPython.core.interactiveshell"
Read = Callable[[str, FrameType | None], InputReply]  # the place of a debugger, its frame -> the user's reply


class NoUserError(RuntimeError):
    """No user can type commands. The message says why."""


class _Commands:
    """Standard input of a debugger."""

    def __init__(self, read: Callable[[], str]) -> None:
        self.readline = read


class _Output:
    """Standard output of a debugger: that of the rank, even while a cell redirects `sys.stdout`."""

    def write(self, text: str) -> None:
        if (stream := sys.__stdout__) is not None:
            stream.write(text)

    def flush(self) -> None:
        if (stream := sys.__stdout__) is not None:
            stream.flush()


class RankPdb(pdb.Pdb):
    """pdb whose commands come from the notebook. It shows the frames of the user's code.

    Args:
        where: describes places, and knows the files of cells.
        read: returns the user's next command.
        first: number of the frame that is shown first, from the outermost one; None: the innermost one.
    """

    def __init__(self, where: CurrentLine, read: Read, first: Callable[[list[Any]], int] | None = None) -> None:
        super().__init__(
            stdin=_Commands(self._readline),  # type: ignore[arg-type]
            stdout=_Output(),  # type: ignore[arg-type]
            nosigint=True,
            readrc=False,
            skip=_SKIPPED,
        )
        self.use_rawinput = 0  # type: ignore[assignment]
        self.prompt = ""
        self._where = where
        self._read = read
        self._first = first
        self._is_interrupted = False  # an interrupt has ended a command

    # ---- the prompt

    def _readline(self) -> str:
        if self._is_interrupted:
            raise KeyboardInterrupt
        reply = self._read("" if self.curframe is None else self._place(self.curframe), self.curframe)
        if reply.error:
            raise NoUserError(reply.error)
        return reply.text + "\n"

    def _place(self, frame: FrameType) -> str:
        """Describe the line of a frame, without the function that it calls."""
        code, line = frame.f_code, self._line(frame)
        return self._where.of_calls([(code.co_filename, line, code.co_name)]) or _file_and_line(frame, line)

    def _line(self, frame: FrameType) -> int:
        """Return the current line of a frame; for a frame of a failure, the line that failed."""
        lines = [line for one, line in self.stack if one is frame]
        return lines[-1] if lines else frame.f_lineno

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        """Open the prompt. Afterwards release the frames, also if a command raises an exception, such as `q`."""
        try:
            INTERACTION(self, frame, tb_or_exc)  # `isolation` refuses that of `pdb.Pdb`
        finally:
            self.forget()

    def forget(self) -> None:
        for frame, _ in getattr(self, "stack", ()):
            frame.f_globals.pop("__pdb_convenience_variables", None)  # Python 3.12 and later: `$_frame`
        super().forget()

    def _cmdloop(self) -> None:
        """Read commands. pdb's own method catches KeyboardInterrupt, which ends a cell here."""
        self.cmdloop()

    def _error_exc(self) -> None:
        """Show the error of a command. pdb would go on after an interrupt, which ends the cell here."""
        self._is_interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        if not self._is_interrupted:
            super()._error_exc()  # type: ignore[misc]  # not in the type information

    # ---- what is shown

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, at = super().get_stack(f, t)
        first = next((number for number, (frame, _) in enumerate(stack) if self._is_of_cell(frame)), 0)
        kept = [number for number in range(first, len(stack)) if not _is_internal(stack[number][0])]
        kept = kept or [at]
        now = sum(number <= at for number in kept) - 1
        shown = [stack[number] for number in kept]
        return shown, max(0, now) if self._first is None else self._first(shown)

    def _is_of_cell(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename in self._where.cells

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, line = frame_lineno
        text = super().format_stack_entry(frame_lineno, lprefix)
        if not self._is_of_cell(frame):
            return text
        _, separator, source = text.partition(lprefix)
        code = frame.f_code
        return self._where.of_calls([(code.co_filename, line, code.co_name)]) + separator + source

    def stop_here(self, frame: FrameType) -> bool:
        return super().stop_here(frame) and not self._is_between_statements(frame)

    def _is_between_statements(self, frame: FrameType) -> bool:
        """Return whether IPython calls a function between two statements of a cell."""
        at: FrameType | None = frame
        while at is not None and not self._is_of_cell(at):
            if at.f_globals.get("__name__") == _SHELL and at.f_code.co_name == "run_ast_nodes":
                return True
            at = at.f_back
        return False

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        if not self._is_statement(frame):  # IPython calls each statement of a cell
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not self._is_statement(frame):
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        if issubclass(exc_info[0], KeyboardInterrupt):  # it ends the cell
            untrace(frame)
        else:
            super().user_exception(frame, exc_info)

    def _is_statement(self, frame: FrameType) -> bool:
        return self._is_of_cell(frame) and not in_function(frame.f_code.co_name)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        # This method gives the calls of pdb a frame of this package, which descriptions of a place leave out.
        return super().trace_dispatch(frame, event, arg)

    # ---- commands that end it, or that a rank cannot execute

    def do_quit(self, arg: str) -> NoReturn:
        raise KeyboardInterrupt("the debugger ended the cell")

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> NoReturn:
        self.do_quit(arg)

    def _refuse(self, arg: str) -> None:
        self.error("this command does not work on a rank: p, pp, !statement, w, up, down and list do")

    do_interact = do_debug = do_run = do_restart = _refuse

    # ---- stopping

    def stop_at(self, frame: FrameType) -> None:
        """Open the prompt in a frame that calls a debugger, and stop later as its commands say."""
        self.reset()
        self.set_step()
        at: FrameType | None = frame
        while at is not None and not _is_runner(at):
            at.f_trace = self.trace_dispatch
            self.botframe, at = at, at.f_back
        try:
            self.interaction(frame, None)
        except NoUserError as error:
            untrace(frame)
            raise RuntimeError(*error.args) from None  # without the frames of pdb
        is_over = self.stopframe is self.botframe and self.stoplineno == -1
        if self.breaks or not is_over:
            sys.settrace(self.trace_dispatch)
        else:
            untrace(frame)

    def look_at(self, at: TracebackType) -> None:
        """Open the prompt in the frames of a failure."""
        self.reset()
        self.interaction(None, at)  # Python 3.13 also accepts an exception


def untrace(frame: FrameType | None) -> None:
    """End tracing in this thread and in these frames."""
    sys.settrace(None)
    while frame is not None:
        frame.f_trace = None
        frame = frame.f_back


def forget_breakpoints() -> None:
    """Remove the breakpoints of all debuggers."""
    for one in Breakpoint.bpbynumber:
        if one is not None:
            one.deleteMe()


def _is_internal(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _is_runner(frame: FrameType) -> bool:
    """Return whether a frame belongs to the code that runs cells or threads."""
    name = str(frame.f_globals.get("__name__", ""))
    return name == _SHELL or (name == "threading" and frame.f_back is None)


def _file_and_line(frame: FrameType, line: int) -> str:
    code = frame.f_code
    thread = threading.current_thread()
    words = f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
    return words if thread is threading.main_thread() else f"{words} (thread {thread.name!r})"
