"""Calls to other ranks, remote references and distributed autograd, as questions to a recording are answered with them.

Times are nanoseconds of the notebook's monotonic clock, as in `views`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall:
    """One call to another rank, or the fetch of a remote reference's value."""

    id: int  # no other call of the session has it
    cell: int  # of the caller
    kind: str  # "rpc_sync", "rpc_async", "remote", "to_here"
    src: int  # the rank that calls
    dst: int  # the rank that runs it; -1: not known
    function: str  # as the cell calls it, through a reference's proxy too
    site: str  # "cell line 7"
    parent: int | None  # the call that it was made in
    nbytes: int | None  # of the function and its arguments as they are sent
    nbytes_back: int | None  # of the tensors in the result
    sent_ns: int
    begun_ns: int | None  # None, as `ended_ns`: an operator or TorchScript, of which only the caller tells
    ended_ns: int | None  # its function has returned; None with `begun_ns`: it runs
    done_ns: int | None  # its answer is there: later than `ended_ns` where the function is one of `async_execution`
    returned_ns: int | None  # the caller has the answer; None: it is open, as far as is known
    error: str  # a line; "" if it went well
    reference: int | None  # that `remote` has made, or whose value is fetched

    @property
    def is_open(self) -> bool:
        """Whether its answer has not come, as far as is known."""
        return self.returned_ns is None

    @property
    def queued_ns(self) -> int | None:
        """From the caller until a thread of the callee has begun: the way, and the wait for a free thread."""
        return None if self.begun_ns is None else max(0, self.begun_ns - self.sent_ns)

    @property
    def running_ns(self) -> int | None:
        """How long its function ran."""
        return None if self.begun_ns is None or self.ended_ns is None else self.ended_ns - self.begun_ns

    @property
    def is_matched(self) -> bool:
        """Whether both sides have told of it."""
        return self.begun_ns is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceUser:
    """One remote reference on a rank that does not own the value."""

    rank: int
    parent: int | None  # the rank that has passed it on; None: the rank has made it by `remote`
    since_ns: int
    deleted_ns: int | None  # None: it is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A value that other ranks refer to."""

    id: int
    owner: int  # the rank that has the value
    cell: int
    what: str  # the type of the value, "Agent"; or what has made it, "make_box()"
    made_ns: int
    made_by: int  # the rank that has called `remote` or `RRef`
    users: tuple[ReferenceUser, ...]
    deleted_ns: int | None  # nobody referred to it any more; None: somebody does


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePair:
    """Tensors of a call that a backward follows: a send where they left, a recv where they came."""

    message: int
    call: int | None  # whose arguments or result it was
    src: int
    dst: int
    nbytes: int | None  # of the message
    forward_ns: int
    backward_ns: int | None  # the gradients have passed, from `dst` to `src`; None: they have not


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """A step of a distributed optimizer."""

    rank: int  # that has asked for it
    name: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradContext:
    """One `with dist_autograd.context()`."""

    id: int
    rank: int  # that has opened it
    cell: int
    began_ns: int
    ended_ns: int | None  # None: it is still open
    backward_began_ns: int | None
    backward_ended_ns: int | None
    pairs: tuple[MessagePair, ...]  # in the order of the forward
    steps: tuple[OptimizerStep, ...]
