"""A Jupyter notebook as the controller of a PyTorch process group.

    %load_ext ddp_notebook
    %ddp_start 4

    %%on_all_ranks
    x = torch.full((2,), float(rank), device=device)
    dist.all_reduce(x)
    x

In scripts: `start(4)`, `current()`, `Session.run`, `Session.pull`, `Session.push`, `Session.stop`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, RankError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddp_notebook.run.result import CellResult
    from ddp_notebook.run.values import RankValues
    from ddp_notebook.session import Session, current, start

__version__ = "0.1.0"
__all__ = ["CellResult", "DDPNotebookError", "RankError", "RankValues", "Session", "current", "start"]

# The ranks import this package too: they must not pay for the notebook's side.
_LAZY = {
    "CellResult": "ddp_notebook.run.result",
    "RankValues": "ddp_notebook.run.values",
    "Session": "ddp_notebook.session",
    "current": "ddp_notebook.session",
    "start": "ddp_notebook.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext ddp_notebook`: register the magics, and let the fork server import torch in the background."""
    from ddp_notebook import magics
    from ddp_notebook.launch import warm

    magics.load(shell)
    if warm.is_wanted():
        warm.prepare()


def unload_ipython_extension(_: InteractiveShell) -> None:
    """`%unload_ext ddp_notebook`: end the ranks and the fork server."""
    from ddp_notebook.launch import warm
    from ddp_notebook.session import current

    session = current()
    if session is not None:
        session.stop()
        print(f"stopped {session.world_size} ranks")
    warm.drop()
