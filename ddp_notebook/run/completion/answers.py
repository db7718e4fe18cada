"""Ask a rank for names and help, and make the replies of a Jupyter kernel."""

from __future__ import annotations

import builtins
import keyword
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.messages.completion_messages import DescribeName, ListNames
from ddp_notebook.messages.encoding import Message
from ddp_notebook.run.completion.cursor import Cursor, assigned_above, name_at, read_cursor
from ddp_notebook.run.completion.rank_code import RankCode
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.rank_requests import Questions

_ANSWER_S = 0.2  # with names of an earlier answer; C code that holds the GIL keeps a rank from answering
_FIRST_ANSWER_S = 1.0
_MOST_KEPT = 200
_OF_PYTHON = {*dir(builtins), *keyword.kwlist}
_MOST_SHOWN = 500
_TYPES = "_jupyter_types_experimental"  # the key that ipykernel uses
Names = list[list[str]]


class Answers:
    """Answers completion and help requests in cells of ranks, from any thread.

    Args:
        questions: sends requests to the ranks.
        liveness: which ranks are alive.
    """

    def __init__(self, questions: Questions, liveness: Liveness) -> None:
        self._questions = questions
        self._liveness = liveness
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Names] = OrderedDict()  # earlier answers, by request

    def complete(self, cell: str, position: int, code: RankCode) -> dict[str, Any] | None:
        """Return the content of a `complete_reply`. None: no name of Python can follow at the cursor.

        Args:
            cell: text of the whole cell.
            position: the cursor, in characters.
            code: the code of ranks in it.
        """
        before = cell[code.start : position]
        if (cursor := read_cursor(before)) is None:
            return None
        found = _matches(cursor, self._names(cursor, before, code.ranks))
        if code.is_names:
            found = [one for one in found if cursor.kind == "variables" and one[0] not in _OF_PYTHON]
        start = position - len(cursor.begun)
        rest = cell[position : position + 1]
        if cursor.quote and rest == cursor.quote:  # the front end has closed the quote already
            found = [(name[:-1], type_) for name, type_ in found]
        types = [{"start": start, "end": position, "text": name, "type": type_} for name, type_ in found]
        return {
            "status": "ok",
            "matches": [name for name, _ in found],
            "cursor_start": start,
            "cursor_end": position,
            "metadata": {_TYPES: types},
        }

    def inspect(self, cell: str, position: int, code: RankCode, detail: int = 0) -> dict[str, Any]:
        """Return the content of an `inspect_reply`. The arguments are those of `complete`.

        Args:
            detail: 1 adds the source.
        """
        text = ""
        if path := name_at(cell[code.start :], position - code.start):
            above = assigned_above(cell[code.start : position])
            facts = self._ask(
                code.ranks, lambda n: DescribeName(request=n, path=path, detail=detail, assigned=above), _FIRST_ANSWER_S
            )
            text = (facts or {}).get("text", "")
        data = {"text/plain": text} if text else {}
        return {"status": "ok", "found": bool(text), "data": data, "metadata": {}}

    def _names(self, cursor: Cursor, before: str, ranks: str | None) -> Names:
        """Return all names of this kind, from a rank or from its earlier answer."""
        if cursor.kind == "attributes" and not cursor.path:
            return []
        above = assigned_above(before) if cursor.kind not in ("modules", "exports") else []
        key = (ranks, cursor.kind, cursor.path)
        with self._lock:
            kept = self._kept.get(key)
        facts = self._ask(
            ranks,
            lambda n: ListNames(request=n, kind=cursor.kind, path=cursor.path, assigned=above),
            _FIRST_ANSWER_S if kept is None else _ANSWER_S,
        )
        if facts is None:
            return kept or []
        names: Names = facts.get("names", [])
        with self._lock:
            self._kept[key] = names
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return names

    def _ask(self, ranks: str | None, make: Callable[[int], Message], timeout_s: float) -> dict[str, Any] | None:
        """Return the facts of the first living rank of a set; None if it does not answer in time."""
        to_ask = self._liveness.to_ask or []
        try:
            chosen = self._liveness.parse(ranks)
        except DDPNotebookError:  # the set is not complete yet
            chosen = list(to_ask)
        living = [rank for rank in chosen if rank in to_ask]
        if not living:
            return None
        answers = self._questions.ask_for(living[:1], make, timeout_s)
        answer = answers.get(living[0])
        return None if answer is None or answer.error else dict(answer.facts)


def _matches(cursor: Cursor, names: Names) -> list[tuple[str, str]]:
    """Return the names that begin as typed, with their types. Names with an underscore need one to be typed."""
    begun = cursor.begun
    if cursor.kind == "keys":
        found = [(name if cursor.quote in ("", name[0]) else _requoted(name), type_) for name, type_ in names]
        return [(name, type_) for name, type_ in found if name.startswith(begun)]
    shown = [
        (name, type_)
        for name, type_ in names
        if name.startswith(begun) and (begun.startswith("_") or not name.startswith("_"))
    ]
    return sorted(shown, key=lambda one: (one[0].startswith("__"), one[0].startswith("_"), one[0].lower()))[
        :_MOST_SHOWN
    ]


def _requoted(name: str) -> str:
    return f'"{name[1:-1]}"' if name[0] == "'" and '"' not in name else name
