"""The magics: each parses its line and delegates."""

from __future__ import annotations

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from ddp_notebook import session as sessions
from ddp_notebook.errors import NoSessionError, UsageError
from ddp_notebook.launch import options


@magics_class
class DDPMagics(Magics):
    """`%ddp_start`, `%ddp_status`, `%ddp_restart`, `%ddp_stop` and `%%on_all_ranks`."""

    @line_magic
    def ddp_start(self, line: str) -> None:
        """Start ranks: %ddp_start [N] [--backend auto|nccl|gloo|mpi] [--gpus 3,4] [--share-gpus] [--env K=V ...]
        [--timeout S]"""
        _start(options.parse(line))

    @line_magic
    def ddp_status(self, line: str) -> None:
        """Show every rank's host, process, device, memory and state: %ddp_status"""
        _refuse_arguments("%ddp_status", line)
        print(_session().status())

    @line_magic
    def ddp_restart(self, line: str) -> None:
        """End the ranks and start them afresh with the same options: %ddp_restart"""
        _refuse_arguments("%ddp_restart", line)
        session = _session()
        session.stop()
        _start(session.options)

    @line_magic
    def ddp_stop(self, line: str) -> None:
        """End the ranks and everything that they have started: %ddp_stop"""
        _refuse_arguments("%ddp_stop", line)
        session = _session()
        session.stop()
        print(f"stopped {session.world_size} rank{'' if session.world_size == 1 else 's'}")

    @cell_magic
    def on_all_ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank: %%on_all_ranks"""
        _refuse_arguments("%%on_all_ranks", line)
        _session().run(cell, execution_count=self._cell_number())

    def _cell_number(self) -> int:
        """The number in this cell's `In [n]`; IPython counts up before a cell runs, or after it in older versions."""
        if self.shell is None or self.shell.history_manager is None:
            return 1
        return max(1, len(self.shell.history_manager.input_hist_parsed) - 1)


def _start(asked: options.StartOptions) -> None:
    stages: list[str] = []

    def report(stage: str) -> None:
        print(f"  {stage}" if stages else f"starting:  {stage}", end="", flush=True)
        stages.append(stage)

    try:
        session = sessions.Session(asked, report=report)
    finally:
        if stages:
            print(flush=True)
    print(session.status())


def _session() -> sessions.Session:
    session = sessions.current()
    if session is None:
        raise NoSessionError
    return session


def _refuse_arguments(magic: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"{magic} takes no {line.strip()!r}; write {magic} alone")


def load(shell: object) -> None:
    """Register the magics with an IPython shell."""
    shell.register_magics(DDPMagics)  # type: ignore[attr-defined]
