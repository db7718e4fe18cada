"""Every collective, send and receive of this process, as it happens: what is under way, and who waits in it.

Kernels at the dispatch key `BackendSelect` of torch's `c10d` operators see all of them: the user's, those of DDP's
reducer, FSDP, DTensor and object collectives, from every thread, and cost nothing elsewhere. A kernel stores
references and goes on to the real operator; what they mean is worked out only when somebody asks. The end of an
operation is seen in `Work.wait`, which is wrapped, or when somebody asks.

A kernel may also refuse the operation (`refuse`), check it first (`guard`), and send it through other connections than
those that its group was made with (`connections`).

Two traps, both of which hang or abort only sometimes: a kernel at the key `CPU` would hold the interpreter's lock
while gloo's worker waits for it, and a strong reference to a group keeps gloo's threads alive past the group's end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ddp_notebook.operation import Operation
from ddp_notebook.records import REDUCE_OPS

if TYPE_CHECKING:
    from ddp_notebook.rank.gpu_times import Marks
    from ddp_notebook.rank.previews import Copy
    from ddp_notebook.rank.tape import Moment, Tape

_MOST_LIVE = 64  # operations that nobody has waited for; those that are done are dropped much earlier
_PRUNE_AT = 16  # operations that may be over; more where many are really under way


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


class Failure(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at_ns: int  # monotonic


class Call:
    """One operation under way: references only, so that it costs little to make."""

    # What is not set on every call stands here, so that it costs nothing.
    work: Any = None
    check: Callable[[], None] | None = None  # for `Work.wait`, before its caller goes on
    # Once its tensors were let go: their type, and the shapes of the input and of the output.
    shapes: tuple[torch.dtype | None, Sequence[torch.Size], Sequence[torch.Size]] | None = None
    # For the recording, see `tape`.
    moment: Moment | None = None  # None: it is not recorded
    site: Any = None  # the fields of a `Site`
    rest: tuple[Any, ...] = ()  # the arguments behind the group, once the others were let go
    serial = state = end_ns = blocked_ns = 0
    bucket: tuple[str, int] | None = None
    input: Copy | None = None
    output: Copy | None = None
    whole: tuple[tuple[int, Copy], ...] = ()
    marks: Marks | None = None
    tells_its_end = is_waited_for = False

    def __init__(
        self, kernel: Kernel, group: Group, number: int, arguments: tuple[Any, ...], thread: int, since_ns: int
    ) -> None:
        self.kernel = kernel
        self.group = group
        self.number = number
        self.arguments = arguments  # none once it is `compact`
        self.thread = thread
        self.since_ns = since_ns

    @property
    def is_done(self) -> bool:
        """Whether it is known to be over. gloo tells of a send, receive or reduce_scatter only in `wait`."""
        if self.work is None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return False  # the query of an event would break a graph that is being captured
        return bool(self.work.is_completed())

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed, though nobody in Python has waited for it."""
        if self.work is None:
            return False
        try:
            future = self.work.get_future()
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


class Group:
    """What is known of a process group. Refers to it weakly."""

    def __init__(self, group: ProcessGroup) -> None:
        self.reference = weakref.ref(group)
        self.name: str = group.group_name
        self.ranks: tuple[int, ...] = tuple(_ranks(group))
        self.title = _title(group, self.ranks)
        self.retired = ""  # why it cannot be used any more
        self.successor: ProcessGroup | None = None  # the group that operations go through instead
        self.connections: Any = None  # the same, as operators take it
        self.twin: Any = None  # the private group of the guard: a `ProcessGroupGloo`
        self.counts = {"collective": 0, "send": 0, "recv": 0}
        self.sent: dict[int, int] = {}  # to each rank of the session

    def session_rank(self, rank: int | None) -> int | None:
        """A rank of this group as one of the session."""
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None


