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

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.calls import KINDS, Call, Group, timeout_of
from ddp_notebook.rank.group.kernels.kernel import Kernel
from ddp_notebook.rank.group.kernels.repeats import Repeating
from ddp_notebook.rank.group.modules import Modules
from ddp_notebook.rank.group.operators import SPECS, flat
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading, time, weakref

if TYPE_CHECKING:
    from ddp_notebook.rank.group.guard.board import Board
    from ddp_notebook.rank.record.event_buffer import EventBuffer
    from ddp_notebook.rank.record.training.buckets import Backward

_MOST_LIVE = 64  # operations that nobody has waited for; those that are over are dropped much earlier
# Which the short way does not know. (The guard looks at no bucket, and a meaning is a message's.)
_HOOKS = frozenset(("refusal", "pause", "instead", "look"))
_set = object.__setattr__
_PRUNE_AT = 16  # operations that may be over; more if many are really under way


class FailedCollective(NamedTuple):
    """An operation that has raised."""

    call: Call
    error: BaseException
    at_ns: int  # monotonic


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
        self.repeating = Repeating()
        self.modules = Modules()
        # Seven hooks, set from outside and looked at in every call.
        self.refusal: Callable[[Group | None], BaseException] | None = None  # makes what operations raise instead
        self.pause: Callable[[], None] | None = None  # called before each one
        # Called before each one begins; may raise, or give tensors to begin a message with in place of its own.
        self.guard: Callable[[Call], Sequence[torch.Tensor] | None] | None = None
        self.instead: Callable[[Kernel, tuple[Any, ...]], Any] | None = None  # called in place of every operation
        self.meaning: Callable[[Call], str] | None = None  # what a message carries
        self.look: Callable[[Call], None] | None = None  # called as each one begins, and raises nothing
        self.event_buffer: EventBuffer | None = None  # where calls are left for the recording
        # Changed by methods only.
        self.failed: FailedCollective | None = None  # the last one
        self.is_torn = False  # a message was counted and interrupted: whether it is under way is not known
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

    def __setattr__(self, name: str, value: Any) -> None:
        _set(self, name, value)
        if name in _HOOKS and value is not None:  # there is more to do in a call than to note it
            self.repeating.backward = None

    def repeat(self, backward: Backward) -> None:
        """Let the buckets of this backward take the short way, see `repeats`."""
        self.repeating.backward = backward  # before the look: another thread may set a hook just now
        if not (self.refusal is None and self.pause is None and self.instead is None and self.look is None):
            self.repeating.backward = None

    def note_failure(self, call: Call, error: BaseException) -> None:
        """An operation has raised."""
        if call.kernel.spec.kind != "collective" and isinstance(error, KeyboardInterrupt):
            self.is_torn = True
        self.failed = FailedCollective(call, error, time.monotonic_ns())

    def install(self) -> None:
        """Put the kernels before the operators."""
        library, functional = torch.library.Library("c10d", "IMPL"), torch.library.Library("_c10d_functional", "IMPL")
        self._libraries = [library, functional]
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        for name in SPECS:
            if hasattr(torch.ops.c10d, name):
                library.impl(name, Kernel(self, name, after).make(), "BackendSelect", with_keyset=True)
        gpu.watch_captures()
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
        self.repeating.backward = None
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
        self.is_torn = False
        for kept in (self.live, self.by_work, self.unwaited):
            kept.clear()
        self.failed = None

    def queued(self, call: Call) -> None:
        """A call is queued on the current stream of a GPU, and nobody waits for it in Python."""
        if not unseen(call.goes_on):
            self.live.pop(id(call), None)
        if call.moment is not None and self.event_buffer is not None:
            unseen(self.event_buffer.ended, call, False, call.since_ns)
        else:
            call.compact()

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
            if (call.is_done or call.is_given_up) and not call.is_to_be_told:
                self._forget(key, call)
        # Those that are over on a GPU hold no tensors.
        left = [item for item in list(self.live.items()) if item[1].over is None and not item[1].is_to_be_told]
        left.sort(key=lambda item: item[1].since_ns)
        for key, call in left[: max(0, len(left) - _MOST_LIVE)]:
            self._forget(key, call)
        self.prune_at = max(_PRUNE_AT, 2 * len(self.live))

    def _forget(self, key: int, call: Call) -> None:
        self.live.pop(key, None)
        self.by_work.pop(id(call.work), None)
        call.work = None  # it holds the tensors
        if call.moment is not None and self.event_buffer is not None:
            self.event_buffer.forgotten(call)

    def operations(self) -> list[Call]:
        """The operations under way, the oldest first. From any thread."""
        under_way = [call for call in list(self.live.values()) if not call.is_done]
        return sorted(under_way, key=lambda call: call.since_ns)  # a call that is made again has kept its place

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
                    call.check(work)
            except BaseException as error:
                self.note_failure(call, error)
                raise
            finally:
                waiting.pop(thread, None)
                if failed or not (gpu.is_in_use() and unseen(call.goes_on)):
                    live.pop(id(call), None)
                elif call.moment is None:  # else it is about to be kept without its tensors
                    call.compact()
                by_work.pop(id(work), None)
                if call.moment is not None and (event_buffer := self.event_buffer) is not None:
                    unseen(event_buffer.ended, call, failed, began_ns)
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
