"""Kernel before a torch operator: it records the call, may refuse it or have it checked, and calls the operator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.call_site import USER
from ddp_notebook.rank.group.calling_threads import enter
from ddp_notebook.rank.group.calls import NOW_NS, Call, Group, RetiredGroupError
from ddp_notebook.rank.group.kernels.repeats import Kept
from ddp_notebook.rank.group.operators import Operator, flat
from ddp_notebook.rank.group.waiting import notice_interrupt
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, time

if TYPE_CHECKING:
    from ddp_notebook.rank.group.recorder import Recorder


END_PROCESS_ON_GPU = frozenset(
    ("send", "recv_", "recv_any_source_", "allgather_coalesced_", "allgather_into_tensor_coalesced_")
)
_GPU = torch.device("cuda")


def refuse_on_gpu(name: str, group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an operation of gloo on GPU tensors, which would end the process.

    Args:
        name: name of the user's function.
        tensors: tensors of the operation.

    Raises:
        RuntimeError: the group uses gloo and the tensors are on a GPU.
    """
    if tensors and tensors[0].is_cuda and group._get_backend(_GPU).name() == "gloo":
        raise RuntimeError(
            f"gloo cannot {name} GPU tensors: the process would crash. Move them to the CPU with x.cpu(), or use "
            "NCCL: %ddp_start --backend nccl (and --share-gpus if ranks share a GPU)"
        )


