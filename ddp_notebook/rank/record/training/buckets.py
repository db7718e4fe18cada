"""Find the gradients in each DDP bucket, and the call that synchronizes it.

DDP's reducer launches its buckets in order. So the next all_reduce in a backward belongs to a model's next bucket if
the sizes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.call_site import Line, SiteFields, line_of
from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.kernels.repeats import Again, Repeat
from ddp_notebook.rank.group.operators import nbytes, nbytes_of
from ddp_notebook.rank.record.training.model_names import nothing, variable_of
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json, threading, time, weakref

if TYPE_CHECKING:
    from ddp_notebook.rank.group.sequences import Moment


class BucketChange(NamedTuple):
    """A change of a model's buckets."""

    time_ns: int
    model: str
    buckets: str
    is_rebuilt: bool


class Model:
    """Data of one DDP model.

    Args:
        model: the model.
        name: its name.
        identity: its identity, see `rank.group.collective_owners`; 0 if unknown.
    """

    def __init__(self, model: DistributedDataParallel, name: str, identity: int = 0) -> None:
        self.name = name
        self.identity = identity  # see `rank.group.collective_owners`
        self.reference = weakref.ref(model, self.forget_calls)
        self._reducer: Callable[[], Any] = nothing  # reducer of the layout, and weak reference to the group
        self._group: Callable[[], Any] = nothing
        self.sizes: list[int] = []  # sizes of the buckets in bytes; empty if not known
        self.at = 0  # index of the next bucket
        # Buckets with known calls: by the backward's line and thread, then by the address of the bucket's data.
        self.repeats: dict[tuple[Line, int], dict[int, Repeat]] = {}
        self.left = 0  # bytes that remain to be synchronized in this backward
        ignored = set(model.parameters_to_ignore)
        parameters = list(model.module.named_parameters())
        named = [(n, p) for n, p in parameters if p.requires_grad and n not in ignored]
        self.ids = {id(p) for n, p in parameters if p.requires_grad or n in ignored}  # averaged or ignored by DDP
        self.names = [name for name, _ in named]
        self._nbytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        self._sum = sum(self._nbytes)
        self._is_rebuilt: bool | None = None

    def forget_calls(self, _: object = None) -> None:
        """Forget the known calls. Called if the model is deleted, has new buckets or has failed, and when a cell
        starts."""
        known, self.repeats = self.repeats, {}  # first: garbage collection below may delete this model
        for repeats in known.values():
            for repeat in repeats.values():
                repeat.forget()

    def forget_layout(self) -> None:
        """Report the buckets again, for a new receiver."""
        self._is_rebuilt = None

    def prepare(self, model: DistributedDataParallel, namespace: Mapping[str, Any]) -> BucketChange | None:
        """Prepare for a backward that synchronizes this model. Return its layout if that has changed.

        Args:
            model: the model.
            namespace: the user's variables. The layout has the variable of the model.
        """
        self.at, self.left = 0, self._sum
        if self._reducer() is not model.reducer or self._group() is not model.process_group:
            self.forget_calls()
            self._reducer, self._group = weakref.ref(model.reducer), weakref.ref(model.process_group)
        is_rebuilt = bool(model._has_rebuilt_buckets)
        if is_rebuilt == self._is_rebuilt and self.sizes:
            return None
        self.forget_calls()
        if model.logger is None:  # it has no buckets
            return None
        facts = model._get_ddp_logging_data()  # 15 us
        if is_rebuilt and not facts.get("rebuilt_bucket_sizes"):
            # The model's own logger has the rebuilt buckets only one step later, and a query now would lose this
            # step's times. A second logger reads them from the same reducer.
            logger = dist.Logger(model.reducer)  # type: ignore[attr-defined]  # exported at run time
            with quiet():
                logger.set_runtime_stats_and_log()
            facts = logger._get_ddp_logging_data().strs_map
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
            {"nbytes": size, "parameters": [self.names[number] for number in numbers if number < len(self.names)]}
            for size, numbers in zip(self.sizes, buckets, strict=False)
        ]
        if words and (variable := variable_of(model, namespace)):
            words[0]["variable"] = variable
        return BucketChange(time.monotonic_ns(), self.name, json.dumps(words), is_rebuilt)

    def _first_buckets(self) -> list[list[int]]:
        """Return the parameters of each bucket in the first layout of torch.

        It goes from the last parameter to the first, since the order of the gradients is not known yet. The lists are
        empty if there are several dtypes, which share no bucket.
        """
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
        """Return whether the next bucket is known to have this size."""
        return self.at < len(self.sizes) and self.sizes[self.at] == size

    def count_bucket(self, size: int) -> tuple[str, int]:
        """Count the next bucket. Return the model's name and the index of the bucket."""
        self.at += 1
        self.left -= size
        return self.name, self.at - 1

    def learn(self, call: Call, engine: CodeType) -> None:
        """Remember the call of a bucket, if it is on the bucket's data and not, for example, on a compressed copy."""
        assert call.bucket is not None
        (tensor,), (_, bucket) = call.arguments[0], call.bucket
        if tensor.layout is not torch.strided or self.sizes[bucket : bucket + 1] != [nbytes_of(tensor)]:
            return
        repeats = self.repeats.setdefault((line_of(call.site), call.thread), {})
        if (address := tensor.data_ptr()) not in repeats:
            repeats[address] = Repeat(call, self, engine)


