"""Displays of several ranks in one row: in the order of the ranks, side by side if there is room.

A front end shows the outputs of a cell one below the other, in the order of arrival. So images and tables of several
ranks are one display, which is updated when the display of a late rank arrives. Other displays are one below the other.
Those of a late rank move them, so that all are in the order of the ranks.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddp_notebook.run.output.fold import Item
from ddp_notebook.run.output.labels import label, labelled
from ddp_notebook.run.output.rate_limiter import RateLimiter, new_id

_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml")
_ACTIVE = ("<script", "<iframe", "<object", "<embed", "<link")  # HTML that would run or load again at each update
_OTHER_VIEWS = ("application/", "text/latex", "text/markdown")  # types that only the front end can draw
_MOST_CHARS = 4_000_000  # limit of characters of a row, because an update may send the whole row
_LABEL = "font-family:var(--jp-code-font-family,monospace);font-size:var(--jp-code-font-size,13px);text-align:left"
_MOST_OPEN = 50  # rows with slots for late ranks
_LEAST_PX = 250  # least width of a slot, if several fit

Bundle = tuple[dict[str, Any], dict[str, Any]]  # data and metadata
_EMPTY: Bundle = ({"text/plain": ""}, {})


class Row:
    """A row with a slot for each rank that displays something in it.

    Args:
        rate_limiter: shows the row.
        is_grid: slots may be side by side, in one display.
        handle: id of the display, by which its rank updates it; "": none.
    """

    def __init__(self, rate_limiter: RateLimiter, is_grid: bool = False, handle: str = "") -> None:
        self._rate_limiter = rate_limiter
        self._is_grid = is_grid
        self._handle = handle
        self._bundles: dict[int, Bundle] = {}
        self._outputs: list[_Output] = []  # outputs in the front end, from top to bottom

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have a slot."""
        return sorted(self._bundles)

    def takes(self, ranks: Sequence[int], data: dict[str, Any]) -> bool:
        """Return whether these ranks can have this display in the row."""
        rest = [bundle[0] for rank, bundle in self._bundles.items() if rank not in ranks]
        return not rest or (not self._handle and sum(map(_chars, [data, *rest])) < _MOST_CHARS)

    def put(self, ranks: Sequence[int], data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Set the display of these ranks. `show` sends it to the front end."""
        self._bundles.update(dict.fromkeys(ranks, (data, metadata)))

    def remove(self, rank: int) -> None:
        """Remove the display of a rank."""
        if self._bundles.pop(rank, None) is not None:
            self.show()

    def show(self) -> None:
        """Send the row to the front end."""
        slots = self._slots()
        if slots and slots[0][0] and self._outputs and not self._outputs[0].has_label:
            # was a grid, which contained its labels; the outputs below have their own
            self._outputs.pop(0).show("", _EMPTY)
        for number, (text, bundle) in enumerate(slots):
            if number == len(self._outputs):
                self._outputs.append(_Output(self._rate_limiter, self._handle, has_label=bool(text)))
            self._outputs[number].show(text, bundle)
        for output in self._outputs[len(slots) :]:
            output.show("", _EMPTY)

    def _slots(self) -> list[tuple[str, Bundle]]:
        """Return the outputs that the front end must show, with their labels."""
        groups = self._groups()
        has_label = not self._outputs or self._outputs[0].has_label  # only the first output may lack a label
        is_grid = self._is_grid and len(groups) > has_label and all(_fits(data) for _, (data, _) in groups)
        if not is_grid:
            return [(label(ranks).rstrip(), bundle) for ranks, bundle in groups]
        text = "\n".join(labelled(ranks, str(data.get("text/plain", ""))) for ranks, (data, _) in groups)
        grid: Bundle = ({"text/html": _grid(groups), "text/plain": text}, {})
        return [("", grid)]  # the grid contains the labels

    def _groups(self) -> list[tuple[list[int], Bundle]]:
        """Return different displays, each with its ranks."""
        groups: list[tuple[list[int], Bundle]] = []
        for rank, bundle in sorted(self._bundles.items()):
            for ranks, other in groups:
                if other[0] == bundle[0]:
                    ranks.append(rank)
                    break
            else:
                groups.append(([rank], bundle))
        return groups


class _Output:
    """An output of the front end that can be changed, with a label above it."""

    def __init__(self, rate_limiter: RateLimiter, handle: str, *, has_label: bool) -> None:
        self._rate_limiter = rate_limiter
        self.has_label = has_label
        self._label_id = new_id()
        self._display_id = handle or new_id()
        self._label = ""
        self._bundle: Bundle | None = None

    def show(self, text: str, bundle: Bundle) -> None:
        """Show this label and display, or replace the shown ones."""
        is_new = self._bundle is None
        if self.has_label and text != self._label:
            self._send({"text/plain": text}, {}, self._label_id, is_new)
        if bundle != self._bundle:
            self._send(*bundle, self._display_id, is_new)
        self._label, self._bundle = text, bundle

    def _send(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, is_new: bool) -> None:
        if is_new:
            self._rate_limiter.show(data, metadata, display_id)
        else:
            self._rate_limiter.update(data, metadata, display_id)


class OpenRow:
    """A row in which late ranks may get slots.

    Args:
        row: the row.
        ranks: ranks that have shown nothing in or below the row.
        until_s: time after which it is closed, in seconds.
        took: called with the ranks that got a slot, and the row.
        cleared: by rank, cleared rows that the rank will replace.
    """

    def __init__(
        self,
        row: Row,
        ranks: set[int],
        until_s: float,
        took: Callable[[Sequence[int], Row], None],
        cleared: Mapping[int, Sequence[Row]],
    ) -> None:
        self.ranks = ranks
        self.until_s = until_s
        self._row = row
        self._took = took
        self._cleared = cleared
        self.has_changed = False  # since it was shown

    def join(self, rank: int, item: Item) -> bool:
        """Add a display in its slot. Return False if it has no slot in this row."""
        display = item.display
        if rank not in self.ranks or display is None or not item.is_display or self._cleared.get(rank):
            return False
        data = display.content["data"]
        if (display.content.get("transient") or {}).get("display_id") is not None or not self._row.takes([rank], data):
            return False
        self._row.put([rank], data, display.content.get("metadata") or {})
        self._took([rank], self._row)
        self.ranks.discard(rank)
        self.has_changed = True
        return True

    def show(self) -> None:
        """Send changes to the front end."""
        if self.has_changed:
            self.has_changed = False
            self._row.show()


class OpenRows:
    """The rows shown last.

    The first display of a late rank gets its slot in the first row, its second display in the second row, and so on.
    """

    def __init__(self) -> None:
        self._rows: list[OpenRow] = []

    def add(self, row: OpenRow) -> None:
        """Add the row that was shown last."""
        if row.ranks and len(self._rows) < _MOST_OPEN:
            self._rows.append(row)

    def close(self) -> None:
        """Close all rows."""
        self._rows.clear()

    def close_until(self, now_s: float) -> None:
        """Close the rows whose time has passed. A rank without a slot in one of them has none in later rows."""
        while self._rows and now_s > self._rows[0].until_s:
            self.pass_by(self._rows.pop(0).ranks)

    def pass_by(self, ranks: Collection[int]) -> None:
        """Record that these ranks have shown something below all rows."""
        if not self._rows:
            return
        for row in self._rows:
            row.ranks.difference_update(ranks)
        self._rows = [row for row in self._rows if row.ranks or row.has_changed]

    def join(self, rank: int, item: Item) -> bool:
        """Add a display in its slot of the first row that accepts it. Return False if there is none."""
        for number, row in enumerate(self._rows):
            if row.join(rank, item):
                for earlier in self._rows[:number]:
                    earlier.ranks.discard(rank)
                return True
        return False

    def show(self) -> None:
        """Send changes to the front end."""
        for row in self._rows:
            row.show()


def _fits(data: dict[str, Any]) -> bool:
    """Return whether it can share a display with others: an image, or HTML without active elements."""
    if any(kind.startswith(_OTHER_VIEWS) for kind in data):
        return False
    if any(kind in data for kind in _IMAGES):
        return True
    text = str(data.get("text/html", "")).lower()
    is_in_comment = text.rfind("<!--") > text.rfind("-->")  # text after an open comment would not be shown
    return bool(text) and not is_in_comment and not any(tag in text for tag in _ACTIVE)


def _chars(data: dict[str, Any]) -> int:
    return sum(len(str(value)) for value in data.values())


def _grid(groups: list[tuple[list[int], Bundle]]) -> str:
    slots = "".join(
        f'<div style="{_width(len(groups))}"><div style="{_LABEL}">{label(ranks).rstrip()}</div>'
        f"{_content(data, metadata)}</div>"
        for ranks, (data, metadata) in groups
    )
    return f'<div class="ddp-slots" style="display:flex;flex-wrap:wrap;row-gap:8px;padding-left:5px">{slots}</div>'


def _width(count: int) -> str:
    """Return the CSS of a slot: up to four slots in a line if they fit, else two, else one."""
    columns = min(count, 4)
    share = f"{100 / columns:.4f}%"
    wide, narrow = columns * _LEAST_PX, 2 * _LEAST_PX
    width = f"max(clamp({share},({wide}px - 100%)*999,50%),min(({narrow}px - 100%)*999,100%))"
    return f"box-sizing:border-box;padding-right:12px;min-width:0;overflow-x:auto;flex:0 0 auto;width:{width}"


def _content(data: dict[str, Any], metadata: dict[str, Any]) -> str:
    if "text/html" in data:
        return str(data["text/html"])
    kind = next(kind for kind in _IMAGES if kind in data)
    encoded = data[kind] if isinstance(data[kind], str) else json.dumps(data[kind])
    if kind == "image/svg+xml":
        encoded = base64.b64encode(encoded.encode()).decode()
    else:
        encoded = "".join(encoded.split())
    asked = metadata.get(kind)
    sizes = {name: _size(asked.get(name)) for name in ("width", "height")} if isinstance(asked, dict) else {}
    size = "".join(f' {name}="{value}"' for name, value in sizes.items() if value)
    style = "max-width:100%" if sizes.get("height") else "max-width:100%;height:auto"
    alt = html.escape(str(data.get("text/plain", "")), quote=True)
    source = html.escape(encoded, quote=True)
    return f'<img alt="{alt}"{size} style="{style}" src="data:{kind};base64,{source}">'


def _size(value: object) -> str:
    """Return the value of a width or height attribute, such as "40" or "50%", or "" if there is none."""
    if isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value)):
        return html.escape(str(value), quote=True)
    return ""
