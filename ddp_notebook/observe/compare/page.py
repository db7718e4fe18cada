"""The comparison of two training runs as one HTML page, without scripts and without a network."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_notebook.observe.writing import in_a_folder, write_whole

if TYPE_CHECKING:
    from ddp_notebook.observe.compare.comparison import Comparison
    from ddp_notebook.observe.compare.times import PartChange

_STYLE = "".join(
    (
        "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto}",
        "table{border-collapse:collapse;font-variant-numeric:tabular-nums}",
        "th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}",
        "th:first-child,td:first-child{text-align:left}",
        ".bar{display:inline-block;height:.7rem}",
        ".more{background:#c44e52}",
        ".less{background:#55a868}",
        ".summary{font-size:1.15rem}",
        ".note{color:#666}",
    )
)
_MOST_BARS = 24
_WIDTH_REM = 18.0


def save(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page. An existing file is replaced when the new one is complete.

    Raises:
        UsageError: the folder does not exist.
    """
    path = in_a_folder(path)
    write_whole(path, lambda file: file.write(render(comparison).encode("utf-8", "backslashreplace")))
    return path


def render(comparison: Comparison) -> str:
    """Return the page. All texts of the user's program are escaped."""
    first, second = comparison.labels
    times = comparison.time
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{_text(f'{first} and {second}')}</title><style>{_STYLE}</style>",
        f"<h1>{_text(first)} and {_text(second)}</h1>",
        f"<p class='summary'>{_text(comparison.direction)}.</p>",
        f"<p class='summary'>Time: {_text(times.sentence)}.</p>",
        f"<p class='summary'>Numbers: {_text(comparison.numbers.sentence)}.</p>",
        *(f"<p class='summary'>Input: {_text(one)}.</p>" for one in comparison.input_sentences),
        *(f"<p class='note'>{_text(note)}.</p>" for note in (*comparison.notes, *times.notes)),
        _runs(comparison),
    ]
    if bars := times.found[:_MOST_BARS]:
        parts += ["<h2>Changed parts of a step</h2>", _bars(bars)]
    if len(rows := comparison.ranks_table()) > 1:
        parts += ["<h2>Change of each part, ms</h2>", _table(rows)]
    for title, texts in comparison.lists():
        parts += [f"<h2>{_text(title)}</h2><ul>", *(f"<li>{_text(text)}</li>" for text in texts), "</ul>"]
    return "\n".join(parts) + "\n</html>\n"


def _text(text: str) -> str:
    return html.escape(text)


def _runs(comparison: Comparison) -> str:
    rows = [["", "run", "steps", "ranks", "step"]]
    for name, label, run in zip("AB", comparison.labels, comparison.runs, strict=True):
        rows.append([name, label, f"{run.steps:,}", str(run.ranks), f"{run.per_step} ({run.definition})"])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<table><tr>", *(f"<th>{_text(cell)}</th>" for cell in head), "</tr>"]
    for row in body:
        lines += ["<tr>", *(f"<td>{_text(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])


def _bars(found: Sequence[PartChange]) -> str:
    """Return the table of the largest changes, each with a bar of its size."""
    largest = max(abs(one.change_ns) for one in found)
    lines = ["<table><tr><th>part</th><th>rank</th><th>A ms</th><th>B ms</th><th>change</th><th></th></tr>"]
    for one in found:
        width = _WIDTH_REM * abs(one.change_ns) / largest
        kind = "more" if one.change_ns > 0 else "less"
        numbers = "".join(f"<td>{ns / 1e6:.1f}</td>" for ns in (one.before_ns, one.after_ns))
        lines.append(
            f"<tr><td>{_text(one.part)}</td><td>{one.rank}</td>{numbers}<td>{one.change_ns / 1e6:+.1f}</td>"
            f"<td style='text-align:left'><span class='bar {kind}' style='width:{width:.1f}rem'></span></td></tr>"
        )
    return "".join([*lines, "</table>"])
