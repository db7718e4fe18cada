"""One collective, send or receive on this rank: its operator, its group and its recorded data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d, get_process_group_ranks, is_initialized

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.operators import Operator, flat, nbytes
from ddp_notebook.records.meaning import meaning
from ddp_notebook.records.operation import Operation
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, itertools, threading, time, weakref

_MOST_PAIRS = 128  # counted pairs of peer and tag in a group
LONG = timedelta(days=1)  # timeout of operations whose limit a debugger holds, see `Recorder.lengthen`
_LONGEST = timedelta(days=36_500)  # gloo adds it to the clock, in 64-bit nanoseconds

if TYPE_CHECKING:
    from ddp_notebook.rank.group.guard.board import Board
    from ddp_notebook.rank.group.sequences import Moment
    from ddp_notebook.rank.record.gpu_times import Marks
    from ddp_notebook.rank.record.previews import Copy


KINDS = ("collective", "send", "recv")  # each kind has its own count
ISSUED, DONE, FAILED, UNWAITED = range(4)  # indices of `records.STATES`
NOT_ASKED_FOR, KEPT, LEFT_OUT = range(3)  # states of a call's tensor values


class CollectiveMismatchError(RuntimeError):
    """Ranks call different collectives, or the same one on different tensors. No data was sent; the group remains
    usable."""


class RetiredGroupError(RuntimeError):
    """The group of an operation cannot be used any more. The message names the reason and the remedy."""


def why_retired(error: BaseException | None) -> str:
    """Return the message of a `RetiredGroupError` during whose handling an error was raised; "" if there is none.

    torch looks up the name of the group while it logs a failed collective. It does not find a retired group, and raises
    an error that hides the cause.
    """
    while error is not None:
        error = error.__context__
        if isinstance(error, RetiredGroupError):
            return str(error)
    return ""


class BackwardSpan(Protocol):
    """The backward pass in which a call was made, see `record.training.buckets`."""

    number: int  # number of its span
    end_ns: int  # 0 while it runs
    is_over: bool  # ended without an error, and so have its calls


class Call:
    """One operation in progress. It stores only references, so that it is cheap to make."""

    # Class defaults instead of slots would make each access 0.05 us slower.
    __slots__ = (
        *("kernel", "group", "number", "arguments", "thread", "since_ns", "work", "check", "shapes"),
        *("moment", "backward", "site", "rest", "serial", "state", "end_ns", "ends", "blocked_ns"),
        *("bucket", "input", "output", "values", "whole", "marks", "over", "meaning"),
        *("tells_its_end", "is_waited_for", "is_of_backward", "is_left", "limit", "pair_number"),
        *("identity", "entry"),
    )

    def __init__(
        self, kernel: Operator, group: Group, number: int, arguments: tuple[Any, ...], thread: int, since_ns: int
    ) -> None:
        self.kernel = kernel
        self.group = group
        self.number = number
        self.arguments = arguments  # empty after `compact`
        self.thread = thread
        self.since_ns = since_ns
        self.work: Any = None
        self.over: Any = None  # GPU event that happens after the operation, once the caller has continued
        self.check: Callable[[Work], None] | None = None  # called in `Work.wait`, before it returns
        # After `compact`: the dtype of the tensors, and the shapes of the input and of the output.
        self.shapes: tuple[torch.dtype | None, Sequence[torch.Size], Sequence[torch.Size]] | None = None
        # For the recording, see `event_buffer`.
        self.moment: Moment | None = None  # None if the call is not recorded
        self.backward: BackwardSpan | None = None  # the backward pass that made the call
        self.site: Any = None  # fields of a `CallSite`
        self.rest: tuple[Any, ...] = ()  # after `compact`: arguments that follow the group
        self.serial = self.state = self.end_ns = self.blocked_ns = 0
        self.ends: list[int] | None = None  # list for the end time, if this is a bucket
        self.bucket: tuple[str, int] | None = None
        self.input: Copy | None = None
        self.output: Copy | None = None
        self.values = NOT_ASKED_FOR
        self.meaning = ""  # description of a message's content, if known
        self.entry = 0  # bits of its word in the ledger; 0 if it was not posted
        self.identity = 0  # object that the call belongs to, see `identities`; 0 if unknown
        self.whole: tuple[tuple[int, Copy], ...] = ()
        self.marks: Marks | None = None
        self.tells_its_end = self.is_waited_for = self.is_of_backward = self.is_left = False
        self.limit: timedelta | None = None  # passed to `Work.wait`
        self.pair_number = 0  # messages with this peer and tag, including this one

    @property
    def is_done(self) -> bool:
        """Return whether the operation is known to be complete.

        gloo reports the end of a send, receive or reduce_scatter only in `wait`.
        """
        work, over = self.work, self.over  # another thread may set the work to None
        if work is None and over is None:
            return False
        if not gpu.is_in_use():
            return bool(work.is_completed())
        with gpu.asking() as may_ask:
            try:
                return may_ask and bool(work.is_completed() if over is None else over.query())
            except RuntimeError:  # the GPU has failed and executes nothing more
                return True

    @property
    def is_on_gpu(self) -> bool:
        """Return whether the operation is known to run on a GPU."""
        return self.over is not None or self.marks is not None or bool(self.arguments and not self.is_on_cpu())

    def goes_on(self) -> bool:
        """Return whether the caller continues before a GPU completes the operation, as with NCCL.

        Only GPU work that the caller queues next waits for it. In this case an event is recorded, which holds no
        tensors.
        """
        tensor = self._tensor()
        if tensor is None or not tensor.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        try:
            over = torch.cuda.Event()
            over.record(torch.cuda.current_stream(tensor.device))
        except RuntimeError:  # the GPU has failed; the user gets that error
            return False
        self.over = over  # only now: an event that was not recorded counts as complete
        return True

    @property
    def is_given_up(self) -> bool:
        """Return whether this is a send that no code can wait for, since the user has dropped its work."""
        return self.work is not None and self.kernel.spec.kind == "send" and not self._is_held

    @property
    def is_to_be_told(self) -> bool:
        """Return whether user code can still wait for this call.

        Only that wait would raise the error that the other ranks have called another operation.
        """
        return self.check is not None and self._is_held

    @property
    def is_dropped(self) -> bool:
        """Return whether no code can wait for this asynchronous call, since the user has dropped its work."""
        return self.work is not None and not self._is_held

    @property
    def _is_held(self) -> bool:
        """Return whether the user holds a reference to the work."""
        return self.work is not None and _references(self) > _OWN_REFERENCES

    def is_on_cpu(self) -> bool:
        """Return whether the tensors are on the CPU, as far as that is known."""
        tensor = self._tensor()
        return not gpu.is_in_use() if tensor is None else tensor.is_cpu

    def _tensor(self) -> torch.Tensor | None:
        """Return the first tensor; None if the call has none, or not any more."""
        at, arguments = self.kernel.at_tensors, self.arguments
        tensors = flat(arguments[at]) if arguments and at is not None else ()
        return tensors[0] if tensors else None

    @property
    def has_failed(self) -> bool:
        """Return whether the operation is known to have failed, even if no Python code has waited for it."""
        work = self.work
        if work is None:
            return False
        try:
            return is_failed(work.get_future())
        except RuntimeError as error:
            return "does not support" not in str(error) and "not implemented" not in str(error)  # no future

    def compact(self) -> None:
        """Drop the tensors and the group.

        Possibly no code ever waits for the call, and a reference to the group would keep gloo's threads alive after its
        end.
        """
        if self.shapes is None:
            kernel, arguments = self.kernel, self.arguments
            self.shapes = kernel.shapes_of(arguments)
            self.rest = arguments[kernel.at_rest :]
            self.arguments = ()

    def describe(self) -> Operation:
        """Return a description of the operation."""
        kernel, group = self.kernel, self.group
        rest = self.rest or self.arguments[kernel.at_rest :]
        dtype, inputs, outputs = self.shapes or kernel.shapes_of(self.arguments)
        shapes = outputs if kernel.spec.shows_output else inputs
        origin, words = ("", self.meaning) if self.meaning else self._what_for()
        return Operation(
            name=kernel.spec.name,
            number=self.number,
            group=group.title,
            ranks=group.ranks,
            dtype=str(dtype).removeprefix("torch.") if dtype and shapes else "",
            shapes=tuple(tuple(shape) for shape in shapes),
            nbytes=nbytes(shapes, dtype),
            root=group.session_rank(kernel.root_of(rest)),
            tag=kernel.tag_of(rest),
            reduce_op=kernel.reduce_op_of(rest),
            meaning=words,
            origin=origin,
            since_s=(time.monotonic_ns() - self.since_ns) / 1e9,
            key=group.name,
            limit_s=self._limit_s(),
            threads=" and ".join(group.threads.values()) if group.has_overlapped else "",
            pair_number=self.pair_number,
        )

    def _limit_s(self) -> float | None:
        """Return the time limit of the operation in seconds; None if it is unknown."""
        if self.limit is not None:
            return self.limit.total_seconds()
        if (of_call := self.kernel.limit_of(self.rest or self.arguments[self.kernel.at_rest :])) is not None:
            return of_call
        group = self.group.reference()
        try:
            return None if group is None else timeout_of(group).total_seconds()
        except (AttributeError, IndexError, RuntimeError):  # a backend without such an option
            return None

    def _what_for(self) -> tuple[str, str]:
        """Return the parallel library of torch that made the call, and the purpose with the module.

        Both are "" if no library made it, and for calls that are not recorded.
        """
        if self.site is None:
            return "", ""
        if self.moment is not None and self.moment.sequence is not None:
            self.moment.sequence.name()
        origin, module = self.site[0], self.site[5]
        if self.bucket is not None or self.is_of_backward:
            origin = "ddp"
        words = meaning(origin, self.kernel.spec.name)
        return (origin, f"{words} of {module}" if module else words) if words else ("", "")


def is_failed(future: Any) -> bool:
    """Return whether a future is known to have failed."""
    if future is None or not future.done():
        return False
    try:
        future.value()
    except RuntimeError:
        return True
    return False


def _references(call: Any) -> int:
    """Return the number of references to the call's work, including the call's own."""
    return sys.getrefcount(call.work)


_OWN_REFERENCES = _references(SimpleNamespace(work=object()))  # differs between versions of Python


class MessageCounts:
    """Numbers of sends and receives in a group, by peer and tag.

    Programs may use a new tag for each message. So the number of counted pairs is limited.
    """

    __slots__ = ("_counts", "is_complete")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int | None, int], int] = {}
        self.is_complete = True  # False: some pairs were not counted

    def add(self, kind: str, peer: int | None, tag: int) -> int:
        """Count a message. Return its number, or 0 if it was not counted.

        Args:
            kind: "send" or "recv".
            peer: rank of the group; None for a receive from any rank.
        """
        key = kind, peer, tag
        number = self._counts.get(key, 0) + 1
        if number == 1 and len(self._counts) >= _MOST_PAIRS:
            self.is_complete = False
            return 0
        self._counts[key] = number
        return number

    def to_json(self, group: Group) -> list[list[Any]]:
        """Return `[kind, peer as a rank of the session, tag, number]` for each pair."""
        return [[kind, group.session_rank(peer), tag, n] for (kind, peer, tag), n in list(self._counts.items())]


_serials = itertools.count()


class Group:
    """Data of a process group, with only a weak reference to the group.

    A strong reference would keep the connections of the group's successor after the group's end.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.serial = next(_serials)  # unique in this process
        self.reference = weakref.ref(group)
        self.name: str = group.group_name
        self.ranks: tuple[int, ...] = tuple(map(int, _ranks(group)))  # the user may have passed NumPy integers
        self.title = _title(group, self.ranks)
        self.retired = ""  # reason why it cannot be used any more
        self.successor: ProcessGroup | None = None  # the group whose connections the operations use
        self.connections: Any = None  # the successor, boxed for operators
        self.board: Board[Any] | None = None  # on which the guard compares calls
        self.counts = dict.fromkeys(KINDS, 0)
        self.sent: dict[int, int] = {}  # number of sends to each rank of the group
        self.messages = MessageCounts()
        self.thread = 0  # thread that started the last collective
        self.threads: dict[int, str] = {}  # names of the Python threads that have started collectives
        self.has_overlapped = False  # two threads have used the group at the same time
        # Calls of one kind are numbered and compared one after the other, also between threads. A send does not wait
        # for a collective: another rank may start that collective only after it has received.
        self.locks = {kind: threading.RLock() for kind in self.counts}
        # Locks that are held until the operation has started. Messages may start at the same time.
        no_lock = contextlib.nullcontext()
        self.starts = dict.fromkeys(("send", "recv", ""), no_lock) | {"collective": self.locks["collective"]}

    def go_through(self, successor: ProcessGroup) -> None:
        """Route operations through the connections of another group from now on.

        Args:
            successor: the other group.
        """
        self.successor, self.connections = successor, successor.boxed()

    def reset_counts(self) -> None:
        """Restart the numbering of calls."""
        self.counts = dict.fromkeys(self.counts, 0)
        self.sent.clear()
        self.messages = MessageCounts()
        self.thread, self.threads, self.has_overlapped = 0, {}, False

    def session_rank(self, rank: int | None) -> int | None:
        """Return a rank of this group as a rank of the session."""
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group's operations."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def check_longest(timeout: Any) -> None:
    """Refuse a timeout that is too long for gloo: all operations would fail at once.

    Raises:
        RuntimeError: it is too long. Operations of such a group raise the same type.
    """
    if isinstance(timeout, timedelta) and timeout > _LONGEST:
        raise RuntimeError(f"timeout must be at most {_LONGEST.days:,} days, got {timeout}")


