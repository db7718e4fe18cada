"""Gradients of each optimizer step: which ones exist, and whether DDP has averaged them.

In a step without findings, the training thread only looks whether each gradient exists, and reads a few elements of
one.
The first step for which something holds is kept, with the facts that the sentence needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from ddp_notebook.rank.findings.clipping import Clipping
from ddp_notebook.rank.findings.loaded_names import LoadedNames
from ddp_notebook.rank.findings.operations import Operations
from ddp_notebook.rank.findings.optimizer_parameters import (
    UNKNOWN,
    ModelCounts,
    OptimizerParameters,
    SinceAverage,
    Unheld,
    has_several_ranks,
    model_name,
    names_of,
    parameters_of,
    ranks_of,
    variable_of,
    version_of,
)
from ddp_notebook.rank.findings.outside_parameters import OutsideParameters, has_unreduced_gradients
from ddp_notebook.rank.findings.partial_outputs import has_partial
from ddp_notebook.rank.findings.passes import Passes
from ddp_notebook.rank.findings.random_draws import RandomDraws
from ddp_notebook.rank.findings.reductions import Reductions
from ddp_notebook.rank.findings.resets import Resets
from ddp_notebook.rank.findings.sharded_weights import ShardedWeights
from ddp_notebook.rank.findings.tensor_checks import InputChecksums, are_finite, are_zero, is_finite
from ddp_notebook.rank.findings.values import Values
from ddp_notebook.rank.group.call_site import calls_of
from ddp_notebook.rank.record.event_buffer import OFF
from ddp_notebook.rank.record.training.buckets import Model
from ddp_notebook.rank.record.training.spans import TrainingSpans
from ddp_notebook.rank.record.training.step_observer import StepObserver, tell
from ddp_notebook.rank.record.training.wrapping import around, passed_over
from ddp_notebook.rank.variables.owners import is_in_a_module
from ddp_notebook.stdlib import threading, weakref

_CONSECUTIVE = 2  # steps without averaging before a finding: one step may be part of a longer period
_ZERO = 3  # steps with zero gradients before a finding: one may have a loss without gradients
_FEW = 4  # first steps of a cell; only these read gradients on a GPU, which waits for it
# Communication may have averaged the gradients, perhaps compressed, if it has more elements than a few numbers for the
# progress of training, and a part of the gradients' elements.
_NUMBERS, _PART = 16, 1000
_MOST_ZEROED = 64
# Steps whose gradients are looked at: the first ones of an optimizer in a cell, then each eighth, and unusual ones.
_FIRST, _EACH = 16, 8
_EXPLAIN_APART = {"ddp-bypassed", "loss-without-path", "no-gradient", "optimizer-of-another-model"}
_MOST_GRAPHS = 4  # first losses of a cell, in whose graphs partial DTensors are looked for


class StepFacts(StepObserver):
    """Facts about the steps of the running cell.

    Args:
        training: observes the steps.
        namespace: returns the user's variables.
        place: describes the innermost of some calls, each with file, line and function.
        cells: files of cells.
    """

    def __init__(
        self,
        training: TrainingSpans,
        namespace: Callable[[], Mapping[str, Any]],
        place: Callable[[list[tuple[str, int, str]]], str],
        cells: Mapping[str, int],
    ) -> None:
        self._training = training
        self._event_buffer = training.event_buffer
        self._namespace = namespace
        self._main = threading.get_ident()
        self._held: weakref.WeakKeyDictionary[Any, OptimizerParameters] = weakref.WeakKeyDictionary()
        self._facts: dict[str, list[Any]] = {}
        self._seen: dict[str, ModelCounts] = {}  # counts by the name of the DDP model
        self._roots: dict[int, Callable[[], Any]] = {}  # roots of FSDP models with a forward in this cell
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # FSDP's groups by module
        self._group_of_root: dict[int, Callable[[], Any]] = {}  # first group of each root
        self._backwards = 0
        self._forwards = 0  # forwards of DDP and FSDP models
        self._unknown = 0  # backwards that averaged buckets of an unknown model
        self._zeroed_before = 0  # number of entries of `_zeroed` from before the step
        self._zeroed: list[Callable[[], Any]] = []  # optimizers and modules with `zero_grad` after the last backward
        self._steps = self._elements = 0
        self._wrapped: Callable[[], Any] | None = None  # a DDP model with parameters of an optimizer
        self._outside: tuple[int, OutsideParameters] | None = None  # with the step
        self._of_cell: list[OptimizerParameters] = []
        self._unheld = Unheld()
        self._batches = InputChecksums()
        self._draws = RandomDraws(lambda: training.event_buffer.level != OFF)
        self._first_model: Any = None  # the model with the first training forward of the cell, until the first step
        self._drawn: dict[str, Any] = {}  # name and ranks of the model with the first training forward of the cell
        # The first model with a forward in this cell, with its name and ranks
        self._of_inputs: tuple[Callable[[], Any], str, list[int]] | None = None
        self._has_bad_loss = False  # since the last step
        self.passes = Passes(self.note)
        self._values = Values(cells, lambda call: place(calls_of(call.site)), self._named_parameters)
        self._reductions = Reductions(self.note, self._averaged_models, self._title_of_model)
        begun = self._values.begun, self._reductions.begun
        self.operations = Operations(self.note, lambda call: place(calls_of(call.site)), begun)
        self._averaged: list[Model] = []  # models of which the last backward has averaged all gradients
        self._has_partial = False  # the loss of the last backward is a function of a partial DTensor
        self._clipping = Clipping(self.note)
        self._resets = Resets(self.note, lambda one: variable_of(one, namespace()))
        self._weights = ShardedWeights()
        self._loaded_names = LoadedNames(lambda: place(_calls_around()))
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            around(owner, "zero_grad", self._around_zero_grad)

    def note(self, name: str, step: int, **details: Any) -> None:
        """Keep a fact, if it is the first one of its name in the cell."""
        self._facts.setdefault(name, [name, step, details])

    # ---- cells

    def begin_cell(self) -> None:
        """Forget the facts of the last cell."""
        has_trained = self._steps or self._backwards or self._forwards
        if has_trained:
            self._seen.clear()
            self._roots.clear()
            self._steps = self._backwards = self._forwards = self._unknown = 0
            self._zeroed.clear()
            for held in self._of_cell:
                held.begin_cell()
            self._of_cell.clear()
            self._wrapped = self._outside = None
            self._group_of_root.clear()
            self._unheld.begin_cell()
            self._averaged.clear()
            self._has_partial = False
            self._clipping.begin_cell()
            self._resets.begin_cell()
        if has_trained or self._reductions.are_used:
            self._reductions.begin_cell()
        self._loaded_names.found.clear()
        self._facts.clear()
        self._has_bad_loss = False
        if self._of_inputs is not None:
            self._of_inputs = None
            self._batches.begin_cell()
        self.operations.calls.clear()
        if self._draws.are_used:
            self._draws.begin_cell()
        self._drawn, self._first_model = {}, None
        self._training.forward_begins = self._draws.forward_begins
        if self._values.are_used:
            self._values.begin_cell()
        self._elements = self._event_buffer.elements
        if self.passes.are_used:
            self.passes.begin_cell()

    def end_cell(self, *, trains_apart: bool) -> Sequence[Sequence[Any]]:
        """Return the facts of the cell: name, step and details of each."""
        if self._draws.are_used:
            self._draws.end_cell()
        if self._values.are_used and (calls := self._values.calls):
            self.note("values", 0, calls=calls)
        for details in self._loaded_names.found.values():
            self.note("nothing-loaded", 0, **details)
        if not self._steps:
            return list(self._facts.values())
        # An error in one part must not hide what the others have found.
        tell(self._note_optimizers)
        tell(self._resets.end_cell, self._of_cell)
        tell(self._note_norms)
        if not trains_apart:
            self.note("communicates", 1)  # rows of calls without a wait may arrive after a report is made
        has_gradients = any(len(held.never or ()) < held.count for held in self._of_cell)
        if trains_apart and not self._backwards and not has_gradients:
            self.note("idle", 1)  # for example, a loop over the learning rates of a scheduler
        elif trains_apart and self._of_cell and all(held.are_sharded for held in self._of_cell):
            self.note("sharded", 1)  # each rank trains its own part of the parameters
        elif trains_apart and self._wrapped is not None and not _EXPLAIN_APART & self._facts.keys():
            if self._has_averaged:
                self.note("communicates", 1)
            else:
                self.note("trains-apart", 1, model=model_name(self._wrapped(), self._namespace()))
        tell(self.passes.end_cell, self._steps)
        tell(self._note_draws)
        tell(self._note_averaging)
        return list(self._facts.values())

    def _note_draws(self) -> None:
        """Note the random numbers of the first step, which the notebook compares."""
        if self._drawn and len(self._drawn["ranks"]) > 1:
            self.note("random", 0, **self._drawn, **self._draws.facts())

    def _note_norms(self) -> None:
        """Note the norms of shards, which the notebook compares."""
        if (norms := self._clipping.end_cell()) is not None:
            self.note("norms", 1, **norms | {"model": self._title_of_model(norms["model"])})

    @property
    def _has_averaged(self) -> bool:
        """Return whether a backward or communication of the cell may have averaged gradients, at least once."""
        moved = self._event_buffer.elements - self._elements
        return bool(self._unknown or moved > _NUMBERS or any(seen.reduced for seen in self._seen.values()))

    def _note_optimizers(self) -> None:
        """Note what is known only now of the cell's optimizers, and of the parameters that none of them holds."""
        for held in self._of_cell:
            if held.pending is not None:
                name, step, details = held.pending
                self.note(name, step, **details)
            held.moved = max(held.moved, self._event_buffer.elements - held.elements)
            if (apart := held.noted_apart) is not None:
                step, model, cause = apart
                if cause == "unreduced":
                    self.note("unreduced", step, model=model)
                elif not _may_average(held.moved, held.elements_of_models):
                    self.note("ddp-bypassed", step, model=model, cause=cause)
            self._note_never(held)
            if held.has_no_rate and held.steps >= _ZERO:
                self.note("nothing-changed", held.first_step, last=held.last_step, count=held.steps, cause="rate")
        if "no-gradient" not in self._facts and (names := self._unheld.unchanged()) and not self._unheld.are_held():
            model = model_name(self._unheld.model(), self._namespace())
            self.note("not-in-optimizer", self._unheld.step, last=self._steps, model=model, names=names)

    def _note_averaging(self) -> None:
        """Note what the notebook compares between the ranks that average gradients."""
        if self._of_inputs is None:
            return
        reference, name, ranks = self._of_inputs
        if (model := reference()) is not None:  # otherwise it was a local variable of a function
            name, ranks = model_name(model, self._namespace()), ranks_of(model)
        if len(ranks) < 2:
            return
        if steps := self._batches.changing():
            self.note("batches", 0, model=name, ranks=ranks, steps=steps)
        if draws := self.passes.draws:
            self.note("draws", 0, ranks=ranks, draws=draws, last=self.passes.last_step)
        if model is not None and self._outside is not None and "ddp-bypassed" not in self._facts:
            step, outside = self._outside
            if (found := outside.facts(self._namespace())) is not None:
                self.note("outside", step, **found)

    # ---- parts of a step

    def inputs(self, model: Any, values: Sequence[Any]) -> None:
        if self._of_inputs is None:
            self._of_inputs = weakref.ref(model), model_name(model, {}), ranks_of(model)
        self._batches.add(values, self._steps)
        self._draws.inputs(values)

    def _around_zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **named: Any) -> Any:
            if threading.get_ident() == self._main:
                if len(self._zeroed) < _MOST_ZEROED:
                    self._zeroed.append(weakref.ref(owner))
                tell(self._clipping.zeroed, owner)
                tell(self._resets.zeroed, owner)
            return original(owner, *args, **named)

        return passed_over(zero_grad)

    def _forward_ends(self, model: Any) -> None:
        if self._draws.forward_ends(model):
            self._training.forward_begins = None
            self._first_model = model

    def ddp_forward(self, known: Model, *, synchronizes: bool, has_graph: bool) -> None:
        seen = self._seen.get(known.name)
        if seen is None:
            seen = self._seen[known.name] = ModelCounts(known.reference)
        if not has_graph:
            seen.in_no_grad += 1
            return
        self._forwards += 1
        if (model := known.reference()) is not None:
            self._forward_ends(model)
        if synchronizes:
            seen.synchronizing += 1
        else:
            seen.in_no_sync += 1
            seen.since.in_no_sync += 1

    def fsdp_forward(self, root: Any) -> None:
        self._forwards += 1
        self._forward_ends(root)
        if id(root) not in self._roots:
            self._roots[id(root)] = weakref.ref(root)

    def fsdp_group_begins(self, parameters: Sequence[Any]) -> None:
        self._weights.begins(parameters)

    def fsdp_group_made(self, module: Any, group: Any) -> None:
        self._groups[module] = weakref.ref(group)
        self._weights.made(module, group)

    def _has_unreduced(self, root: Any) -> bool:
        """Return whether FSDP keeps gradients of a backward that it has not reduced, in the first group of a root."""
        reference = self._group_of_root.get(id(root))
        if reference is None:
            found = (self._groups[one] for one in root.modules() if one in self._groups)
            reference = self._group_of_root[id(root)] = next(found, lambda: None)
        return has_unreduced_gradients(reference())

    def backward_begins(self, outputs: Sequence[Any]) -> None:
        for seen in self._seen.values():
            seen.begin_backward()
        self._averaged.clear()
        self._has_partial = False
        tell(self._resets.backward_begins)
        tell(self._look_at_graph, outputs)

    def _look_at_graph(self, outputs: Sequence[Any]) -> None:
        """Look at the operations that have computed the losses. A loss may be a `GradientEdge`, without a tensor."""
        losses = [one for one in outputs if isinstance(one, torch.Tensor)]
        self._reductions.backward_begins(losses)
        self._has_partial = self._backwards < _MOST_GRAPHS and has_partial(losses, self._reductions.sums_without_graph)

    def backward(self, outputs: Any, synchronized: Collection[Model], *, has_unknown: bool) -> None:
        self._backwards += 1
        self._unknown += has_unknown
        self._zeroed.clear()
        self.passes.note_backward()
        if outputs and not self._has_bad_loss and "not-finite" not in self._facts:
            self._has_bad_loss = not is_finite(outputs)
        self._batches.add_losses(outputs)
        for known in synchronized:
            if (seen := self._seen.get(known.name)) is not None:
                seen.reduced += 1
                seen.complete = known.at >= len(known.sizes)
                version = (0, 0) if (model := known.reference()) is None else version_of(model)
                seen.since = SinceAverage(self._backwards, self._event_buffer.elements, version)
                seen.at_reduction, seen.before = seen.forwards if seen.complete else -1, None
                if seen.complete:
                    self._averaged.append(known)
        for seen in self._seen.values():
            if seen.before is not None:
                seen.end_backward()
        self._clipping.backward()
        tell(self._resets.backward)
        tell(self._reductions.backward, self._averaged_models(), self._averaging_roots())

    def _averaged_models(self) -> list[Any]:
        """Return the DDP models of which the last backward has averaged all gradients."""
        return [model for known in self._averaged if (model := known.reference()) is not None]

    def _averaging_roots(self) -> Iterator[Any]:
        """Yield the roots of FSDP models with a forward in this cell that divide gradients by the number of ranks."""
        for reference in self._roots.values():
            if (root := reference()) is not None:
                groups = [self._groups[one]() for one in root.modules() if one in self._groups]
                if all(getattr(one, "gradient_divide_factor", None) is None for one in groups):
                    yield root

    def _title_of_model(self, model: Any) -> str:
        return model_name(model, self._namespace())

    def loader_begins(self, loader: Any, iterator: Any) -> None:
        self.passes.begin(loader, iterator, self._steps)
        self._draws.loader_begins(loader, iterator)

    def batch(self, iterator: Any, data: Any) -> None:
        self.passes.batch(iterator, data)
        self._draws.batch(iterator, data)

    def loader_ended(self, iterator: Any) -> None:
        self.passes.end(iterator, self._steps)

    # ---- steps

    @property
    def _is_apart(self) -> bool:
        """Return whether a step is inside a backward, where the gradients are not complete, or in another thread."""
        return self._event_buffer.backward is not None or threading.get_ident() != self._main

    def step_begins(self, optimizer: Any) -> None:
        if self._is_apart:
            return
        held = self._held_by(optimizer)
        number = self._event_buffer.moment.step + 1
        tell(self._reductions.step_begins, held, number, is_only_backward=self._backwards - held.backwards == 1)
        if self._roots:
            tell(self._look_at_weights, number)
        if self._has_partial and any(hasattr(p, "placements") for p in held.parameters):
            self.note("partial-output", number, optimizer=variable_of(optimizer, self._namespace()))
        held.before = held.was_finite = None
        held.is_zeroed = False
        self._zeroed_before = len(self._zeroed)
        if not self._is_looked_at(held, held.steps + 1):
            return
        parameters = held.parameters
        held.before = {i for i, p in enumerate(parameters) if p.grad is not None}
        if held.steps == 0 and self._outside is None:
            self._look_outside(held)
        if self._has_bad_loss:
            held.was_finite = are_finite(parameters)
        if held.zero and held.before:
            gradients = [one for i in held.before if (one := parameters[i].grad) is not None]
            held.is_zeroed = not are_zero(gradients, 0)[0]

    def _look_at_weights(self, step: int) -> None:
        """Keep checksums of the weights that were sharded since the last step, which the notebook compares."""
        roots = [root for one in self._roots.values() if (root := one()) is not None]
        if groups := self._weights.of(roots):
            self.note("weights", step, model=self._title_of_model(roots[0]), groups=groups)

    def _look_outside(self, held: OptimizerParameters) -> None:
        """Find parameters whose gradients DDP does not average, before the first step of an optimizer."""
        models = self._training.ddp_models()
        seen = [(model, self._seen[known.name]) for model, known in models if known.name in self._seen]
        reduced = [(model, one) for model, one in seen if one.reduced and has_several_ranks(model)]
        if reduced:
            model, one = reduced[0]
            is_alone = len(seen) == 1 and one.forwards == self._backwards
            averaged = set[int]().union(*(known.ids for _, known in models))
            outside = OutsideParameters(held, model, averaged, is_alone=is_alone)
            if outside.found:
                self._outside = self._event_buffer.moment.step + 1, outside

    def stepped(self, optimizer: Any, step: int) -> None:
        self._steps = step
        if self._is_apart:
            return
        if self._first_model is not None:
            tell(self._note_first_model)
        self._batches.end_step(step)
        self.passes.end_step(step)
        held = self._held_by(optimizer)
        tell(self._clipping.stepped, held, step)
        tell(self._resets.stepped, held, step)
        if held.steps:
            held.moved = max(held.moved, self._event_buffer.elements - held.elements)
        else:
            held.first_step = step
            self._of_cell.append(held)
        held.steps += 1
        held.last_step = step
        if held.has_no_rate:  # at most the first steps of a warm-up
            held.has_no_rate = all(_is_zero_rate(group.get("lr", 1)) for group in optimizer.param_groups)
        if self._is_looked_at(held, held.steps):
            self._look_at_gradients(optimizer, held, step)
        if held.models and self._unheld.step == 0:
            self._look_for_unheld(step)
        held.backwards, held.forwards = self._backwards, self._forwards
        held.elements = self._event_buffer.elements
        if held.models:
            self._wrapped = held.models[0][0]
            for _, known, _ in held.models:
                if (seen := self._seen.get(known.name)) is not None:
                    held.counts[known.name] = seen.counts

    def _note_first_model(self) -> None:
        """Keep the name and the ranks of the first model now: at the end of the cell it may be gone."""
        model, self._first_model = self._first_model, None
        self._drawn = {"model": self._title_of_model(model), "ranks": ranks_of(model)}

    def _is_looked_at(self, held: OptimizerParameters, number: int) -> bool:
        return number <= _FIRST or number % _EACH == 0 or self._is_unusual(held)

    def _is_unusual(self, held: OptimizerParameters) -> bool:
        """Return whether the gradients of a step must be looked at. In a long loop most steps are like the ones
        before."""
        if held.never or held.zero or held.idle or self._has_bad_loss or self._zeroed or not held.has_gradients:
            return True
        if self._backwards == held.backwards:
            return True
        for _, known, _ in held.models:
            if not self._since_step(held, known)[3] or not self._seen[known.name].complete:
                return True
        return False

    def _look_at_gradients(self, optimizer: Any, held: OptimizerParameters, step: int) -> None:
        parameters = held.parameters
        gradients = [p.grad for p in parameters]
        lacking = [i for i, gradient in enumerate(gradients) if gradient is None]
        if self._has_bad_loss:
            self._look_for_infinite(held, step)
        if lacking and (held.before is None or not held.before.isdisjoint(lacking)):
            return  # the step itself has reset them, as a subclass or a hook may do
        if held.never is None:
            held.never = set(lacking)
        elif held.never:
            held.never.intersection_update(lacking)
        held.has_gradients = len(lacking) < len(parameters)
        if self._roots and self._note_unreduced(held, step):
            return
        if held.has_gradients:
            held.idle, held.pending = 0, None
            if held.models and self._backwards > held.backwards:
                self._with_models(held, step, set(lacking))
            if step < _FEW or parameters[0].is_cpu:
                self._look_for_zero(optimizer, held, step, [one for one in gradients if one is not None])
        elif held.is_trainable:
            self._without_gradients(optimizer, held, step)

    def _note_unreduced(self, held: OptimizerParameters, step: int) -> bool:
        """Note an FSDP model that keeps gradients of its last backward. Return whether it does so in this step."""
        for reference in self._roots.values():
            root = reference()
            is_unreduced = root is not None and self._has_unreduced(root)
            if is_unreduced and any(id(p) in held.ids for p in root.parameters()):
                self._note_apart(held, step, root, "unreduced")
                return True
        if held.apart is not None and held.apart[2] == "unreduced":
            held.apart = None
        return False

    def _held_by(self, optimizer: Any) -> OptimizerParameters:
        held = self._held.get(optimizer)
        if held is None or not held.is_current:
            held = self._held[optimizer] = OptimizerParameters(optimizer)
        if held.models_made != self._training.models_made:
            held.find_models(self._training.ddp_models(), self._training.models_made)
        return held

    def _since_step(self, held: OptimizerParameters, known: Model) -> tuple[int, int, int, int]:
        """Return the counts of a model since the last step of an optimizer, see `ModelCounts.counts`."""
        now = self._seen[known.name].counts if known.name in self._seen else (0, 0, 0, 0)
        before = held.counts.get(known.name, (0, 0, 0, 0))
        return now[0] - before[0], now[1] - before[1], now[2] - before[2], now[3] - before[3]

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of the models of variables and of optimizers, with their names."""
        for model in list(self._namespace().values()):
            if issubclass(type(model), torch.nn.Module):
                yield from getattr(model, "module", model).named_parameters()
        for optimizer in list(self._held):
            for number, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
                yield f"parameter {number}", parameter

    # ---- no gradient at all

    def _without_gradients(self, optimizer: Any, held: OptimizerParameters, step: int) -> None:
        """Note an optimizer step without any gradient."""
        names = self._namespace()
        title = variable_of(optimizer, names)
        if self._backwards == held.backwards:  # no backward since the last step
            held.idle += 1
            if held.idle >= _CONSECUTIVE and self._forwards > held.forwards:
                self.note("no-gradient", step, optimizer=title, cause="no backward")
            return
        if held.is_noted:  # the search below may take a second
            return
        held.is_noted = True
        if self._has_zeroed(optimizer, held):
            self.note("no-gradient", step, optimizer=title, cause="zero_grad")
            return
        for reference, known, _ in held.models:
            model = reference()
            synchronizing, in_no_sync, in_no_grad, _ = self._since_step(held, known)
            cause = "no path" if synchronizing + in_no_sync else "no_grad" if in_no_grad else "no forward"
            if model is not None:
                details = {"optimizer": title, "model": model_name(model, names), "cause": cause}
                if cause == "no forward":
                    held.pending = "loss-without-path", step, details
                else:
                    self.note("loss-without-path", step, **details)
                return
        roots = [root for one in self._roots.values() if (root := one()) is not None]
        if any(id(p) in held.ids for root in roots for p in root.parameters()):
            model = next(root for root in roots if any(id(p) in held.ids for p in root.parameters()))
            self.note("loss-without-path", step, optimizer=title, model=model_name(model, names), cause="no path")
            return
        self._look_for_other_models(held, step, title, roots)

    def _look_for_other_models(self, held: OptimizerParameters, step: int, title: str, roots: list[Any]) -> None:
        """Note an optimizer without parameters of a model that ran backward."""
        names = self._namespace()
        ran = [
            model
            for model, known in self._training.ddp_models()
            if known.name in self._seen and self._seen[known.name].reduced
        ]
        ran = [one for one in [*ran, *roots] if any(p.grad is not None for p in one.parameters())]
        if not ran:
            is_replaced = not is_in_a_module(held.parameters)
            cause = "replaced" if is_replaced else ""
            held.pending = "no-gradient", step, {"optimizer": title, "cause": cause}
            return
        shapes = {p.shape for root in roots for p in root.parameters() if hasattr(p, "placements")}
        is_before = shapes.issuperset(p.shape for p in held.parameters) and not is_in_a_module(held.parameters)
        models = [model_name(one, names) for one in ran[:3]]
        details = {"optimizer": title, "models": models, "is_before_sharding": is_before}
        held.pending = "optimizer-of-another-model", step, details

    def _has_zeroed(self, optimizer: Any, held: OptimizerParameters) -> bool:
        """Return whether gradients of the optimizer were reset after the last backward."""
        for reference in self._zeroed[: self._zeroed_before]:
            owner = reference()
            if owner is optimizer:
                return True
            if isinstance(owner, torch.nn.Module) and any(id(p) in held.ids for p in owner.parameters()):
                return True
        return False

    # ---- gradients of DDP models

    def _with_models(self, held: OptimizerParameters, step: int, lacking: set[int]) -> None:
        """Note gradients of DDP models that were not averaged, and parameters that a backward did not use."""
        is_apart = False
        since = {known.name: self._since_step(held, known) for _, known, _ in held.models}
        # parameters that another model has averaged: a module may be wrapped again, and the first model still exist
        averaged = {i for _, known, indices in held.models if since[known.name][3] for i in indices}
        for reference, known, indices in held.models:
            counts = since[known.name]
            if counts[0] and not lacking.isdisjoint(indices):
                is_reached = not lacking.issuperset(indices)  # otherwise no backward of the step went through it
                if is_reached and not (counts[3] and self._seen[known.name].complete):
                    self._note_unused(reference(), step)
            elif counts[3] and (self._seen[known.name].since.in_no_sync or self._seen[known.name].since.again):
                is_apart |= self._note_late(held, step, reference(), indices, self._seen[known.name].since)
            elif not (counts[3] or self._unknown or (lacking | averaged).issuperset(indices)):
                is_apart |= self._note_bypassed(held, step, reference(), indices, counts)
        if not is_apart:
            held.apart = None

    def _note_bypassed(
        self, held: OptimizerParameters, step: int, model: Any, indices: list[int], counts: tuple[int, int, int, int]
    ) -> bool:
        """Note a model whose gradients were not averaged in consecutive steps. Return whether they were not in this
        one.

        Args:
            model: the DDP model; None if it was deleted.
            indices: its parameters in the optimizer.
            counts: see `ModelCounts.counts`, since the last step of the optimizer.
        """
        synchronizing, in_no_sync, in_no_grad, _ = counts
        if model is None or not has_several_ranks(model) or (synchronizing and model._comm_hooks):
            return False  # a hook of the user may average in another way
        parameters = held.parameters
        gradients = [one for i in indices if (one := parameters[i].grad) is not None]
        moved = self._event_buffer.elements - (held.elements if held.steps > 1 else self._elements)
        if _may_average(moved, sum(one.numel() for one in gradients)) or are_zero(gradients, 0)[0]:
            return False
        cause = "autograd" if synchronizing else "no_sync" if in_no_sync else "no_grad" if in_no_grad else "no forward"
        self._note_apart(held, step, model, cause)
        return True

    def _note_late(
        self, held: OptimizerParameters, step: int, model: Any, indices: list[int], since: SinceAverage
    ) -> bool:
        """Note a model whose gradients were averaged before the last backward of consecutive steps. Arguments and
        result as in `_note_bypassed`."""
        if model is None or not has_several_ranks(model) or self._backwards == since.backwards:
            return False
        if version_of(model) == since.version:  # a backward of another model
            return False
        parameters = held.parameters
        moved = self._event_buffer.elements - since.elements
        if _may_average(moved, sum(parameters[i].numel() for i in indices)):
            return False
        self._note_apart(held, step, model, "late" if since.in_no_sync else "again")
        return True

    def _note_apart(self, held: OptimizerParameters, step: int, model: Any, cause: str) -> None:
        """Note a step without averaging, if the step before had the same cause."""
        if held.apart is None:
            held.apart = step, model_name(model, self._namespace()), cause
        elif held.apart[2] == cause and held.noted_apart is None:
            held.noted_apart = held.apart  # until the end of the cell: a later step may average the parameters

    def _note_unused(self, model: Any, step: int) -> None:
        """Note parameters without a gradient in a DDP model that has not averaged all its buckets."""
        if model is None or not has_several_ranks(model):
            return
        if model.find_unused_parameters or getattr(model, "static_graph", False):
            return
        names = [name for name, p in parameters_of(model).items() if p.grad is None]
        if names:
            some = [*names[:6], f"{len(names) - 6} more"] if len(names) > 7 else names
            self.note("unused-parameters", step, model=model_name(model, self._namespace()), names=some)

    def _look_for_unheld(self, step: int) -> None:
        """Find parameters of DDP models that no optimizer holds."""
        optimizers = [one for one in list(self._namespace().values()) if issubclass(type(one), torch.optim.Optimizer)]
        held = {id(p) for one in [*optimizers, *self._held] for group in one.param_groups for p in group["params"]}
        for model, known in self._training.ddp_models():
            if known.name in self._seen and self._seen[known.name].reduced and has_several_ranks(model):
                self._unheld.add(step, model, {n: p for n, p in parameters_of(model).items() if id(p) not in held})

    # ---- gradients that change nothing

    def _look_for_zero(
        self, optimizer: Any, held: OptimizerParameters, step: int, gradients: list[torch.Tensor]
    ) -> None:
        first = gradients[0]
        if first.is_meta or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        is_zero, held.not_zero = are_zero(gradients, held.not_zero if held.not_zero < len(gradients) else 0)
        if not is_zero or held.is_zeroed:
            held.zero.clear()
            return
        held.zero.append(step)
        if len(held.zero) == _ZERO and self._backwards > held.backwards:
            title = variable_of(optimizer, self._namespace())
            is_sharded = any(hasattr(one, "to_local") for one in gradients)
            if is_sharded or any(one.numel() for one in gradients):
                self.note(
                    "nothing-changed", held.zero[0], optimizer=title, last=step, count=_ZERO, is_sharded=is_sharded
                )

    def _look_for_infinite(self, held: OptimizerParameters, step: int) -> None:
        """Note a step whose loss was NaN or infinite, if the parameters are too after it. The step may have been
        skipped."""
        self._has_bad_loss = False
        if held.was_finite is not None and not are_finite(held.parameters):
            self.note("not-finite", step, was_finite=held.was_finite)

    def _note_never(self, held: OptimizerParameters) -> None:
        """Note parameters that had no gradient in any step of the cell."""
        parameters = held.parameters
        if held.steps < 2 or not held.never or len(held.never) == held.count or len(parameters) != held.count:
            return
        never = [p for i in sorted(held.never) if _is_trained(p := parameters[i])]
        models = [(model, indices) for one, _, indices in held.models if (model := one()) is not None]
        expected = {i for model, indices in models if model.find_unused_parameters for i in indices}
        if not never or not held.never.isdisjoint(expected) or "unused-parameters" in self._facts:
            return
        names = names_of(never, self._namespace(), [model for model, _ in models])
        is_unknown = any(name.startswith(UNKNOWN) for name in names)
        if not (is_unknown and not is_in_a_module(never)):
            self.note("no-gradient", held.first_step, cause="never", names=names, last=held.last_step, count=held.steps)
            return
        lacking = [p for model, _ in models for p in parameters_of(model).values() if id(p) not in held.ids]
        self.note(
            "no-gradient", held.first_step, cause="some replaced", names=names, last=held.last_step, count=held.steps,
            lacking=names_of([p for p in lacking if p.grad is not None], {}, [model for model, _ in models]),
        )  # fmt: skip


def _calls_around() -> list[tuple[str, int, str]]:
    """Return file, line and function of the running calls of this thread, innermost first."""
    calls: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls


def _is_trained(parameter: torch.Tensor) -> bool:
    """Return whether a parameter may get a gradient. FSDP1 leaves no elements on a rank with another shard."""
    return parameter.requires_grad and parameter.numel() > 0


def _is_zero_rate(rate: Any) -> bool:
    """Return whether a learning rate is 0. One on a GPU is not read, since that would wait for the GPU.

    Example:
        >>> _is_zero_rate(0.0), _is_zero_rate(torch.tensor(0.0)), _is_zero_rate(torch.zeros(1, device="meta"))
        (True, True, False)
    """
    return (not isinstance(rate, torch.Tensor) or rate.is_cpu) and bool(rate == 0)


def _may_average(moved: int, gradients: int) -> bool:
    """Return whether communication of some elements may have averaged the gradients of others.

    Example:
        >>> _may_average(1, 161), _may_average(161, 161), _may_average(50, 1_000_000)
        (False, True, False)
    """
    return moved > _NUMBERS and moved * _PART >= gradients
