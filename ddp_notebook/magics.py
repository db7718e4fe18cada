"""The magics. Each parses its line and delegates; `line_of` connects it with the declaration of its line.

A magic imports its implementation when it is called, so that %load_ext is fast (`tests/test_layers.py`).
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class

from ddp_notebook.errors import CellFailedHereError, UsageError
from ddp_notebook.line_parser import LineParser, line_of, read_expression, refuse_arguments
from ddp_notebook.records.names import listed
from ddp_notebook.run import debugging, features, hints, magic_help, magic_lines
from ddp_notebook.run.auto import AutoSend
from ddp_notebook.run.cells import cell_options
from ddp_notebook.run.interrupted import OF_MAGICS, tells_interrupts
from ddp_notebook.run.notebook_kernel import cell_number, is_run_by_program


def _start_line() -> LineParser:
    from ddp_notebook.launch import start_line

    return start_line.start_line()


def _commands() -> object:
    from ddp_notebook import session_commands

    return session_commands


@tells_interrupts(OF_MAGICS)
@magics_class
@features.add_magics(_commands)
class DDPMagics(Magics):
    """Magics of sessions (`%ddp_start` to `%ddp_check`), cells (`%%on_all_ranks` to `%ddp_auto`) and values
    (`%ddp_pull`, `%ddp_push`). `run/features` adds the magics of features.
    """

    # ---- the session

    @line_magic
    @line_of(_start_line)
    def ddp_start(self, line: str) -> None:
        """Start ranks: processes in an initialized process group.

        If ranks with the same options are already running, they stay, and a message says so."""
        from ddp_notebook import session_commands
        from ddp_notebook.launch import start_line

        asked = start_line.read(line)
        if asked.note:
            print(asked.note)
        if asked.checks:
            session_commands.check(asked.options)
        else:
            session_commands.start(asked.options)

    @line_magic
    @line_of(magic_lines.status)
    def ddp_status(self, line: str) -> None:
        """Show each rank's host, process, device, memory and state."""
        from ddp_notebook import session_commands

        refuse_arguments("%ddp_status", line)
        print(session_commands.shown().status())

    @line_magic
    @line_of(magic_lines.restart)
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start new ones with the same options."""
        from ddp_notebook import session_commands

        refuse_arguments("%ddp_restart", line)
        session = session_commands.of_session()
        if session._outlives_stop:
            name = session._kept_as
            raise UsageError(
                f"this notebook must drive the ranks to restart them, but {name} goes on without it: "
                f"%ddp_attach {name} --take-over takes it over, %ddp_stop detaches from it"
            )
        session_commands.restart(session)

    @line_magic
    @line_of(magic_lines.stop)
    def ddp_stop(self, line: str) -> None:
        """End the ranks and every process that they have started.

        If the notebook is attached to a torchrun job, it only detaches from it."""
        from ddp_notebook import session_commands

        refuse_arguments("%ddp_stop", line)
        session_commands.stop()

    @line_magic
    @line_of(magic_lines.interrupt)
    def ddp_interrupt(self, line: str) -> None:
        """End cells that have not ended on some ranks.

        The ranks keep their variables. If the notebook is attached to a torchrun job, the operations in which its ranks
        wait raise an error in the script."""
        from ddp_notebook import attached_job, session_commands

        parser = magic_lines.interrupt()
        replace = parser.parse_line(line).replace
        if (job := attached_job.current()) is not None:
            if replace:
                parser.error(f"torchrun replaces the ranks of job {job.name}, not --replace")
            print("\n".join(job.interrupt()))
        else:
            print("\n".join(session_commands.of_session().interrupt(replace=replace)))

    @line_magic
    @line_of(magic_lines.heal)
    def ddp_heal(self, line: str) -> None:
        """Replace dead ranks; the other ranks keep their variables."""
        from ddp_notebook import session_commands

        parser = magic_lines.heal()
        given = parser.parse_line(line)
        source = given.from_rank
        from_rank = None if source is None else parser.number(int, "--from", source, "rank number")
        print("\n".join(session_commands.of_session().ranks.heal(from_rank, given.names)))

    @line_magic
    @line_of(magic_lines.check)
    def ddp_check(self, line: str) -> None:
        """Compare models, optimizers, data and versions across ranks."""
        from ddp_notebook import session_commands

        parser = magic_lines.check()
        print(session_commands.compare_variables(parser.parse_line(line).names))

    # ---- cells

    @line_cell_magic
    @line_of(cell_options.on_all_ranks)
    def on_all_ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank; %on_all_ranks runs one line."""
        if cell is not None:
            self._run(cell_options.parse(line), cell)
        elif line.strip():
            self._run(*cell_options.parse_line(line))
        else:
            raise UsageError(
                "%on_all_ranks needs something to run: %on_all_ranks x.sum(), or %%on_all_ranks above a whole cell"
            )

    @cell_magic
    @line_of(cell_options.on_ranks)
    def on_ranks(self, line: str, cell: str) -> None:
        """Run the cell on some ranks."""
        self._run(cell_options.parse(line, cell_options.on_ranks), cell)

    @cell_magic
    @line_of(magic_lines.local)
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook, also while %ddp_auto is on."""
        refuse_arguments("%%local", line)
        self._run_here(cell)

    @line_magic
    @line_of(magic_lines.auto)
    def ddp_auto(self, line: str) -> None:
        """Run every plain cell on all ranks, or in the notebook again."""
        from ddp_notebook import session_commands

        word = line.strip()
        if word not in ("on", "off"):
            raise UsageError(f"%ddp_auto takes on or off, not {word!r}")
        if word == "on":
            session_commands.of_session()
        assert self.shell is not None
        AutoSend.of(self.shell).is_on = word == "on"
        print(
            "every plain cell runs on all ranks now; %%local keeps one in the notebook"
            if word == "on"
            else "plain cells run in the notebook again"
        )

    # ---- values

    @line_magic
    @line_of(magic_lines.pull)
    def ddp_pull(self, line: str) -> None:
        """Copy variables from the ranks to the notebook.

        Each becomes a mapping from rank to value. The notebook unpickles what ranks send, except with --safe."""
        from ddp_notebook import session_commands
        from ddp_notebook.run import progress
        from ddp_notebook.run.values.exchange import check_name

        parser = magic_lines.pull()
        given = parser.parse_line(line)
        if given.new is not None and len(given.names) > 1:
            parser.error(f"--as takes one variable, got {len(given.names)}: pull them one by one")
        assert self.shell is not None
        for name in [*given.names, *filter(None, [given.new])]:
            check_name(name)
        session = session_commands.of_session()
        # Pull all variables before the first is assigned, so that an error changes no variable of the notebook.
        with progress.shown("pulling:") as report:
            pulled = {name: session.pull(name, given.ranks, given.force, given.safe, report) for name in given.names}
        for name, values in pulled.items():
            self.shell.user_ns[given.new or name] = values
            print(f"{name}:\n{values}" if len(given.names) > 1 else values)

    @line_magic
    @line_of(magic_lines.peek)
    def ddp_peek(self, line: str) -> None:
        """Show an expression on ranks, also while a job runs.

        A running job is read between two of its optimizer steps."""
        from ddp_notebook import session_commands

        ranks, expression = read_expression(magic_lines.peek(), line)
        print(session_commands.of_session().peek(expression, ranks))

    @line_magic
    @line_of(magic_lines.push)
    def ddp_push(self, line: str) -> None:
        """Copy variables from the notebook to the ranks."""
        from ddp_notebook import session_commands

        parser = magic_lines.push()
        given = parser.parse_line(line)
        assert self.shell is not None
        here = self.shell.user_ns
        if unknown := [repr(name) for name in given.names if name not in here]:
            raise UsageError(f"the notebook has no variable {listed(unknown)}; assign it in the notebook first")
        session_commands.of_session().push(
            {name: here[name] for name in given.names}, ranks=given.ranks, force=given.force
        )

    # ---- help

    @line_magic
    @line_of(magic_lines.help_)
    def ddp_help(self, line: str) -> None:
        """List the magics, or show every option of one."""
        name = magic_lines.help_().parse_line(line).name
        print(magic_help.about(name, _MAGICS) if name else magic_help.overview(_MAGICS))

    def _run(self, options: cell_options.CellOptions, code: str) -> None:
        from ddp_notebook import session_commands

        session = session_commands.of_session()
        send = session.submit if options.background else session.run
        done: Any = send(
            code,
            options.ranks,
            options.timeout_s,
            quiet=options.quiet,
            fold=options.fold,
            file=self._cell_file(code),
            record=options.record,
        )
        if options.background and is_run_by_program():  # such a program drops output that arrives after the cell
            session.jobs.wait(done.number)
        if options.here:
            self._run_here(code)

    def _run_here(self, code: str) -> None:
        assert self.shell is not None
        with AutoSend.of(self.shell).paused():
            result = self.shell.run_cell(code)
            if isinstance(result.error_before_exec or result.error_in_exec, KeyboardInterrupt):
                raise KeyboardInterrupt  # so that the rest of the user's program stops too
            if not result.success:
                raise CellFailedHereError("the cell failed in the notebook: see the error above")

    def _cell_file(self, code: str) -> str:
        """Return the file name that the notebook gives to a cell's code."""
        assert self.shell is not None
        return str(self.shell.compile.get_code_name(code, code, cell_number()))


_MAGICS = magic_help.in_order({name: magic for name, magic in vars(DDPMagics).items() if hasattr(magic, "parser")})


def load(shell: object) -> None:
    """Register the magics with an IPython shell, and add hints to errors of cells that were meant for the ranks."""
    shell.register_magics(DDPMagics)  # type: ignore[attr-defined]
    hints.watch(shell, _has_session)
    debugging.watch(shell, _failure_opener)
    # The line of `%on_all_ranks` is code, for which IPython has its own completion.
    signs = {name: "%%" if name in DDPMagics.magics["cell"] else "%" for name in _MAGICS}
    magic_help.watch_completion(shell, {f"{signs[name]}{name}": magic.parser for name, magic in _MAGICS.items()})


def _failure_opener() -> Any:
    """Return the function that opens a debugger in the failed cell of the ranks; None if there is none."""
    if not _has_session():
        return None
    from ddp_notebook import session_commands

    return session_commands.failure_opener()


def _has_session() -> bool:
    """Return whether there are ranks that can run cells."""
    if "ddp_notebook.session" not in sys.modules:
        return False
    from ddp_notebook import session_commands

    return session_commands.has_session()
