"""Observe every collective, send and receive of this process: which are in progress, and which threads wait for them.

Kernels at the dispatch key `BackendSelect` of torch's `c10d` operators see all calls, from every thread: those of the
user, DDP's reducer, FSDP, DTensor and object collectives. Other operators have no overhead. A kernel stores references
and calls the real operator; their meaning is worked out only on request. The end of an operation is observed in the
wrapped `Work.wait`, or on request.

A kernel may also refuse the operation (`refusal`) or check it first (`guard`). It may send the operation through the
connections of another group (`connections`).

Two designs hang or abort only sometimes. A kernel at the key `CPU` would hold the GIL while gloo's worker waits for it.
A strong reference to a group would keep gloo's threads alive after the group's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.calls import KINDS, Call, CollectiveMismatchError, Group, timeout_of
from ddp_notebook.rank.group.collective_owners import Identities
from ddp_notebook.rank.group.held_time import CLOCK
from ddp_notebook.rank.group.kernels import lazy_bits
from ddp_notebook.rank.group.kernels.kernel import Kernel
from ddp_notebook.rank.group.kernels.repeats import Repeating
from ddp_notebook.rank.group.modules import Modules
from ddp_notebook.rank.group.operators import SPECS, flat
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, time, weakref

if TYPE_CHECKING:
    from ddp_notebook.rank.group.guard.board import Board
    from ddp_notebook.rank.group.guard.ledger import CallDifference
    from ddp_notebook.rank.record.event_buffer import EventBuffer
    from ddp_notebook.rank.record.training.buckets import Backward

_MOST_LIVE = 64  # kept operations without a wait; completed ones are dropped much earlier
# Hooks that the fast path of repeated calls does not support. (The guard does not check buckets, and only messages have
# a meaning.)
_HOOKS = frozenset(("refusal", "pause", "instead", "look", "lengthen"))
_set = object.__setattr__
_PRUNE_AT = 16  # possibly completed operations; more if many are in progress


class FailedCollective(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at_ns: int  # monotonic clock


class Lengthen(Protocol):
    """Gives operations a long timeout, and ends those that have reached their own limit."""

    def arguments(self, call: Call, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with which the operation starts."""

    def timeout(self, call: Call, timeout: timedelta | None) -> timedelta | None:
        """Return the timeout of a wait that begins now."""

    def error(self) -> BaseException | None:
        """Return the error that operations raise because one of them has reached its limit; None if none has."""


class UserCalls(Protocol):
    """Follows the collectives of the user, and the asynchronous calls of Python code."""

    def begun(self, call: Call) -> None: ...
    def issued(self, call: Call) -> None: ...
    def waited(self, call: Call) -> None: ...
    def forgotten(self, call: Call) -> None: ...


