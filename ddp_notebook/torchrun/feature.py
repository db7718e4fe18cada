"""Declares `%ddp_torchrun`."""

from __future__ import annotations

from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.features import Commands, FeatureMagic, NotebookFeature


def _line() -> LineParser:
    from ddp_notebook.torchrun import start_job

    return start_job.torchrun_line()


def ddp_torchrun(_: Commands, line: str) -> None:
    """Run a script with torchrun and show it in the cell.

    The cell has its output, a monitor, and a card when its ranks wait for each other. The stop button ends the job."""
    from ddp_notebook.torchrun import start_job

    print(start_job.run(start_job.read(line)).status())


_INTERRUPTED = "interrupted: %ddp_status shows the job if it runs; %ddp_stop detaches from it"
FEATURE = NotebookFeature(
    magics={"ddp_torchrun": FeatureMagic(_line, ddp_torchrun, _INTERRUPTED, "session", "ddp_attach")}
)
