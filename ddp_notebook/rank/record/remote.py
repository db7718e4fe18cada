"""Remote calls, references and contexts of distributed autograd: what `rank/rpc/record` leaves on the tape, and the
columns of its rows. The first two are what `rank/rpc` knows of calls that are not recorded, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from ddp_notebook.rank.group.origin import Site, SiteFields
from ddp_notebook.rank.record.tape import Moment
from ddp_notebook.rank.record.texts import Texts
from ddp_notebook.records.schema import RPC_KINDS, RPC_SIDES

CALLER, CALLEE = range(len(RPC_SIDES))
TORCH = RPC_KINDS.index("torch")


class Sent:
    """A call on its caller's side."""

    __slots__ = (
        *("number", "function", "to", "agent", "cell", "thread", "sent_ns", "came", "is_recorded"),
        *("kind", "src", "dst", "site", "parent", "nbytes", "nbytes_back", "reference", "error", "moment"),
        *("returned_ns", "is_told", "context"),
    )
    number: int
    function: str
    to: str  # "worker1 (rank 1)"
    agent: str  # that it was sent to; "": it is what a cell calls, and sends calls of its own
    cell: int  # that it was made for
    thread: int  # that has made it
    sent_ns: int
    came: SimpleQueue[Any]  # gets something when its answer has come
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


TABLES: dict[type, str] = {Sent: "rpc", Ran: "rpc", ReferenceEvent: "reference", ContextEvent: "context"}


def row(record: Any, rank: int, texts: Texts, thread_of: Callable[[int], int]) -> tuple[Any, ...]:
    """The columns of a record's row, in the order of its table.

    Args:
        record: of one of the kinds of `TABLES`.
        rank: this one.
        texts: numbers them.
        thread_of: numbers threads.
    """
    moment: Moment = record.moment
    kind, number = type(record), texts.number
    if kind is Sent:
        site = 0 if record.site is None else texts.of_site(Site(*record.site), moment.title)
        return (  # in one piece, as below: a tuple of tuples takes 1 us longer
            rank, CALLER, record.number, record.kind, record.src, record.dst, number(record.function),
            site, record.parent, record.nbytes, record.nbytes_back, record.reference,
            number(record.error), moment.cell, record.sent_ns, record.returned_ns, -1, thread_of(record.thread),
        )  # fmt: skip
    if kind is Ran:
        return (
            rank, CALLEE, record.number, 0, -1, rank, 0, 0, 0, -1, -1, 0, number(record.error),
            moment.cell, record.begun_ns, record.ended_ns, record.done_ns, thread_of(record.thread),
        )  # fmt: skip
    match record:
        case ReferenceEvent():
            return (
                *(rank, record.event, record.reference, record.fork, record.owner, record.parent, record.call),
                *(texts.number(record.name), moment.cell, record.time_ns),
            )
        case _:
            return (
                *(rank, record.event, record.context, record.message, record.src, record.dst, record.call),
                *(record.nbytes, texts.number(record.name), moment.cell, record.start_ns, record.end_ns),
            )
