"""The stretches of a training step: input, forward, backward, optimizer; and which gradients a bucket of DDP holds.

Nothing of the user's is replaced: loaders, models in DDP or FSDP, backwards and optimizers are seen where torch runs
them. DDP's reducer launches its buckets in order, so the next all_reduce in a backward that has the size of a model's
next bucket is that bucket. A user's comm hook keeps its slot, and may be registered again.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_notebook.rank import previews
from ddp_notebook.rank.recorder import Call, nbytes
from ddp_notebook.rank.tape import OFF, Moment, Tape

CELL, FORWARD, BACKWARD, OPTIMIZER, INPUT = range(5)  # of `records.SPANS`
_HOOK = "ddp_notebook_hook"  # attribute of a model: the user's comm hook and its state


class Span(NamedTuple):
    """A stretch of a step that is over."""

    span: int
    kind: int
    name: str
    moment: Moment
    start_ns: int
    end_ns: int
    samples: int
    thread: int


class Layout(NamedTuple):
    """A model's buckets have changed."""

    time_ns: int
    model: str
    buckets: str
    is_rebuilt: bool


class Gradient(NamedTuple):
    """What the gradient of the chosen parameter was, here and after the ranks' were averaged."""

    span: int
    name: str
    side: int
    copy: previews.Copy


class Model:
    """What is known of one model in DDP."""

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        self.name = name
        self.sizes: list[int] = []  # of its buckets, in bytes; none: not known
        self.at = 0  # its next bucket
        self.left = 0  # bytes that it has yet to synchronise in this backward
        ignored = set(model.parameters_to_ignore)
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored]
        self._names = [name for name, _ in named]
        self._nbytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        self._is_rebuilt: bool | None = None

    def prepare(self, model: DistributedDataParallel) -> Layout | None:
        """The next backward will synchronise its gradients. Returns its layout if that has changed."""
        self.at, self.left = 0, sum(self._nbytes)
        is_rebuilt = bool(model._has_rebuilt_buckets)
        if is_rebuilt == self._is_rebuilt and self.sizes:
            return None
        facts = model._get_ddp_logging_data()  # 15 us
        if is_rebuilt and not facts.get("rebuilt_bucket_sizes") and model.logger is not None:
            model.logger.set_runtime_stats_and_log()  # else it tells of them one step later
            facts = model._get_ddp_logging_data()
        sizes = str(facts.get("rebuilt_bucket_sizes" if is_rebuilt else "bucket_sizes", ""))
        self.sizes = [int(size) for size in sizes.split(",") if size.strip()]
        if not self.sizes:
            return None
        if is_rebuilt:
            order = str(facts.get("rebuilt_per_bucket_param_indices", ""))
            buckets = [[int(number) for number in one.split()] for one in order.split(",")]
        else:
            buckets = self._first_buckets()
        self._is_rebuilt = is_rebuilt
        words = [
            {"nbytes": size, "parameters": [self._names[number] for number in numbers]}
            for size, numbers in zip(self.sizes, buckets, strict=False)
        ]
        return Layout(time.monotonic_ns(), self.name, json.dumps(words), is_rebuilt)

    def _first_buckets(self) -> list[list[int]]:
        """The parameters of each bucket, as torch has them before it knows in which order gradients become ready: from
        the last to the first. No names where they are of several types, which do not share a bucket."""
        buckets: list[list[int]] = []
        end = len(self._nbytes)
        for size in self.sizes:
            begin, filled = end, 0
            while begin and filled < size:
                begin -= 1
                filled += self._nbytes[begin]
            if filled != size:
                return [[] for _ in self.sizes]
            buckets.append(list(range(begin, end)))
            end = begin
        return buckets

    def takes(self, size: int) -> bool:
        """Whether its next bucket has this size, as far as it is known."""
        return self.at < len(self.sizes) and self.sizes[self.at] == size

    def take(self, size: int) -> tuple[str, int]:
        """Count its next bucket."""
        self.at += 1
        self.left -= size
        return self.name, self.at - 1


