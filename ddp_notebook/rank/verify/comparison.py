"""Run one training step in several forms, and return facts about the results.

| run | gradients of | computed |
|---|---|---|
| together | the rank's part | by all ranks together, as in training |
| local | the rank's part | without communication, with the same random state |
| nudged | the rank's part | as local, with parameters that are changed by one rounding error |
| quiet | the rank's part | as local, with the parameters of rank 0, without dropout and batch statistics |
| quiet_rows | the rank's part | as quiet, with micro-steps that count by their number of samples |
| whole | the whole batch | as quiet, on rank 0, and on the second rank in the opposite order |
| intended | none | local gradients after their average, with the user's hooks and later statements |

`ddp_notebook.run.verify.causes` derives sentences from the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.variables import random_states
from ddp_notebook.rank.verify import batches, memory
from ddp_notebook.rank.verify.batches import JoinError
from ddp_notebook.rank.verify.coverage import Coverage, has_values, main_module
from ddp_notebook.rank.verify.local_model import FullParameters, SyncFlags, reshard, stop_sync
from ddp_notebook.rank.verify.model_state import ModelState, all_modules
from ddp_notebook.rank.verify.products import inner_products
from ddp_notebook.rank.verify.reads import names_read
from ddp_notebook.rank.verify.step import OF_WORLD, Run, Step, StepError, evaluate, one_process
from ddp_notebook.stdlib import contextlib, hashlib, math, re

_SEED = 1
_RESOLUTION = 1e-7  # smallest relative difference that inner products of float64 can show
_QUIET_MODULES, _QUIET_ALL = 1, 2
_HOOK_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # dtype by a part of the name of the comm hook
_MARGIN = 4.0  # rounding errors that may hide a difference; the notebook tolerates more
_FEWEST_ROWS = 3  # samples of a part that is split to see if its loss is a mean
_MOST_ROUNDING = 1000.0  # rounding errors between a gradient and the sum of those of its samples
_CLOSE = 1e-3  # relative difference of two losses that are the same
_MOST_LEFT = 3
_MOST_CHARS = 200  # maximum length of an error in a sentence


class RefusedError(Exception):
    """The step cannot be compared. All ranks raise it with the same text."""


class _CommunicatesError(Exception):
    """The step of one process has called a collective."""


class Comparison:
    """Comparison of one step. All ranks must make it and run it at the same time.

    Args:
        namespace: the user's variables.
        step: the step.
        main: name of the variable with the main model.
        recorder: collectives of this rank.
        hidden: names of variables that do not belong to the user.
        keep: called with the saved state before anything is changed.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        step: Step,
        main: str,
        recorder: Recorder,
        hidden: Collection[str],
        keep: Callable[[ModelState], None],
    ) -> None:
        self._namespace = namespace
        self._step = step
        self._main = main
        self._recorder = recorder
        self._hidden = hidden
        self._keep = keep
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._common: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors, and the values of rank 0
        self._quiet = self._local_quiet = 0  # the latter: in the runs local, nudged and together
        self._entered: set[int] = set()  # ids of the DDP models whose forward was called

    # ---- agreement of the ranks

    def _all(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, value)
        return found

    def _attempt(self, call: Callable[[], Any], what: str = "the step failed") -> Any:
        """Return the result of a local call. If it fails on a rank, all ranks raise the error of the first one.

        Args:
            what: clause about a failure.
        """
        result, problem = None, ""
        try:
            result = call()
        except (StepError, JoinError) as error:
            problem = str(error)
        except Exception as error:
            problem = f"{what} with {_words(error)}{self._remedy(error)}"
        problems = self._all(problem)
        failed = [rank for rank, one in enumerate(problems) if one]
        if failed:
            where = "" if len(failed) == self._world else f" (on rank {failed[0]})"
            raise RefusedError(problems[failed[0]] + where)
        return result

    def _computed(self) -> list[str]:
        """Return the variables that the step reads and that were computed with a gradient before it."""
        read = names_read(f"{self._step.before}\n{self._step.loss}", self._namespace)
        return sorted(
            name
            for name in read
            if isinstance(one := self._namespace.get(name), torch.Tensor) and one.grad_fn is not None
        )

    def _remedy(self, error: Exception) -> str:
        """Return a sentence for a step that reads a tensor of an earlier forward pass."""
        # torch: "Trying to backward through the graph a second time"
        if "a second time" not in str(error) or not (computed := self._computed()):
            return ""
        return (
            f". {computed[0]} was computed before the step: LOSS must contain the expression that computes it, such as "
            "F.cross_entropy(model(x), y)"
        )

    # ---- the runs

    def run(self) -> dict[str, Any] | None:
        """Return the facts on rank 0, None on other ranks.

        Raises:
            RefusedError: the step cannot be compared.
        """
        self._attempt(self._check_names)
        self._ranks_on_host = self._all(memory.host_name()).count(memory.host_name())
        self._state = state = self._attempt(self._save, "copying the variables failed")
        self._keep(state)
        main = self._main or main_module(self._namespace, f"{self._step.before}\n{self._step.loss}")
        self._coverage = coverage = self._attempt(lambda: Coverage(self._namespace, main, state.modules))
        self._attempt(self._check_support)
        self._values = self._attempt(self._batch)
        if self._values and not any(self._all(batches.rows_of(self._values))):
            raise RefusedError(f"the batch has no samples on any rank: {', '.join(self._values)}")
        self._full = self._attempt(lambda: FullParameters(state.modules, coverage))
        facts = self._compare()
        return facts if self._rank == 0 else None

    def _save(self) -> ModelState:
        modules = all_modules()
        reshard(modules)
        state = ModelState(self._namespace, self._hidden, modules)
        parameters = [one for module in modules for one in module.parameters(recurse=False)]
        on_host, on_device = state.nbytes, memory.gradient_bytes(parameters)  # copies of variables are on the host
        if self._device().type == "cpu":
            on_host, on_device = on_host + on_device, 0
        for needed, device in ((on_host, torch.device("cpu")), (on_device, self._device())):
            free = memory.free_bytes(device, self._ranks_on_host)
            if sizes := memory.shortage(needed, free):
                raise StepError(f"copies of the variables and gradients need about {sizes}")
        state.take()
        return state

    def _check_names(self) -> None:
        needed = (self._main,) if self._step.selects else (*self._step.batch, self._main)
        missing = [name for name in needed if name and name not in self._namespace]
        if missing:
            raise StepError(f"undefined variable {missing[0]!r}")
        if self._step.loss in self._computed():
            raise StepError(
                f"{self._step.loss} is a tensor that was already computed: LOSS must be the expression that computes "
                "it, such as F.cross_entropy(model(x), y)"
            )
        if self._main and not isinstance(self._namespace[self._main], nn.Module):
            kind = type(self._namespace[self._main]).__name__
            raise StepError(f"{self._main} must be a module, got {kind}: name the model with --model")

    def _batch(self) -> dict[str, Any]:
        """Return this rank's part of the batch by name.

        Raises:
            StepError: the names are not clear.
        """
        values = {name: self._namespace[name] for name in self._step.batch if name in self._namespace}
        if not self._step.selects:
            if all(isinstance(one, int | float) for one in values.values()):
                raise StepError(f"{', '.join(values)} has no samples: name the batch with --batch x,y")
            return values
        values = {name: value for name, value in values.items() if batches.has_samples(value)}
        if not values:
            raise StepError("no variable of the last step is a tensor with samples: name the batch with --batch x,y")
        if len({batches.rows_of({name: value}) for name, value in values.items()}) > 1:
            raise StepError(f"the batch is not clear among {', '.join(values)}: name it with --batch x,y")
        return values

    def _check_support(self) -> None:
        if obstacle := self._coverage.flat.obstacle():
            raise StepError(obstacle)
        for name in sorted(names_read(f"{self._step.before}\n{self._step.loss}", self._namespace)):
            module = self._namespace.get(name)
            if isinstance(module, nn.Module) and any(map(is_lazy, module.parameters())):
                raise StepError(f"parameters of {name} have no values yet: run a training step first")
        own = {id(one) for root in self._coverage.roots.values() for one in root.modules()}
        for one in self._coverage.ddp:
            if one.static_graph and id(one) in own and not one._static_graph_delay_allreduce_enqueued:
                raise StepError(
                    "a DDP model with static_graph=True records its graph in its first step: run a training step first"
                )
        if stepping := self._coverage.steps_in_backward():
            raise StepError(
                f"{stepping[0]} has a hook that runs after its gradient is complete, such as an optimizer step in "
                "backward: the gradient cannot be compared"
            )

    def _local(
        self,
        values: Mapping[str, Any],
        *,
        step: Step | None = None,
        common: bool = False,
        nudge: float = 0.0,
        alone: bool = False,
    ) -> Run:
        """Compute a step without communication of the wrappers.

        Args:
            step: the step; None: that of the ranks.
            common: use the parameters of rank 0.
            nudge: relative change of the parameters.
            alone: in a world of one rank.

        Raises:
            StepError: the step calls a collective, in a world of one rank.
        """
        self._state.restore()
        coverage = self._coverage
        stop_sync(coverage)
        with torch.no_grad():
            for tensor, of_first in self._common if common else self._buffers:
                tensor.copy_(of_first)
        self._full.put(common=common)
        for parameter in coverage.user_hooks().values():
            parameter._backward_hooks.clear()
        if nudge:
            self._nudge(nudge)
        self._make_quiet()
        before = random_states.checksums(random_states.read(all_devices=True))
        world = self._one_process() if alone else contextlib.nullcontext()
        with world, _eager(self._state.modules), _noting_forward(self._entered):
            weighs = self._quiet > 0 and not alone
            run = evaluate(step or self._step, self._namespace, coverage, values, weighs=weighs)
        run.drew_random = before != random_states.checksums(random_states.read(all_devices=True))
        return run

    @contextlib.contextmanager
    def _one_process(self) -> Iterator[None]:
        """Let the step see a world of one rank, and refuse its collectives."""
        before, self._recorder.instead = self._recorder.instead, refuse_collective
        try:
            with one_process(self._namespace):
                yield
        except _CommunicatesError as error:
            raise StepError(f"the loss calls {error}, which needs all ranks") from None
        finally:
            self._recorder.instead = before

    def _nudge(self, by: float) -> None:
        """Multiply each parameter by 1 + `by` or 1 - `by`, at random."""
        for name, parameter in sorted(self._coverage.parameters().items()):
            if isinstance(parameter, DTensor):
                continue  # its model takes no part in the step
            generator = torch.Generator().manual_seed(_SEED + len(name))
            with torch.no_grad():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                changed = parameter.detach() * (1 + by * signs.double()).to(parameter.device)
                if self._full.has(parameter):
                    parameter.data = changed.to(parameter.dtype)  # `put` restores it
                else:
                    parameter.copy_(changed)

    def _make_quiet(self) -> None:
        for module in self._state.modules if self._quiet else ():
            if self._quiet == _QUIET_ALL or _is_noisy(module):
                module.training = False

    def _together(self) -> Run:
        """Compute the step as in training, with the communication of the wrappers."""
        self._state.restore()
        self._make_quiet()
        flags = SyncFlags(self._coverage)
        self._no_sync = flags.are_off
        self._state.is_in_step = True
        with _noting_forward(self._entered):
            run = evaluate(self._step, self._namespace, self._coverage, self._values, syncs=flags.set, is_together=True)
        self._state.is_in_step = False
        return run

    def _compare(self) -> dict[str, Any]:
        coverage = self._coverage
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._weights = self._other_weights()
        local = self._attempt(lambda: self._local(self._values))
        names = self._all({name: one.numel() for name, one in local.gradients.items()})
        sizes = {name: size for of_rank in names for name, size in of_rank.items()}
        sizes = dict(sorted(sizes.items()))
        self._state.restore()  # with the user's parameters in the modules
        coverage.focus(sizes)
        self._group = coverage.group_of()
        self._groups = self._all(self._group)
        if any(len(one) < self._world for one in self._groups):
            # Ranks that compute one part draw other random numbers than one process.
            self._quiet = self._local_quiet = _QUIET_ALL
            local = self._attempt(lambda: self._local(self._values))
        missing = {
            name: ranks for name in sizes if (ranks := [rank for rank in range(self._world) if name not in names[rank]])
        }
        facts = self._facts(local, sizes, missing)
        if facts["hangs"]:
            return facts
        together = self._together()
        facts["mixed_shards"] = self._mixed_shards(together)
        self._complete(together, sizes)
        # After the step of all ranks: DDP orders its buckets in the next forward pass, which all ranks must call.
        nudged = self._attempt(lambda: self._local(self._values, nudge=facts["unit"]))
        runs = {"local": local, "nudged": nudged, "together": together}
        intended = self._intended(local, sizes, together.variables)
        facts |= {"together_losses": self._all(together.loss), "no_sync": any(self._all(self._no_sync))}
        self._compare_whole(runs, facts)
        gradients = {name: run.gradients for name, run in runs.items()} | intended
        self._state.restore()
        matrices = inner_products(list(gradients.values()), sizes, self._device())
        facts |= {"runs": list(gradients), "matrices": matrices, "repeat": None}
        if any(self._all(matrices is not None and self._differs(matrices, list(gradients), facts["unit"]))):
            facts["repeat"] = self._repeat(local, facts["unit"])
        return facts

    def _differs(self, matrices: Mapping[str, Any], runs: Sequence[str], unit: float) -> bool:
        """Return whether the step of all ranks may differ from the average of the parts by more than rounding.

        If both are equal, the step can be repeated. The notebook decides with more facts if a difference counts.
        """
        parts = self._groups[0]
        average = np.zeros(len(runs) * self._world)
        for rank in parts:
            average[rank * len(runs) + runs.index("local")] = 1 / len(parts)
        for rank in range(self._world):
            off = average.copy()
            off[rank * len(runs) + runs.index("together")] -= 1
            if any(
                off @ matrix @ off > (_MARGIN * unit) ** 2 * (average @ matrix @ average)
                for matrix in matrices.values()
            ):
                return True
        return False

    def _repeat(self, local: Run, unit: float) -> list[dict[str, float]]:
        """Return how far the gradients of a second local step are off, in rounding errors, by rank and parameter."""
        quiet, self._quiet = self._quiet, self._local_quiet
        again = self._attempt(lambda: self._local(self._values))
        self._quiet = quiet
        off: dict[str, float] = {}
        total = math.sqrt(sum(float(one.double().square().sum()) for one in local.gradients.values()))
        for name, gradient in local.gradients.items():
            size = max(unit * float(gradient.double().norm()), _RESOLUTION * total)
            other = again.gradients.get(name)
            difference = math.inf if other is None else float((other.double() - gradient.double()).norm())
            off[name] = difference / size if size else 0.0
        return self._all(off)

    def _device(self) -> torch.device:
        if "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # ---- what the ranks hold

    def _other_weights(self) -> dict[str, dict[int, float]]:
        """Return the tensors of the models that differ between ranks: by name and rank the relative difference to
        rank 0. Infinity: the shape differs."""
        tensors = {name: one for name, one in sorted(self._coverage.tensors().items()) if not isinstance(one, DTensor)}
        tensors = dict(sorted((tensors | self._full.flat).items()))
        marks = self._attempt(
            lambda: {name: (tuple(one.shape), str(one.dtype), _checksum(one)) for name, one in tensors.items()}
        )
        all_marks = self._all(marks)
        self._buffers = self._with_first(
            [one for model in self._coverage.ddp if model.broadcast_buffers for one in model.module.buffers()]
        )
        # FSDP keeps other statistics of BatchNorm on each rank.
        self._common = list(self._buffers) or self._with_first(
            [one for root in self._coverage.roots.values() for one in torch.nn.Module.buffers(root)]
        )
        found: dict[str, dict[int, float]] = {}
        self._largest: dict[str, float] = {}  # largest absolute difference of an element, by parameter
        for name in all_marks[0]:
            of_ranks = [marks.get(name) for marks in all_marks]
            others = [rank for rank, mark in enumerate(of_ranks) if mark is not None and mark != of_ranks[0]]
            if not others:
                continue
            if any(mark is None or mark[:2] != of_ranks[0][:2] for mark in of_ranks):
                found[name] = dict.fromkeys(others, float("inf"))
                continue
            first = self._of_first(tensors[name])
            gap = (tensors[name].detach() - first).double()
            by_rank = self._all((float(gap.norm() / first.double().norm().clamp_min(1e-30)), float(gap.abs().max())))
            found[name] = {rank: by_rank[rank][0] for rank in others}
            self._largest[name] = max(by_rank[rank][1] for rank in others)
            if name in self._full.flat:
                self._full.set_first(name, first)
            else:
                self._common.append((tensors[name], first))
        self._copies = self._other_copies()
        return found | self._copies

    def _with_first(self, buffers: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return buffers with their values on rank 0, or nothing if they are equal on all ranks."""
        buffers = list({id(one): one for one in buffers if has_values(one)}.values())
        shapes = self._all([(tuple(one.shape), str(one.dtype)) for one in buffers])
        marks = self._all(self._attempt(lambda: [_checksum(one) for one in buffers]))
        if any(one != shapes[0] for one in shapes) or all(one == marks[0] for one in marks):
            return []
        return [(one, self._of_first(one)) for one in buffers]

    def _other_copies(self) -> dict[str, dict[int, float]]:
        """Return the sharded parameters whose copies differ, such as the replicas of HSDP, like `_other_weights`."""
        own: dict[str, tuple[list[int], str]] = {}
        shards: dict[str, torch.Tensor] = {}
        for name, one in sorted(self._coverage.tensors().items()):
            if not isinstance(one, DTensor) or (place := one.device_mesh.get_coordinate()) is None:
                continue
            replicated = [placement.is_replicate() for placement in one.placements]
            if any(replicated):
                shards[name] = one.to_local().detach()
                shard = [at for at, is_copy in zip(place, replicated, strict=True) if not is_copy]
                own[name] = (shard, _checksum(shards[name]))
        by_rank = self._all(own)
        found: dict[str, dict[int, float]] = {}
        for name in sorted({name for of_rank in by_rank for name in of_rank}):
            firsts: dict[tuple[int, ...], int] = {}  # first rank with each shard
            others: dict[int, int] = {}  # ranks with another copy than the first one
            for rank, of_rank in enumerate(by_rank):
                if name in of_rank:
                    first = firsts.setdefault(tuple(of_rank[name][0]), rank)
                    if of_rank[name] != by_rank[first][name]:
                        others[rank] = first
            if others:
                values = self._all(shards[name].cpu().double() if name in shards else None)
                gaps = {rank: values[rank] - values[first] for rank, first in others.items()}
                found[name] = {
                    rank: float(gap.norm() / values[others[rank]].norm().clamp_min(1e-30)) for rank, gap in gaps.items()
                }
                self._largest[name] = max(float(gap.abs().max()) for gap in gaps.values())
        return found

    def _other_options(self) -> list[tuple[str, str, list[float]]]:
        """Return the options of optimizers that differ between ranks: variable, option and the values of the ranks.

        Only optimizers count whose parameters belong to a model of the step.
        """
        own = {id(one) for one in self._coverage.parameters().values()}
        found: dict[tuple[str, int, str], float] = {}
        for name, value in sorted(self._namespace.items()):
            if not isinstance(value, torch.optim.Optimizer) or name.startswith("_"):
                continue
            for at, group in enumerate(value.param_groups):
                if any(id(one) in own for one in group["params"]):
                    numbers = {key: one for key, one in group.items() if isinstance(one, float)}
                    found |= {(name, at, key): one for key, one in numbers.items()}
        by_rank = self._all(found)
        return [
            (key[0], key[2], values)
            for key in by_rank[0]
            if all(key in one for one in by_rank) and len(set(values := [one[key] for one in by_rank])) > 1
        ]

    def _of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, 0)
        return received

    def _facts(self, local: Run, sizes: dict[str, int], missing: dict[str, list[int]]) -> dict[str, Any]:
        coverage = self._coverage
        causes = coverage.causes()
        hooks = [hook for model in coverage.ddp for hook in getattr(model, "_comm_hooks", ())]
        dtypes = self._all([str(one).removeprefix("torch.") for one in self._types(local, hooks)])
        modules = coverage.modules_of(sizes)
        return {
            **self._facts_of_batch(),
            **self._facts_of_reducer(sizes, missing, causes),
            "world": self._world,
            "wrapper": coverage.wrapper(),
            "losses": self._all(local.loss),
            "sizes": sizes,
            "causes": causes,
            "weights": self._weights,
            "largest": self._largest,
            "options": self._other_options() if self._weights else [],
            "copies": sorted(self._copies),
            "missing": missing,
            "hook": next((_name_of(hook) for hook, _ in hooks), ""),
            "unit": max(torch.finfo(getattr(torch, one)).eps for of_rank in dtypes for one in of_rank),
            "dtypes": sorted({one for of_rank in dtypes for one in of_rank}),
            # On a GPU, kernels of the backward may add in another order each time.
            "is_eager": not any(map(_is_compiled, modules)) and not coverage.is_sharded and not _are_on_gpu(modules),
            "drops": any(self._all(local.drew_random or any(map(_drops, modules)))),
            "norms": sorted({type(one).__name__ for one in modules if _has_batch_statistics(one)}),
            "gradient_hooks": sorted(coverage.user_hooks()),
            "divide_factor": self._divide_factor(),
            "prefixes": list(coverage.roots),
            "left": self._left(),
            "plain": sorted(name for name, one in self._namespace.items() if isinstance(one, torch.Tensor)),
        }

    def _left(self) -> list[tuple[str, str]]:
        """Return the objects that the step reads and that cannot be restored, with the reasons."""
        read = names_read(f"{self._step.before}\n{self._step.loss}", self._namespace)
        return [(place, why) for place, why in self._state.left.items() if re.split(r"\W", place)[0] in read][
            :_MOST_LEFT
        ]

    def _facts_of_batch(self) -> dict[str, Any]:
        hashes = self._all(batches.samples(self._values))
        parts = self._groups[0]
        part_of = self._all(self._group.index(self._rank) if self._rank in self._group else 0)
        of_parts = [hashes[rank] for rank in parts]
        return {
            "parts": parts,
            "rows": self._all(batches.rows_of(self._values)),
            "counts": self._all(batches.counts(self._values)),
            "micro": self._step.micro,
            "divides": self._step.divides,
            "sized": next((name for name, one in self._values.items() if _has_length(one, self._values)), ""),
            "samples": sum(map(len, of_parts)),
            "same_batch": len(parts) > 1 and bool(hashes[0]) and all(one == hashes[0] for one in of_parts),
            "overlap": batches.overlap(of_parts),
            "other_batch": [rank for rank in range(self._world) if hashes[rank] != hashes[parts[part_of[rank]]]],
        }

    def _facts_of_reducer(
        self, sizes: dict[str, int], missing: dict[str, list[int]], causes: dict[str, str]
    ) -> dict[str, Any]:
        """Return parameters for which DDP would wait in the step of all ranks, which then is not computed."""
        models = self._coverage.ddp
        entered = all(self._all(any(id(one) in self._entered for one in models)))
        needs_all = entered and not any(one.find_unused_parameters or one.static_graph for one in models)
        covered = set(self._coverage.parameters()) - set(causes) if models and needs_all else set()
        if entered and any(one.static_graph for one in models):
            left = sorted(set(self._coverage.parameters()) - set(causes) - (set(sizes) - set(missing)))
            if any(self._all(bool(left))):
                raise RefusedError(
                    f"the loss does not depend on {', '.join(left[:3]) or 'a parameter'} on all ranks, and a DDP model "
                    "with static_graph=True may wait for it"
                )
        never = sorted(set[str]().union(*self._all(covered - set(sizes))))
        return {
            "never": never,
            "hangs": any(self._all(bool(never) or bool(covered & set(missing)))),
            "forward_bypassed": bool(models) and not entered,
        }

    def _divide_factor(self) -> float | None:
        groups = [one for module in self._coverage.fsdp2 for one in module._get_fsdp_state()._fsdp_param_groups]
        return next((one.gradient_divide_factor for one in groups if one.gradient_divide_factor), None)

    def _types(self, local: Run, hooks: Sequence[Any]) -> set[torch.dtype]:
        found = set(local.dtypes) | {one.dtype for one in local.gradients.values() if one.is_floating_point()}
        for hook, _ in hooks:
            found |= {dtype for part, dtype in _HOOK_TYPES.items() if part in _name_of(hook)}
        for module in self._coverage.fsdp2:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found |= {one for one in (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype) if one is not None}
        return found

    # ---- after the step together

    def _complete(self, run: Run, sizes: dict[str, int]) -> None:
        """Replace sharded gradients by complete ones. All ranks call it at the same time."""
        have = self._all(sorted(run.gradients))
        for name in sizes:
            gradient = run.gradients.get(name)
            if isinstance(gradient, DTensor) and all(name in of_rank for of_rank in have):
                run.gradients[name] = gradient.full_tensor()
        run.gradients |= self._coverage.flat.complete_gradients()
        run.gradients = {name: one for name, one in run.gradients.items() if not isinstance(one, DTensor)}

    def _mixed_shards(self, run: Run) -> list[str]:
        """Return the sharded parameters for which the statements after `backward` have combined the ranks' shards.

        Ranks hold different elements of a sharded gradient. After a collective, all have the sum or mean of the shards.
        """
        if not self._step.after:
            return []
        marks = {
            name: (_checksum(before), _checksum(after.to_local()))
            for name, before in run.shards.items()
            if isinstance(after := run.gradients.get(name), DTensor)
        }
        by_rank = self._all(marks)
        found = []
        for name in sorted(by_rank[0]):
            of_ranks = [one.get(name, ("", "")) for one in by_rank]
            if len({before for before, _ in of_ranks}) == 1 or len({after for _, after in of_ranks}) > 1:
                continue  # elementwise statements keep equal shards equal
            shards = [one.double() for one in self._all(run.shards[name].cpu())]
            if len({one.shape for one in shards}) > 1:
                continue
            total, largest = sum(shards), max(float(one.abs().max()) for one in shards)
            limit = _MARGIN * self._world * torch.finfo(run.shards[name].dtype).eps * largest
            gradient: Any = run.gradients[name]
            after = gradient.to_local().cpu().double()
            if any(float((one - after).abs().max()) <= limit for one in (total, total / self._world)):
                found.append(name)
        return found

    def _intended(
        self, local: Run, sizes: dict[str, int], variables: Mapping[str, Any]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the gradients that the user's hooks and statements make of the average, and of the rank's own part.

        Args:
            variables: variables before the statements after `backward`.

        Returns nothing if there are no hooks and no statements after `backward`.
        """
        self._state.restore()
        hooked = {name: one for name, one in self._coverage.user_hooks().items() if not isinstance(one, DTensor)}
        if not any(self._all(bool(hooked) or bool(self._step.after))):
            return {}
        parameters = self._coverage.parameters()
        averages, own = {}, dict(local.gradients)
        for name in sizes:
            average = torch.zeros(parameters[name].shape, dtype=torch.float64, device=parameters[name].device)
            if self._rank in self._groups[0] and name in local.gradients:
                average += local.gradients[name].double()
            dist.all_reduce(average)
            averages[name] = (average / len(self._groups[0])).to(parameters[name].dtype)

        def change() -> dict[str, torch.Tensor]:
            for name, parameter in hooked.items():
                for hook in list((parameter._backward_hooks or {}).values()):
                    for gradients in (averages, own):
                        if name in gradients and (changed := hook(gradients[name].clone())) is not None:
                            gradients[name] = changed
            return averages

        self._attempt(change)
        if not self._step.after:
            return {"intended": averages, "changed": own}
        self._state.restore()
        self._namespace.update(variables)
        for name, average in averages.items():
            parameters[name].grad = _as(parameters[name], average.clone())
        exec(compile(self._step.after, "<step>", "exec"), self._namespace)  # type: ignore[arg-type]
        run = Run(loss=0.0, gradients={name: one for name in sizes if (one := parameters[name].grad) is not None})
        self._complete(run, sizes)
        return {"intended": run.gradients, "changed": own}

    # ---- the whole batch on one process

    def _compare_whole(self, runs: dict[str, Run], facts: dict[str, Any]) -> None:
        """Add the runs `quiet` and `whole`, or the fact `no_whole`: why there is no run of the whole batch."""
        facts |= {"no_whole": "", "whole_loss": None, "shortage": "", "loss_is": ""}
        parts = self._groups[0]
        if len(parts) < 2:
            facts["no_whole"] = "one part"
            return
        try:
            runs["quiet"] = self._quiet_run(runs["local"])
            facts["shortage"] = self._shortage(runs["local"])
            if facts["shortage"]:
                run = self._whole_in_parts(facts)
            else:
                whole = self._whole_batch(parts)
                run = self._attempt(lambda: self._run_whole(whole))
        except RefusedError as error:
            facts["no_whole"] = str(error)
            runs.pop("quiet", None)
            return
        if any(self._all(bool(runs["quiet"].by_rows))):
            gradients = runs["quiet"].by_rows or runs["quiet"].gradients
            runs["quiet_rows"] = Run(loss=runs["quiet"].loss, gradients=gradients)
        runs["whole"] = run
        facts["quiet_losses"] = losses = self._all(runs["quiet"].loss)
        facts["whole_loss"] = self._all(run.loss)[0]
        average = sum(losses[rank] for rank in parts) / len(parts)
        # A factor of the world size changes the loss. Only then the step is computed in another world.
        needs = not abs(average - facts["whole_loss"]) <= _CLOSE * abs(facts["whole_loss"])
        facts["alone_losses"] = self._all(self._alone_loss() if needs else None)

    def _quiet_run(self, local: Run) -> Run:
        is_noisy = any(map(_is_noisy, self._state.modules)) and self._quiet < _QUIET_ALL
        is_uneven = batches.rows_of(self._values) % self._step.micro > 0
        if not any(self._all(is_noisy or local.drew_random or bool(self._common or self._weights) or is_uneven)):
            return local  # nothing to silence
        for level in (_QUIET_MODULES, _QUIET_ALL):
            self._quiet = max(level, self._quiet)
            run: Run = self._attempt(lambda: self._local(self._values, common=True))
            if not any(self._all(run.drew_random)):
                return run
        raise RefusedError("the loss draws random numbers, apart from dropout")

    def _whole_batch(self, parts: Sequence[int]) -> dict[str, Any]:
        rows = [self._all(batches.rows_of(self._values))[rank] for rank in parts]
        values = self._values | {name: self._namespace[name] for name in self._carried()}
        everything = self._gather(batches.on_cpu(values), parts[:2])
        places = range(len(parts))

        def join() -> dict[str, Any]:
            order = places if self._rank == parts[0] else places[::-1]
            joined: dict[str, Any] = {}
            if not everything:
                return joined
            for name in values:
                of_ranks, is_batch = [everything[parts[at]][name] for at in order], name in self._values
                joined[name] = batches.join(of_ranks, name, [rows[at] for at in order], is_batch=is_batch)
            return dict(batches.on_device(joined, _device_of(values)))

        self._state.restore()
        return dict(self._attempt(join))

    def _gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the values of all ranks on some ranks, and an empty list on others."""
        found: list[Any] = []
        for rank in ranks:
            gathered: list[Any] | None = [None] * self._world if rank == self._rank else None
            dist.gather_object(value, gathered, rank)
            found = gathered or found
        return found

    def _shortage(self, local: Run) -> str:
        """Return a clause if the whole batch does not fit on one of the ranks that compute it."""
        parts = self._groups[0]
        rows = self._all(batches.rows_of(self._values))
        share = rows[self._rank] / max(1, sum(rows[rank] for rank in parts))
        problem = ""
        if share and self._rank in parts[:2]:
            free = memory.free_bytes(_device_of(self._values), self._ranks_on_host)
            needed = memory.whole_bytes(local.saved_bytes * self._step.micro, batches.nbytes(self._values), share)
            problem = memory.shortage(needed, free)
        return next(
            (f"the whole batch needs about {one} on rank {rank}" for rank, one in enumerate(self._all(problem)) if one),
            "",
        )

    def _whole_in_parts(self, facts: dict[str, Any]) -> Run:
        """Return the gradients of the whole batch from those of the ranks' parts.

        Each rank splits its part, to see whether the loss is a mean or a sum over samples. Then so is the loss of the
        whole batch.

        Raises:
            RefusedError: it is neither, or a rank has fewer than two samples.
        """
        parts, unit = self._groups[0], facts["unit"]
        step = replace(self._step, micro=1)
        rows = batches.rows_of(self._values)
        if any(self._all(rows < _FEWEST_ROWS)):
            raise RefusedError(f"{facts['shortage']}, and a rank has too few samples to compute it in parts")
        part = self._attempt(lambda: self._local(self._values, step=step, common=True, alone=True))
        # Pieces of different sizes, which tell a mean from a sum.
        counts = [rows // _FEWEST_ROWS, rows - rows // _FEWEST_ROWS]
        pieces = self._attempt(lambda: batches.split_by(self._values, counts))
        of_pieces = [self._attempt(partial(self._local, piece, step=step, common=True, alone=True)) for piece in pieces]
        weights = {"mean": [count / rows for count in counts], "sum": [1.0, 1.0]}
        for kind, factors in weights.items():
            if all(self._all(_are_sum(part, of_pieces, factors, _MOST_ROUNDING * unit))):
                facts["loss_is"] = kind
        if not facts["loss_is"]:
            raise RefusedError(f"{facts['shortage']}, and the loss is neither a mean nor a sum over samples")
        total_rows = sum(self._all(rows)[rank] for rank in parts)
        weight = (rows / total_rows if facts["loss_is"] == "mean" else 1.0) * (self._rank in parts)
        run = Run(loss=sum(one * weight_of for one, weight_of in self._all((part.loss, weight))), gradients={})
        for name in facts["sizes"]:
            total = torch.zeros(facts["sizes"][name], dtype=torch.float64, device=self._device())
            if name in part.gradients:
                total += part.gradients[name].reshape(-1).to(self._device()).double() * weight
            dist.all_reduce(total)
            run.gradients[name] = total
        return run

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
        by_rank = self._all({name: batches.digest(value) for name, value in values.items()})
        shapes = self._all({name: value for name, value in values.items() if isinstance(value, int | float)})
        found = []
        for name in sorted({name for one in by_rank for name in one}):
            if len({one.get(name) for one in by_rank}) == 1:
                continue
            if [one.get(name) for one in shapes] == list(range(self._world)):
                continue  # another name for `rank`
            if any(name not in one for one in by_rank) or any(name in one for one in shapes):
                raise RefusedError(f"{name} differs between ranks, and the step reads it")
            found.append(name)
        return found

    def _run_whole(self, whole: dict[str, Any]) -> Run:
        if self._rank not in self._groups[0][:2]:
            return Run(loss=0.0, gradients={})
        return self._local(whole, common=True, alone=True, step=replace(self._step, micro=1))

    def _alone_loss(self) -> float | None:
        """Return the loss of this rank's part in a world of one rank; None if it cannot be computed."""
        try:
            return self._local(self._values, common=True, alone=True).loss
        except Exception:
            return None


def _are_sum(part: Run, pieces: Sequence[Run], factors: Sequence[float], tolerance: float) -> bool:
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


def _as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a complete gradient in the form of its parameter."""
    if not isinstance(parameter, DTensor):
        return gradient
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_shortened(lines[0])}" if lines else type(error).__name__


def _shortened(text: str) -> str:
    """Return the first sentences of a text, without the last full stop.

    Example:
        >>> _shortened("The graph is freed. Call it again."), _shortened("A first sentence. " + "word " * 60)
        ('The graph is freed. Call it again', 'A first sentence')
    """
    if len(text) > _MOST_CHARS:
        sentences = text[:_MOST_CHARS].rpartition(". ")[0]
        text = sentences or text[:_MOST_CHARS].rpartition(" ")[0] + " ..."
    return text if text.endswith("...") else text.rstrip(".")


def refuse_collective(kernel: Any, _: tuple[Any, ...]) -> Any:
    """Raise an error in place of a collective, which would wait for other ranks."""
    raise _CommunicatesError(kernel.spec.name)


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    return hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def _device_of(values: Any) -> torch.device:
    found = next((one for one in values.values() if isinstance(one, torch.Tensor)), None)
    return torch.device("cpu") if found is None else found.device


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).rpartition(".")[2]


def _are_on_gpu(modules: Sequence[nn.Module]) -> bool:
    return any(one.device.type != "cpu" for module in modules for one in module.parameters(recurse=False))


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _has_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def _is_noisy(module: nn.Module) -> bool:
    """Return whether a module drops values or uses statistics of its batch now."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
        return True
    return any("drop" in name and isinstance(one, float) and one > 0 for name, one in vars(module).items())


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops values now."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(one, float) and one > 0 for name, one in vars(module).items())


def _has_length(value: Any, values: Mapping[str, Any]) -> bool:
    """Return whether `len(value)` is the number of samples of a batch."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batches.rows_of(values)


@contextlib.contextmanager
def _eager(modules: Sequence[nn.Module]) -> Any:
    """Run compiled modules eagerly: one process must not compile again for each size of a batch."""
    if any(map(_is_compiled, modules)):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextlib.contextmanager
def _noting_forward(entered: set[int]) -> Any:
    """Add the id of each DDP model whose `forward` is called."""
    original = DistributedDataParallel._pre_forward

    def _pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        entered.add(id(self))
        return original(self, *args, **kwargs)

    DistributedDataParallel._pre_forward = _pre_forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel._pre_forward = original  # type: ignore[method-assign]
