"""Remote calls, references and contexts of distributed autograd as data, and the columns of their rows.

`rank/rpc` writes this data, also for calls that are not recorded, and `rank/record` sends it. Neither needs the other.
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

if TYPE_CHECKING:
    from ddp_notebook.rank.record.text_numbers import TextNumbers

CALLER, CALLEE = range(len(RPC_SIDES))
TORCH = RPC_KINDS.index("torch")
NO_WORKER = NO_RANK = -1


class Sent:
    """A call on its caller's side."""

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
    callee: int  # its rank; NO_RANK: a call to no rank, or to several
    worker: int  # number of the process that received the call; NO_WORKER: a call of a cell that itself sends calls
    cell: int  # that it was made for
    thread: int  # that has made it
    sent_ns: int
    came: list[SimpleQueue[Any]]  # it gets something when the answer has come; none: somebody waits by it
    reference_future: Any  # future of an `rpc.remote`; None for other calls
    is_recorded: bool  # else it has nothing of what follows
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
    returned_ns: int  # -1: its answer has not come
    is_told: bool  # as one whose answer has not
    context: int  # of distributed autograd


@dataclass(slots=True, eq=False)
class Ran:
    """A call on its callee's side."""

    function: str
    cell: int  # of its caller, that it was made for
    number: int  # 0: it is not recorded
    context: int  # of distributed autograd
    thread: int
    begun_ns: int
    outer: Ran | None = None  # that the same thread was executing
    is_stopped: bool = False
    moment: Moment | None = None
    ended_ns: int = -1  # -1: it runs
    done_ns: int = -1  # -1: its result was there when its function ended
    error: str = ""
    is_told: bool = False  # as one that runs


class ReferenceEvent(NamedTuple):
    """Something has happened to a remote reference."""

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
    """Something has happened in a context of distributed autograd."""

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
    """The columns of the rows of some calls on their caller's side, in the order of their table. For all rows at once,
    since a row alone takes five times as long.

    Args:
        calls: at least one.
        rank: this one.
        texts: numbers them.
        thread_of: numbers threads.
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
    """The same of calls on their callee's side, which tells nothing that their caller does."""
    number, error, cell, begun, ended, done, thread = zip(*map(_OF_RAN, calls), strict=True)
    nothing, unknown = repeat(0), repeat(-1)
    return (
        *(repeat(rank), repeat(CALLEE), number, nothing, unknown, repeat(rank), nothing, nothing),
        *(nothing, unknown, unknown, nothing, texts.numbers(error), cell, begun, ended, done),
        map(thread_of, thread),
    )


COLUMNS: dict[type, Callable[..., tuple[Iterable[Any], ...]]] = {Sent: columns_of_sent, Ran: columns_of_ran}


def row(record: ReferenceEvent | ContextEvent, rank: int, texts: TextNumbers) -> tuple[Any, ...]:
    """The columns of another record's row, in the order of its table.

    Args:
        record: of one of the kinds of `TABLES`.
        rank: this one.
        texts: numbers them.
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
