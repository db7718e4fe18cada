"""A folder for the Unix sockets of `multiprocessing` that is removed with the rank.

`multiprocessing` makes a folder `pymp-...` in the directory for temporary files where a DataLoader's workers or a
Manager hand over descriptors. It removes it when the process exits, which a killed process and a rank that `os._exit`
ends do not. In a rank the folder is in the host server's, which removes it. The name of the folder is in a private
dictionary of `multiprocessing`; where that is missing, `pymp-...` folders of killed processes stay.
"""

from __future__ import annotations

import multiprocessing.process

from ddp_notebook.registry import private
from ddp_notebook.stdlib import contextlib, os

_LONGEST = 80  # bytes: the path of a Unix socket in it may have 108
_folder = ""


def settle(folder: str) -> None:
    """Use this folder from now on. Child processes inherit it."""
    global _folder
    config = getattr(multiprocessing.process.current_process(), "_config", None)
    if isinstance(config, dict) and len(os.fsencode(folder)) <= _LONGEST:
        config["tempdir"] = _folder = folder
        restore()


def restore() -> None:
    """Make the folder again if a cleaner has removed it."""
    if _folder and not os.path.isdir(_folder):
        with contextlib.suppress(Exception):  # then `multiprocessing` says that it cannot make a socket
            private.restore(_folder)
