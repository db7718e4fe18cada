"""Files that are there for a while only, and are known by how their names begin."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from ddp_notebook.stdlib import contextlib

MARK = ".ddp_notebook-"  # how their names begin


def a_name() -> str:
    """One that no other has.

    Example:
        >>> a_name().startswith(MARK)
        True
    """
    return f"{MARK}{secrets.token_hex(8)}"


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """A file in a folder of the notebook's, whose name tells a host that it sees the same folder. Yields the name; "":
    none can be made there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, marked(Path(folder)) as name:
        ...     (Path(folder) / name).exists()
        True
    """
    marker = folder / a_name()
    try:
        marker.touch(mode=0o600, exist_ok=False)
    except OSError:
        yield ""
        return
    try:
        yield marker.name
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()