class Recorder:
    """Observer of the operations of this process, from `install` to `remove`.

    Example:
        >>> recorder = Recorder()
        >>> recorder.install()
        >>> [str(operation) for operation in recorder.operations()]
        []
        >>> recorder.remove()
    """

    def __init__(self) -> None:
        self.repeating = Repeating()
        self.modules = Modules()
        self.identities = Identities(self.modules)
        # Nine hooks, set from outside and read in every call.
        self.refusal: Callable[[Group | None], BaseException] | None = None  # makes the exception that operations raise
        self.pause: Callable[[], None] | None = None  # called before each operation
        # Called before each operation. It may raise, or return the tensors with which a message starts.
        self.guard: Callable[[Call], Sequence[torch.Tensor] | None] | None = None
        # Called if a repeated call differs from that of another rank. It may raise.
        self.differs: Callable[[Call, CallDifference], None] = lambda call, found: None
        # Called with the group and the parameters' names of a new DDP model or FSDP module. It may raise.
        self.claim: Callable[[Group, int, int, Sequence[str]], None] = lambda group, rank, identity, names: None
        self.instead: Callable[[Kernel, tuple[Any, ...]], Any] | None = None  # called instead of every operation
        # Called with a call, its arguments and a timeout. Returns arguments with a long timeout, or a long timeout,
        # because the caller ends the operation at its own limit. None: operations end by themselves.
        self.lengthen: Lengthen | None = None
        self.meaning: Callable[[Call], str] | None = None  # returns a description of a message's content
        # Called at the start of each operation; never raises. `listen` sets it.
        self.look: Callable[[Call], None] | None = None
        self.event_buffer: EventBuffer | None = None  # receives the recorded calls
        self.user_calls: UserCalls | None = None  # follows calls of the user
        self.refused_threads: set[int] = set()  # threads that must not start an operation
        # Changed only by methods.
        self.failed: FailedCollective | None = None  # the last failure
        self.is_torn = False  # a message was counted and then interrupted, so it may or may not be in progress
        self.live: dict[int, Call] = {}  # calls by id; they may not be complete
        self.waiting: dict[int, Call] = {}  # calls by the thread that executes them or waits for them
        self.by_work: dict[int, Call] = {}  # calls by id of their work
        self.unwaited: dict[int, Call] = {}  # issued synchronous calls before their wait, by thread
        self.prune_at = _PRUNE_AT
        self._kept: list[Any] = []
        self._looks: dict[str, Callable[[Call], None]] = {}  # functions of listeners
        self._boards: weakref.WeakKeyDictionary[ProcessGroup, Board[Any] | None] = weakref.WeakKeyDictionary()
        self._knowing = threading.Lock()  # several threads may register groups and boards at once
        self.groups: dict[int, Group] = {}  # groups by id of the process group
        self._libraries: list[Any] = []
        self._waits: dict[type, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        _set(self, name, value)
        if name in _HOOKS and value is not None:  # a call must do more than record itself
            self.repeating.backward = None

    def repeat(self, backward: Backward) -> None:
        """Let the buckets of this backward pass use the fast path, see `repeats`."""
        self.repeating.backward = backward  # set before the check: another thread may set a hook at this moment
        hooks = (self.refusal, self.pause, self.instead, self.look, self.lengthen)
        if any(hook is not None for hook in hooks):
            self.repeating.backward = None

    def listen(self, listener: str, look: Callable[[Call], None] | None) -> None:
        """Call a function at the start of each operation from now on, besides those of other listeners.

        Args:
            listener: name of the caller.
            look: the function, which never raises; None: call it no longer.
        """
        self._looks = {name: one for name, one in self._looks.items() if name != listener}
        if look is not None:
            self._looks[listener] = look
        looks = tuple(self._looks.values())

        def look_all(call: Call) -> None:
            for one in looks:
                one(call)

        self.look = None if not looks else looks[0] if len(looks) == 1 else look_all

    def note_failure(self, call: Call, error: BaseException) -> None:
        """Store the failure of an operation."""
        if call.kernel.spec.kind != "collective" and isinstance(error, KeyboardInterrupt):
            self.is_torn = True
        self.failed = FailedCollective(call, error, time.monotonic_ns())

    def install(self) -> None:
        """Register the kernels before the operators, and wrap `Work.wait`."""
        library, functional = torch.library.Library("c10d", "IMPL"), torch.library.Library("_c10d_functional", "IMPL")
        self._libraries = [library, functional]
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name in SPECS:
            if hasattr(torch.ops.c10d, name):
                library.impl(name, Kernel(self, name, after).make(), "BackendSelect", with_keyset=True)
                for key, kernel in lazy_bits.kernels(lambda: self.guard is not None, name).items():
                    library.impl(name, kernel, key, with_keyset=True)
        gpu.watch_captures()
        functional.impl("wait_tensor", self._around_wait_tensor(after), "BackendSelect", with_keyset=True)
        kinds: list[type] = [Work, *Work.__subclasses__()]
        for kind in kinds:  # the work of the fake backend has its own `wait`
            if "wait" in kind.__dict__:
                self._waits[kind] = kind.__dict__["wait"]  # not `getattr`, which loses the descriptor
                kind.wait = self._around_wait(kind.wait)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Remove the kernels and wrappers."""
        for library in self._libraries:
            library._destroy()
        for kind, wait in self._waits.items():
            kind.wait = wait  # type: ignore[attr-defined]

    def group(self, group: ProcessGroup) -> Group:
        """Return the data of a process group. It is made at the group's first call, since the ranks are unknown
        before."""
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
        """Return the registered torch groups by name, in the order of their creation."""
        names = distributed_c10d._world.pg_names
        groups = {name: self.group(group) for group, name in list(names.items()) if group.size() > 0}
        return dict(sorted(groups.items(), key=lambda item: (not item[0].isdigit(), len(item[0]), item[0])))

    def retire(self, why: str) -> None:
        """Disable all groups in a forked child; operations raise this text.

        No group may be freed here: gloo would join threads that this process does not have.
        """
        self.repeating.backward = None
        self._kept += [*self.groups.values(), *self._boards.values()]
        for group in self.registered().values():
            group.retired = why

    def declare(self, process_group: ProcessGroup, identity: int, names: Sequence[str]) -> None:
        """Let the guard compare the parameters of a new object with those of other ranks.

        Args:
            process_group: the group over which the object is distributed.
            identity: identity of the object.
            names: names of its parameters.
        """
        self.claim(self.group(process_group), process_group.rank(), identity, names)

    # ---- the guard's boards

    def keep_board(self, group: ProcessGroup, board: Board[Any] | None) -> None:
        """Set a group's board. The `Group` of a group that is still being made does not exist yet."""
        if board is not None and self.lengthen is not None:
            board.hold_timeout(True)
        with self._knowing:
            self._boards[group] = board
            if (known := self._known(group)) is not None:
                known.board = board

    def board_of(self, group: ProcessGroup) -> Board[Any] | None:
        """Return a group's board; None if it has none."""
        with self._knowing:
            return self._boards.get(group)

    def hold_boards(self, on: bool) -> None:
        """Let waits at all boards end only when their caller ends them, see `lengthen`."""
        with self._knowing:
            boards = [board for board in self._boards.values() if board is not None]
        for board in boards:
            board.hold_timeout(on)

    def cut_boards(self) -> None:
        """End every wait at the boards, on this rank and the others. Callable from any thread."""
        with self._knowing:
            boards = [board for board in self._boards.values() if board is not None]
        for board in boards:
            board.cut()

    def why_ended(self, error: BaseException) -> CollectiveMismatchError | None:
        """Return the error to raise instead of gloo's if a rank has ended the operations; None if none has.

        Args:
            error: raised by an operation.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveMismatchError):
            return None
        reason = self.reason
        return CollectiveMismatchError(reason) if reason else None

    def raise_reason(self, error: BaseException) -> None:
        """Raise the reason if a rank has ended the operations, instead of the error of an operation."""
        if self.lengthen is not None and (late := self.lengthen.error()) is not None:
            raise late from None
        if (better := self.why_ended(error)) is not None:
            raise better from None

    @property
    def reason(self) -> str:
        """Return the reason for which a rank has ended the operations; "" if none has. Callable from any thread."""
        with self._knowing:
            boards = [board for board in self._boards.values() if board is not None and board.is_cut]
        return next(filter(None, (board.ledger.reason for board in boards if board.ledger is not None)), "")

    @property
    def is_cut(self) -> bool:
        """Return whether ranks were interrupted while they compared calls: their posted call numbers may differ.

        Callable from any thread.
        """
        for group in list(distributed_c10d._world.pg_names):
            known, board = self._known(group), self.board_of(group)
            if board is not None and board.is_cut and not (known is not None and known.retired):
                return True
        return False

    # ---- how far this rank has come

    @property
    def counts(self) -> dict[str, dict[str, Any]]:
        """Return the number of started operations of each kind, by name of the group. Ranks in step have equal counts.

        It includes unused groups, since another rank may have used them. Callable from any thread.
        """
        counts: dict[str, dict[str, Any]] = {}
        for group, name in list(distributed_c10d._world.pg_names.items()):
            if group.size() > 0:
                known = self._known(group)
                of_kind = dict.fromkeys(KINDS, 0) if known is None else known.counts
                sent = {} if known is None else {known.session_rank(to): n for to, n in known.sent.items()}
                counts[name] = {**of_kind, "sent": sent}
                if known is not None and (messages := known.messages.to_json(known)):
                    counts[name]["messages"] = messages
                    counts[name]["is_complete"] = known.messages.is_complete
        return counts

    @property
    def begun(self) -> int:
        """Return the number of started operations in all groups."""
        return sum(sum(group.counts.values()) for group in list(self.groups.values()))

    def reset_counts(self) -> None:
        """Restart all counts after the groups were re-formed, and forget operations of the old connections."""
        for group in list(self.groups.values()):
            group.reset_counts()
        self.is_torn = False
        for kept in (self.live, self.by_work, self.unwaited):
            kept.clear()
        self.failed = None

    def queued(self, call: Call) -> None:
        """Record a call that is queued on the current GPU stream, without a wait in Python."""
        if not unseen(call.goes_on):
            self.live.pop(id(call), None)
        if call.moment is not None and self.event_buffer is not None:
            unseen(self.event_buffer.ended, call, False, call.since_ns)
        else:
            call.compact()

    def leave(self, thread: int) -> None:
        """Clear the wait of a thread whose code has ended. It may have been stopped before its wait."""
        self.unwaited.pop(thread, None)
        self.waiting.pop(thread, None)

    def first_failed(self) -> Call | None:
        """Return the first operation that failed without an exception in Python, for example in a DDP backward pass."""
        return next((call for call in list(self.live.values()) if call.has_failed), None)

    def forget_failure(self) -> None:
        """Drop the last failure, and with it the frames of its traceback."""
        self.failed = None

    def compact(self, thread: int) -> None:
        """Drop the tensors of operations that no code has waited for.

        Args:
            thread: has started all its own operations. Another thread's operation without a work has yet to start.
        """
        if not self.live:
            return
        self.prune()
        for call in list(self.live.values()):
            if call.thread == thread or call.work is not None:
                call.compact()

    def prune(self) -> None:
        """Forget completed operations, so that their tensors live no longer than the user keeps them."""
        for key, call in list(self.live.items()):
            if (call.is_done or call.is_given_up) and not call.is_to_be_told:
                self._forget(key, call)
        # Operations that complete on a GPU hold no tensors.
        left = [item for item in list(self.live.items()) if item[1].over is None and not item[1].is_to_be_told]
        left.sort(key=lambda item: item[1].since_ns)
        for key, call in left[: max(0, len(left) - _MOST_LIVE)]:
            self._forget(key, call)
        self.prune_at = max(_PRUNE_AT, 2 * len(self.live))

    def _forget(self, key: int, call: Call) -> None:
        if call.work is not None and self.user_calls is not None:
            self.user_calls.forgotten(call)
        self.live.pop(key, None)
        self.by_work.pop(id(call.work), None)
        call.work = None  # it holds the tensors
        if call.moment is not None and self.event_buffer is not None:
            self.event_buffer.forgotten(call)

    def operations(self) -> list[Call]:
        """Return the operations in progress, oldest first. Callable from any thread."""
        under_way = [call for call in list(self.live.values()) if not call.is_done]
        return sorted(under_way, key=lambda call: call.since_ns)  # a repeated call keeps its position

    def waits_in(self, thread: int) -> Call | None:
        """Return the operation that a thread waits for, as far as Python sees it. Callable from any thread."""
        return self.waiting.get(thread)

    def _around_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        waiting, by_work, unwaited = self.waiting, self.by_work, self.unwaited
        get_ident, monotonic_ns = threading.get_ident, time.monotonic_ns

        def recorded_wait(work: Work, timeout: timedelta | None = None) -> bool:
            thread = get_ident()
            call = by_work.get(id(work)) if by_work else None
            if call is None:
                call = unwaited.pop(thread, None)
                if call is None:  # its group is not recorded
                    return wait(work) if timeout is None else wait(work, timeout)
                call.is_waited_for = True  # set first: another thread may find it complete and forget it
                call.work = work
            elif call.work is not work:
                return wait(work) if timeout is None else wait(work, timeout)
            elif self.user_calls is not None:
                unseen(self.user_calls.waited, call)
            call.limit = timeout = _limit(call) if timeout is None else timeout
            if (lengthen := self.lengthen) is not None:
                timeout = lengthen.timeout(call, timeout)
            call.is_waited_for = not call.end_ns
            failed, began_ns = True, monotonic_ns()
            try:
                waiting[thread] = call
                try:
                    done = wait(work) if timeout is None else wait(work, timeout)
                except RuntimeError as error:
                    done = _wait_longer(wait, call, work, timeout, began_ns, error)
                failed = False
                if call.check is not None:
                    call.check(work)
            except BaseException as error:
                self.note_failure(call, error)
                self.raise_reason(error)
                raise
            finally:
                waiting.pop(thread, None)
                by_work.pop(id(work), None)
                self._end_wait(call, began_ns, failed=failed)
            return done

        return recorded_wait

    def _end_wait(self, call: Call, began_ns: int, *, failed: bool) -> None:
        if failed or not (gpu.is_in_use() and unseen(call.goes_on)):
            self.live.pop(id(call), None)
        elif call.moment is None:  # otherwise the recording keeps it without tensors
            call.compact()
        if call.moment is not None and (event_buffer := self.event_buffer) is not None:
            unseen(event_buffer.ended, call, failed, began_ns)

    def _around_wait_tensor(self, after: Any) -> Callable[..., torch.Tensor]:
        """Return a kernel that waits for a functional collective in Python first.

        Functional collectives, including DTensor's, are waited for in C++ by their output tensor. After the wait in
        Python, C++ finds them complete.
        """
        wait = torch.ops._c10d_functional.wait_tensor.default.redispatch

        def wait_tensor(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            call = unseen(self._that_fills, tensor)
            if call is not None and (work := call.work) is not None:
                work.wait()
            return wait(keys & after, tensor)

        return wait_tensor

    def _that_fills(self, tensor: torch.Tensor) -> Call | None:
        """Return the operation in progress that writes its output to this tensor; None if there is none."""
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


def _wait_longer(
    wait: Callable[..., bool], call: Call, work: Work, limit: timedelta | None, began_ns: int, error: RuntimeError
) -> bool:
    """Wait again for a collective, if a debugger has held the limit of the wait. Otherwise raise the error.

    The end of such a wait does not end the operation. (The end of a wait for a message does.)
    """
    may_wait = call.kernel.spec.kind == "collective" and call.is_on_cpu()
    limit_s = 0.0 if limit is None or not may_wait else limit.total_seconds()
    while limit_s and not work.is_completed() and (left_s := CLOCK.left_s(limit_s, began_ns)):
        try:
            return wait(work, timedelta(seconds=left_s))
        except RuntimeError as later:
            error = later
    raise error


def _limit(call: Call) -> timedelta | None:
    """Return the timeout with which to wait for a call; None for that of the group when it was made.

    gloo would wait for a message with the group's initial timeout even if another one was set since. (With a timeout,
    NCCL blocks the thread until the device is done.)
    """
    if call.kernel.spec.kind == "collective" or not unseen(call.is_on_cpu):
        return None
    group = call.group.reference()
    return None if group is None else timeout_of(group)
