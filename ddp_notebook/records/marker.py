"""Temporary files of this package, recognized by the prefix of their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, secrets

MARK = ".ddp_notebook-"  # prefix of the names


def a_name() -> str:
    """Return a new unique file name.

    Example:
        >>> a_name().startswith(MARK)
        True
    """
    return f"{MARK}{secrets.token_hex(8)}"


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Create a temporary marker file in the notebook's folder, so that a host can check that it sees the same folder.

    Yields:
        The name of the file; "" if it cannot be created.

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
