"""Measured values and their bars, as a table that is printed and stored in RESULTS.md."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).with_name("RESULTS.md")
_PACKAGES = ("torch", "ipyparallel", "ipykernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured value.

    Args:
        what: Description, the label of the row.
        value: Result in `unit`: a median, mean or minimum of all measurements.
        unit: Unit of `value`, such as "ms".
        bar: Limit for the ratio to `baseline`, or for the value if there is no baseline.
        baseline: Reference value, measured in the same run, in `unit`.
        against: Description of the baseline.
        blocks: Result of each block, in `unit`; shows how steady the machine was.
    """

    what: str
    value: float
    unit: str
    bar: float
    baseline: float | None = None
    against: str = ""
    blocks: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.value / self.baseline

    @property
    def meets_bar(self) -> bool:
        return (self.value if self.ratio is None else self.ratio) <= self.bar

    def __repr__(self) -> str:
        """Return the row of the table."""
        return "| " + " | ".join(self._cells()) + " |"

    def _cells(self) -> tuple[str, ...]:
        blocks = f" ({', '.join(f'{block:.2f}' for block in self.blocks)})" if self.blocks else ""
        return (
            self.what,
            f"{self.value:.2f} {self.unit}{blocks}",
            f"{self.against}: {self.baseline:.2f} {self.unit}" if self.baseline is not None else "",
            "" if self.ratio is None else f"{self.ratio:.3f}",
            f"{self.bar:g}" if self.ratio is not None else f"{self.bar:g} {self.unit}",
            "yes" if self.meets_bar else "**no**",
        )


def table(figures: Sequence[Figure]) -> list[str]:
    """Return the rows with a header."""
    head = [
        "| measurement | result (of each block) | reference | ratio | limit | within limit |",
        "|---|---|---|---|---|---|",
    ]
    return head + [repr(figure) for figure in figures]


def moment() -> str:
    """Return date, machine, versions, and the load of the machine."""
    gpu = "with a GPU" if shutil.which("nvidia-smi") else "no GPU"
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"{datetime.date.today().isoformat()}: {len(os.sched_getaffinity(0))} cores, {gpu}, "
        f"Python {platform.python_version()}, {packages}; load average at the start {os.getloadavg()[0]:.1f}"
    )


def replace_section(name: str, lines: Sequence[str], file: Path = FILE) -> None:
    """Replace the lines between `<!-- name -->` and `<!-- end of name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = "\n".join([begin, *lines, end])
    found = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    before = file.read_text()
    if not found.search(before):
        raise ValueError(f"{file} has no section between {begin!r} and {end!r}")
    file.write_text(found.sub(lambda _: text, before))
