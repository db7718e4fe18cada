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
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ddp_notebook.rank.group.calls import SPECS, Call, Group, Operator, flat, timeout_of

if TYPE_CHECKING:
    from ddp_notebook.rank.record.tape import Tape

_MOST_LIVE = 64  # operations that nobody has waited for; those that are done are dropped much earlier
_PRUNE_AT = 16  # operations that may be over; more where many are really under way


class Failure(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at_ns: int  # monotonic


class Kernel(Operator):
    """Stands before one operator."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
        super().__init__(name)
        self._after = after
        self._recorder = recorder

    def make(self) -> Callable[..., Any]:
        """The kernel itself: a closure, since every attribute that it would look up costs (12 us a call, of which 7
        are those of a kernel in Python that does nothing)."""
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self.at_rest - 1
        live, waiting, by_work, groups = recorder.live, recorder.waiting, recorder.by_work, recorder.groups
        redispatch, after, unbox_group, unbox_work = self.redispatch, self._after, ProcessGroup.unbox, Work.unbox
        get_ident, monotonic_ns, is_send = threading.get_ident, time.monotonic_ns, kind == "send"
        unwaited = recorder.unwaited
        at_async = None if self.at_async is None else self.at_async + self.at_rest
        keys_after: dict[int, Any] = {}  # by the keys: `&` takes twice as long as to look them up

        def run(keys: Any, *arguments: Any, **named: Any) -> Any:
            if named:
                arguments += tuple(named.get(a.name, a.default_value) for a in self.arguments[len(arguments) :])
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
            thread = get_ident()
            tape = recorder.tape
            key, call = 0, None
            try:
                with group.locks[kind]:  # until it is compared: another thread's would be, with this one's number
                    counts[kind] = number = counts[kind] + 1
                    call = Call(kernel, group, number, arguments, thread, monotonic_ns())
                    key = id(call)
                    live[key] = waiting[thread] = call
                    if tape is not None:
                        if tape.level:
                            call.site = tape.site(2)
                        else:
                            tape = None
                    if is_send:
                        to = kernel.root_of(arguments[at + 1 :])
                        group.sent[to] = group.sent.get(to, 0) + 1  # type: ignore[index,arg-type]  # a send has one
                    elif (guard := recorder.guard) is not None:
                        guard(call)
                if tape is not None:
                    tape.begin(call)
                if group.connections is not None:
                    arguments = (*arguments[:at], group.connections, *arguments[at + 1 :])
                bits = keys.raw_repr()
                if (below := keys_after.get(bits)) is None:
                    below = keys_after[bits] = keys & after
                out = redispatch(below, *arguments)
            except BaseException as error:
                live.pop(key, None)
                if call is not None:
                    recorder.failed = Failure(call, error, monotonic_ns())
                    if tape is not None and call.moment is not None:
                        tape.ended(call, True, monotonic_ns())
                raise
            finally:
                waiting.pop(thread, None)
            work = out[-1] if type(out) is tuple or type(out) is list else out
            if work is None:  # monitored_barrier has waited
                live.pop(key, None)
                if tape is not None:
                    tape.ended(call, False, call.since_ns)
            elif (
                at_async is not None and at_async < len(arguments) and not arguments[at_async]
            ):  # the next thing that this thread does is to wait
                unwaited[thread] = call
            else:
                work = unbox_work(work)
                if tape is not None:
                    tape.issued(call, work)
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
        self.refusal: Callable[[Group | None], BaseException] | None = None  # what an operation is to raise instead
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
                self.groups.pop(key, None)  # another thread may do the same
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
            if call.is_done or call.is_given_up:
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
            call = by_work.get(id(work)) if by_work else None
            if call is None:
                call = unwaited.pop(thread, None)
                if call is None:  # of a group that is not recorded
                    return wait(work) if timeout is None else wait(work, timeout)
                call.is_waited_for = True  # first: another thread may see that it is over, and forget it
                call.work = work
            elif call.work is not work:
                return wait(work) if timeout is None else wait(work, timeout)
            if timeout is None and call.kernel.spec.kind != "collective" and call.is_on_cpu:
                # gloo would take the timeout that its group was formed with, whatever it was set to since. (NCCL keeps
                # the thread until the device is done where a timeout is given.)
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
                    tape.ended(call, failed, began_ns)
            return done

        return recorded_wait

    def _around_wait_tensor(self, after: Any) -> Callable[..., torch.Tensor]:
        """Functional collectives, and with them DTensor, are waited for by their output, in C++, which finds them over
        when they were waited for here."""
        wait = torch.ops._c10d_functional.wait_tensor.default.redispatch

        def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            call = self._that_fills(tensor)
            if call is not None and (work := call.work) is not None:
                work.wait()
            return wait(keys & after, tensor)

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


def _is_registered(group: ProcessGroup) -> bool:
    """Whether torch knows it: one that was destroyed may live on for a while, and its name be given again."""
    return group in distributed_c10d._world.pg_names
