"""One broken program of the course: shows it, runs it on the ranks, and judges a repair."""

from __future__ import annotations

import ast
import html

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.lessons.capstones.programs import PROGRAMS
from ddp_notebook.lessons.lesson_cells import running
from ddp_notebook.lessons.questions.questions import Verdict

_REPAIRED_S = 20.0  # limit of a repaired program, which ends by itself


class Bug:
    """A broken program.

    The output of a cell shows the words of the user who reports it, and the program. Lines between `run` and a repair
    are those of a usual cell, so all commands work on it.

    Args:
        number: Number of the program, from 1 to 12.

    Raises:
        UsageError: There is no program of this number.

    Example:
        >>> lessons.bug(12).check()
        not yet: run your repaired program in a cell with %%on_all_ranks, then check it
    """

    def __init__(self, number: int) -> None:
        if number not in PROGRAMS:
            raise UsageError(f"a bug has a number from 1 to {len(PROGRAMS)}, got {number}")
        self.number = number
        self._program = PROGRAMS[number]

    @property
    def code(self) -> str:
        """The broken program."""
        return self._program.code

    @property
    def limit_s(self) -> float:
        """Seconds after which `run` stops the program."""
        return self._program.limit_s

    def run(self) -> None:
        """Run the broken program on all ranks. Its error, if it has one, is printed and not raised."""
        self._run(self.code, self.limit_s)

    def edit(self) -> None:
        """Put the broken program into a new cell for the ranks.

        Raises:
            UsageError: Not called in a notebook.
        """
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            raise UsageError("edit() needs a notebook; print(lessons.bug(1).code) shows a program")
        shell.set_next_input(f"%%on_all_ranks --timeout {max(self.limit_s, 2):g}\n{self.code.strip()}\n")

    def repair(self) -> None:
        """Run the repaired program of this package."""
        code = self.code
        for old, new in self._program.repairs:
            if old not in code:
                raise ValueError(f"program {self.number} has no text {old!r}")
            code = code.replace(old, new)
        self._run(code, _REPAIRED_S)

    def _run(self, code: str, limit_s: float) -> None:
        session = running()
        session.run(_forget(), quiet=True)
        try:
            session.run(code, timeout_s=limit_s)
        except DDPNotebookError as error:
            print(f"{type(error).__name__}: {error}")

    def check(self) -> Verdict:
        """Judge the program that has just run on the ranks: it is repaired if its results are right on all ranks."""
        session = running()
        try:
            session.run(f"repaired = None\n{self._program.judge}", timeout_s=10.0, quiet=True)
            values = session.pull("repaired")
        except DDPNotebookError:  # the variables of the program do not exist, or its ranks disagree
            return Verdict(False, "run your repaired program in a cell with %%on_all_ranks, then check it")
        wrong = [rank for rank, value in values.items() if value is not True]
        if wrong:
            return Verdict(False, "the results are not right yet")
        return Verdict(True, "the program does the right thing on all ranks")

    def where(self) -> str:
        """Return the address of a report of this mistake, or of the page of torch that warns of it."""
        return self._program.source

    def __repr__(self) -> str:
        return f"Bug {self.number}: {self._program.report}\nTry: {self._program.tools}\n\n{self.code}"

    def _repr_html_(self) -> str:
        return (
            f"<p><b>Bug {self.number}.</b> <i>&ldquo;{html.escape(self._program.report)}&rdquo;</i><br>"
            f"Try: {html.escape(self._program.tools)}</p>"
            f'<pre style="border-left:4px solid #999;padding:4px 12px">{html.escape(self.code)}</pre>'
        )


def _names(code: str) -> list[str]:
    """Return the global names that a program defines."""
    found = [
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    found += [
        node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return sorted({*found, "repaired"})


def _forget() -> str:
    """Return code that deletes the variables of earlier programs, which could make a later one look repaired."""
    names = sorted({name for program in PROGRAMS.values() for name in _names(program.code + program.judge)})
    return f"for _name in {names}:\n    globals().pop(_name, None)\n"
