"""Fast path for calls that a training loop repeats in each step: only number and times of a DDP bucket change.

The fast path is used in steps whose tensor values are not recorded. It records only the number and the times. Code that
runs once in milliseconds finds cold caches, so each line of it counts (`tests/benchmarks/cold.py`).
"""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_notebook.rank.group.calls import Call, is_failed
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.buckets import Backward, Model


class Repeating:
    """The backward pass whose buckets use the fast path. A separate class, since setting an attribute of the recorder
    is slower."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward: Backward | None = None


class Repeat(Call):
    """Call of one bucket, which is repeated in each backward pass. Its only tensors are those of the last future in
    `kept`.

    Args:
        call: the call that synchronized the bucket in an earlier step.
        model: the model of the bucket.
        engine: the function that calls it from C++. Calls of a user's hook come from another function.
    """

    __slots__ = ("below", "engine", "following", "kept", "ledger", "lock", "model", "row")

    def __init__(self, call: Call, model: Model, engine: CodeType) -> None:
        assert call.bucket is not None
        super().__init__(call.kernel, call.group, call.number, (), call.thread, call.since_ns)
        _copy(call, self)
        self.model = model
        self.following = call.bucket[1] + 1
        self.engine = engine
        self.lock = call.group.locks["collective"]
        board = call.group.board
        self.ledger = None if board is None or not call.entry else board.ledger
        self.below: Any = None  # dispatch keys for the operator; they depend on the device of its tensors
        self.kept: Kept = []  # data of the last repetition
        self.row: bytes | None = None  # row without number and times, for the recorder's thread

    @property
    def is_done(self) -> bool:
        """Return whether the call is known to be complete: a successful backward pass has waited for it."""
        backward, kept = self.backward, self.kept
        if backward is None:
            return False
        future = kept[0] if kept else None  # read first: another thread removes it once `is_over` is set
        if backward.is_over or len(kept) > 1:
            return True
        # Otherwise an interrupt may have prevented the callback for the end.
        return bool(backward.end_ns if future is None else future.done())

    @property
    def has_failed(self) -> bool:
        """Return whether the call is known to have failed."""
        kept = self.kept
        return bool(kept) and is_failed(kept[0])

    def forget(self) -> None:
        """Drop the tensors, since the call is not repeated any more. Does nothing if it is incomplete or has failed."""
        if self.is_done and not self.has_failed:
            self.kept = [None, 0]

    def alone(self, again: Again) -> Call:
        """Return one repetition as a separate call, which may end after its backward pass."""
        _, number, since_ns, kept = again
        call = Call(self.kernel, self.group, number, (), self.thread, since_ns)
        _copy(self, call)
        call.ends, call.work = kept[1:], _Work(kept[0]) if kept else None
        return call


class _Work(NamedTuple):
    """Work of which only the future is known."""

    future: Any

    def is_completed(self) -> bool:
        return bool(self.future.done())

    def get_future(self) -> Any:
        return self.future


# Data of one call: the future of its work once it has started, and its end time once it is complete. The work itself is
# not kept: its last owner spends 3 us to free it, and that should be gloo's thread, not the caller. The future is
# removed as soon as the backward pass has succeeded. Otherwise a few hundred bytes between the gradients of a step
# would displace those of the next step. The heap grew by the size of the gradients, again and again.
Kept = list[Any]
Again = tuple[Repeat, int, int, Kept]  # repeated call, its number, its start, and its data


def _copy(call: Call, into: Call) -> None:
    """Copy the fields that are the same each time."""
    into.shapes = call.shapes or call.kernel.shapes_of(call.arguments)
    into.rest = call.rest or call.arguments[call.kernel.at_rest :]
    into.site, into.bucket, into.is_of_backward, into.entry = call.site, call.bucket, True, call.entry
