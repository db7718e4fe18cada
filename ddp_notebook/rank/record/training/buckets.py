"""Which gradients a bucket of DDP holds, and which call synchronises it.

DDP's reducer launches its buckets in order, so the next all_reduce in a backward that has the size of a model's next
bucket is that bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from ddp_notebook.rank.record.training.model_names import nothing
from ddp_notebook.stdlib import json, threading, time, weakref

if TYPE_CHECKING:
    from ddp_notebook.rank.group.sequences import Moment


class BucketChange(NamedTuple):
    """A model's buckets have changed."""

    time_ns: int
    model: str
    buckets: str
    is_rebuilt: bool


class Model:
    """What is known of one model in DDP."""

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        self.name = name
        self.reference = weakref.ref(model, self.forget_calls)
        self._reducer: Callable[[], Any] = nothing  # that the layout is of, as the group a weak reference
        self._group: Callable[[], Any] = nothing
        self.sizes: list[int] = []  # of its buckets, in bytes; none: not known
        self.at = 0  # its next bucket
        # By the line of the backward and its thread, and the address of their data: buckets whose calls are known.
        self.repeats: dict[tuple[Line, int], dict[int, Repeat]] = {}
        self.left = 0  # bytes still to be synchronised in this backward
        ignored = set(model.parameters_to_ignore)
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored]
        self._names = [name for name, _ in named]
        self._nbytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        self._sum = sum(self._nbytes)
        self._is_rebuilt: bool | None = None

    def forget_calls(self, _: object = None) -> None:
        """The calls that are known are not made again: the model is gone, has other buckets, or has failed, or another
        cell begins."""
        known, self.repeats = self.repeats, {}  # first: garbage may be collected below, and this model with it
        for repeats in known.values():
            for repeat in repeats.values():
                repeat.forget()

    def forget_layout(self) -> None:
        """Somebody reads from now on who was not told of its buckets."""
        self._is_rebuilt = None

    def prepare(self, model: DistributedDataParallel) -> BucketChange | None:
        """The next backward will synchronise its gradients. Returns its layout if that has changed."""
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
            # The model's own logger learns of them one step later, and would lose the times of this step if it were
            # asked now. One of our own reads them from the same reducer.
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
            {"nbytes": size, "parameters": [self._names[number] for number in numbers if number < len(self._names)]}
            for size, numbers in zip(self.sizes, buckets, strict=False)
        ]
        return BucketChange(time.monotonic_ns(), self.name, json.dumps(words), is_rebuilt)

    def _first_buckets(self) -> list[list[int]]:
        """The parameters of each bucket in torch's first layout, which goes from the last to the first, since the order
        in which gradients become ready is not known yet. Empty if there are several dtypes, which share no bucket."""
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
        """Whether its next bucket is known to have this size."""
        return self.at < len(self.sizes) and self.sizes[self.at] == size

    def count_bucket(self, size: int) -> tuple[str, int]:
        """Count its next bucket."""
        self.at += 1
        self.left -= size
        return self.name, self.at - 1

    def learn(self, call: Call, engine: CodeType) -> None:
        """Remember the call of a bucket, unless that is of something else, as a compressed copy of it."""
        assert call.bucket is not None
        (tensor,), (_, bucket) = call.arguments[0], call.bucket
        if tensor.layout is not torch.strided or self.sizes[bucket : bucket + 1] != [nbytes_of(tensor)]:
            return
        repeats = self.repeats.setdefault((line_of(call.site), call.thread), {})
        if (address := tensor.data_ptr()) not in repeats:
            repeats[address] = Repeat(call, self, engine)


class Backward:
    """One backward under way. When it ends it is put into the event buffer as a span, with those of its calls that took
    the short way.

    Args:
        number: of its span.
        prepared: models whose gradients it may synchronise, by the order of their forwards.
        site: of a distributed one, which runs in threads of its own.
    """

    __slots__ = (
        *("_prepared", "again", "began_ns", "calls", "end_ns", "has_span", "is_distributed", "is_over", "moment"),
        *("number", "outer", "repeats", "serials", "site", "thread"),
    )

    def __init__(self, number: int, prepared: list[Model], site: SiteFields | None = None) -> None:
        self.number = number
        self.moment: Moment | None = None  # in which it began
        self.outer: Backward | None = None  # that was under way then
        self.began_ns = time.monotonic_ns()
        self.end_ns = 0  # once it is over
        self.is_over = False  # it has ended well, and so have its calls
        self.has_span = True  # of its own: it is no action of a pipeline
        self.calls: list[Call] = []  # begun in it by reducers
        self.thread = threading.get_ident()
        self.site = site  # of these calls
        self.is_distributed = site is not None
        self.repeats: dict[int, Repeat] = {}  # by the address of their data: calls that may take the short way
        self.again: list[Again] = []  # those that did
        self.serials: Iterator[int] | None = None  # counts the rank's calls: these are counted as rows are made of them
        self._prepared = prepared

    def add_call(self, call: Call) -> Model | None:
        """A reducer has called it. Returns the model whose bucket it synchronises, if any."""
        self.calls.append(call)
        call.is_of_backward = True
        dtype, shapes, _ = call.kernel.shapes_of(call.arguments)
        if call.kernel.spec.name != "all_reduce" or dtype is torch.int32:  # the latter says which parameters were used
            return None
        size = nbytes(shapes, dtype)
        if (model := self._whose_next_has(size)) is not None:
            call.bucket = model.count_bucket(size)
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
        """Whether later backwards may make this call again in the same way. On a GPU events tell its begin and end."""
        return call.thread == self.thread and not self.is_distributed and call.marks is None

    def recalls(self, line_of_it: Callable[[], Line]) -> bool:
        """Whether there are buckets whose calls from its line are known; they are `repeats` from now on."""
        line = None
        for model in self._prepared:
            if not model.repeats:
                continue
            line = line or line_of_it()
            if repeats := model.repeats.get((line, self.thread)):
                if next(iter(repeats.values())).group.retired:  # the model's, so that of all of them
                    self.repeats = {}
                    break
                self.repeats = self.repeats | repeats if self.repeats else repeats
        return bool(self.repeats)

    @property
    def has_waited(self) -> bool:
        """Whether it has waited for all that it has begun: DDP does if each of a model's buckets was complete."""
        for model in self._prepared:  # noqa: SIM110 - a generator is one more thing that no cache holds
            if model.at and model.at != len(model.sizes):
                return False
        return True

    def forget(self) -> None:
        """It has failed: what it has begun may still be under way, and its calls are not to be begun again."""
        for model in self._prepared:
            model.forget_calls()
