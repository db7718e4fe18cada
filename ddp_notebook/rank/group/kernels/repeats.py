"""Calls that a training loop makes again in each step: of DDP's buckets all is known but the number and the times.

Where the values of a step are left out its buckets take a short way through the kernel, which notes these and nothing
else: code that runs once in milliseconds finds no cache warm, so each line of it counts (`tests/benchmarks/cold.py`).
"""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_notebook.rank.group.calls import Call, is_failed

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.buckets import Backward, Model


class Repeating:
    """Whose buckets take the short way now. Its attribute is set for less than one of the recorder's."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward: Backward | None = None


class Repeat(Call):
    """The call of one bucket, which is under way again in each backward. It holds no tensors but by what is kept of the
    last time.

    Args:
        call: that has synchronised the bucket in an earlier step.
        model: whose bucket it is.
        engine: the function that calls it from C++. What a hook of the user's calls is another one.
    """

    __slots__ = ("below", "engine", "following", "kept", "lock", "model", "row")

    def __init__(self, call: Call, model: Model, engine: CodeType) -> None:
        assert call.bucket is not None
        super().__init__(call.kernel, call.group, call.number, (), call.thread, call.since_ns)
        _copy(call, self)
        self.model = model
        self.following = call.bucket[1] + 1
        self.engine = engine
        self.lock = call.group.locks["collective"]
        self.below: Any = None  # the keys that the operator goes on with, which are those of its tensors' memory
        self.kept: Kept = []  # of the last time
        self.row: bytes | None = None  # without number and times, for the recorder's thread

    @property
    def is_done(self) -> bool:
        """Whether it is known to be over: a backward that has ended well has waited for it."""
        backward, kept = self.backward, self.kept
        if backward is None:
            return False
        future = kept[0] if kept else None  # first: it goes once `is_over` is set, in another thread
        if backward.is_over or len(kept) > 1:
            return True
        # Else an interrupt may have come before its end could be noted, or what would note it.
        return bool(backward.end_ns if future is None else future.done())

    @property
    def has_failed(self) -> bool:
        """Whether it is known to have failed."""
        kept = self.kept
        return bool(kept) and is_failed(kept[0])

    def forget(self) -> None:
        """Nobody makes it again: if it has ended well, it holds no tensors any more."""
        if self.is_done and not self.has_failed:
            self.kept = [None, 0]

    def alone(self, again: Again) -> Call:
        """One of these calls by itself, which may end after its backward."""
        _, number, since_ns, kept = again
        call = Call(self.kernel, self.group, number, (), self.thread, since_ns)
        _copy(self, call)
        call.ends, call.work = kept[1:], _Work(kept[0]) if kept else None
        return call


class _Work(NamedTuple):
    """What is known of a work by its future."""

    future: Any

    def is_completed(self) -> bool:
        return bool(self.future.done())

    def get_future(self) -> Any:
        return self.future


# Of a call: the future of its work once it has begun, and the time of its end once it is over. Not the work: where the
# caller is the last one to have that, freeing it is its task, which takes 3 us, and gloo's thread's otherwise. The
# future goes as soon as the backward has ended well: a few hundred bytes that a step leaves between its gradients keep
# the next step's from their places, and the heap grew by as many megabytes as they have, again and again.
Kept = list[Any]
Again = tuple[Repeat, int, int, Kept]  # what was called, its number, when, and what is kept of it


def _copy(call: Call, into: Call) -> None:
    """What is the same each time."""
    into.shapes = call.shapes or call.kernel.shapes_of(call.arguments)
    into.rest = call.rest or call.arguments[call.kernel.at_rest :]
    into.site, into.bucket, into.is_of_backward = call.site, call.bucket, True