class Kernel(Operator):
    """Kernel that runs before one operator."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
        super().__init__(name)
        self._ends_process = name in END_PROCESS_ON_GPU
        self.after = after
        self._recorder = recorder

    def make(self) -> Callable[..., Any]:
        """Return the kernel as a closure, since attribute lookups cost time.

        A call takes 12 us, of which any Python kernel takes 7, even if it does nothing.
        """
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self.at_rest - 1
        live, waiting, groups = recorder.live, recorder.waiting, recorder.groups
        redispatch, after, unbox_group = self.redispatch, self.after, ProcessGroup.unbox
        get_ident, monotonic_ns, is_message = threading.get_ident, time.monotonic_ns, kind != "collective"
        begin, follow, may_end = self._make_begin(), self._make_follow(), self._ends_process
        # gloo matches operations in the order in which they start. So the next thread must not start one in between.
        # Messages, and a barrier that waits in C++, may start at the same time as others.
        starts = kind if self.returns else ""
        keys_after: dict[int, Any] = {}  # cache by bits: `&` takes twice as long as a lookup

        def run(keys: Any, *arguments: Any, **named: Any) -> Any:
            if named:
                arguments += kernel.defaults_from(len(arguments), named)
            process_group = unbox_group(arguments[at])
            group = groups.get(id(process_group))
            if group is None or group.reference() is not process_group:
                group = recorder.group(process_group)
            _check_group(recorder, group, kind)
            peer = _peer(kernel, group, arguments[at + 1 :]) if is_message else None
            if (instead := recorder.instead) is not None:
                return instead(kernel, arguments)
            if may_end:
                _check_device(kernel, process_group, arguments)
            counts, thread, call = group.counts, get_ident(), None
            try:
                with group.starts[starts]:
                    with group.locks[kind]:  # held until the comparison: calls are compared in the order of numbers
                        counts[kind] = number = counts[kind] + 1
                        call = Call(kernel, group, number, arguments, thread, monotonic_ns())
                        live[id(call)] = waiting[thread] = call
                        if (tensors := begin(call, peer)) is not None:
                            first = kernel.at_tensors or 0
                            arguments = (*arguments[:first], tensors, *arguments[first + 1 :])
                    if (lengthen := recorder.lengthen) is not None:
                        arguments = lengthen.arguments(call, arguments)
                    if group.connections is not None:
                        arguments = (*arguments[:at], group.connections, *arguments[at + 1 :])
                    bits = keys.raw_repr()
                    if (below := keys_after.get(bits)) is None:
                        below = keys_after[bits] = keys & after
                    out = redispatch(below, *arguments)
            except BaseException as error:
                try:
                    notice_interrupt()  # here, if C++ waited: the clean-up below must always run
                finally:
                    _note_failure(recorder, call, error)
                recorder.raise_reason(error)
                raise
            finally:
                waiting.pop(thread, None)
            follow(call, out[-1] if type(out) is tuple or type(out) is list else out, arguments)
            return out

        return _short_way(recorder, kernel, run) if self._is_repeated else run

    @property
    def _is_repeated(self) -> bool:
        """Return whether calls of DDP buckets may use the fast path instead of this kernel."""
        return self.spec.name == "all_reduce"

    def _make_begin(self) -> Callable[[Call, int | None], Sequence[torch.Tensor] | None]:
        """Return the part of the kernel before the operator, under the group's lock: describe, record and compare a
        call."""
        recorder, kind = self._recorder, self.spec.kind
        is_message, is_send = kind != "collective", kind == "send"
        depth = 4 if self._is_repeated else 3  # frames up to the caller

        def begin(call: Call, peer: int | None) -> Sequence[torch.Tensor] | None:
            """Return other tensors with which a message starts; None to keep its own."""
            if is_message and recorder.meaning is not None:
                call.meaning = recorder.meaning(call)
            elif (look := recorder.look) is not None:
                look(call)
            if (event_buffer := recorder.event_buffer) is not None and event_buffer.level:
                call.site = event_buffer.site(depth)
                unseen(event_buffer.begin, call)
                if call.site[0] is USER and not is_message and (user_calls := recorder.user_calls) is not None:
                    user_calls.begun(call)
            if is_message:
                tag = self.tag_of(call.arguments[self.at_rest :])
                call.pair_number = call.group.messages.add(kind, peer, tag)
            if is_send:
                sent = call.group.sent
                sent[peer] = sent.get(peer, 0) + 1  # type: ignore[index,arg-type]  # a send has a destination
            return None if (guard := recorder.guard) is None else guard(call)

        return begin

    def _make_follow(self) -> Callable[[Call, Any, tuple[Any, ...]], None]:
        """Return the part of the kernel after the operator, which stores the data needed to observe the call's end."""
        recorder, is_on_gpu = self._recorder, gpu.is_in_use
        live, by_work, unwaited = recorder.live, recorder.by_work, recorder.unwaited
        unbox_work: Callable[[Any], Work | None] = Work.unbox
        at_async = len(self.arguments) if self.at_async is None else self.at_async + self.at_rest

        def follow(call: Call, boxed: Any, arguments: tuple[Any, ...]) -> None:
            """Record an issued call. `boxed` is the operator's work, as operators return it."""
            if boxed is None:  # monitored_barrier has waited
                live.pop(id(call), None)
                _record_end(recorder, call, failed=False)
            elif at_async < len(arguments) and not arguments[at_async]:
                thread = call.thread
                if (other := unwaited.get(thread)) is not None:  # an earlier call that got no wait
                    recorder._forget(id(other), other)
                if is_on_gpu() and unbox_work(boxed) is None:  # NCCL needs no wait if everything is on one stream
                    unwaited.pop(thread, None)
                    recorder.queued(call)
                else:
                    unwaited[thread] = call  # this thread waits for the call next
            elif (work := unbox_work(boxed)) is None:  # one of several messages that NCCL starts together
                recorder.queued(call)
            else:
                if recorder.user_calls is not None:
                    recorder.user_calls.issued(call)  # first: a call that is complete drops its tensors
                if call.moment is not None and (event_buffer := recorder.event_buffer) is not None:
                    event_buffer.issued(call, work)
                call.work = work  # from now on another thread may find it complete and forget it
                by_work[id(work)] = call
            if len(live) >= recorder.prune_at:
                recorder.prune()

        return follow


def _check_group(recorder: Recorder, group: Group, kind: str) -> None:
    """Raise an error if the group, or this process, must not start an operation of this kind now."""
    if (pause := recorder.pause) is not None:
        pause()
    if (refuse := recorder.refusal) is not None:
        raise refuse(group)
    if group.retired:
        raise RetiredGroupError(group.retired)
    if (thread := threading.get_ident()) in recorder.refused_threads:
        raise RuntimeError(f"this thread must not start an operation of a group, here a {kind}: other ranks do not")
    if kind == "collective" and thread != group.thread:
        unseen(enter, group, thread, recorder.waiting)


