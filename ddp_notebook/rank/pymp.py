"""Folder for the Unix sockets of `multiprocessing`, which is removed with the rank.

`multiprocessing` makes a folder `pymp-...` in the temporary directory when DataLoader workers or a Manager pass
descriptors. It removes the folder when the process exits, but not if the process is killed or calls `os._exit`. A rank
uses a folder inside that of the host server, which removes it. Its name is in a private dictionary of
`multiprocessing`. If that is missing, `pymp-...` folders of killed processes remain.
"""

from __future__ import annotations

import multiprocessing.process

from ddp_notebook.registry import private
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os

_LONGEST = 80  # bytes; the path of a Unix socket in the folder can have at most 108
_folder = ""


def settle(folder: str) -> None:
    """Use this folder from now on. Child processes inherit the setting."""
    global _folder
    config = getattr(multiprocessing.process.current_process(), "_config", None)
    if isinstance(config, dict) and len(os.fsencode(folder)) <= _LONGEST:
        config["tempdir"] = _folder = folder
        restore()


def restore() -> None:
    """Make the folder again if a cleaner has removed it."""
    with contextlib.suppress(Exception):  # `multiprocessing` then reports that it cannot make a socket
        if _folder and not os.path.isdir(_folder):
            private.restore(_folder)
