"""Every collective, send and receive of this process, as it happens: what is under way, and who waits in it.

Kernels at the dispatch key `BackendSelect` of torch's `c10d` operators see all of them: the user's and those of DDP's
reducer, FSDP, DTensor and object collectives, from every thread, and cost nothing elsewhere. A kernel stores
references and goes on to the real operator; what they mean is worked out only on request. The end of an operation is
seen in `Work.wait`, which is wrapped, or on request.

A kernel may also refuse the operation (`refusal`), check it first (`guard`), and send it through other connections
than those that its group was made with (`connections`).

Two traps, both of which hang or abort only sometimes: a kernel at the key `CPU` would hold the GIL while gloo's worker
waits for it, and a strong reference to a group keeps gloo's threads alive past the group's end.
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

from ddp_notebook.rank.group.calls import KINDS, Call, Group, timeout_of
from ddp_notebook.rank.group.operators import SPECS, Operator, flat
from ddp_notebook.rank.unseen import unseen

if TYPE_CHECKING:
    from ddp_notebook.rank.group.guard.board import Board
    from ddp_notebook.rank.record.tape import Tape

_MOST_LIVE = 64  # operations that nobody has waited for; those that are over are dropped much earlier
_PRUNE_AT = 16  # operations that may be over; more if many are really under way


class Failure(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at_ns: int  # monotonic


class Kernel(Operator):
    """Runs before one operator."""

    def __init__(self, recorder: Recorder, name: str, after: Any) -> None:
        super().__init__(name)
        self._after = after
        self._recorder = recorder

    def make(self) -> Callable[..., Any]:
        """The kernel itself: a closure, since attribute lookups cost time (12 us a call, 7 of them for any kernel in
        Python, even one that does nothing)."""
        recorder, kernel, kind, at = self._recorder, self, self.spec.kind, self.at_rest - 1
        live, waiting, by_work, groups = recorder.live, recorder.waiting, recorder.by_work, recorder.groups
        redispatch, after, unbox_group, unbox_work = self.redispatch, self._after, ProcessGroup.unbox, Work.unbox
        get_ident, monotonic_ns, is_send = threading.get_ident, time.monotonic_ns, kind == "send"
        unwaited, is_message = recorder.unwaited, kind != "collective"
        at_async = None if self.at_async is None else self.at_async + self.at_rest
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
            if (instead := recorder.instead) is not None:
                return instead(kernel, arguments)
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
                            call.site = tape.site(2)
                            unseen(tape.begin, call)
                        else:
                            tape = None
                    if is_send:
                        to = kernel.root_of(arguments[at + 1 :])
                        group.sent[to] = group.sent.get(to, 0) + 1  # type: ignore[index,arg-type]  # a send has one
                    elif (guard := recorder.guard) is not None:
                        guard(call)
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
                unwaited[thread] = call  # the next thing that this thread does is to wait
            else:
                work = unbox_work(work)
                if tape is not None:
                    tape.issued(call, work)
                call.work = work  # from now on another thread may see that it is over and forget it
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
        >>> recorder.remove()
    """

    def __init__(self) -> None:
        # Seven hooks, set from outside and looked at in every call.
        self.refusal: Callable[[Group | None], BaseException] | None = None  # makes what operations raise instead
        self.pause: Callable[[], None] | None = None  # called before each one
        self.guard: Callable[[Call], None] | None = None  # called before each one begins; may raise
        self.instead: Callable[[Kernel, tuple[Any, ...]], Any] | None = None  # called in place of every operation
        self.meaning: Callable[[Call], str] | None = None  # what a message carries
        self.look: Callable[[Call], None] | None = None  # called as each one begins, and raises nothing
        self.tape: Tape | None = None  # where calls are left for the recording
        # Changed by methods only.
        self.failed: Failure | None = None  # the last one
        self.live: dict[int, Call] = {}  # by id; calls that may not be over
        self.waiting: dict[int, Call] = {}  # by thread that is in a call, or waits for it
        self.by_work: dict[int, Call] = {}  # by id of the work
        self.unwaited: dict[int, Call] = {}  # by thread: a synchronous call that was issued and is not waited for yet
        self.prune_at = _PRUNE_AT
        self._kept: list[Any] = []
        self._boards: weakref.WeakKeyDictionary[ProcessGroup, Board[Any] | None] = weakref.WeakKeyDictionary()
        self._knowing = threading.Lock()  # groups, and their boards, may be new in several threads at once
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
        for kind in kinds:  # the work of the fake backend has a `wait` of its own
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
        """What is known of a process group, from its first call on: its ranks are not known before it is made."""
        with self._knowing:
            if (known := self._known(group)) is None:
                known = self.groups[id(group)] = Group(group)
                known.board = self._boards.get(group)
                for key in [key for key, one in self.groups.items() if one.reference() is None]:
                    del self.groups[key]
        return known

    def _known(self, group: ProcessGroup) -> Group | None:
        known = self.groups.get(id(group))
        return known if known is not None and known.reference() is group else None

    def registered(self) -> dict[str, Group]:
        """torch's groups by name, in the order in which they were made."""
        names = distributed_c10d._world.pg_names
        groups = {name: self.group(group) for group, name in list(names.items()) if group.size() > 0}
        return dict(sorted(groups.items(), key=lambda item: (not item[0].isdigit(), len(item[0]), item[0])))

    def retire(self, why: str) -> None:
        """In a forked child: no group can be used any more, and operations raise these words. Nothing of a group may
        be freed here, since gloo would join threads that this process does not have."""
        self._kept += [*self.groups.values(), *self._boards.values()]
        for group in self.registered().values():
            group.retired = why

    # ---- the guard's boards

    def keep_board(self, group: ProcessGroup, board: Board[Any] | None) -> None:
        """This is a group's board from now on. Of a group that is being made its `Group` cannot be made yet."""
        with self._knowing:
            self._boards[group] = board
            if (known := self._known(group)) is not None:
                known.board = board

    def board_of(self, group: ProcessGroup) -> Board[Any] | None:
        """A group's board, if any."""
        with self._knowing:
            return self._boards.get(group)

    def cut_boards(self) -> None:
        """End every wait at the boards, here and on the other ranks. From any thread."""
        with self._knowing:
            boards = [board for board in self._boards.values() if board is not None]
        for board in boards:
            board.cut()

    @property
    def is_cut(self) -> bool:
        """Whether ranks were interrupted while their calls were compared: they may have posted different numbers. From
        any thread."""
        for group in list(distributed_c10d._world.pg_names):
            known, board = self._known(group), self.board_of(group)
            if board is not None and board.is_cut and not (known is not None and known.retired):
                return True
        return False

    # ---- how far this rank has come

    @property
    def counts(self) -> dict[str, dict[str, Any]]:
        """How many operations of each kind were begun in each group, by its name: whether ranks are in step. A group
        that was never used counts too, since another rank may have. From any thread."""
        counts: dict[str, dict[str, Any]] = {}
        for group, name in list(distributed_c10d._world.pg_names.items()):
            if group.size() > 0:
                known = self._known(group)
                of_kind = dict.fromkeys(KINDS, 0) if known is None else known.counts
                sent = {} if known is None else {known.session_rank(to): n for to, n in known.sent.items()}
                counts[name] = {**of_kind, "sent": sent}
        return counts

    @property
    def begun(self) -> int:
        """How many operations were begun, in all groups."""
        return sum(sum(group.counts.values()) for group in list(self.groups.values()))

    def reset_counts(self) -> None:
        """The groups were formed anew: count from the beginning, and forget the operations of the old connections."""
        for group in list(self.groups.values()):
            group.reset_counts()
        for kept in (self.live, self.by_work, self.unwaited):
            kept.clear()
        self.failed = None

    def leave(self, thread: int) -> None:
        """The code of a thread has ended: it waits in nothing, though it may have been stopped before a wait."""
        self.unwaited.pop(thread, None)
        self.waiting.pop(thread, None)

    def first_failed(self) -> Call | None:
        """The first operation that failed without raising anywhere in Python: in DDP's backward, for example."""
        return next((call for call in list(self.live.values()) if call.has_failed), None)

    def forget_failure(self) -> None:
        """Drop the last failure, and with it the frames of its traceback."""
        self.failed = None

    def compact(self, thread: int) -> None:
        """Drop the tensors of operations that nobody has waited for.

        Args:
            thread: has begun all of its own. An operation of another thread without a work is still to begin.
        """
        if not self.live:
            return
        self.prune()
        for call in list(self.live.values()):
            if call.thread == thread or call.work is not None:
                call.compact()

    def prune(self) -> None:
        """Forget what is over, so that its tensors live no longer than the user keeps them."""
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
        call.work = None  # it holds the tensors
        if call.moment is not None and self.tape is not None:
            self.tape.forgotten(call)

    def operations(self) -> list[Call]:
        """The operations under way, the oldest first. From any thread."""
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
                if call is None:  # its group is not recorded
                    return wait(work) if timeout is None else wait(work, timeout)
                call.is_waited_for = True  # first: another thread may see that it is over and forget it
                call.work = work
            elif call.work is not work:
                return wait(work) if timeout is None else wait(work, timeout)
            if timeout is None and call.kernel.spec.kind != "collective" and unseen(call.is_on_cpu):
                # gloo would use the timeout that its group was formed with, whatever was set since. (With a timeout,
                # NCCL blocks the thread until the device is done.)
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
                    unseen(tape.ended, call, failed, began_ns)
            return done

        return recorded_wait

    def _around_wait_tensor(self, after: Any) -> Callable[..., torch.Tensor]:
        """Functional collectives, and so DTensor's, are waited for in C++ by their output tensor. They are waited for
        here first, so that C++ finds them over."""
        wait = torch.ops._c10d_functional.wait_tensor.default.redispatch

        def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            call = unseen(self._that_fills, tensor)
            if call is not None and (work := call.work) is not None:
                work.wait()
            return wait(keys & after, tensor)

        return wait_tensor

    def _that_fills(self, tensor: torch.Tensor) -> Call | None:
        """The operation under way whose output a tensor is."""
        if type(tensor) is not torch.Tensor:  # a tensor of torch.compile has no data
            return None
        at_data = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
        for call in reversed(list(self.live.values())) if at_data else ():
            arguments, at_output = call.arguments, call.kernel.at_output
            if arguments and at_output is not None:
                for one in flat(arguments[at_output]):
                    if one.layout is torch.strided and one.untyped_storage().data_ptr() == at_data:
                        return call
        return None
