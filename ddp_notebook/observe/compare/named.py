"""Training runs by the names that users write: a cell's number, a saved recording, or a folder of ranks' recordings."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ddp_notebook.errors import MissingRecordingError, UsageError
from ddp_notebook.observe.compare.comparison import Comparison, compare
from ddp_notebook.observe.compare.sides import cells_with_steps
from ddp_notebook.observe.files import load
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.tables.matching import prompt_of

_NUMBER = re.compile(r"\[?(\d+)\]?")
_IN_FILE = re.compile(r"(.+):(\d+)")
Named = tuple[Recording, int | None, str]  # recording, cell, and name of the file; "" for that of the session


def compare_named(names: list[str], recorded: Callable[[], Recording]) -> Comparison:
    """Compare two training runs.

    Args:
        names: none: the last two training runs of the session. One: that run with the last one. Two: these two.
        recorded: returns the recording of the session; called only if it is needed.

    Raises:
        UsageError: a run does not exist.
        RecordingError: a file is not a recording.
    """
    found = [named(name, recorded) for name in names]
    if len(found) < 2:
        recording = recorded()
        cells = cells_with_steps(recording)
        taken = [cell for one, cell, source in found if one is recording and not source]
        left = [cell for cell in cells if cell not in taken]
        if len(found) + len(left) < 2:
            have = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
            raise UsageError(
                f"a comparison needs two training runs, but the recording has {have} with optimizer steps; run the "
                "training cell again, or name a saved recording: %ddp_diff run.npz"
            )
        found += [(recording, cell, "") for cell in left[len(found) - 2 :]]
    (a, cell, source), (b, other_cell, other_source) = found
    return compare(a, b, (cell, other_cell), (source, other_source))


def named(name: str, recorded: Callable[[], Recording]) -> Named:
    """Return the recording and the cell of a name.

    Args:
        name: "6" for In [6]; the path of a recording; or "run.npz:6" for one cell of it.
        recorded: returns the recording of the session.

    Raises:
        UsageError: the cell does not exist or has no optimizer step.
        RecordingError: the file is not a recording.
    """
    if (number := _NUMBER.fullmatch(name)) is not None:
        recording = recorded()
        return recording, _cell_of(recording, int(number[1]), "the recording"), ""
    path, cell = name, None
    if not os.path.exists(os.path.expanduser(name)) and (inside := _IN_FILE.fullmatch(name)) is not None:
        path = inside[1]
        cell = int(inside[2])
    try:
        recording = load(path)
    except MissingRecordingError:
        raise MissingRecordingError(
            f"{name!r} is neither the number of a cell, as in %ddp_diff 6 8, nor an existing file or folder"
        ) from None
    source = Path(path).name or str(path)
    return recording, None if cell is None else _cell_of(recording, cell, source), source


def is_missing(name: str) -> bool:
    """Return whether a name is neither a number nor an existing path, with or without the number of a cell.

    Example:
        >>> is_missing("6"), is_missing("/:6"), is_missing("/nowhere")
        (False, False, True)
    """
    inside = _IN_FILE.fullmatch(name)
    paths = [name, *([inside[1]] if inside is not None else [])]
    return _NUMBER.fullmatch(name) is None and not any(os.path.exists(os.path.expanduser(path)) for path in paths)


def _cell_of(recording: Recording, number: int, where: str) -> int:
    """Return the last cell with optimizer steps that has this number in its prompt, or else this number."""
    cells = cells_with_steps(recording)
    same = [cell for cell in cells if re.search(rf"\b{number}\b", prompt_of(recording, cell))]
    if not same and number in cells and not prompt_of(recording, number):
        same = [number]
    if not same:
        have = ", ".join(prompt_of(recording, cell) or str(cell) for cell in cells) or "none"
        raise UsageError(f"In [{number}] of {where} has no optimizer step; cells with steps: {have}")
    return same[-1]