class Backward:
    """One backward under way.

    Args:
        number: of its span.
        prepared: models whose gradients it may synchronise, in the order of their forwards.
    """

    __slots__ = ("_prepared", "end_ns", "number")

    def __init__(self, number: int, prepared: list[Model]) -> None:
        self.number = number
        self.end_ns = 0  # once it is over
        self._prepared = prepared

    def bucket_of(self, call: Call) -> tuple[str, int] | None:
        """The model and the bucket that this call of a reducer synchronises, if it does."""
        dtype, shapes, _ = call.kernel.shapes_of(call.arguments)
        if call.kernel.spec.name != "all_reduce" or dtype is torch.int32:  # which parameters were used
            return None
        size = nbytes(shapes, dtype)
        for model in reversed(self._prepared):  # gradients come from the last forward to the first
            if model.takes(size):
                return model.take(size)
        for model in reversed(self._prepared):  # its buckets are not known yet, or a hook has made them smaller
            if size <= model.left and (not model.sizes or model.at < len(model.sizes)):
                return model.take(size)
        return None


class Training:
    """Sees the training in this process, from `install` on.

    Args:
        tape: where the spans are left.
    """

    def __init__(self, tape: Tape) -> None:
        self.on_step: list[Callable[[], None]] = []  # called after each optimizer step
        self.gradient = ""  # the name of the parameter whose gradients are looked at
        self._tape = tape
        self._models: weakref.WeakKeyDictionary[Any, Model] = weakref.WeakKeyDictionary()
        self._prepared: list[Model] = []
        self._began: dict[int, int] = {}  # optimizer steps under way, by optimizer
        self._optimizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._gradients: list[tuple[int, str, torch.Tensor]] = []  # of the backward under way, to be averaged
        self._hooked = WeakTensorKeyDictionary()  # parameters

    def install(self) -> None:
        """Look at what torch runs. What this torch does not let be seen is left out, with a message."""
        unseen = []
        for what, look in (
            ("models in DDP", self._look_at_ddp),
            ("models in FSDP", self._look_at_fsdp),
            ("data loaders", self._look_at_loaders),
            ("backwards", self._look_at_backwards),
        ):
            try:
                look()
            except (AttributeError, ImportError):
                unseen.append(what)
        if unseen:
            print(f"ddp_notebook: torch {torch.__version__} does not let {', '.join(unseen)} be seen", file=sys.stderr)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _look_at_ddp(self) -> None:
        _around(DistributedDataParallel, "forward", self._around_forward)
        _around(DistributedDataParallel, "register_comm_hook", self._around_register)

    def _look_at_fsdp(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        _around(FSDPState, "_pre_forward", self._around_pre_forward)
        _around(FSDPState, "_post_forward", self._around_post_forward)

    def _look_at_loaders(self) -> None:
        _around(dataloader._BaseDataLoaderIter, "__next__", self._around_next)

    def _look_at_backwards(self) -> None:
        for module in (torch.autograd, torch.autograd.graph):
            _around(module, "_engine_run_backward", self._around_backward)

    def put(self, kind: int, name: str, start_ns: int, samples: int = -1, number: int = 0) -> None:
        """Leave a span that ends now."""
        tape = self._tape
        tape.put(
            Span(
                number or tape.next_span(),
                kind,
                name,
                tape.moment,
                start_ns,
                time.monotonic_ns(),
                samples,
                threading.get_ident(),
            )
        )

    # ---- forward

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
            if self._tape.level == OFF:
                return original(model, *inputs, **named)
            began_ns = time.monotonic_ns()
            try:
                out = original(model, *inputs, **named)
            finally:
                known = self._model(model)
                self.put(FORWARD, known.name, began_ns, _samples((*inputs, *named.values())))
            if model.require_backward_grad_sync and torch.is_grad_enabled():
                if (layout := known.prepare(model)) is not None:
                    self._tape.put(layout)
                if known in self._prepared:
                    self._prepared.remove(known)
                self._prepared.append(known)
                if self.gradient:
                    self._look_at_gradient(model)
            return out

        return _disable_dynamo(forward, recursive=False)  # torch.compile calls it as it is

    def _model(self, model: DistributedDataParallel) -> Model:
        known = self._models.get(model)
        if known is None:
            kind = type(model.module).__name__
            same = sum(one.name.split(" ")[0] == kind for one in self._models.values())
            known = self._models[model] = Model(model, f"{kind} {same + 1}" if same else kind)
        return known

    def _around_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _pre_forward(state: Any, module: Any, args: Any, named: Any) -> Any:
            began_ns = time.monotonic_ns()
            out = original(state, module, args, named)
            if self._tape.level != OFF and state._state_ctx.iter_forward_root is state:
                self._began[id(state)] = began_ns
                state.ddp_notebook_samples = _samples((*args, *named.values()))
            return out

        return _pre_forward

    def _around_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _post_forward(state: Any, module: Any, *rest: Any) -> Any:
            began_ns = self._began.pop(id(state), None)
            out = original(state, module, *rest)
            if began_ns is not None:
                samples = getattr(state, "ddp_notebook_samples", -1)
                self.put(FORWARD, type(module).__name__.removeprefix("FSDP"), began_ns, samples)
            return out

        return _post_forward

    # ---- backward

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _engine_run_backward(*args: Any, **named: Any) -> Any:
            tape = self._tape
            if tape.level == OFF or tape.moment.backward is not None:  # inside another one
                return original(*args, **named)
            began_ns, backward = time.monotonic_ns(), Backward(tape.next_span(), self._prepared)
            tape.go_back(backward)
            try:
                out = original(*args, **named)
                while self._gradients:
                    span, name, parameter = self._gradients.pop()
                    if parameter.grad is not None:
                        self._put_gradient(span, name, 3, parameter.grad)
                return out
            finally:
                backward.end_ns = time.monotonic_ns()
                self._gradients.clear()
                self.put(BACKWARD, "", began_ns, number=backward.number)
                self._prepared[:] = [model for model in self._prepared if not model.at]
                tape.go_back(None)

        return _engine_run_backward

    def _around_register(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(model: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            known = getattr(model, _HOOK, None)
            if known is not None:  # torch takes one hook only; ours calls whichever is the last
                model._check_comm_hook(hook)
                known[:] = [state, hook]
                return
            held = [state, hook]

            @functools.wraps(hook)
            def ours(held: list[Any], bucket: Any) -> Any:
                state, hook = held
                tape, index = self._tape, bucket.index()
                if tape.level == OFF:
                    return hook(state, bucket)
                moment, began_ns, name = tape.moment, time.monotonic_ns(), self._model(model).name
                size = bucket.buffer().nbytes
                tape.bucket = name, index
                try:
                    future = hook(state, bucket)
                finally:
                    tape.bucket = None
                number = 0 if moment.backward is None else moment.backward.number

                def ended(_: Any) -> None:
                    end_ns = time.monotonic_ns()
                    tape.put(Hooked(name, index, _name(hook), size, moment, number, began_ns, end_ns))

                future.add_done_callback(ended)
                return future

            original(model, held, ours)
            setattr(model, _HOOK, held)

        return register_comm_hook

    # ---- gradients of one parameter

    def _look_at_gradient(self, model: DistributedDataParallel) -> None:
        for name, parameter in model.module.named_parameters():
            if name == self.gradient and parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = True
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))

    def _on_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Before DDP averages it: its own hook comes later."""
        backward = self._tape.moment.backward
        if name != self.gradient or backward is None or parameter.grad is None:
            return
        span = backward.number
        self._put_gradient(span, name, 2, parameter.grad)
        self._gradients.append((span, name, parameter))

    def _put_gradient(self, span: int, name: str, side: int, gradient: torch.Tensor) -> None:
        copy = previews.copy([gradient])
        if copy is not None:
            self._tape.put(Gradient(span, name, side, copy))

    # ---- optimizer and input

    def _before_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self._tape.level != OFF and not self._began.get(-1):
            self._began[-1] = id(optimizer)
            self._began[id(optimizer)] = time.monotonic_ns()

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        if self._began.get(-1) != id(optimizer):  # inside another one's
            return
        self._began.pop(-1)
        began_ns = self._began.pop(id(optimizer))
        name = self._optimizers.get(optimizer)
        if name is None:
            kind = type(optimizer).__name__
            same = sum(one.split(" ")[0] == kind for one in self._optimizers.values())
            name = self._optimizers[optimizer] = f"{kind} {same + 1}" if same else kind
        self.put(OPTIMIZER, name, began_ns)
        self._tape.count_step()
        for call in self.on_step:
            call()

    def begin_cell(self) -> None:
        """What an interrupted cell has left half done is over."""
        self._began.clear()
        self._tape.bucket = None

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            if self._tape.level == OFF:
                return original(iterator)
            began_ns = time.monotonic_ns()
            data = original(iterator)
            self.put(INPUT, "", began_ns, _samples(data if isinstance(data, list | tuple) else (data,)))
            return data

        return __next__


class Hooked(NamedTuple):
    """A bucket that a user's comm hook has synchronised."""

    model: str
    bucket: int
    hook: str
    nbytes: int
    moment: Moment
    backward: int
    start_ns: int
    end_ns: int


def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _samples(values: Any) -> int:
    """The size of the batch: the first dimension of the first tensor; -1: there is none."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[0])
    return -1


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__).rpartition(".")[2]
