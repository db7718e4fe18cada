"""The folder for the output of the ranks of a torchrun job."""

from __future__ import annotations

from ddp_notebook.launch.transports import folders


def make() -> str:
    """Make the folder. It is removed at the latest when the notebook's process ends.

    Raises:
        StartError: it cannot be made.
    """
    return folders.make("ddp_notebook-", is_large=True)


def remove(folder: str) -> None:
    """Remove the folder with its files."""
    folders.remove(folder)
