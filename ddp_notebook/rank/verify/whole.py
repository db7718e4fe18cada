"""The gradients of the whole batch, computed by one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.rank.verify import batches, memory, noise
from ddp_notebook.rank.verify.copies import Copies
from ddp_notebook.rank.verify.model_state import ModelState
from ddp_notebook.rank.verify.ranks import Ranks, RefusedError
from ddp_notebook.rank.verify.reads import names_read
from ddp_notebook.rank.verify.runs import Runs
from ddp_notebook.rank.verify.step import OF_WORLD, Run, Step
from ddp_notebook.stdlib import math

_FEWEST_ROWS = 3  # samples of a part that is split to see if its loss is a mean
_MOST_ROUNDING = 1000.0  # rounding errors between a gradient and the sum of those of its samples
_CLOSE = 1e-3  # relative difference of two losses that are the same


class WholeBatch:
    """Comparison with the whole batch. All ranks must make it, and call its methods, at the same time.

    Args:
        ranks: the ranks.
        runs: evaluations of the step on this rank.
        state: the saved state.
        namespace: the user's variables.
        step: the step.
        values: this rank's part of the batch by name.
        parts: ranks with different parts of the batch.
        copies: tensors that differ between ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        runs: Runs,
        state: ModelState,
        namespace: MutableMapping[str, Any],
        step: Step,
        values: Mapping[str, Any],
        parts: Sequence[int],
        copies: Copies,
    ) -> None:
        self._ranks = ranks
        self._runs = runs
        self._state = state
        self._namespace = namespace
        self._step = step
        self._values = values
        self._parts = parts
        self._copies = copies
        self._silenced = runs.silenced

    def compare(
        self, local: Run, are_outside: bool, sizes: Mapping[str, int], unit: float, ranks_on_host: int
    ) -> tuple[dict[str, Run], dict[str, Any]]:
        """Return the runs `quiet`, `quiet_rows` and `whole`, and their facts.

        Args:
            local: the run `local` of this rank.
            are_outside: random numbers are drawn outside of noisy modules.
            sizes: number of elements by parameter.
            unit: relative rounding error.
            ranks_on_host: number of ranks that share the memory of this host.

        Raises:
            RefusedError: the whole batch cannot be compared.
        """
        facts: dict[str, Any] = {"loss_is": ""}
        quiet = self._quiet_run(local, are_outside)
        facts["quiet_losses"] = self._ranks.all(quiet.loss)
        facts["shortage"] = self._shortage(local, ranks_on_host)
        if facts["shortage"]:
            run = self._in_parts(quiet, facts, sizes, unit)
            facts["whole_loss"] = self._ranks.all(run.loss)[0]
        else:
            run = self._on_first_ranks(facts)
        runs = {"quiet": quiet, "whole": run}
        if self._ranks.any(quiet.by_rows):
            runs["quiet_rows"] = Run(loss=quiet.loss, gradients=quiet.by_rows or quiet.gradients)
        return runs, facts

    def _quiet_run(self, local: Run, are_outside: bool) -> Run:
        """Return this rank's part without noise, with the parameters and buffers of rank 0."""
        is_noisy = any(map(noise.is_noisy, self._state.modules)) and self._silenced < noise.ALL_MODULES
        is_uneven = batches.rows_of(self._values) % self._step.micro > 0
        differ = bool(self._copies.common or self._copies.weights)
        if not self._ranks.any(is_noisy or local.drew_random or differ or is_uneven):
            return local  # nothing to silence
        outside = self._ranks.any(are_outside)
        self._silenced = max(noise.ALL_MODULES if outside else noise.NOISY_MODULES, self._silenced)
        run: Run = self._ranks.attempt(lambda: self._quiet(self._values))
        if self._ranks.any(run.drew_random):
            raise RefusedError("the loss draws random numbers, apart from dropout")
        return run

    def _quiet(self, values: Mapping[str, Any], **options: Any) -> Run:
        return self._runs.local(values, common=True, silenced=self._silenced, **options)

    # ---- on one rank

    def _on_first_ranks(self, facts: dict[str, Any]) -> Run:
        """Return the gradients of the whole batch, computed by the first two ranks with a part.

        The second one joins the parts in the opposite order, and sees the number of ranks. If the loss then differs, it
        depends on this number.
        """
        first, second = self._parts[:2]
        whole = self._joined(first, second)
        step = replace(self._step, micro=1)

        def compute() -> Run:
            if self._ranks.rank == first:
                return self._quiet(whole, step=step, alone=True)
            if self._ranks.rank == second:
                return self._quiet(whole, step=step, alone=True, world_size=self._ranks.world)
            return Run(loss=0.0, gradients={})

        run: Run = self._ranks.attempt(compute)
        losses = self._ranks.all(run.loss)
        facts["whole_loss"] = losses[first]
        facts["on_one"] = factor = _ratio(losses[first], losses[second])
        if factor is not None and abs(factor - 1) > _CLOSE and self._ranks.rank == second:
            run.gradients = {name: one * factor for name, one in run.gradients.items()}
        return run

    def _joined(self, first: int, second: int) -> dict[str, Any]:
        """Return the whole batch on two ranks, in opposite orders, and nothing on others."""
        rows = [self._ranks.all(batches.rows_of(self._values))[rank] for rank in self._parts]
        values = {**self._values, **{name: self._namespace[name] for name in self._carried()}}
        everything = self._ranks.gather(batches.on_cpu(values), [first, second])
        places = range(len(self._parts))

        def join() -> dict[str, Any]:
            order = places if self._ranks.rank == first else places[::-1]
            joined: dict[str, Any] = {}
            if not everything:
                return joined
            for name in values:
                of_ranks, is_batch = [everything[self._parts[at]][name] for at in order], name in self._values
                joined[name] = batches.join(of_ranks, name, [rows[at] for at in order], is_batch=is_batch)
            return dict(batches.on_device(joined, batches.device_of(values)))

        self._state.restore()
        return dict(self._ranks.attempt(join))

    def _carried(self) -> list[str]:
        """Return the variables that the step reads and that differ between ranks, such as a hidden state.

        Raises:
            RefusedError: a variable is no state of the samples.
        """
        self._state.restore()
        names = names_read(f"{self._step.before}\n{self._step.loss}", self._namespace)
        names -= {*self._values, *OF_WORLD}
        values = {name: self._namespace[name] for name in sorted(names) if name in self._namespace}
        values = {name: value for name, value in values.items() if batches.is_state(value)}
        by_rank = self._ranks.all({name: batches.digest(value) for name, value in values.items()})
        numbers = self._ranks.all({name: value for name, value in values.items() if isinstance(value, int | float)})
        found = []
        for name in sorted({name for one in by_rank for name in one}):
            if len({one.get(name) for one in by_rank}) == 1:
                continue
            if [one.get(name) for one in numbers] == list(range(self._ranks.world)):
                continue  # another name for `rank`
            if any(name not in one for one in by_rank) or any(name in one for one in numbers):
                raise RefusedError(f"{name} differs between ranks, and the step reads it")
            found.append(name)
        return found

    # ---- in parts

    def _shortage(self, local: Run, ranks_on_host: int) -> str:
        """Return a clause if the whole batch does not fit on one of the ranks that compute it."""
        rows = self._ranks.all(batches.rows_of(self._values))
        share = rows[self._ranks.rank] / max(1, sum(rows[rank] for rank in self._parts))
        problem = ""
        if share and self._ranks.rank in self._parts[:2]:
            free = memory.free_bytes(batches.device_of(self._values), ranks_on_host)
            needed = memory.whole_bytes(local.saved_bytes * self._step.micro, batches.nbytes(self._values), share)
            problem = memory.shortage(needed, free)
        return next(
            (
                f"the whole batch needs about {one} on rank {rank}"
                for rank, one in enumerate(self._ranks.all(problem))
                if one
            ),
            "",
        )

    def _in_parts(self, quiet: Run, facts: dict[str, Any], sizes: Mapping[str, int], unit: float) -> Run:
        """Return the gradients of the whole batch from those of the ranks' parts.

        Each rank splits its part, to see whether the loss is a mean or a sum over samples. Then so is the loss of the
        whole batch.

        Raises:
            RefusedError: it is neither, or a rank has fewer than two samples.
        """
        step = replace(self._step, micro=1)
        rows = batches.rows_of(self._values)
        if self._ranks.any(rows < _FEWEST_ROWS):
            raise RefusedError(f"{facts['shortage']}, and a rank has too few samples to compute it in parts")
        part = self._ranks.attempt(lambda: self._quiet(self._values, step=step, alone=True))
        # Pieces of different sizes, which tell a mean from a sum.
        counts = [rows // _FEWEST_ROWS, rows - rows // _FEWEST_ROWS]
        pieces = self._ranks.attempt(lambda: batches.split_by(self._values, counts))
        of_pieces = [self._ranks.attempt(partial(self._quiet, piece, step=step, alone=True)) for piece in pieces]
        weights = {"mean": [count / rows for count in counts], "sum": [1.0, 1.0]}
        for kind, factors in weights.items():
            if all(self._ranks.all(_are_sum(part, of_pieces, factors, _MOST_ROUNDING * unit))):
                facts["loss_is"] = kind
        if not facts["loss_is"]:
            raise RefusedError(f"{facts['shortage']}, and the loss is neither a mean nor a sum over samples")
        is_mean = facts["loss_is"] == "mean"
        # The loss of `quiet` is the mean of its micro-steps.
        ratios = self._ranks.all(_ratio(part.loss, quiet.loss * (1 if is_mean else self._step.micro)))
        facts["on_one"] = next((ratios[rank] for rank in self._parts if ratios[rank] is not None), None)
        total_rows = sum(self._ranks.all(rows)[rank] for rank in self._parts)
        weight = (rows / total_rows if is_mean else 1.0) * (self._ranks.rank in self._parts)
        run = Run(loss=sum(one * weight_of for one, weight_of in self._ranks.all((part.loss, weight))), gradients={})
        for name, size in sizes.items():
            total = torch.zeros(size, dtype=torch.float64, device=self._ranks.device)
            if name in part.gradients:
                total += part.gradients[name].reshape(-1).to(self._ranks.device).double() * weight
            dist.all_reduce(total)
            run.gradients[name] = total
        return run


def _ratio(one: float, other: float) -> float | None:
    """Return the ratio of two losses; None if it is not finite."""
    return one / other if other and math.isfinite(one / other) else None


def _are_sum(part: Run, pieces: Sequence[Run], factors: Collection[float], tolerance: float) -> bool:
    """Return whether the gradient of a part is the sum of those of its pieces, times factors."""
    off = size = 0.0
    for name, gradient in part.gradients.items():
        total = torch.zeros_like(gradient, dtype=torch.float64)
        for piece, factor in zip(pieces, factors, strict=True):
            if name in piece.gradients:
                total += piece.gradients[name].double() * factor
        off += float((gradient.double() - total).square().sum())
        size += float(gradient.double().square().sum())
    return off <= tolerance**2 * size