class Kernel:
    """Stands before one operator. All operators take tensors, then the group, then the rest."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
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
        self._at_async = places.get("async_op")
        self.returns = len(operator._schema.returns)
        self._arguments = arguments
        # `operator.redispatch` without its frame, which takes 0.6 us
        self._redispatch = getattr(getattr(operator, "_handle", None), "redispatch_boxed", operator.redispatch)
        self._after = after
        self._recorder = recorder

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

    def blocks(self, rest: tuple[Any, ...]) -> bool:
        """Whether its caller waits for it."""
        at = self._at_async
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
            return tensors[0].dtype, shapes, shapes
        inputs = () if at_in is None else flat(arguments[at_in])
        outputs = () if at_out is None else flat(arguments[at_out])
        some = inputs or outputs
        dtype = some[0].dtype if some else None
        return dtype, [one.shape for one in inputs], [one.shape for one in outputs]

    def make(self) -> Callable[..., Any]:
        """The kernel itself: a closure, since every attribute that it would look up costs (12 us a call, of which 7
        are those of a kernel in Python that does nothing)."""
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self.at_rest - 1
        live, waiting, by_work, groups = recorder.live, recorder.waiting, recorder.by_work, recorder.groups
        redispatch, after, unbox_group, unbox_work = self._redispatch, self._after, ProcessGroup.unbox, Work.unbox
        get_ident, monotonic_ns, is_send = threading.get_ident, time.monotonic_ns, kind == "send"
        unwaited = recorder.unwaited
        at_async = None if self._at_async is None else self._at_async + self.at_rest

        def run(keys: Any, *arguments: Any, **named: Any) -> Any:
            if named:
                arguments += tuple(named.get(a.name, a.default_value) for a in self._arguments[len(arguments) :])
            process_group = unbox_group(arguments[at])
            group = groups.get(id(process_group))
            if group is None or group.reference() is not process_group:
                group = recorder.group(process_group)
            if (refuse := recorder.refusal) is not None:
                raise refuse(group)
            if group.retired:
                raise RuntimeError(group.retired)
            if (instead := recorder.instead) is not None:
                return instead(kernel, arguments)
            counts = group.counts
            counts[kind] = number = counts[kind] + 1
            thread = get_ident()
            call = Call(kernel, group, number, arguments, thread, monotonic_ns())
            key = id(call)
            live[key] = waiting[thread] = call
            tape = recorder.tape
            try:
                if is_send:
                    to = kernel.root_of(arguments[at + 1 :])
                    group.sent[to] = group.sent.get(to, 0) + 1  # type: ignore[index,arg-type]  # a send has one
                elif (guard := recorder.guard) is not None:
                    guard(call)
                if tape is not None:
                    tape.begin(call)
                if group.connections is not None:
                    arguments = (*arguments[:at], group.connections, *arguments[at + 1 :])
                out = redispatch(keys & after, *arguments)
            except BaseException as error:
                live.pop(key, None)
                recorder.failed = Failure(call, error, monotonic_ns())
                if call.moment is not None:
                    tape.ended(call, True, 0)  # type: ignore[union-attr]
                raise
            finally:
                waiting.pop(thread, None)
            work = out[-1] if type(out) is tuple or type(out) is list else out
            if work is None:  # monitored_barrier has waited
                live.pop(key, None)
                if call.moment is not None:
                    tape.ended(call, False, monotonic_ns() - call.since_ns)  # type: ignore[union-attr]
            elif (
                at_async is not None and at_async < len(arguments) and not arguments[at_async]
            ):  # the next thing that this thread does is to wait
                unwaited[thread] = call
            else:
                work = unbox_work(work)
                if call.moment is not None:
                    tape.issued(call, work)  # type: ignore[union-attr]
                call.work = work  # from now on another thread may see that it is over, and forget it
                by_work[id(work)] = call
            if len(live) >= recorder.prune_at:
                recorder.prune()
            return out

        return run


class Recorder:
    """Sees the operations of this process from `install` to `remove`.

    Example:
        >>> recorder = Recorder()
        >>> recorder.install()
        >>> [str(operation) for operation in recorder.operations()]
        []
    """

    def __init__(self) -> None:
        self.refusal: Callable[[Group], BaseException] | None = None  # what an operation is to raise instead
        self.guard: Callable[[Call], None] | None = None  # looks at each before it begins; may raise
        self.instead: Callable[[Kernel, tuple[Any, ...]], Any] | None = None  # done in place of every operation
        self.tape: Tape | None = None  # where calls are left for the recording
        self.failed: Failure | None = None  # the last one
        self.live: dict[int, Call] = {}  # that may not be over, by id
        self.waiting: dict[int, Call] = {}  # by thread that is in one or waits for one
        self.by_work: dict[int, Call] = {}
        self.unwaited: dict[int, Call] = {}  # by thread: a synchronous one between its issue and its wait
        self.prune_at = _PRUNE_AT
        self.twins: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()  # of the guard
        self.groups: dict[int, Group] = {}  # by id of the process group
        self._libraries: list[Any] = []
        self._waits: dict[type, Any] = {}

    def install(self) -> None:
        """Put the kernels before the operators."""
        library, functional = torch.library.Library("c10d", "IMPL"), torch.library.Library("_c10d_functional", "IMPL")
        self._libraries = [library, functional]
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name in SPECS:
            if hasattr(torch.ops.c10d, name):
                library.impl(name, Kernel(self, name, after).make(), "BackendSelect", with_keyset=True)
        functional.impl("wait_tensor", self._around_wait_tensor(after), "BackendSelect", with_keyset=True)
        kinds: list[type] = [Work, *Work.__subclasses__()]
        for kind in kinds:  # of the fake backend, which has a `wait` of its own
            if "wait" in kind.__dict__:
                self._waits[kind] = kind.__dict__["wait"]  # not `getattr`, which loses the descriptor
                kind.wait = self._around_wait(kind.wait)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Take the kernels away."""
        for library in self._libraries:
            library._destroy()
        for kind, wait in self._waits.items():
            kind.wait = wait  # type: ignore[attr-defined]

    def group(self, group: ProcessGroup) -> Group:
        """What is known of a process group."""
        known = self.groups.get(id(group))
        if known is None or known.reference() is not group:
            known = self.groups[id(group)] = Group(group)
            known.twin = self.twins.get(group)
            for key in [key for key, one in list(self.groups.items()) if one.reference() is None]:
                del self.groups[key]
        return known

    @property
    def counts(self) -> dict[str, dict[str, Any]]:
        """How many operations of each kind were begun in each group, by its name: whether ranks are in step."""
        return {
            group.name: {**group.counts, "sent": {group.session_rank(to): n for to, n in group.sent.items()}}
            for group in list(self.groups.values())
            if (one := group.reference()) is not None and _is_registered(one)
        }

    @property
    def begun(self) -> int:
        """How many operations were begun, in all groups."""
        return sum(sum(group.counts.values()) for group in list(self.groups.values()))

    def reset_counts(self) -> None:
        """The groups were formed anew: count from the beginning, and forget what the old connections took along."""
        for group in list(self.groups.values()):
            group.counts = dict.fromkeys(group.counts, 0)
            group.sent.clear()
        self.live.clear()
        self.by_work.clear()
        self.unwaited.clear()
        self.failed = None

    def prune(self) -> None:
        """Forget what is over: its tensors should not live longer than their user lets them."""
        for key, call in list(self.live.items()):
            if call.is_done:
                self._forget(key, call)
        left = list(self.live.items())
        for key, call in left[: max(0, len(left) - _MOST_LIVE)]:
            self._forget(key, call)
        self.prune_at = max(_PRUNE_AT, 2 * len(self.live))

    def _forget(self, key: int, call: Call) -> None:
        self.live.pop(key, None)
        self.by_work.pop(id(call.work), None)
        call.work = None  # which holds its tensors
        if call.moment is not None and self.tape is not None:
            self.tape.forgotten(call)

    def operations(self) -> list[Call]:
        """What is under way, the oldest first. From any thread."""
        return [call for call in list(self.live.values()) if not call.is_done]

    def waits_in(self, thread: int) -> Call | None:
        """The operation that a thread waits in, as far as Python sees it. From any thread."""
        return self.waiting.get(thread)

    def _around_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        waiting, by_work, live, unwaited = self.waiting, self.by_work, self.live, self.unwaited
        get_ident, monotonic_ns = threading.get_ident, time.monotonic_ns

        def recorded_wait(work: Work, timeout: timedelta | None = None) -> bool:
            thread = get_ident()
            call = by_work.get(id(work))
            if call is None:
                call = unwaited.pop(thread, None)
                if call is None:  # of a group that is not recorded
                    return wait(work) if timeout is None else wait(work, timeout)
                call.is_waited_for = True  # first: another thread may see that it is over, and forget it
                call.work = work
            elif call.work is not work:
                return wait(work) if timeout is None else wait(work, timeout)
            if timeout is None and call.kernel.spec.kind != "collective":
                # gloo would take the timeout that its group was formed with, whatever it was set to since.
                group = call.group.reference()
                timeout = None if group is None else timeout_of(group)
            call.is_waited_for = not call.end_ns
            failed, began_ns = True, monotonic_ns()
            try:
                waiting[thread] = call
                done = wait(work) if timeout is None else wait(work, timeout)
                failed = False
                if call.check is not None:
                    call.check()
            except BaseException as error:
                self.failed = Failure(call, error, monotonic_ns())
                raise
            finally:
                waiting.pop(thread, None)
                live.pop(id(call), None)
                by_work.pop(id(work), None)
                if call.moment is not None and (tape := self.tape) is not None:
                    tape.ended(call, failed, monotonic_ns() - began_ns)
                    call.work = None  # it holds the tensors, and the call may be on the tape for a while
            return done

        return recorded_wait

    def _around_wait_tensor(self, after: Any) -> Callable[..., torch.Tensor]:
        """Functional collectives, and with them DTensor, are waited for by their output, in C++."""
        waiting, live, wait = self.waiting, self.live, torch.ops._c10d_functional.wait_tensor.default.redispatch

        def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            call = self._that_fills(tensor)
            if call is None:
                return wait(keys & after, tensor)
            thread, failed, began_ns = threading.get_ident(), True, time.monotonic_ns()
            call.is_waited_for = not call.end_ns
            try:
                waiting[thread] = call
                out = wait(keys & after, tensor)
                failed = False
                return out
            except BaseException as error:
                self.failed = Failure(call, error, time.monotonic_ns())
                raise
            finally:
                waiting.pop(thread, None)
                live.pop(id(call), None)
                self.by_work.pop(id(call.work), None)
                if call.moment is not None and self.tape is not None:
                    self.tape.ended(call, failed, time.monotonic_ns() - began_ns)

        return wait_tensor

    def _that_fills(self, tensor: torch.Tensor) -> Call | None:
        """The operation under way that a tensor is the output of."""
        if type(tensor) is not torch.Tensor:  # of torch.compile's, which has no data
            return None
        at_data = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for call in reversed(list(self.live.values())) if at_data else ():
            arguments, at_output = call.arguments, call.kernel.at_output
            if arguments and at_output is not None:
                for one in flat(arguments[at_output]):
                    if one.layout is torch.strided and one.untyped_storage().data_ptr() == at_data:
                        return call
        return None


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long its operations may take."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def _is_registered(group: ProcessGroup) -> bool:
    """Whether torch knows it: one that was destroyed may live on for a while, and its name be given again."""
    return group in distributed_c10d._world.pg_names


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
