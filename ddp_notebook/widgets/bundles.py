"""The JavaScript that `hatch_build.py` builds."""

from __future__ import annotations

from pathlib import Path

from ddp_notebook.errors import MissingBuildError

MONITOR = Path(__file__).with_name("static") / "monitor.js"


def monitor() -> str:
    """Return the monitor's bundle.

    Raises:
        MissingBuildError: The bundle was not built.
    """
    return read(MONITOR, "the monitor")


def read(file: Path, whose: str, more: str = "") -> str:
    """Read a bundle.

    Args:
        file: Path of the bundle.
        whose: Name of the bundle in the error, such as "the monitor".
        more: Text to add to the error.

    Raises:
        MissingBuildError: The bundle was not built.
    """
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingBuildError(
            f"the JavaScript of {whose} is missing ({file}): in a checkout, build it with `pip install -e .` or "
            f"`python hatch_build.py`{more}"
        ) from None
