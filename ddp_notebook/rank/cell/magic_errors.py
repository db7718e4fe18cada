"""Raise the errors that the IPython magics `%run` and `%%capture` only show.

IPython prints the error of a script under `%run`, and the cell continues. On a rank, the cell would then seem
successful, while the other ranks wait for its collectives. So the magic raises the error at its end, and the cell fails
as with any other error.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from sys import _getframe
from types import FrameType, TracebackType
from typing import Any

import IPython

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, os

_MAGICS = (("line", "run"), ("line", "rerun"), ("cell", "capture"))
_IPYTHON = os.path.dirname(IPython.__file__) + os.sep
_RUNNERS = (_IPYTHON, OURS, runpy.__file__, "<frozen runpy>")


class MagicErrors:
    """Makes magics of a shell raise the errors of the code that they run.

    Args:
        shell: shell whose magics and methods for running code are replaced.
        is_cell: returns whether a file name belongs to a cell.
    """

    def __init__(self, shell: Any, is_cell: Callable[[str], bool]) -> None:
        self._shell = shell
        self._is_cell = is_cell
        self._depth = 0  # nesting depth of running magics
        self._error: BaseException | None = None  # error of the code that the innermost magic has run
        self._script_exit: SystemExit | None = None
        self._execfile, self._execfile_ipy = shell.safe_execfile, shell.safe_execfile_ipy
        self._module, self._nested = shell.safe_run_module, shell.run_cell
        shell.run_cell = self._cell
        shell.safe_execfile, shell.safe_execfile_ipy = self._run_file, self._run_ipy
        shell.safe_run_module = self._run_module
        for kind, name in _MAGICS:
            magic = shell.find_magic(name, kind)
            shell.register_magic_function(self._raising(magic, with_cells=name != "run"), kind, name)

    def is_exit_of_script(self, error: SystemExit) -> bool:
        """Return whether this exception was raised by a script under `%run`."""
        return error is self._script_exit

    def will_raise(self) -> bool:
        """Return whether a magic will raise the current error, so that IPython need not show it."""
        frame: FrameType | None = _getframe(1)
        while frame is not None and not self._is_cell(frame.f_code.co_filename):
            if frame.f_code is MagicErrors._run_cell.__code__:
                return True
            frame = frame.f_back
        return False

    def hide_frames(self, error: BaseException) -> None:
        """Remove our magic frame, and the IPython frames that called it, from the traceback of an error."""
        kept: list[TracebackType] = []
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code.co_filename != __file__:
                kept.append(at)
            else:
                while len(kept) > 1 and kept[-1].tb_frame.f_code.co_filename.startswith(_IPYTHON):
                    kept.pop()
            at = at.tb_next
        for one, after in zip(kept, [*kept[1:], None], strict=True):
            one.tb_next = after

    def _raising(self, magic: Callable[..., Any], *, with_cells: bool) -> Callable[..., Any]:
        @functools.wraps(magic)
        def raising(*args: Any, **kwargs: Any) -> Any:
            outer, self._error = self._error, None
            self._depth += 1
            try:
                with self._taking_cells() if with_cells else contextlib.nullcontext():
                    value = magic(*args, **kwargs)
                error = self._error
            finally:
                self._depth -= 1
                self._error = outer
            if error is not None:
                raise error
            return value

        return raising

    @contextlib.contextmanager
    def _taking_cells(self) -> Iterator[None]:
        """Context that records errors of code that IPython runs as a cell."""
        before = self._shell.run_cell
        self._shell.run_cell = self._run_cell
        try:
            yield
        finally:
            self._shell.run_cell = before

    def _cell(self, *args: Any, **kwargs: Any) -> Any:
        """Run code as a nested cell, and raise its interrupt again: IPython only shows it, so a loop would continue.

        The kernel runs cells of `%%px` by the same method. It must get their result, so that it replies.
        """
        result = self._nested(*args, **kwargs)
        if isinstance(result.error_in_exec, KeyboardInterrupt) and self._is_in_cell(_getframe(1)):
            raise result.error_in_exec
        return result

    def _is_in_cell(self, frame: FrameType | None) -> bool:
        while frame is not None and not self._is_cell(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None

    def _run_cell(self, *args: Any, **kwargs: Any) -> Any:
        self._shell.run_cell = self._cell  # a cell that this code runs shows its own errors
        try:
            result = self._nested(*args, **kwargs)
        finally:
            self._shell.run_cell = self._run_cell
        self._keep(result.error_before_exec or result.error_in_exec)
        return result

    def _run_file(self, fname: Any, *where: Any, exit_ignore: bool = False, **options: Any) -> None:
        if not self._depth or options.get("raise_exceptions"):
            self._execfile(fname, *where, exit_ignore=exit_ignore, **options)
            return
        if self._error is not None:  # do not repeat a failed script under `%run -t -N5`
            return
        try:
            self._execfile(fname, *where, **{**options, "raise_exceptions": True})
        except SystemExit as error:
            if not exit_ignore:
                self._script_exit = error
                self._keep(error)
        except BaseException as error:
            self._keep(error)

    def _run_ipy(self, fname: Any, *args: Any, **kwargs: Any) -> None:
        with self._taking_cells() if self._depth else contextlib.nullcontext():
            self._execfile_ipy(fname, *args, **kwargs)

    def _run_module(self, mod_name: Any, where: dict[str, Any]) -> None:
        if not self._depth:
            self._module(mod_name, where)
            return
        try:
            where.update(runpy.run_module(str(mod_name), run_name="__main__", alter_sys=True))
        except SystemExit as error:
            if error.code:
                self._script_exit = error
                self._keep(error)
        except BaseException as error:
            self._keep(error)

    def _keep(self, error: BaseException | None) -> None:
        if error is None or self._error is not None:
            return
        while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename.startswith(_RUNNERS):
            error.__traceback__ = error.__traceback__.tb_next
        self._error = error
