"""A kernel before one of torch's operators: notes the call, may refuse it or have it checked, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import ProcessGroup, Work

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.calls import Call, Group
from ddp_notebook.rank.group.kernels import gloo_on_gpu
from ddp_notebook.rank.group.kernels.repeats import short_way
from ddp_notebook.rank.group.operators import Operator, flat
from ddp_notebook.rank.group.waiting import notice_interrupt
from ddp_notebook.rank.unseen import unseen
from ddp_notebook.stdlib import threading, time

if TYPE_CHECKING:
    from ddp_notebook.rank.group.recorder import Recorder


def _no_such_rank(peer: int, group: Group) -> str:
    where = "" if group.title == "default" else f" of group {group.title}"
    return f"there is no rank {peer}{where}: the ranks{where} are 0 to {len(group.ranks) - 1}"


class Kernel(Operator):
    """Runs before one operator."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
        super().__init__(name)
        self._ends_process = name in gloo_on_gpu.END_THE_PROCESS
        self.after = after
        self._recorder = recorder

    def make(self) -> Callable[..., Any]:
        """The kernel itself: a closure, since attribute lookups cost time (12 us a call, 7 of them for any kernel in
        Python, even one that does nothing)."""
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self.at_rest - 1
        live, waiting, by_work, groups = recorder.live, recorder.waiting, recorder.by_work, recorder.groups
        redispatch, after, unbox_group = self.redispatch, self.after, ProcessGroup.unbox
        unbox_work: Callable[[Any], Work | None] = Work.unbox
        get_ident, monotonic_ns, is_send = threading.get_ident, time.monotonic_ns, kind == "send"
        unwaited, is_message = recorder.unwaited, kind != "collective"
        at_async = None if self.at_async is None else self.at_async + self.at_rest
        is_repeated = self.spec.name == "all_reduce"
        is_on_gpu, may_end = gpu.is_in_use, self._ends_process
        depth = 3 if is_repeated else 2  # of the caller
        keys_after: dict[int, Any] = {}  # by their bits: `&` takes twice as long as this lookup

        def run(keys: Any, *arguments: Any, **named: Any) -> Any:
            if named:
                arguments += tuple(named.get(a.name, a.default_value) for a in self.arguments[len(arguments) :])
            process_group = unbox_group(arguments[at])
            group = groups.get(id(process_group))
            if group is None or group.reference() is not process_group:
                group = recorder.group(process_group)
            if (pause := recorder.pause) is not None:
                pause()
            if (refuse := recorder.refusal) is not None:
                raise refuse(group)
            if group.retired:
                raise RuntimeError(group.retired)
            peer = kernel.root_of(arguments[at + 1 :]) if is_message else None
            if peer is not None and not 0 <= peer < len(group.ranks):  # gloo looks in memory that is not its own
                raise ValueError(_no_such_rank(peer, group))
            if (instead := recorder.instead) is not None:
                return instead(kernel, arguments)
            if may_end and is_on_gpu() and (at_tensors := kernel.at_tensors) is not None:
                gloo_on_gpu.refuse(kernel.spec.name, process_group, flat(arguments[at_tensors]))
            counts = group.counts
            thread, tape, key, call = get_ident(), recorder.tape, 0, None
            try:
                with group.locks[kind]:  # until it is compared: calls are compared in the order of their numbers
                    counts[kind] = number = counts[kind] + 1
                    call = Call(kernel, group, number, arguments, thread, monotonic_ns())
                    key = id(call)
                    live[key] = waiting[thread] = call
                    if is_message and recorder.meaning is not None:
                        call.meaning = recorder.meaning(call)
                    elif (look := recorder.look) is not None:
                        look(call)
                    if tape is not None:
                        if tape.level:
                            call.site = tape.site(depth)
                            unseen(tape.begin, call)
                        else:
                            tape = None
                    if is_send:
                        group.sent[peer] = group.sent.get(peer, 0) + 1  # type: ignore[index,arg-type]  # a send has one
                    if (guard := recorder.guard) is not None and (others := guard(call)) is not None:
                        first = kernel.at_tensors or 0
                        arguments = (*arguments[:first], others, *arguments[first + 1 :])
                if group.connections is not None:
                    arguments = (*arguments[:at], group.connections, *arguments[at + 1 :])
                bits = keys.raw_repr()
                if (below := keys_after.get(bits)) is None:
                    below = keys_after[bits] = keys & after
                out = redispatch(below, *arguments)
            except BaseException as error:
                try:
                    notice_interrupt()  # of a wait in C++, here: what follows is to be done in any case
                finally:
                    live.pop(key, None)
                    if call is not None:
                        recorder.note_failure(call, error)
                        if tape is not None and call.moment is not None:
                            tape.ended(call, True, call.since_ns)
                raise
            finally:
                waiting.pop(thread, None)
            work = out[-1] if type(out) is tuple or type(out) is list else out
            if work is None:  # monitored_barrier has waited
                live.pop(key, None)
                if tape is not None:
                    tape.ended(call, False, call.since_ns)
            elif at_async is not None and at_async < len(arguments) and not arguments[at_async]:
                if (other := unwaited.get(thread)) is not None:  # of a tensor made of two, of which one is waited for
                    recorder._forget(id(other), other)
                if is_on_gpu() and unbox_work(work) is None:  # NCCL needs no wait where all is on one stream
                    unwaited.pop(thread, None)
                    recorder.queued(call)
                else:
                    unwaited[thread] = call  # the next thing that this thread does is to wait
            elif (work := unbox_work(work)) is None:  # a message of several that NCCL begins together
                recorder.queued(call)
            else:
                if tape is not None:
                    tape.issued(call, work)
                call.work = work  # from now on another thread may see that it is over and forget it
                by_work[id(work)] = call
            if len(live) >= recorder.prune_at:
                recorder.prune()
            return out

        return short_way(recorder, kernel, run) if is_repeated else run
