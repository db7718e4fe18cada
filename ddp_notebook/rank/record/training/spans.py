"""Spans of a training step: input, forward, backward, optimizer.

No object of the user is replaced: loaders, DDP and FSDP models, backwards and optimizers are observed in torch's code.
The code before and after them is hidden from torch.compile, which would trace it.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.call_site import IDENTITY, SiteFields
from ddp_notebook.rank.group.collective_owners import Identities
from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.group.waiting import notice_interrupt
from ddp_notebook.rank.hide_from_profiler import function_modes, operator_modes, unseen
from ddp_notebook.rank.imports import after_import
from ddp_notebook.rank.record.event_buffer import OFF, EventBuffer, new
from ddp_notebook.rank.record.training.blocks import Blocks, Checkpoints
from ddp_notebook.rank.record.training.buckets import Backward, Model
from ddp_notebook.rank.record.training.comm_hooks import ObservedCommHooks
from ddp_notebook.rank.record.training.gradients import GradientHook
from ddp_notebook.rank.record.training.loaders import Loaders, LoopCounts, samples_of
from ddp_notebook.rank.record.training.model_names import new_name
from ddp_notebook.rank.record.training.optimizers import Optimizers
from ddp_notebook.rank.record.training.pipeline_stages import Pipelines
from ddp_notebook.rank.record.training.step_observer import StepObserver, tell
from ddp_notebook.rank.record.training.wrapping import around, hide_from_compile, passed_over, uncompiled
from ddp_notebook.rank.variables.between import BetweenSteps
from ddp_notebook.records.schema import SPANS
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, logging, threading, time, weakref

CELL, FORWARD, BACKWARD, OPTIMIZER, BLOCK, EVALUATION, CHECKPOINT, FUTURE = map(
    SPANS.index, ("cell", "forward", "backward", "optimizer", "block", "evaluation", "checkpoint", "future")
)
_log = logging.getLogger(__name__)


class Span(NamedTuple):
    """A span of a step that has ended."""

    span: int
    kind: int
    name: str
    moment: Moment
    start_ns: int
    end_ns: int
    samples: int
    thread: int
    place: tuple[int, int, int]  # for an action: span of the pipeline's step, stage, microbatch
    is_training: bool  # for a forward: the model was in training mode


def span_of(backward: Backward) -> Span:
    """Return a backward that has ended as a span."""
    one, moment = backward, backward.moment
    assert moment is not None
    return Span(one.number, BACKWARD, "", moment, one.began_ns, one.end_ns, -1, one.thread, (0, 0, 0), False)


class TrainingSpans:
    """Observer of this process's training, from `install` on.

    Args:
        event_buffer: receives the spans.
        between: tasks for the main thread between two steps.
        identities: registers models and FSDP's groups of parameters.
        declare: receives the group, the identity and the names of parameters of each. It may raise.
        why_ended: returns the error to raise instead of that of a backward; None to keep it.
    """

    def __init__(
        self,
        event_buffer: EventBuffer,
        between: BetweenSteps | None = None,
        identities: Identities | None = None,
        declare: Callable[[Any, int, Sequence[str]], None] = lambda group, identity, names: None,
        why_ended: Callable[[BaseException], BaseException | None] = lambda error: None,
    ) -> None:
        self._declare, self._why_ended = declare, why_ended
        self._identities = Identities(event_buffer.modules) if identities is None else identities
        self.on_step: list[Callable[[], None]] = []  # called after each optimizer step
        self.forward_begins: Callable[[], None] | None = None  # called before a forward of a model in DDP or FSDP
        self.models_made = 0  # number of DDP models that this process has made
        self.between = BetweenSteps() if between is None else between
        self.event_buffer = self._event_buffer = event_buffer
        self._models: weakref.WeakKeyDictionary[Any, Model] = weakref.WeakKeyDictionary()
        self._last: Model | None = None  # last requested model, which is probably the next one
        self._prepared: list[Model] = []
        self._roots: dict[int, tuple[int, int]] = {}  # running forwards of FSDP: start time and batch size
        self._naming = threading.Lock()  # several threads may create models at once
        self.namespace: Mapping[str, Any] = {}  # variables of the user, in a cell
        self._observer: StepObserver | None = None
        self._optimizers = Optimizers(event_buffer, self.stepped, self._step_begins)
        self._gradients = GradientHook(event_buffer)
        self.pipelines = Pipelines(event_buffer, self.put)
        self.loop_counts = LoopCounts()
        self._loaders = Loaders(event_buffer, self.put, self.loop_counts)
        self._blocks = Blocks(event_buffer, lambda name, began_ns: self.put(BLOCK, name, began_ns))
        self._checkpoints = Checkpoints(event_buffer, lambda name, began_ns: self.put(CHECKPOINT, name, began_ns))
        # Cleared by each cell. A method call for each part would take longer: between cells the caches lose its code.
        self._of_cell: tuple[dict[Any, Any] | set[str], ...] = (
            self._roots,
            self._optimizers.stepping,
            self._optimizers.of_cell,
            self.pipelines.doing,
            self.pipelines.steps,
            self._loaders.told,
            self.loop_counts.drawn,
            self.loop_counts.passes,
            self.loop_counts.ended,
        )

    def install(self) -> None:
        """Install all observers. A message lists what this version of torch does not support."""
        hide_from_compile()
        unseen = []
        for what, look in (
            ("models in DDP", self._look_at_ddp),
            ("models in FSDP", self._look_at_fsdp),
            ("modules of DTensor", self._look_at_dtensor),
            ("data loaders", self._loaders.install),
            ("backwards", self._look_at_backwards),
            ("named blocks", self._blocks.install),
            ("checkpoints", self._checkpoints.install),
        ):
            try:
                look()
            except (AttributeError, ImportError):
                unseen.append(what)
        _say_unseen(unseen)
        after_import("torch.distributed.pipelining.schedules", self._look_at_pipelines)
        self._optimizers.install()

    def _look_at_pipelines(self) -> None:
        try:
            self.pipelines.install()
        except (AttributeError, ImportError):
            _say_unseen(["pipelines"])

    def _look_at_ddp(self) -> None:
        around(DistributedDataParallel, "__init__", self._around_init)
        around(DistributedDataParallel, "forward", self._around_forward)
        around(DistributedDataParallel, "register_comm_hook", self._around_register)
        around(dist, "_register_comm_hook", ObservedCommHooks(self._event_buffer, self._model_of).around_register)

    def _look_at_fsdp(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        around(FSDPParamGroup, "__init__", self._around_param_group)
        around(FSDPState, "_pre_forward", self._around_pre_forward)
        around(FSDPState, "_post_forward", self._around_post_forward)

    def _look_at_dtensor(self) -> None:
        self._event_buffer.modules.watch(lambda: self._event_buffer.level != OFF)

    def _look_at_backwards(self) -> None:
        self._event_buffer.engine = inspect.unwrap(torch.autograd.graph._engine_run_backward).__code__
        for module in (torch.autograd, torch.autograd.graph):
            around(module, "_engine_run_backward", self._around_backward)

    def put(
        self,
        kind: int,
        name: str,
        start_ns: int,
        samples: int = -1,
        *,
        number: int = 0,
        end_ns: int = 0,
        moment: Moment | None = None,
        place: tuple[int, int, int] = (0, 0, 0),
        is_training: bool = False,
    ) -> None:
        """Add a span. By default it ends now and belongs to the current moment."""
        event_buffer = self._event_buffer
        number, moment, end_ns = (
            number or next(event_buffer.spans),
            moment or event_buffer.moment,
            end_ns or time.monotonic_ns(),
        )
        thread = threading.get_ident()
        event_buffer.put(new(Span, (number, kind, name, moment, start_ns, end_ns, samples, thread, place, is_training)))

    # ---- forward

    def observe(self, observer: StepObserver) -> None:
        """Let another feature follow the steps."""
        self._observer = self._loaders.observer = observer

    def note(self, name: str, step: int, **details: Any) -> None:
        """Send a fact about the cell to the notebook, if another feature follows the steps."""
        if self._observer is not None:
            self._observer.note(name, step, **details)

    def ddp_models(self) -> list[tuple[DistributedDataParallel, Model]]:
        """Return the living DDP models of this process."""
        with self._naming:
            return list(self._models.items())

    def _put_forward(self, model: torch.nn.Module, name: str, began_ns: int, samples: int) -> None:
        kind = FORWARD if torch.is_grad_enabled() else EVALUATION
        # The program may have set the mode of the DDP model only.
        is_training = model.training and getattr(model, "module", model).training
        self.put(kind, name, began_ns, samples, is_training=is_training)
        if kind == FORWARD:
            self._event_buffer.has_begun = self._event_buffer.sees_forwards = True

    def _around_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(model: DistributedDataParallel, *args: Any, **named: Any) -> None:
            elements = self._event_buffer.elements
            try:
                original(model, *args, **named)
            except RuntimeError as error:
                if (better := self._why_ended(error)) is not None:  # it communicates in C++
                    raise better from None
                raise
            self._event_buffer.elements = elements  # without the calls that copy and compare the parameters
            known = self._model(model)  # the buckets index the parameters that require gradients now
            self._declare(model.process_group, known.identity, known.names)
            # torch.compile traces the forward, so the model keeps that of torch or of its class.
            if getattr(model, "_use_python_reducer", False) and type(model).forward is DistributedDataParallel.forward:
                model.forward = types.MethodType(torchs_forward, model)  # type: ignore[method-assign]

        torchs_forward = DistributedDataParallel.forward  # before it is wrapped
        return __init__

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        after = uncompiled(self._after_forward)

        def forward(model: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
            if self._event_buffer.level == OFF:
                return original(model, *inputs, **named)
            if self.forward_begins is not None:
                tell(self.forward_begins)
            began_ns, has_failed = time.monotonic_ns(), True
            try:
                out = original(model, *inputs, **named)
                has_failed = False
                return out
            finally:
                try:
                    if operator_modes() or function_modes():
                        unseen(after, model, began_ns, (*inputs, *named.values()), has_failed)
                    else:  # it calls no operators
                        after(model, began_ns, (*inputs, *named.values()), has_failed)
                except Exception:  # the user's forward must continue
                    _log.info("a forward was not recorded", exc_info=True)
                    self._event_buffer.dropped += 1

        return passed_over(forward)  # torch.compile calls it without tracing it

    def _after_forward(
        self, model: DistributedDataParallel, began_ns: int, inputs: tuple[Any, ...], has_failed: bool
    ) -> None:
        known = self._last
        if known is None or known.reference() is not model:
            known = self._model(model)
        self._put_forward(model, known.name, began_ns, samples_of(inputs))
        has_graph = torch.is_grad_enabled()
        synchronizes = model.require_backward_grad_sync and has_graph
        if (observer := self._observer) is not None and not has_failed:
            tell(observer.ddp_forward, known, synchronizes=synchronizes, has_graph=has_graph)
            if has_graph:
                tell(observer.inputs, model, inputs)
        if has_failed or not synchronizes:
            return
        if (layout := known.prepare(model, self.namespace)) is not None:
            self._event_buffer.put(layout)
        if known in self._prepared:
            self._prepared.remove(known)
        self._prepared.append(known)
        if self._gradients.parameter:
            self._gradients.look_at(model.module)

    def _around_register(self, original: Callable[..., None]) -> Callable[..., None]:
        def register_comm_hook(model: DistributedDataParallel, *args: Any, **named: Any) -> None:
            self._model(model)  # a hook of mixed precision is registered while the model is being made
            original(model, *args, **named)

        return register_comm_hook

    def _model_of(self, reducer: Any) -> tuple[DistributedDataParallel, str] | None:
        """Return the model with this reducer, and its name; None if it is not known."""
        with self._naming:
            found = (
                (model, known.name) for model, known in self._models.items() if getattr(model, "reducer", 0) is reducer
            )
            return next(found, None)

    def _model(self, model: DistributedDataParallel) -> Model:
        with self._naming:
            known = self._models.get(model)
            if known is None:
                name = new_name(model.module, {one.name for one in self._models.values()})
                identity = self._identities.add(model.module, self._event_buffer.moment.cell, [model.process_group])
                known = self._models[model] = Model(model, name, identity)
                self.models_made += 1
                self._event_buffer.counts_elements = True
        self._last = known
        return known

    def _around_param_group(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(group: Any, params: Any, modules: Any, *args: Any, **named: Any) -> None:
            known = {id(one): name for module in modules for name, one in module.named_parameters()}
            names = [known.get(id(one), "") for one in params]
            if self._observer is not None:
                tell(self._observer.fsdp_group_begins, params)
            original(group, params, modules, *args, **named)
            shards = getattr(group.mesh_info, "shard_process_group", None)
            replicas = getattr(group.mesh_info, "replicate_process_group", None)
            groups = [one for one in (shards, replicas) if isinstance(one, dist.ProcessGroup)]
            identity = self._identities.add(modules[0], self._event_buffer.moment.cell, groups)
            setattr(group, IDENTITY, identity)
            if isinstance(shards, dist.ProcessGroup):
                self._declare(shards, identity, names)
            if self._observer is not None:
                tell(self._observer.fsdp_group_made, modules[0], group)

        return __init__

    def _around_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _pre_forward(state: Any, module: Any, args: Any, named: Any) -> Any:
            if self.forward_begins is not None and self._event_buffer.level != OFF:
                tell(self.forward_begins)
            began_ns = time.monotonic_ns()
            out = original(state, module, args, named)
            if self._event_buffer.level != OFF and state._state_ctx.iter_forward_root is state:
                self._roots[id(state)] = began_ns, unseen(samples_of, (*args, *named.values()))
                if (observer := self._observer) is not None and torch.is_grad_enabled():
                    tell(observer.inputs, module, (*args, *named.values()))
            return out

        return passed_over(_pre_forward)

    def _around_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _post_forward(state: Any, module: Any, *rest: Any) -> Any:
            root = self._roots.pop(id(state), None)
            out = original(state, module, *rest)
            if root is not None:
                self._put_forward(module, type(module).__name__.removeprefix("FSDP"), *root)
                if (observer := self._observer) is not None and torch.is_grad_enabled():
                    tell(observer.fsdp_forward, module)
            return out

        return passed_over(_post_forward)

    # ---- backward

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        backward_of_thread = torch._C._current_graph_task_id

        def _engine_run_backward(*args: Any, **named: Any) -> Any:
            event_buffer = self._event_buffer
            if event_buffer.level == OFF or backward_of_thread() != -1:  # this thread is in a backward
                return original(*args, **named)
            self.loop_counts.backwards += 1
            other = event_buffer.backward
            if other is not None and not other.end_ns:  # its thread has the buckets: record only the time
                return self._time_backward(original, *args, **named)
            return self.run_backward(functools.partial(original, *args, **named))

        return _engine_run_backward

    def run_backward(self, run: Callable[[], Any], site: SiteFields | None = None) -> Any:
        """Run a backward, and record its span and the buckets of its models.

        Args:
            run: runs the backward.
            site: call site of a distributed backward, whose collectives run in other threads.
        """
        event_buffer, prepared = self._event_buffer, self._prepared
        for model in prepared:
            if model.reference() is None:
                prepared[:] = [one for one in prepared if one.reference() is not None]
                break
        backward = Backward(next(event_buffer.spans), prepared, site)
        if self._observer is not None:
            tell(self._observer.backward_begins, _outputs(run))
        failed = True
        try:
            event_buffer.go_back(backward, depth=3)  # frames of this function and of the wrapper
            out = run()
            failed = False
            if self._observer is not None:
                self._observe_backward(self._observer, run, backward)
            if self._gradients.parameter:
                self._gradients.end_backward()
            return out
        except BaseException as error:
            notice_interrupt()  # now, and not below, where calls of the backward are recorded
            if (better := self._why_ended(error)) is not None:  # DDP waits in C++
                raise better from None
            raise
        finally:
            backward.end_ns = time.monotonic_ns()
            backward.has_span = backward.thread not in self.pipelines.doing
            try:
                if failed or backward.calls:
                    unseen(event_buffer.end_backward, backward, failed)
                elif backward.again:
                    event_buffer.end_again(backward)
                if self._gradients.parameter:
                    self._gradients.forget_backward()
                for model in prepared:
                    if not model.at:  # a model that was not part of this backward
                        prepared[:] = [one for one in prepared if not one.at]
                        break
                else:
                    prepared.clear()
            finally:  # an interrupt may have come
                event_buffer.come_back(backward)
                if backward.has_span or backward.again:
                    event_buffer.put(backward)

    def _observe_backward(self, observer: StepObserver, run: Any, backward: Backward) -> None:
        synchronized = [model for model in self._prepared if model.at]
        has_unknown = not synchronized and bool(backward.calls or backward.again)
        tell(observer.backward, _outputs(run), synchronized, has_unknown=has_unknown)

    def _time_backward(self, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        began_ns, moment = time.monotonic_ns(), self._event_buffer.moment
        self._event_buffer.has_begun = True
        try:
            return original(*args, **named)
        finally:
            if threading.get_ident() not in self.pipelines.doing:
                self.put(BACKWARD, "", began_ns, moment=moment)

    # ---- optimizer and input

    def _step_begins(self, optimizer: Any) -> None:
        if self._observer is not None:
            tell(self._observer.step_begins, optimizer)

    def stepped(self, optimizer: Any, began_ns: int) -> str:
        """Record an optimizer step that started at `began_ns`. Return the optimizer's name."""
        name = self._optimizers.name(optimizer)
        self._optimizers.of_cell.add(name)
        self.put(OPTIMIZER, name, began_ns, moment=self._event_buffer.count_step())
        for call in self.on_step:
            call()
        if self._observer is not None:
            tell(self._observer.stepped, optimizer, self._event_buffer.moment.step)
        if self.between:
            self.between.stepped(self._event_buffer.moment.step)
        return name

    @property
    def has_several_optimizers(self) -> bool:
        """Return whether more than one optimizer has stepped in the cell."""
        return len(self._optimizers.of_cell) > 1

    def tell_again(self) -> None:
        """Report the layouts of all models again, for a new receiver."""
        with self._naming:
            for known in self._models.values():
                known.forget_layout()

    def begin_cell(self, gradient: str = "") -> None:
        """Prepare for a cell: forget events that an interrupted cell has left incomplete.

        Args:
            gradient: name of the parameter whose gradients are recorded.
        """
        if gradient or self._gradients.parameter:
            self._gradients.begin_cell(gradient)
        for kept in self._of_cell:
            kept.clear()
        self.loop_counts.backwards = 0
        self._blocks.here.open.clear()
        self._last = None
        self._event_buffer.bucket = None
        for model in [*self._models.values(), *self._prepared]:
            model.forget_calls()  # lines of another cell

    def end_cell(self) -> None:
        """End the recording of a cell's training."""
        if self._gradients.parameter:
            self._gradients.end_cell(model.module for model in self._models)


def _outputs(run: Any) -> Sequence[Any]:
    """Return the tensors whose gradients a backward computes: arguments of torch's engine. A distributed backward has
    none."""
    arguments = getattr(run, "args", None)
    return arguments[0] if arguments else ()


def _say_unseen(what: list[str]) -> None:
    if what:
        print(f"ddp_notebook: {', '.join(what)} cannot be recorded with torch {torch.__version__}", file=sys.stderr)