def timeout_setter() -> tuple[Callable[..., None], list[tuple[Any, str]]]:
    """Return the torch function that sets the timeout of a group, with its modules and its name there.

    This is `set_timeout` from torch 2.14 on, where the earlier private function warns.
    """
    if hasattr(distributed_c10d, "set_timeout"):
        return distributed_c10d.set_timeout, [(distributed_c10d, "set_timeout"), (dist, "set_timeout")]
    return distributed_c10d._set_pg_timeout, [(distributed_c10d, "_set_pg_timeout")]


def _ranks(group: ProcessGroup) -> list[int]:
    try:
        return get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError):  # a group that torch did not register, or a destroyed one
        return list(range(group.size()))


def _title(group: ProcessGroup, ranks: tuple[int, ...]) -> str:
    if is_initialized() and group is dist.group.WORLD:
        return "default"
    described = group.group_desc
    if described and described not in ("undefined", "default_pg"):
        return described
    return f"[{','.join(map(str, ranks[:8]))}{',...' if len(ranks) > 8 else ''}]"


NOW_NS = iter(time.monotonic_ns, None)  # `next` of it is the time; shared, since making one takes longer


def noting_time(into: list[int]) -> Callable[..., None]:
    """Return a callback for a gloo thread that appends the current time to `into`.

    It uses only builtins. In a thread that Python has not started, each call of a Python function first allocates a new
    stack. Such a call takes 4 to 24 us instead of 1 to 4.

    Example:
        >>> ends = []
        >>> noting_time(ends)("a future")
        >>> ends[0] <= time.monotonic_ns()
        True
    """
    return partial(next, map(into.append, NOW_NS))