def _peer(kernel: Kernel, group: Group, rest: tuple[Any, ...]) -> int | None:
    """Return the peer of a message as a rank of the group; None for any rank. `rest` holds the arguments after the
    group.

    Raises:
        ValueError: the group has no such rank. (gloo would read foreign memory.)
    """
    peer = kernel.root_of(rest)
    if peer is not None and not 0 <= peer < len(group.ranks):
        where = "" if group.title == "default" else f" of group {group.title}"
        raise ValueError(f"rank {peer}{where} does not exist: the ranks{where} are 0 to {len(group.ranks) - 1}")
    return peer


def _check_device(kernel: Kernel, group: ProcessGroup, arguments: tuple[Any, ...]) -> None:
    """Raise an error if gloo would end the process because the tensors are on a GPU."""
    if gpu.is_in_use() and (at_tensors := kernel.at_tensors) is not None:
        refuse_on_gpu(kernel.spec.name, group, flat(arguments[at_tensors]))


def _note_failure(recorder: Recorder, call: Call | None, error: BaseException) -> None:
    """Record that an operation raised. `call` is None if the operation was interrupted before it was recorded."""
    if call is not None:
        recorder.live.pop(id(call), None)
        recorder.note_failure(call, error)
        _record_end(recorder, call, failed=True)


def _record_end(recorder: Recorder, call: Call, *, failed: bool) -> None:
    """Record that the caller of a call continues. Does nothing for a call that is not recorded."""
    if call.moment is not None and (event_buffer := recorder.event_buffer) is not None:
        event_buffer.ended(call, failed, call.since_ns)


def _short_way(recorder: Recorder, kernel: Kernel, long_way: Callable[..., Any]) -> Callable[..., Any]:
    """Return the all_reduce kernel with the fast path for repeated calls, see `repeats`.

    Args:
        long_way: the kernel for all other calls.
    """
    redispatch, after, unbox_work, live = kernel.redispatch, kernel.after, Work.unbox, recorder.live
    repeating = recorder.repeating
    caller, monotonic_ns, at = sys._getframe, time.monotonic_ns, kernel.at_rest - 1

    def run(keys: Any, *arguments: Any, **named: Any) -> Any:
        if (backward := repeating.backward) is None:
            return long_way(keys, *arguments, **named)
        try:
            repeat = backward.repeats.get(arguments[0][0].data_ptr())
        except (IndexError, RuntimeError):  # no tensor, or one without storage, such as a sparse gradient
            repeat = None
        if repeat is None or caller(1).f_code is not repeat.engine:
            return long_way(keys, *arguments, **named)
        kept: Kept = []
        group = repeat.group
        if (connections := group.connections) is not None:
            arguments = (*arguments[:at], connections, *arguments[at + 1 :])
        try:
            with repeat.lock:
                counts = group.counts
                counts["collective"] = repeat.number = number = counts["collective"] + 1
                repeat.since_ns = since_ns = monotonic_ns()
                repeat.backward, repeat.kept = backward, kept
                live[id(repeat)] = repeat
                backward.again.append((repeat, number, since_ns, kept))
                if (ledger := repeat.ledger) is not None and (found := ledger.post(number, repeat.entry)) is not None:
                    recorder.differs(repeat, found)
                if (below := repeat.below) is None:
                    below = repeat.below = keys & after
                out = redispatch(below, *arguments)
        except BaseException as error:
            live.pop(id(repeat), None)
            recorder.note_failure(repeat, error)
            recorder.raise_reason(error)
            raise
        future = unbox_work(out[1]).get_future()
        kept.append(future)
        future.add_done_callback(
            partial(next, map(kept.append, NOW_NS))
        )  # see `noting_time`; called immediately if the work is complete
        repeat.model.at = repeat.following
        return out

    return run
