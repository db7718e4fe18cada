"""Coordinates of this rank in the device meshes of its variables, for sets of ranks such as `tp=1`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddp_notebook.rank.variables.static_lookup import inherits, instance_attributes, items, stored_attribute
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_MOST_MODULES = 2000  # per model; meshes of models are found in its first parameters


def coordinates(namespace: Mapping[str, Any]) -> list[list[Any]]:
    """Return, for each mesh with named dimensions, its variable, the names, and the coordinates of this rank.

    A mesh that no variable holds is listed under the model whose parameters use it. Meshes of which this rank is no
    member are left out. No code of the user runs, so any thread may call this.

    Args:
        namespace: variables of the rank.

    Example:
        >>> coordinates({"x": 1})
        []
    """
    module = sys.modules.get("torch.distributed.device_mesh")  # a mesh can only exist if it was imported
    if module is None:
        return []
    found: list[list[Any]] = []
    seen: set[int] = set()
    variables = items(namespace)
    held = [(name, value) for name, value in variables.items() if type(value) is module.DeviceMesh]
    of_models = (
        (f"mesh of {name}", mesh)
        for name, value in variables.items()
        if inherits(type(value), torch.nn.Module)
        for mesh in _of_model(value, module.DeviceMesh)
    )
    for name, mesh in [*held, *of_models]:
        if id(mesh) in seen or name.startswith("_"):
            continue
        seen.add(id(mesh))
        names, place = mesh.mesh_dim_names, mesh.get_coordinate()
        if names and place:
            found.append([name, list(names), list(place)])
    return found


def _of_model(model: Any, mesh_type: type) -> Iterator[Any]:
    """Yield the meshes of the parameters of a model."""
    left, visited = [model], 0
    while left and visited < _MOST_MODULES:
        own = instance_attributes(left.pop())
        visited += 1
        for parameter in items(own.get("_parameters")).values():
            mesh = getattr(stored_attribute(parameter, "_spec"), "mesh", None)
            if type(mesh) is mesh_type:
                yield mesh
        left += [part for part in items(own.get("_modules")).values() if part is not None]
