"""One call of a collective, of a send or of a receive: its operator, its group, and what is kept of it."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from ddp_notebook.records.operation import Operation
from ddp_notebook.records.schema import REDUCE_OPS

if TYPE_CHECKING:
    from ddp_notebook.rank.record.gpu_times import Marks
    from ddp_notebook.rank.record.previews import Copy
    from ddp_notebook.rank.record.tape import Moment


ISSUED, DONE, FAILED, UNWAITED = range(4)  # of `records.STATES`


class Spec(NamedTuple):
    """What an operator means."""

    name: str  # as users call it
    input: str  # the argument with what this rank gives
    output: str  # and with what it gets
    shows_output: bool = False  # what has the same shape on all ranks is the output, not the input
    uneven: bool = False  # ranks may differ in shape
    kind: str = "collective"


SPECS = {
    "allreduce_": Spec("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": Spec("all_reduce_coalesced", "tensors", "tensors"),
    "broadcast_": Spec("broadcast", "tensors", "tensors"),
    "reduce_": Spec("reduce", "tensors", "tensors"),
    "gather_": Spec("gather", "input_tensors", "output_tensors"),
    "scatter_": Spec("scatter", "input_tensors", "output_tensors", shows_output=True),
    "allgather_": Spec("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": Spec("all_gather_single", "input_tensor", "output_tensor"),
    "allgather_coalesced_": Spec("all_gather_coalesced", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": Spec("all_gather_single_coalesced", "inputs", "outputs"),
    "reduce_scatter_": Spec("reduce_scatter", "input_tensors", "output_tensors", shows_output=True),
    "_reduce_scatter_base_": Spec("reduce_scatter_single", "input_tensor", "output_tensor", shows_output=True),
    "reduce_scatter_tensor_coalesced_": Spec("reduce_scatter_single_coalesced", "inputs", "outputs", shows_output=True),
    "alltoall_base_": Spec("all_to_all_single", "input", "output", uneven=True),
    "alltoall_": Spec("all_to_all", "input_tensors", "output_tensors", uneven=True),
    "barrier": Spec("barrier", "", ""),
    "monitored_barrier_": Spec("monitored_barrier", "", ""),
    "send": Spec("send", "tensors", "", kind="send"),
    "recv_": Spec("recv", "", "tensors", shows_output=True, kind="recv"),
    "recv_any_source_": Spec("recv", "", "tensors", shows_output=True, kind="recv"),
}


class Operator:
    """What the arguments of one operator are. All take tensors, then the group, then the rest.

    Args:
        name: of the operator, a key of `SPECS`.
    """

    def __init__(self, name: str) -> None:
        operator = getattr(torch.ops.c10d, name).default
        arguments = operator._schema.arguments
        places = {argument.name: at for at, argument in enumerate(arguments)}
        self.spec = SPECS[name]
        self.at_input = places.get(self.spec.input)
        self.at_output = places.get(self.spec.output)
        self.at_tensors = self.at_output if self.spec.shows_output else self.at_input
        self.at_rest = places["process_group"] + 1
        places = {name: at - self.at_rest for name, at in places.items()}
        self._at_reduce_op = places.get("reduce_op")
        self._at_tag = places.get("tag")
        self._at_root = next((places[word] for word in ("root_rank", "src", "dst") if word in places), None)
        self.at_async = places.get("async_op")
        self._at_facts = tuple(at for at in (self._at_tag, self._at_root, self.at_async) if at is not None)
        self.returns = len(operator._schema.returns)
        self.arguments = arguments
        # `operator.redispatch` without its frame, which takes 0.6 us
        self.redispatch = getattr(getattr(operator, "_handle", None), "redispatch_boxed", operator.redispatch)

    # Of the arguments behind the group. Those that have their default value are left out.

    def root_of(self, rest: tuple[Any, ...]) -> int | None:
        at = self._at_root
        return rest[at] if at is not None and at < len(rest) else None

    def tag_of(self, rest: tuple[Any, ...]) -> int:
        at = self._at_tag
        return rest[at] if at is not None and at < len(rest) else 0

    def reduce_op_of(self, rest: tuple[Any, ...]) -> str:
        at = self._at_reduce_op
        return "" if at is None else REDUCE_OPS[1 + int(rest[at].op())]

    def facts_of(self, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        """All of these, to tell calls apart."""
        op = None if (at := self._at_reduce_op) is None else rest[at].op()
        return op, *[rest[at] for at in self._at_facts if at < len(rest)]

    def blocks(self, rest: tuple[Any, ...]) -> bool:
        """Whether its caller waits for it."""
        at = self.at_async
        return not self.returns or (at is not None and at < len(rest) and not rest[at])

    def shapes_of(
        self, arguments: tuple[Any, ...]
    ) -> tuple[torch.dtype | None, Sequence[torch.Size], Sequence[torch.Size]]:
        """Of all arguments: the type of the tensors, and the shapes of the input and of the output."""
        at_in, at_out = self.at_input, self.at_output
        if at_in == at_out:
            if at_in is None:
                return None, (), ()
            tensors = arguments[at_in]
            if len(tensors) == 1:
                tensor = tensors[0]
                shapes: Sequence[torch.Size] = (tensor.shape,)
                return tensor.dtype, shapes, shapes
            shapes = [tensor.shape for tensor in tensors]
            return tensors[0].dtype if tensors else None, shapes, shapes
        inputs = () if at_in is None else flat(arguments[at_in])
        outputs = () if at_out is None else flat(arguments[at_out])
        some = inputs or outputs
        dtype = some[0].dtype if some else None
        return dtype, [one.shape for one in inputs], [one.shape for one in outputs]


class Call:
    """One operation under way: references only, so that it costs little to make."""

    # With defaults in the class instead of slots each look at one would take 0.05 us.
    __slots__ = (
        *("kernel", "group", "number", "arguments", "thread", "since_ns", "work", "check", "shapes"),
        *("moment", "site", "rest", "serial", "state", "end_ns", "blocked_ns", "bucket", "input", "output", "whole"),
        *("marks", "tells_its_end", "is_waited_for", "is_of_backward", "is_left"),
    )

    def __init__(
        self, kernel: Operator, group: Group, number: int, arguments: tuple[Any, ...], thread: int, since_ns: int
    ) -> None:
        self.kernel = kernel
        self.group = group
        self.number = number
        self.arguments = arguments  # none once it is `compact`
        self.thread = thread
        self.since_ns = since_ns
        self.work: Any = None
        self.check: Callable[[], None] | None = None  # for `Work.wait`, before its caller goes on
        # Once its tensors were let go: their type, and the shapes of the input and of the output.
        self.shapes: tuple[torch.dtype | None, Sequence[torch.Size], Sequence[torch.Size]] | None = None
        # For the recording, see `tape`.
        self.moment: Moment | None = None  # None: it is not recorded
        self.site: Any = None  # the fields of a `Site`
        self.rest: tuple[Any, ...] = ()  # the arguments behind the group, once the others were let go
        self.serial = self.state = self.end_ns = self.blocked_ns = 0
        self.bucket: tuple[str, int] | None = None
        self.input: Copy | None = None
        self.output: Copy | None = None
        self.whole: tuple[tuple[int, Copy], ...] = ()
        self.marks: Marks | None = None
        self.tells_its_end = self.is_waited_for = self.is_of_backward = self.is_left = False

    @property
    def is_done(self) -> bool:
        """Whether it is known to be over. gloo tells of a send, receive or reduce_scatter only in `wait`."""
        work = self.work  # which another thread may let go of
        if work is None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return False  # the query of an event would break a graph that is being captured
        return bool(work.is_completed())

    @property
    def is_given_up(self) -> bool:
        """Whether it is a send that nobody can wait for any more: its user has let go of the work."""
        return self.work is not None and self.kernel.spec.kind == "send" and _references(self) <= _OWN_REFERENCES

    @property
    def is_on_cpu(self) -> bool:
        """Whether its tensors are the processor's, as far as that is known."""
        at, arguments = self.kernel.at_tensors, self.arguments
        if at is None or not arguments:
            return not torch.cuda.is_available()
        tensors = flat(arguments[at])
        return not tensors or tensors[0].is_cpu

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed, though nobody in Python has waited for it."""
        work = self.work
        if work is None:
            return False
        try:
            future = work.get_future()
            if future.done():
                future.value()
        except RuntimeError as error:
            return "does not support" not in str(error) and "not implemented" not in str(error)  # no future
        return False

    def compact(self) -> None:
        """Let go of its tensors and its group: nobody may ever wait for it, and who holds a group keeps gloo's threads
        alive past its end."""
        if self.shapes is None:
            kernel, arguments = self.kernel, self.arguments
            self.shapes = kernel.shapes_of(arguments)
            self.rest = arguments[kernel.at_rest :]
            self.arguments = ()

    def describe(self) -> Operation:
        """The operation in words and numbers."""
        kernel, group = self.kernel, self.group
        rest = self.rest or self.arguments[kernel.at_rest :]
        dtype, inputs, outputs = self.shapes or kernel.shapes_of(self.arguments)
        shapes = outputs if kernel.spec.shows_output else inputs
        return Operation(
            name=kernel.spec.name,
            number=self.number,
            group=group.title,
            ranks=group.ranks,
            dtype=str(dtype).removeprefix("torch.") if dtype and shapes else "",
            shapes=tuple(tuple(shape) for shape in shapes),
            nbytes=nbytes(shapes, dtype),
            root=group.session_rank(kernel.root_of(rest)),
            reduce_op=kernel.reduce_op_of(rest),
            since_s=(time.monotonic_ns() - self.since_ns) / 1e9,
        )


def _references(call: Any) -> int:
    """To its work, ours among them."""
    return sys.getrefcount(call.work)


_OWN_REFERENCES = _references(SimpleNamespace(work=object()))  # which differs from one Python to another


class Group:
    """What is known of a process group. Refers to it weakly."""

    def __init__(self, group: ProcessGroup) -> None:
        self.reference = weakref.ref(group)
        self.name: str = group.group_name
        self.ranks: tuple[int, ...] = tuple(map(int, _ranks(group)))  # of NumPy's, where the user's were
        self.title = _title(group, self.ranks)
        self.retired = ""  # why it cannot be used any more
        self.successor: ProcessGroup | None = None  # the group that operations go through instead
        self.connections: Any = None  # the same, as operators take it
        self.twin: Any = None  # the private group of the guard: a `ProcessGroupGloo`
        self.counts = {"collective": 0, "send": 0, "recv": 0}
        self.sent: dict[int, int] = {}  # to each rank of the group
        # Threads' calls of a kind are numbered and compared one after the other. A send does not wait for that: another
        # rank's all_reduce, which this one's waits for, may come after its receive.
        self.locks = {kind: threading.RLock() for kind in self.counts}

    def session_rank(self, rank: int | None) -> int | None:
        """A rank of this group as one of the session."""
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long its operations may take."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def flat(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if type(value) is not list:
        return (value,)
    if not value or type(value[0]) is not list:
        return value
    return [tensor for part in value for tensor in flat(part)]


def nbytes(shapes: Sequence[torch.Size], dtype: torch.dtype | None) -> int:
    """Of tensors of these shapes."""
    return 0 if dtype is None else dtype.itemsize * sum(shape.numel() for shape in shapes)


def _ranks(group: ProcessGroup) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError):  # made behind torch's back, or destroyed
        return list(range(group.size()))


def _title(group: ProcessGroup, ranks: tuple[int, ...]) -> str:
    if dist.is_initialized() and group is dist.group.WORLD:
        return "default"
    described = group.group_desc
    if described and described not in ("undefined", "default_pg"):
        return described
    return f"[{','.join(map(str, ranks[:8]))}{',...' if len(ranks) > 8 else ''}]"
