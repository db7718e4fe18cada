"""Gradients that are clipped before `backward()` has computed them, after their step, or by the norm of a shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed import get_process_group_ranks

from ddp_notebook.rank.findings.optimizer_parameters import OptimizerParameters, held_by
from ddp_notebook.rank.findings.tensor_checks import are_zero
from ddp_notebook.rank.record.training.step_observer import tell
from ddp_notebook.rank.record.training.wrapping import around, traced_as
from ddp_notebook.stdlib import functools, gc, threading

_NORM = "clip_grad_norm_"
_FUNCTIONS = {_NORM: "max_norm", "clip_grad_value_": "clip_value"}  # with the name of the limit
_OF_FSDP1 = "_is_flat_param", "_fsdp_flattened"  # attributes of parameters of which FSDP1 has made shards
_MOST_NORMS = 4
_CONSECUTIVE = 2  # steps without clipping before a finding
_MOST = 64  # calls of a cell that are looked at
_MEASURES = 1e4  # a larger limit only serves to get the norm


class _Clip:
    """A call that clips gradients.

    Args:
        function: its name.
        ids: ids of the parameters.
        is_empty: the parameters had no gradients, or only zeros.
        is_late: an optimizer of the parameters has stepped since the last backward.
    """

    def __init__(self, function: str, ids: set[int], *, is_empty: bool, is_late: bool) -> None:
        self.function, self.ids, self.is_empty, self.is_late = function, ids, is_empty, is_late
        self.is_reset = False  # `zero_grad` has reset the clipped gradients
        self.is_used = False  # an optimizer has stepped before the next backward

    @property
    def cause(self) -> str:
        """Return why the clipped gradients are not used by a step; "" if they may be."""
        if self.is_used:
            return ""
        if self.is_late:
            return "late" if self.is_empty or self.is_reset else ""
        return "early" if self.is_empty else ""


class Clipping:
    """Calls of the running cell that clip gradients.

    Args:
        note: keeps a fact.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._main = threading.get_ident()
        self._looked = 0  # calls of the cell
        self._since: list[_Clip] = []  # since the last backward
        self._before: list[_Clip] = []  # between the last step of their optimizer and the last backward
        # Ids of the parameters of each optimizer that has stepped since the last backward
        self._stepped: dict[int, set[int]] = {}
        self._found: dict[int, tuple[int, int, _Clip]] = {}  # first step, number of steps and first call
        self._has_shards = False  # the running call gets shards of FSDP1
        self._ids_of_shards: set[int] = set()
        self._norms: list[list[float]] = []  # step, norm and limit
        self._step = 0  # number of steps in the cell
        for name in _FUNCTIONS:
            around(torch.nn.utils, name, functools.partial(self._around, name))
            # The module that defines it, where `pickle` looks for it
            setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))

    def begin_cell(self) -> None:
        """Forget the calls of the last cell."""
        self._looked = self._step = 0
        self._norms = []
        self._ids_of_shards.clear()
        self._since.clear()
        self._before.clear()
        self._stepped.clear()
        self._found.clear()

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **named: Any) -> Any:
            if self._looked >= _MOST or threading.get_ident() != self._main or not (args or "parameters" in named):
                return original(*args, **named)
            parameters = args[0] if args else named["parameters"]
            if isinstance(parameters, Iterator):  # it is used twice; torch warns of an empty one
                parameters = list(parameters) or parameters
                args, named = ((parameters, *args[1:]), named) if args else (args, named | {"parameters": parameters})
            limit = args[1] if len(args) > 1 else named.get(_FUNCTIONS[name])
            tell(self._clipped, name, parameters, limit)
            result = original(*args, **named)
            if self._has_shards:
                tell(self._keep_norm, result, limit)
            return result

        return traced_as(original, clip)

    def _clipped(self, function: str, parameters: torch.Tensor | Iterable[torch.Tensor], limit: Any) -> None:
        self._looked += 1
        self._has_shards = False
        if not isinstance(limit, int | float) or limit >= _MEASURES:
            return
        ones = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = {id(p) for p in ones}
        gradients = [gradient for p in ones if (gradient := p.grad) is not None]
        is_empty = not gradients or (not gradients[0].is_cuda and are_zero(gradients, 0)[0])
        is_late = any(not ids.isdisjoint(stepped) for stepped in self._stepped.values())
        self._since.append(_Clip(function, ids, is_empty=is_empty, is_late=is_late))
        if function == _NORM and len(self._norms) < _MOST_NORMS:
            self._has_shards = any(hasattr(p, name) for p in ones for name in _OF_FSDP1)
            self._ids_of_shards |= ids if self._has_shards else set()

    def _keep_norm(self, norm: Any, limit: float) -> None:
        self._norms.append([self._step + 1, float(norm), float(limit)])

    def end_cell(self) -> dict[str, Any] | None:
        """Return the norms that were computed from shards of a model in FSDP1, which the notebook compares; None if
        there are none. The class is looked up only if there are some."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if not self._norms or fsdp is None:
            return None
        for model in [one for one in gc.get_objects() if issubclass(type(one), fsdp.FullyShardedDataParallel)]:
            handle = model._handle
            is_sharded = handle is not None and handle.uses_sharded_strategy
            if is_sharded and any(id(p) in self._ids_of_shards for p in model.parameters()):
                try:
                    ranks = list(map(int, get_process_group_ranks(model.process_group)))
                except (KeyError, ValueError):  # the cell has destroyed the group
                    return None
                return {"model": model, "ranks": ranks, "norms": self._norms}
        return None

    def zeroed(self, owner: Any) -> None:
        """Note that an optimizer or a module has reset its gradients."""
        if self._since:
            ids = {id(p) for p in held_by(owner)}
            for clip in self._since:
                clip.is_reset |= not ids.isdisjoint(clip.ids)

    def backward(self) -> None:
        """Note the end of a backward."""
        self._before += self._since
        self._since.clear()
        self._stepped.clear()

    def stepped(self, held: OptimizerParameters, step: int) -> None:
        """Note consecutive steps of an optimizer whose gradients were clipped only when this has no effect."""
        self._stepped[id(held)] = held.ids
        self._step = step
        if not self._looked:
            return
        clips = [one for one in self._since if not one.ids.isdisjoint(held.ids)]
        for clip in clips:
            clip.is_used = True
        before = [one for one in self._before if not one.ids.isdisjoint(held.ids)]
        self._before = [one for one in self._before if one.ids.isdisjoint(held.ids)]
        if clips or not before or not all(one.cause for one in before):
            self._found.pop(id(held), None)
            return
        first, count, clip = self._found.get(id(held), (step, 0, before[0]))
        self._found[id(held)] = first, count + 1, clip
        if count + 1 == _CONSECUTIVE:
            self._note("clipped-without-effect", first, function=clip.function, cause=clip.cause)
