"""Tensors that must be equal on several ranks but may differ: `DTensor.from_local` with `Replicate()` checks nothing.

Tensor parallel creates its inputs like this, and `to_local` its gradients. For the first such tensors of each module in
a cell, a few numbers are recorded and compared by the notebook: the norm of the tensor, and its sums with random signs.
The difference of two such sums is about the norm of the tensors' difference. So different rounding can be distinguished
from different tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.sharding.observed_functions import before
from ddp_notebook.stdlib import contextlib, functools, logging

_CALLS = 4  # per module and cell
_LOOKS = 1000  # per cell; finding the name takes 2 us
_ELEMENTS = 1 << 16  # number of elements read, spread over the tensor
_SIGNS = 4
_FRAMES = 8  # from the creation of a gradient to the backward that needs it
# Modules in which FSDP gets its dimensions of a mesh. (torch 2.11 has no such meshes.)
_SHARDERS = ("torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.replicate_with_fsdp")
_log = logging.getLogger(__name__)


class Replicas:
    """Tensors of this rank that must be equal on other ranks.

    Args:
        name: returns the name of the module for which an autograd function runs, from its context and its caller's
            frame.
        cell: returns the number of the running cell.

    Example:
        >>> Replicas(lambda ctx, frame: "", lambda: 1).facts()
        []
    """

    def __init__(self, name: Callable[[Any, FrameType], str], cell: Callable[[], int]) -> None:
        self._name = name
        self._cell = cell
        self._looked_in = 0  # cell of `_left`
        self._left = 0  # number of tensors that may still be read
        self._kept_in = 0  # cell of `_kept` and `_counts`
        self._kept: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._signs: torch.Tensor | None = None
        self._of_data: dict[tuple[Any, ...], set[str]] = {}  # see `_note_mesh`

    def facts(self) -> list[dict[str, Any]]:
        """Return facts about the tensors of the last `cell` that created such tensors.

        Each has:

        - `what`: "input" of a `module`, "gradient" of a `to_local` result ("partial" if its DTensor was partial),
          else "tensor"
        - `at`: its number among these
        - `ranks`: ranks that must have an equal tensor
        - `shape`, `dtype`, and `sketch`, the numbers to compare
        """
        return [facts | {"sketch": sketch.tolist()} for facts, sketch in self._kept]

    def watch(self) -> None:
        """Replace the torch function.

        Raises:
            ImportError, AttributeError: this torch version lacks the function.
        """
        from torch.distributed.tensor._api import _FromTorchTensor

        function: Any = _FromTorchTensor
        original = function.forward

        @functools.wraps(original)
        def forward(ctx: Any, tensor: Any, mesh: Any, placements: Any, run_check: bool = False, *rest: Any) -> Any:
            if not torch.compiler.is_compiling() and not run_check and self._may_look():
                try:
                    self._look(ctx, tensor, mesh, placements, sys._getframe(1))
                except Exception:  # the user's forward must continue
                    _log.info("a tensor was not looked at", exc_info=True)
            return original(ctx, tensor, mesh, placements, run_check, *rest)

        function.forward = staticmethod(forward)
        for sharder in _SHARDERS:
            after_import(sharder, functools.partial(self._watch_meshes, sharder))

    def _may_look(self) -> bool:
        if (cell := self._cell()) != self._looked_in:
            self._looked_in, self._left = cell, _LOOKS
        return self._left > 0

    def _watch_meshes(self, sharder: str) -> None:
        with contextlib.suppress(AttributeError):
            before(sys.modules[sharder], "_get_mesh_info", self._note_mesh)

    def _note_mesh(self, mesh: Any, dp_mesh_dims: Any = None, *_: Any, **__: Any) -> None:
        """Register a mesh that FSDP shares with DTensor.

        Along the dimensions of FSDP each rank has different data. DTensor still treats them as replicated, because FSDP
        handles the gradients.
        """
        if dp_mesh_dims is not None:
            names = {*dp_mesh_dims.shard_names, *dp_mesh_dims.replicate_names}
            self._of_data.setdefault(_names_and_sizes(mesh), set()).update(names)

    def _look(self, ctx: Any, tensor: Any, mesh: Any, placements: Any, frame: FrameType) -> None:
        dims = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
        if self._of_data and (of_data := self._of_data.get(_names_and_sizes(mesh))):
            dims = [dim for dim in dims if mesh.mesh_dim_names[dim] not in of_data]
        if not dims or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._left -= 1
        if self._kept_in != self._looked_in:
            self._kept_in, self._kept, self._counts = self._looked_in, [], {}
        ranks = unseen(ranks_along, mesh, dims)
        if len(ranks) < 2:
            return
        module = self._name(ctx, frame)
        what = "input" if module else "gradient" if torch._C._current_graph_task_id() != -1 else "tensor"
        if what == "gradient" and _is_of_partial(frame):
            what = "partial"
        at = self._counts.get((module, what, ranks), 0)
        if at < _CALLS:
            self._counts[module, what, ranks] = at + 1
            facts = {"cell": self._kept_in, "what": what, "module": module, "at": at, "ranks": ranks}
            facts |= {"shape": [*tensor.shape], "dtype": str(tensor.dtype).removeprefix("torch.")}
            self._kept.append((facts, unseen(self._sketch, tensor)))

    @torch.no_grad()
    def _sketch(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._signs is None or self._signs.device != tensor.device:
            draw = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (_SIGNS, _ELEMENTS), generator=draw).double().mul_(2).sub_(1)
            self._signs = signs.to(tensor.device)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        some = flat[:: max(1, -(-len(flat) // _ELEMENTS))].double()
        return torch.cat([some.norm().reshape(1), self._signs[:, : len(some)] @ some])


def _is_of_partial(frame: FrameType | None) -> bool:
    """Return whether these frames compute the gradient of a partial DTensor that `to_local` has made a local tensor."""
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == "backward":
            spec = getattr(frame.f_locals.get("ctx"), "dtensor_spec", None)
            return spec is not None and any(one.is_partial() for one in spec.placements)
        frame = frame.f_back
    return False


def _names_and_sizes(mesh: Any) -> tuple[Any, ...]:
    return mesh.mesh_dim_names, tuple(mesh.shape)


def ranks_along(mesh: Any, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks with the same mesh coordinates as this rank, except along `dims`; empty outside the mesh.

    Args:
        mesh: a `DeviceMesh`.
        dims: dimensions of the mesh.
    """
    place = mesh.get_coordinate()
    if place is None:
        return ()
    at = tuple(slice(None) if dim in dims else place[dim] for dim in range(mesh.ndim))
    return tuple(mesh.mesh[at].reshape(-1).tolist())
