"""The feature in a session: keeps the texts of cells, and describes where ranks diverged."""

from __future__ import annotations

import ast
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.divergence.control_flow import ControlFlow, mark_elifs
from ddp_notebook.run.divergence.paths import LastAct, Paths, paths_of
from ddp_notebook.run.divergence.sentences import divergence
from ddp_notebook.run.groups.rank_view import Views
from ddp_notebook.run.lint.warnings import parse_cell
from ddp_notebook.run.session_hooks import SessionFeature
from ddp_notebook.run.session_parts import SessionParts

_MOST_CELLS = 100  # earlier cells whose functions are known
_MOST_BYTES = 1_000_000  # size of a file that is read

_log = logging.getLogger(__name__)


class DivergedCells(SessionFeature):
    """Describes where the paths of ranks through a cell diverged."""

    _last: tuple[object, str] | None = None  # facts of the last hang, and its sentence

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._since_s = time.time()  # files that were changed later may have been imported before

    def cause(self, run: CellRun, views: Views) -> str:
        last = _last_acts(run, views)
        recordings = self.parts.hooks.features.get("recording")
        if last is None or recordings is None:
            return ""
        waits = {rank: act.operation and (act.operation.key, act.operation.number) for rank, act in last.items()}
        facts = run.number, waits
        if self._last is None or self._last[0] != facts:
            try:
                paths = paths_of(recordings.now, run.number, last)
                sentence = "" if paths is None else self._sentence(run.number, paths)
            except Exception:  # the card and the error are more important
                _log.exception("where ranks diverged is unknown")
                sentence = ""
            self._last = facts, sentence
        return self._last[1]

    def _sentence(self, cell: int, paths: Paths) -> str:
        cells = self.parts.cells
        earlier = {prompt: code for prompt, number, code in cells.numbered_codes() if number != cell and "def " in code}
        files = {event.source for path in paths.events.values() for event in path if event.source.endswith(".py")}
        sources = {f"In[{prompt}]": _tree(code) for prompt, code in list(earlier.items())[-_MOST_CELLS:]}
        sources |= (
            {name: _tree(_text_of(name, self._since_s)) for name in sorted(files)} if self.parts.cluster.is_here else {}
        )
        known = {name: tree for name, tree in sources.items() if tree is not None}
        tree = _tree(cells.code_of(cell) or "")
        return "" if tree is None else divergence(ControlFlow({**known, "": tree}), paths)


def _last_acts(run: CellRun, views: Views) -> Mapping[int, LastAct] | None:
    """Return the last act of each rank of the cell; None if a rank may still act, or does not answer.

    The place of a rank that failed by itself is the text of its error, which `paths_of` refuses.
    """
    last = {}
    for rank in run.ranks:
        view = views.get(rank)
        if view is None or view.state not in ("waiting", "ended", "failed") or view.background or view.remote.serves:
            return None
        last[rank] = LastAct(view.operation if view.state == "waiting" else None, view.place, view.state == "failed")
    return last


def _tree(code: str) -> ast.Module | None:
    tree = parse_cell(code)
    return None if tree is None else mark_elifs(tree, code)


def _text_of(name: str, until_s: float) -> str:
    """Return the text of a file that the ranks have imported; "" if it is not the only one of this name.

    Args:
        name: its name without a folder.
        until_s: Unix time in seconds; "" if the file was changed later.
    """
    found = {path.resolve() for path in _candidates(name) if path.is_file()}
    path = found.pop() if len(found) == 1 else None
    if path is None or path.stat().st_size > _MOST_BYTES or path.stat().st_mtime > until_s:
        return ""
    return path.read_text(errors="replace")


def _candidates(name: str) -> Iterable[Path]:
    yield Path.cwd() / name
    yield from (Path(folder) / name for folder in sys.path if folder)
