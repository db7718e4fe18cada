"""Run one training step in several forms, and return facts about the results.

| run | gradients of | computed | local steps |
|---|---|---|---|
| local | the rank's part | without communication, with the same random state | 1 |
| together | the rank's part | by all ranks together, as in training | 1 |
| nudged | the rank's part | as local, with parameters that are changed by one rounding error | 1 |
| quiet | the rank's part | as local, with the parameters of rank 0, without dropout and batch statistics | 0 or 1 |
| quiet_rows | the rank's part | in the run quiet, with micro-steps that count by their number of samples | 0 |
| whole | the whole batch | as quiet, on rank 0, and on the second rank in the opposite order | parts |
| whole, in parts | the whole batch | from the rank's part and two pieces of it, if it does not fit on one rank | 2 |
| intended | none | local gradients after their average, with the user's hooks and later statements | 0 |
| repeat | the rank's part | as local, in place of quiet and whole, if losses and gradients change too much | 1 |

A local step is the forward and the backward pass of the largest part of the batch of a rank, in all its micro-steps.
The whole batch has at most `parts` times as many samples, so it counts as `parts` local steps: the number of ranks with
different parts. Ranks compute their steps at the same time. Ranks that compute one part together, such as in tensor
parallel, compute `local` twice if it draws random numbers. They have at most `world_size / 2` parts. So each rank
computes at most `2 * world_size + 2` local steps.

`ddp_notebook.run.verify.causes` derives sentences from the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.verify import batches, facts, memory, noise
from ddp_notebook.rank.verify.copies import Copies, checksum
from ddp_notebook.rank.verify.coverage import Coverage, main_module
from ddp_notebook.rank.verify.local_model import FullParameters, reshard
from ddp_notebook.rank.verify.model_state import ModelState, all_modules
from ddp_notebook.rank.verify.noise import Draws
from ddp_notebook.rank.verify.products import inner_products
from ddp_notebook.rank.verify.ranks import Ranks, RefusedError
from ddp_notebook.rank.verify.reads import names_read
from ddp_notebook.rank.verify.repeats import may_change, rounding_errors
from ddp_notebook.rank.verify.runs import Runs
from ddp_notebook.rank.verify.statements import Intended, complete, mixed_shards
from ddp_notebook.rank.verify.step import Run, Step, StepError
from ddp_notebook.rank.verify.whole import WholeBatch
from ddp_notebook.stdlib import re

_MOST_LEFT = 3


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
        self._text = f"{step.before}\n{step.loss}"
        self._main = main
        self._recorder = recorder
        self._hidden = hidden
        self._keep = keep
        self._ranks = Ranks(self._remedy)

    def run(self) -> dict[str, Any] | None:
        """Return the facts on rank 0, None on other ranks.

        Raises:
            RefusedError: the step cannot be compared.
        """
        ranks = self._ranks
        ranks.attempt(self._check_names)
        self._ranks_on_host = ranks.all(memory.host_name()).count(memory.host_name())
        self._state = state = ranks.attempt(self._save, "copying the variables failed")
        self._keep(state)
        self._values = ranks.attempt(self._batch)
        if self._values and not ranks.any(batches.rows_of(self._values)):
            raise RefusedError(f"the batch has no samples on any rank: {', '.join(self._values)}")
        main = self._main or main_module(self._namespace, self._text)
        self._coverage = coverage = ranks.attempt(lambda: Coverage(self._namespace, main, state, self._values))
        ranks.attempt(self._check_support)
        full = ranks.attempt(lambda: FullParameters(state.modules, coverage))
        self._copies = Copies(ranks, coverage, full)
        self._runs = Runs(self._namespace, self._step, self._recorder, state, coverage, full, self._copies)
        found = self._compare()
        return found if ranks.rank == 0 else None

    # ---- before the first run

    def _save(self) -> ModelState:
        modules = all_modules()
        reshard(modules)
        state = ModelState(self._namespace, self._hidden, modules)
        parameters = [one for module in modules for one in module.parameters(recurse=False)]
        on_host, on_device = state.nbytes, memory.gradient_bytes(parameters)  # copies of variables are on the host
        if self._ranks.device.type == "cpu":
            on_host, on_device = on_host + on_device, 0
        for needed, device in ((on_host, torch.device("cpu")), (on_device, self._ranks.device)):
            free = memory.free_bytes(device, self._ranks_on_host)
            if sizes := memory.shortage(needed, free):
                raise StepError(f"copies of the variables and gradients need about {sizes}")
        state.take()
        return state

    def _computed(self) -> list[str]:
        """Return the variables that the step reads and that were computed with a gradient before it."""
        return sorted(
            name
            for name in names_read(self._text, self._namespace)
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
        for name in sorted(names_read(self._text, self._namespace)):
            module = self._namespace.get(name)
            if isinstance(module, nn.Module) and any(map(is_lazy, module.parameters())):
                raise StepError(f"parameters of {name} have no values yet: run a training step first")
        own = {id(one) for root in self._coverage.roots.values() for one in root.modules()}
        for one in self._coverage.ddp:
            if one.static_graph and id(one) in own and not one._static_graph_delay_allreduce_enqueued:
                raise StepError(
                    "a DDP model with static_graph=True records its graph in its first step: run a training step first"
                )
        self._check_steps_in_backward(names_read(self._text, self._namespace))

    # ---- the runs

    def _compare(self) -> dict[str, Any]:
        ranks, coverage, runs = self._ranks, self._coverage, self._runs
        local = ranks.attempt(lambda: runs.local(self._values))
        names = ranks.all({name: one.numel() for name, one in local.gradients.items()})
        sizes = dict(sorted({name: size for of_rank in names for name, size in of_rank.items()}.items()))
        self._state.restore()  # with the user's parameters in the modules
        ranks.attempt(lambda: self._check_steps_in_backward(coverage.in_graph))
        if not sizes:
            raise RefusedError(f"no parameter of a model takes part in {self._step.loss}")
        coverage.focus(sizes)
        group = coverage.group_of()
        if ranks.any(len(group) < ranks.world) and ranks.any(self._is_noisy(local)):
            # Ranks that compute one part draw other random numbers than one process.
            runs.silenced = noise.ALL_MODULES
            local = ranks.attempt(lambda: runs.local(self._values))
            self._state.restore()
        found = {
            **facts.of_batch(ranks, self._values, self._step, group),
            **facts.of_reducer(ranks, coverage, runs, sizes, names),
            **facts.of_models(ranks, coverage, self._copies, runs, local, sizes, self._namespace),
            "left": self._left(),
        }
        if found["hangs"]:
            return found
        parts, unit = found["parts"], found["unit"]
        together = self._together()
        found |= {"mixed_shards": mixed_shards(together, ranks), "no_sync": ranks.any(runs.no_sync)}
        complete(together, ranks, coverage, sizes)
        # After the step of all ranks: DDP orders its buckets in the next forward pass, which all ranks must call.
        draws = Draws() if local.drew_random else None
        nudged = ranks.attempt(lambda: runs.local(self._values, nudge=unit, draws=draws))
        intended = Intended(ranks, coverage, self._namespace, self._step, self._state, parts)
        others = intended.gradients(local, sizes, together.variables)
        self._state.restore()
        all_runs = {"local": local, "nudged": nudged, "together": together}
        found |= {"repeat": None, "no_whole": "", "whole_loss": None, "shortage": "", "loss_is": "", "on_one": None}
        if may_change(ranks, local, nudged, together, parts=parts, sizes=sizes, unit=unit):
            again = ranks.attempt(lambda: runs.local(self._values))
            found["repeat"] = ranks.all(rounding_errors(local, again, unit))
            found["no_whole"] = "the loss changes by more than rounding errors if the step is repeated"
        elif len(parts) < 2:
            found["no_whole"] = "one part"
        else:
            whole = WholeBatch(ranks, runs, self._state, self._namespace, self._step, self._values, parts, self._copies)
            try:
                more, of_whole = whole.compare(
                    local, draws is not None and draws.are_outside, sizes, unit, self._ranks_on_host
                )
                all_runs |= more
                found |= of_whole
            except RefusedError as error:
                found["no_whole"] = str(error)
        gradients = {name: run.gradients for name, run in all_runs.items()} | others
        self._state.restore()
        return {
            **found,
            "runs": list(gradients),
            "matrices": inner_products(list(gradients.values()), sizes, ranks.device),
        }

    def _is_noisy(self, local: Run) -> bool:
        return local.drew_random or any(map(noise.is_noisy, self._state.modules))

    def _check_steps_in_backward(self, names: Iterable[str]) -> None:
        if reason := self._coverage.steps_in_backward(names):
            raise StepError(reason)

    def _together(self) -> Run:
        """Return the step of all ranks.

        Raises:
            RefusedError: a hook has changed parameters, such as an optimizer's step in backward.
        """
        coverage = self._coverage
        hooks = [hook for model in coverage.ddp for hook in getattr(model, "_comm_hooks", ())]
        watched = coverage.local_parameters() if hooks else {}
        watched |= {name: one for name, one in coverage.user_hooks().items() if name in coverage.local_parameters()}
        before = {name: checksum(one) for name, one in watched.items()}
        run = self._runs.together(self._values)
        changed = [name for name, mark in before.items() if checksum(watched[name]) != mark]
        self._ranks.attempt(lambda: self._refuse_changed(changed))
        return run

    @staticmethod
    def _refuse_changed(names: list[str]) -> None:
        if names:
            raise StepError(
                f"a hook changes {names[0]} during backward, such as an optimizer step in backward: the gradient "
                "cannot be compared"
            )

    def _left(self) -> list[tuple[str, str]]:
        """Return the objects that the step reads and that cannot be restored, with the reasons."""
        read = names_read(self._text, self._namespace)
        return [(place, why) for place, why in self._state.left.items() if re.split(r"\W", place)[0] in read][
            :_MOST_LEFT
        ]
