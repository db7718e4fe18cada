"""RPC calls, remote references and distributed autograd: plain data that queries return.

Times are nanoseconds of the notebook's monotonic clock, as in `views`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall:
    """One call to another rank, or one fetch of a remote reference's value."""

    id: int  # unique in the session
    cell: int  # cell of the caller
    kind: str  # "rpc_sync", "rpc_async", "remote", "to_here"
    src: int  # the calling rank
    dst: int  # the executing rank; -1: unknown
    function: str  # name in the cell, even if called through a proxy of a reference
    site: str  # "cell line 7"
    parent: int | None  # the enclosing call
    nbytes: int | None  # size of the function and its arguments in the message
    nbytes_back: int | None  # size of the tensors in the result
    sent_ns: int
    begun_ns: int | None  # None, like `ended_ns`, for operators and TorchScript, which only the caller reports
    ended_ns: int | None  # end of the function; None with `begun_ns`: it is running
    done_ns: int | None  # time when the answer exists; later than `ended_ns` for functions with `async_execution`
    returned_ns: int | None  # arrival of the answer at the caller; None: the call is open, as far as is known
    error: str  # one line; "" without an error
    reference: int | None  # created by `remote`, or the one whose value is fetched

    @property
    def is_open(self) -> bool:
        """Return whether its answer has not arrived, as far as is known."""
        return self.returned_ns is None

    @property
    def queued_ns(self) -> int | None:
        """Return the time from the call to the start on the callee: the transfer, and the wait for a free thread."""
        return None if self.begun_ns is None else max(0, self.begun_ns - self.sent_ns)

    @property
    def running_ns(self) -> int | None:
        """Return the run time of its function."""
        return None if self.begun_ns is None or self.ended_ns is None else self.ended_ns - self.begun_ns

    @property
    def is_matched(self) -> bool:
        """Return whether both sides have reported it."""
        return self.begun_ns is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceUser:
    """One remote reference on a rank that does not own the value."""

    rank: int
    parent: int | None  # the rank that passed it on; None: this rank created it by `remote`
    since_ns: int
    deleted_ns: int | None  # None: it still exists


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A value to which other ranks refer."""

    id: int
    owner: int  # the rank that has the value
    cell: int
    what: str  # type of the value, "Agent"; or the call that created it, "make_box()"
    made_ns: int
    made_by: int  # the rank that called `remote` or `RRef`
    users: tuple[ReferenceUser, ...]
    deleted_ns: int | None  # time when the last user was deleted; None: it has users


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePair:
    """Tensors of a call in a backward pass: a send on the source, and a recv on the destination."""

    message: int
    call: int | None  # the call with these arguments or this result
    src: int
    dst: int
    nbytes: int | None  # size of the message
    forward_ns: int
    backward_ns: int | None  # time when the gradients were sent, from `dst` to `src`; None: they were not


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One step of a distributed optimizer."""

    rank: int  # the rank that requested it
    name: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradContext:
    """One `with dist_autograd.context()`."""

    id: int
    rank: int  # the rank that opened it
    cell: int
    began_ns: int
    ended_ns: int | None  # None: it is still open
    backward_began_ns: int | None
    backward_ended_ns: int | None
    pairs: tuple[MessagePair, ...]  # in the order of the forward pass
    steps: tuple[OptimizerStep, ...]
