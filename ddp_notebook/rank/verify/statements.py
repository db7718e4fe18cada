"""Effects of the user's hooks, and of statements between `backward` and the optimizer's step, on gradients."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_notebook.rank.verify.copies import checksum
from ddp_notebook.rank.verify.coverage import Coverage
from ddp_notebook.rank.verify.model_state import ModelState
from ddp_notebook.rank.verify.ranks import Ranks
from ddp_notebook.rank.verify.step import Run, Step

_MARGIN = 4.0  # rounding errors of a sum of shards


def complete(run: Run, ranks: Ranks, coverage: Coverage, sizes: Mapping[str, int]) -> None:
    """Replace sharded gradients of a run by complete ones. All ranks call it at the same time.

    Args:
        run: the run `together`, or one with its gradients after statements.
        ranks: the ranks.
        coverage: parameters by name.
        sizes: number of elements by parameter.
    """
    have = ranks.all(sorted(run.gradients))
    for name in sizes:
        gradient = run.gradients.get(name)
        if isinstance(gradient, DTensor) and all(name in of_rank for of_rank in have):
            run.gradients[name] = gradient.full_tensor()
    run.gradients |= coverage.flat.complete_gradients()
    run.gradients = {name: one for name, one in run.gradients.items() if not isinstance(one, DTensor)}


def mixed_shards(run: Run, ranks: Ranks) -> list[str]:
    """Return the sharded parameters for which the statements after `backward` have combined the ranks' shards.

    Ranks hold different elements of a sharded gradient. After a collective, all have the sum or mean of the shards.

    Args:
        run: the run `together`, before `complete`.
        ranks: the ranks.
    """
    if not ranks.any(run.shards):
        return []
    marks = {
        name: (checksum(before), checksum(after.to_local()))
        for name, before in run.shards.items()
        if isinstance(after := run.gradients.get(name), DTensor)
    }
    by_rank = ranks.all(marks)
    found = []
    for name in sorted(by_rank[0]):
        of_ranks = [one.get(name, ("", "")) for one in by_rank]
        if len({before for before, _ in of_ranks}) == 1 or len({after for _, after in of_ranks}) > 1:
            continue  # elementwise statements keep equal shards equal
        shards = [one.double() for one in ranks.all(run.shards[name].cpu())]
        if len({one.shape for one in shards}) > 1:
            continue
        gradient: Any = run.gradients[name]
        after = gradient.to_local().cpu().double()
        if _is_sum(after, shards, run.shards[name].dtype):
            found.append(name)
    return found


def _is_sum(after: torch.Tensor, shards: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether a tensor is the sum or the mean of shards."""
    total, largest = sum(shards), max(float(one.abs().max()) for one in shards)
    limit = _MARGIN * len(shards) * torch.finfo(dtype).eps * largest
    return any(float((one - after).abs().max()) <= limit for one in (total, total / len(shards)))


class Intended:
    """Gradients that the user's hooks and statements make of the average of the parts.

    Args:
        ranks: the ranks.
        coverage: parameters by name.
        namespace: the user's variables.
        step: the step.
        state: the saved state.
        parts: ranks with different parts of the batch.
    """

    def __init__(
        self,
        ranks: Ranks,
        coverage: Coverage,
        namespace: MutableMapping[str, Any],
        step: Step,
        state: ModelState,
        parts: Sequence[int],
    ) -> None:
        self._ranks = ranks
        self._coverage = coverage
        self._namespace = namespace
        self._step = step
        self._state = state
        self._parts = parts

    def gradients(
        self, local: Run, sizes: Mapping[str, int], variables: Mapping[str, Any]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the gradients that hooks and statements make of the average, and of the rank's own part.

        Args:
            local: the run `local` of this rank.
            sizes: number of elements by parameter.
            variables: variables before the statements after `backward`.

        Returns:
            "intended" and "changed"; nothing if there are no hooks and no statements after `backward`.
        """
        self._state.restore()
        parameters = self._coverage.parameters()
        hooked = {name: one for name, one in self._coverage.user_hooks().items() if not isinstance(one, DTensor)}
        if not self._ranks.any(bool(hooked) or bool(self._step.after)):
            return {}
        averages, own = {}, dict(local.gradients)
        for name in sizes:
            average = torch.zeros(parameters[name].shape, dtype=torch.float64, device=parameters[name].device)
            if self._ranks.rank in self._parts and name in local.gradients:
                average += local.gradients[name].double()
            dist.all_reduce(average)
            averages[name] = (average / len(self._parts)).to(parameters[name].dtype)

        def change() -> None:
            for name, parameter in hooked.items():
                for hook in list((parameter._backward_hooks or {}).values()):
                    for gradients in (averages, own):
                        if name in gradients and (changed := hook(gradients[name].clone())) is not None:
                            gradients[name] = changed

        self._ranks.attempt(change)
        if not self._step.after:
            return {"intended": averages, "changed": own}
        self._state.restore()
        self._namespace.update(variables)
        for name, average in averages.items():
            parameters[name].grad = _as(parameters[name], average.clone())
        exec(compile(self._step.after, "<step>", "exec"), self._namespace)  # type: ignore[arg-type]
        run = Run(loss=0.0, gradients={name: one for name in sizes if (one := parameters[name].grad) is not None})
        complete(run, self._ranks, self._coverage, sizes)
        return {"intended": run.gradients, "changed": own}


def _as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a complete gradient in the form of its parameter."""
    if not isinstance(parameter, DTensor):
        return gradient
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