class Backward:
    """A running backward. At its end it is added to the event buffer as a span, with its fast-path calls.

    Args:
        number: number of its span.
        prepared: models whose gradients it may synchronize, in the order of their forwards.
        site: call site of a distributed backward, which runs in its own threads.
    """

    __slots__ = (
        *("_prepared", "again", "began_ns", "calls", "end_ns", "has_span", "is_distributed", "is_over", "moment"),
        *("number", "outer", "repeats", "serials", "site", "thread"),
    )

    def __init__(self, number: int, prepared: list[Model], site: SiteFields | None = None) -> None:
        self.number = number
        self.moment: Moment | None = None  # at the start
        self.outer: Backward | None = None  # backward that was running at the start
        self.began_ns = time.monotonic_ns()
        self.end_ns = 0  # 0 while it runs
        self.is_over = False  # it has succeeded, and so have its calls
        self.has_span = True  # False for an action of a pipeline
        self.calls: list[Call] = []  # calls that reducers have started in it
        self.thread = threading.get_ident()
        self.site = site  # call site of these calls
        self.is_distributed = site is not None
        self.repeats: dict[int, Repeat] = {}  # calls that may use the fast path, by the address of their data
        self.again: list[Again] = []  # calls that used the fast path
        self.serials: Iterator[int] | None = None  # numbers of these calls, taken when rows are made of them
        self._prepared = prepared

    def add_call(self, call: Call) -> Model | None:
        """Add a call of a reducer. Return the model whose bucket it synchronizes, if any."""
        self.calls.append(call)
        call.is_of_backward = True
        dtype, shapes, _ = call.kernel.shapes_of(call.arguments)
        if call.kernel.spec.name != "all_reduce" or dtype is torch.int32:  # the latter contains the used parameters
            return None
        size = nbytes(shapes, dtype)
        if (model := self._whose_next_has(size)) is not None:
            call.bucket = model.count_bucket(size)
            if all(one is model or (one.sizes and size not in one.sizes) for one in self._prepared):
                call.identity = model.identity
        return model

    def _whose_next_has(self, size: int) -> Model | None:
        for model in reversed(self._prepared):  # gradients become ready from the last forward to the first
            if model.takes(size):
                return model
        for model in reversed(self._prepared):  # its buckets are not known yet, or a hook has made them smaller
            if size <= model.left and (not model.sizes or model.at < len(model.sizes)):
                return model
        return None

    def can_learn(self, call: Call) -> bool:
        """Return whether later backwards may repeat this call on the fast path. On a GPU, events contain the times
        instead."""
        return call.thread == self.thread and not self.is_distributed and call.marks is None

    def recalls(self, line_of_it: Callable[[], Line]) -> bool:
        """Set `repeats` to the known calls of buckets for the line of this backward. Return whether there are any."""
        line = None
        for model in self._prepared:
            if not model.repeats:
                continue
            line = line or line_of_it()
            if repeats := model.repeats.get((line, self.thread)):
                if next(iter(repeats.values())).group.retired:  # the group of the model, so of all its calls
                    self.repeats = {}
                    break
                self.repeats = self.repeats | repeats if self.repeats else repeats
        return bool(self.repeats)

    @property
    def has_waited(self) -> bool:
        """Return whether the backward has waited for all its calls. DDP does so if all buckets of each model were
        complete."""
        for model in self._prepared:  # noqa: SIM110 - a generator is one more thing that no cache holds
            if model.at and model.at != len(model.sizes):
                return False
        return True

    def forget(self) -> None:
        """Forget the known calls of a failed backward: some of its calls may still be in progress."""
        for model in self._prepared:
            model.forget_calls()
