"""The state of a widget of a rank, kept in the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class WidgetState:
    """A widget's state as its rank and its user have last set it, so that a page can have it without the rank.

    Example:
        >>> state = WidgetState()
        >>> state.take({"state": {"value": 1, "max": 9}}, [])
        >>> state.take({"method": "update", "state": {}, "buffer_paths": [["value"]]}, [b"png"])
        >>> state.told()
        ({'method': 'update', 'state': {'value': 1, 'max': 9}, 'buffer_paths': [['value']]}, [b'png'])
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}  # by path: what is no JSON, and not in the state

    def __repr__(self) -> str:
        return f"<WidgetState: {len(self._state)} values, {len(self._buffers)} buffers>"

    @property
    def is_known(self) -> bool:
        """Whether it is a widget's: other comms have no state."""
        return bool(self._state)

    def take(self, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """An opening, or a message, of either side."""
        if data.get("method", "update") not in ("update", "echo_update") or "state" not in data:
            return
        paths = [tuple(path) for path in data.get("buffer_paths", ())]
        changed = data["state"].keys() | {path[0] for path in paths}
        self._buffers = {path: buffer for path, buffer in self._buffers.items() if path[0] not in changed}
        self._state.update(data["state"])
        self._buffers.update(zip(paths, buffers, strict=False))

    def told(self) -> tuple[dict[str, Any], list[Any]]:
        """The answer to a page that asks for it: its data, and its buffers."""
        paths = [list(path) for path in self._buffers]
        return {"method": "update", "state": self._state, "buffer_paths": paths}, list(self._buffers.values())
