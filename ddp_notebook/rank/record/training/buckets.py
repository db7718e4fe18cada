"""Which gradients a bucket of DDP holds, and which call synchronises it.

DDP's reducer launches its buckets in order, so the next all_reduce in a backward that has the size of a model's next
bucket is that bucket.
"""

from __future__ import annotations

import json
import threading
import time
from types import CodeType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.kernels.repeats import Again, Repeat
from ddp_notebook.rank.group.operators import nbytes
from ddp_notebook.rank.group.origin import Line, SiteFields, line_of


class Layout(NamedTuple):
    """A model's buckets have changed."""

    time_ns: int
    model: str
    buckets: str
    is_rebuilt: bool


class Model:
    """What is known of one model in DDP."""

    def __init__(self, model: DistributedDataParallel, name: str) -> None:
        self.name = name
        self.sizes: list[int] = []  # of its buckets, in bytes; none: not known
        self.at = 0  # its next bucket
        # By the line of the backward, and the address of their data: those buckets whose calls are known.
        self.repeats: dict[Line, dict[int, Repeat]] = {}
        self.left = 0  # bytes still to be synchronised in this backward
        ignored = set(model.parameters_to_ignore)
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored]
        self._names = [name for name, _ in named]
        self._nbytes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        self._is_rebuilt: bool | None = None

    def forget_layout(self) -> None:
        """Somebody reads from now on who was not told of its buckets."""
        self._is_rebuilt = None

    def prepare(self, model: DistributedDataParallel) -> Layout | None:
        """The next backward will synchronise its gradients. Returns its layout if that has changed."""
        self.at, self.left = 0, sum(self._nbytes)
        is_rebuilt = bool(model._has_rebuilt_buckets)
        if is_rebuilt == self._is_rebuilt and self.sizes:
            return None
        self.repeats.clear()
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
        return Layout(time.monotonic_ns(), self.name, json.dumps(words), is_rebuilt)

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

    def take(self, size: int) -> tuple[str, int]:
        """Count its next bucket."""
        self.at += 1
        self.left -= size
        return self.name, self.at - 1


class Backward:
    """One backward under way.

    Args:
        number: of its span.
        prepared: models whose gradients it may synchronise, by the order of their forwards.
    """

    __slots__ = (
        *("_prepared", "again", "calls", "end_ns", "is_distributed", "is_over", "number", "repeats", "site", "thread"),
    )

    def __init__(self, number: int, prepared: list[Model]) -> None:
        self.number = number
        self.end_ns = 0  # once it is over
        self.is_over = False  # it has ended well, and so have its calls
        self.calls: list[Call] = []  # begun in it by reducers
        self.thread = threading.get_ident()
        self.site: SiteFields | None = None  # of these calls
        self.is_distributed = False  # it runs in threads of its own
        self.repeats: dict[int, Repeat] = {}  # by the address of their data: calls that may take the short way
        self.again: list[Again] = []  # those that did
        self._prepared = prepared

    def learn(self, call: Call, engine: CodeType) -> None:
        """Remember a call, which later backwards will make again if it is a bucket's. Its tensors are still there."""
        if call.bucket is None or self.is_distributed:
            return
        model = next(model for model in self._prepared if model.name == call.bucket[0])
        repeats = model.repeats.setdefault(line_of(call.site), {})
        (tensor,) = call.arguments[0]
        if tensor.layout is torch.strided and (address := tensor.data_ptr()) not in repeats:
            repeats[address] = Repeat(call, model, engine)

    @property
    def is_known(self) -> bool:
        """Whether there is a line whose calls are known."""
        return any(model.repeats for model in self._prepared)

    def recalls(self, line: Line) -> bool:
        """Whether there are buckets whose calls from this line are known; they are `repeats` from now on."""
        for model in self._prepared:
            self.repeats = self.repeats | model.repeats.get(line, {})
        return bool(self.repeats) and not any(repeat.group.retired for repeat in self.repeats.values())

    def forget(self) -> None:
        """It has failed: what it has begun may still be under way, and its calls are not to be begun again."""
        for model in self._prepared:
            model.repeats.clear()

    def bucket_of(self, call: Call) -> tuple[str, int] | None:
        """The model and the bucket that this call of a reducer synchronises, if any."""
        dtype, shapes, _ = call.kernel.shapes_of(call.arguments)
        if call.kernel.spec.name != "all_reduce" or dtype is torch.int32:  # the latter says which parameters were used
            return None
        size = nbytes(shapes, dtype)
        for model in reversed(self._prepared):  # gradients become ready from the last forward to the first
            if model.takes(size):
                return model.take(size)
        for model in reversed(self._prepared):  # its buckets are not known yet, or a hook has made them smaller
            if size <= model.left and (not model.sizes or model.at < len(model.sizes)):
                return model.take(size)
        return None
