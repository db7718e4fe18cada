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
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ddp_notebook.operation import Operation

_MOST_LIVE = 64  # operations that nobody has waited for; those that are done are dropped much earlier
_PRUNE_AT = 16  # operations that may be over; more where many are really under way
_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class Spec(NamedTuple):
    """What an operator means."""

    name: str  # as users call it
    tensors: str  # the argument whose shape is the same on all ranks, if any is
    uneven: bool = False  # ranks may differ in shape
    kind: str = "collective"


SPECS = {
    "allreduce_": Spec("all_reduce", "tensors"),
    "allreduce_coalesced_": Spec("all_reduce_coalesced", "tensors"),
    "broadcast_": Spec("broadcast", "tensors"),
    "reduce_": Spec("reduce", "tensors"),
    "gather_": Spec("gather", "input_tensors"),
    "scatter_": Spec("scatter", "output_tensors"),
    "allgather_": Spec("all_gather", "input_tensors"),
    "_allgather_base_": Spec("all_gather_single", "input_tensor"),
    "allgather_coalesced_": Spec("all_gather_coalesced", "input_list"),
    "allgather_into_tensor_coalesced_": Spec("all_gather_single_coalesced", "inputs"),
    "reduce_scatter_": Spec("reduce_scatter", "output_tensors"),
    "_reduce_scatter_base_": Spec("reduce_scatter_single", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": Spec("reduce_scatter_single_coalesced", "outputs"),
    "alltoall_base_": Spec("all_to_all_single", "input", uneven=True),
    "alltoall_": Spec("all_to_all", "input_tensors", uneven=True),
    "barrier": Spec("barrier", ""),
    "monitored_barrier_": Spec("monitored_barrier", ""),
    "send": Spec("send", "tensors", kind="send"),
    "recv_": Spec("recv", "tensors", kind="recv"),
    "recv_any_source_": Spec("recv", "tensors", kind="recv"),
}


class Failure(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at: float  # monotonic seconds


class Call:
    """One operation under way: references only, so that it costs little to make."""

    __slots__ = ("_described", "arguments", "check", "group", "kernel", "number", "since", "thread", "work")

    def __init__(
        self, kernel: _Kernel, group: Group, number: int, arguments: tuple[Any, ...], thread: int, since: float
    ) -> None:
        self.kernel = kernel
        self.group = group
        self.number = number
        self.arguments = arguments
        self.thread = thread
        self.since = since
        self.work: Any = None
        self._described: Operation | None = None
        self.check: Callable[[], None] | None = None  # for `Work.wait`, before its caller goes on

    @property
    def is_done(self) -> bool:
        """Whether it is known to be over. gloo tells of a send, receive or reduce_scatter only in `wait`."""
        if self.work is None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return False  # the query of an event would break a graph that is being captured
        return bool(self.work.is_completed())

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed, though nobody in Python has waited for it."""
        try:
            future = self.work.get_future()
            if future.done():
                future.value()
        except RuntimeError as error:
            return "does not support" not in str(error) and "not implemented" not in str(error)  # no future
        return False

    def let_go(self) -> None:
        """Keep its words only, and none of its tensors: nobody may ever wait for it."""
        self._described = self.describe()
        self.arguments = ()

    def describe(self) -> Operation:
        """The operation in words and numbers."""
        if self._described is not None:
            return replace(self._described, since_s=time.monotonic() - self.since)
        kernel, group = self.kernel, self.group
        tensors = list(_flat(self.arguments[kernel.at_tensors])) if kernel.at_tensors is not None else []
        return Operation(
            name=kernel.spec.name,
            number=self.number,
            group=group.title,
            ranks=group.ranks,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            root=group.session_rank(kernel.root_of(self.arguments)),
            reduce_op=kernel.reduce_op_of(self.arguments),
            since_s=time.monotonic() - self.since,
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


class _Kernel:
    """Stands before one operator."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
        operator = getattr(torch.ops.c10d, name).default
        arguments = operator._schema.arguments
        places = {argument.name: at for at, argument in enumerate(arguments)}
        self.spec = SPECS[name]
        self.at_tensors = places.get(self.spec.tensors)
        self.at_reduce_op = places.get("reduce_op")
        self._at_root = next((places[word] for word in ("root_rank", "src", "dst") if word in places), None)
        self._at_async = places.get("async_op")
        self._at_group = places["process_group"]
        self._arguments = arguments
        self._redispatch = operator.redispatch
        self._after = after
        self._recorder = recorder

    def root_of(self, arguments: tuple[Any, ...]) -> int | None:
        at = self._at_root
        return arguments[at] if at is not None and at < len(arguments) else None

    def reduce_op_of(self, arguments: tuple[Any, ...]) -> str:
        return "" if self.at_reduce_op is None else _REDUCE_OPS[int(arguments[self.at_reduce_op].op())]

    def blocks(self, arguments: tuple[Any, ...]) -> bool:
        """Whether its caller waits for it. Arguments that have their default value are left out."""
        at = self._at_async
        return at is not None and at < len(arguments) and not arguments[at]

    def make(self) -> Callable[..., Any]:
        """The kernel itself: a closure, since every attribute that it would look up costs (12 us a call, of which 7
        are those of a kernel in Python that does nothing)."""
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self._at_group
        live, waiting, by_work, groups = recorder.live, recorder.waiting, recorder.by_work, recorder.groups
        redispatch, after, unbox_group, unbox_work = self._redispatch, self._after, ProcessGroup.unbox, Work.unbox
        get_ident, monotonic, is_send = threading.get_ident, time.monotonic, kind == "send"

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
            number = group.counts[kind] = group.counts[kind] + 1
            thread = get_ident()
            call = Call(kernel, group, number, arguments, thread, monotonic())
            key = id(call)
            live[key] = waiting[thread] = call
            try:
                if is_send:
                    to = kernel.root_of(arguments)
                    group.sent[to] = group.sent.get(to, 0) + 1  # type: ignore[index,arg-type]  # a send has one
                elif (guard := recorder.guard) is not None:
                    guard(call)
                if group.connections is not None:
                    arguments = (*arguments[:at], group.connections, *arguments[at + 1 :])
                out = redispatch(keys & after, *arguments)
            except BaseException as error:
                live.pop(key, None)
                recorder.failed = Failure(call, error, monotonic())
                raise
            finally:
                waiting.pop(thread, None)
            work = out[-1] if type(out) is tuple or type(out) is list else out
            if work is None:  # monitored_barrier has waited
                live.pop(key, None)
                return out
            call.work = work = unbox_work(work)
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
        self.failed: Failure | None = None  # the last one
        self.live: dict[int, Call] = {}  # that may not be over, by id
        self.waiting: dict[int, Call] = {}  # by thread that is in one or waits for one
        self.by_work: dict[int, Call] = {}
        self.prune_at = _PRUNE_AT
        self.twins: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()  # of the guard
        self.groups: dict[int, Group] = {}  # by id of the process group
        self._library: Any = None
        self._wait: Any = None

    def install(self) -> None:
        """Put the kernels before the operators."""
        self._library = torch.library.Library("c10d", "IMPL")
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name in SPECS:
            if hasattr(torch.ops.c10d, name):
                self._library.impl(name, _Kernel(self, name, after).make(), "BackendSelect", with_keyset=True)
        self._wait = Work.__dict__["wait"]
        Work.wait = self._around_wait(Work.wait)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Take the kernels away."""
        self._library._destroy()
        Work.wait = self._wait  # type: ignore[method-assign]

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

    def operations(self) -> list[Call]:
        """What is under way, the oldest first. From any thread."""
        return [call for call in list(self.live.values()) if not call.is_done]

    def waits_in(self, thread: int) -> Call | None:
        """The operation that a thread waits in, as far as Python sees it. From any thread."""
        return self.waiting.get(thread)

    def _around_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        waiting, by_work, live = self.waiting, self.by_work, self.live

        def recorded_wait(work: Work, timeout: timedelta | None = None) -> bool:
            call = by_work.get(id(work))
            if call is None or call.work is not work:  # of a group that is not recorded
                return wait(work) if timeout is None else wait(work, timeout)
            thread = threading.get_ident()
            waiting[thread] = call
            if timeout is None and call.kernel.spec.kind != "collective":
                # gloo would take the timeout that its group was formed with, whatever it was set to since.
                group = call.group.reference()
                timeout = None if group is None else timeout_of(group)
            try:
                done = wait(work) if timeout is None else wait(work, timeout)
                if call.check is not None:
                    call.check()
            except BaseException as error:
                self.failed = Failure(call, error, time.monotonic())
                raise
            finally:
                waiting.pop(thread, None)
                live.pop(id(call), None)
                by_work.pop(id(work), None)
            return done

        return recorded_wait


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long its operations may take."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def _is_registered(group: ProcessGroup) -> bool:
    """Whether torch knows it: one that was destroyed may live on for a while, and its name be given again."""
    return group in distributed_c10d._world.pg_names


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)


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
