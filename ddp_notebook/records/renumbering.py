"""Marker between the batches of a recording: from here on, ranks have new numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json


class Renumbered(NamedTuple):
    """New rank numbers after a resize.

    Args:
        stayed: new rank -> previous rank, for each rank that stayed.
        world_size: maximum number of ranks so far.

    Example:
        >>> Renumbered.decode(Renumbered({0: 1}, 2).encode())
        Renumbered(stayed={0: 1}, world_size=2)
    """

    stayed: Mapping[int, int]
    world_size: int

    def encode(self) -> bytes:
        return json.dumps([list(self.stayed.items()), self.world_size]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Renumbered:
        stayed, world_size = json.loads(data)
        return cls(dict(stayed), world_size)
