"""Remote calls, references and contexts of distributed autograd as data, and the columns of their rows.

`rank/rpc` writes this data, also for calls that are not recorded. `rank/record` sends it. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_notebook.rank.group.call_site import SiteFields
from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.records.schema import RPC_KINDS, RPC_SIDES
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

if TYPE_CHECKING:
    from ddp_notebook.rank.record.text_numbers import TextNumbers

CALLER, CALLEE = range(len(RPC_SIDES))
TORCH = RPC_KINDS.index("torch")
NO_WORKER = NO_RANK = -1


class Sent:
    """A call on the caller's side."""

    __slots__ = (
        *("number", "function", "to", "callee", "worker", "cell", "thread", "sent_ns", "came", "reference_future"),
        *(
            "is_recorded",
            "kind",
            "src",
            "dst",
            "site",
            "parent",
            "nbytes",
            "nbytes_back",
            "reference",
            "error",
            "moment",
        ),
        *("returned_ns", "is_told", "context"),
    )
    number: int
    function: str
    to: str  # "worker1 (rank 1)"
    callee: int  # rank of the callee; NO_RANK for a call to no rank or to several
    worker: int  # number of the receiving process; NO_WORKER if unknown, or if the call only sends others
    cell: int  # number of the cell that made the call
    thread: int  # the calling thread
    sent_ns: int
    came: list[SimpleQueue[Any]]  # one queue, filled when the answer arrives; empty if a thread waits on it
    reference_future: Any  # future of an `rpc.remote`; None for other calls
    is_recorded: bool  # otherwise the following fields are not set
    kind: int
    src: int
    dst: int
    site: SiteFields | None
    parent: int
    nbytes: int
    nbytes_back: int
    reference: int
    error: str
    moment: Moment
    returned_ns: int  # -1 until the answer arrives
    is_told: bool  # already sent as an open call
    context: int  # context of distributed autograd


@dataclass(slots=True, eq=False)
class Ran:
    """A call on the callee's side."""

    function: str
    cell: int  # number of the caller's cell
    number: int  # 0 if it is not recorded
    context: int  # context of distributed autograd
    thread: int
    begun_ns: int
    outer: Ran | None = None  # the call that this thread was executing when this one started
    is_stopped: bool = False
    moment: Moment | None = None
    ended_ns: int = -1  # -1 while it runs
    done_ns: int = -1  # -1 if the result was complete when the function returned
    error: str = ""
    is_told: bool = False  # already sent as a running call


class ReferenceEvent(NamedTuple):
    """One event of a remote reference."""

    event: int
    reference: int
    fork: int
    owner: int
    parent: int
    call: int
    name: str
    moment: Moment
    time_ns: int


class ContextEvent(NamedTuple):
    """One event in a context of distributed autograd."""

    event: int
    context: int
    message: int
    src: int
    dst: int
    call: int
    nbytes: int
    name: str
    moment: Moment
    start_ns: int
    end_ns: int


TABLES: dict[type, str] = {ReferenceEvent: "reference", ContextEvent: "context"}
_OF_SENT = attrgetter(
    *("number", "kind", "src", "dst", "function", "site", "moment.title", "parent", "nbytes", "nbytes_back"),
    *("reference", "error", "moment.cell", "sent_ns", "returned_ns", "thread"),
)
_OF_RAN = attrgetter("number", "error", "moment.cell", "begun_ns", "ended_ns", "done_ns", "thread")


def columns_of_sent(
    calls: Sequence[Sent], rank: int, texts: TextNumbers, thread_of: Callable[[int], int]
) -> tuple[Iterable[Any], ...]:
    """Return the columns of the rows of some calls on the caller's side, in the order of the table.

    Building rows one by one takes five times as long.

    Args:
        calls: at least one call.
        rank: number of this rank.
        texts: numbers the texts.
        thread_of: numbers the threads.
    """
    number, kind, src, dst, function, site, title, parent, nbytes, back, *rest = zip(*map(_OF_SENT, calls), strict=True)
    reference, error, cell, sent, returned, thread = rest
    return (
        *(repeat(rank), repeat(CALLER), number, kind, src, dst, texts.numbers(function), texts.of_sites(site, title)),
        *(parent, nbytes, back, reference, texts.numbers(error), cell, sent, returned, repeat(-1)),
        map(thread_of, thread),
    )


def columns_of_ran(
    calls: Sequence[Ran], rank: int, texts: TextNumbers, thread_of: Callable[[int], int]
) -> tuple[Iterable[Any], ...]:
    """Return these columns on the callee's side. They leave out what the caller's row contains."""
    number, error, cell, begun, ended, done, thread = zip(*map(_OF_RAN, calls), strict=True)
    nothing, unknown = repeat(0), repeat(-1)
    return (
        *(repeat(rank), repeat(CALLEE), number, nothing, unknown, repeat(rank), nothing, nothing),
        *(nothing, unknown, unknown, nothing, texts.numbers(error), cell, begun, ended, done),
        map(thread_of, thread),
    )


COLUMNS: dict[type, Callable[..., tuple[Iterable[Any], ...]]] = {Sent: columns_of_sent, Ran: columns_of_ran}


def row(record: ReferenceEvent | ContextEvent, rank: int, texts: TextNumbers) -> tuple[Any, ...]:
    """Return the columns of the row of another record, in the order of its table.

    Args:
        record: a record of one of the kinds in `TABLES`.
        rank: number of this rank.
        texts: numbers the texts.
    """
    match record:
        case ReferenceEvent():
            return (
                *(rank, record.event, record.reference, record.fork, record.owner, record.parent, record.call),
                *(texts.number(record.name), record.moment.cell, record.time_ns),
            )
        case _:
            return (
                *(rank, record.event, record.context, record.message, record.src, record.dst, record.call),
                *(record.nbytes, texts.number(record.name), record.moment.cell, record.start_ns, record.end_ns),
            )
