"""Claims of the lessons: assertions that test a notebook, and do not belong to its reader.

`claims/NN_name.py` has the claims of `notebooks/NN_name.ipynb`, in percent format. A block runs in the kernel of the
notebook after the cell that its header names:

    # %% cell-10
    assert session["got"][1] == [7.0, 7.0, 7.0]

    # %% cell-15 time
    assert session["total"][0] < 0.8

`time` marks a statement about time. Its failure is printed, and fails the test only on a machine that was idle.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADER = re.compile(r"^# %% (?P<cell>\S+)(?P<time> time)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """Code that runs after a cell.

    Args:
        cell: Id of the cell.
        code: Statements.
        is_about_time: A busy machine may contradict it.
    """

    cell: str
    code: str
    is_about_time: bool


def has_claims(notebook: Path) -> bool:
    """Return whether a notebook has a file of claims."""
    return _file_of(notebook).exists()


def claims_of(notebook: Path) -> list[Claim]:
    """Return the claims of a notebook in their order; [] without a file.

    Raises:
        ValueError: A line starts with `# %%` and is not a header.
    """
    if not has_claims(notebook):
        return []
    text = _file_of(notebook).read_text()
    found = list(_HEADER.finditer(text))
    if text.count("\n# %%") != len(found):
        raise ValueError(f"{_file_of(notebook).name}: a header is '# %% CELL-ID' or '# %% CELL-ID time'")
    ends = [*(one.start() for one in found[1:]), len(text)]
    return [
        Claim(one["cell"], text[one.end() : end].strip("\n") + "\n", one["time"] is not None)
        for one, end in zip(found, ends, strict=True)
    ]


def is_idle() -> bool:
    """Return whether less than half of the cores have been busy in the last minute."""
    return os.getloadavg()[0] < (os.cpu_count() or 1) / 2


def _file_of(notebook: Path) -> Path:
    return FOLDER / f"{notebook.stem}.py"
