"""Coordinates of this rank in the device meshes of the user's program."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_MODULE = "torch.distributed.device_mesh"


def coordinates(namespaces: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the coordinates of this rank by name of a mesh dimension.

    A dimension has several coordinates if meshes with this dimension disagree.

    Args:
        namespaces: variables that may be meshes.
    """
    kind = getattr(sys.modules.get(_MODULE), "DeviceMesh", None)
    found: dict[str, set[int]] = {}
    for namespace in namespaces if kind is not None else ():
        for value in list(namespace.values()):
            if type(value) is kind and (at := value.get_coordinate()) is not None:
                for name, coordinate in zip(value.mesh_dim_names or (), at, strict=False):
                    found.setdefault(name, set()).add(int(coordinate))
    return {name: sorted(numbers) for name, numbers in found.items()}
