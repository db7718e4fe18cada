"""Remote calls, references and contexts of distributed autograd: what `rank/rpc/recorder` leaves on the tape, and the
columns of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ddp_notebook.rank.group.origin import Site, SiteFields
from ddp_notebook.rank.record.tape import Moment
from ddp_notebook.rank.record.texts import Texts
from ddp_notebook.records.schema import RPC_SIDES

CALLER, CALLEE = range(len(RPC_SIDES))


class Sent:
    """A call on its caller's side."""

    __slots__ = (
        *("number", "kind", "src", "dst", "function", "site", "parent", "nbytes", "nbytes_back", "reference", "error"),
        *("moment", "sent_ns", "returned_ns", "thread", "future"),
    )
    number: int
    kind: int
    src: int
    dst: int
    function: str
    site: SiteFields | None
    parent: int
    nbytes: int
    nbytes_back: int
    reference: int
    error: str
    moment: Moment
    sent_ns: int
    returned_ns: int
    thread: int
    future: Any  # until its answer was looked at


class Ran(NamedTuple):
    """A call on its callee's side."""

    number: int
    moment: Moment
    begun_ns: int
    ended_ns: int
    done_ns: int  # -1: its result was there when its function ended
    error: str
    thread: int


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
    match record:
        case Sent():
            site = 0 if record.site is None else texts.of_site(Site(*record.site), moment.title)
            return (
                *(rank, CALLER, record.number, record.kind, record.src, record.dst, texts.number(record.function)),
                *(site, record.parent, record.nbytes, record.nbytes_back, record.reference),
                *(texts.number(record.error), moment.cell, record.sent_ns, record.returned_ns, -1),
                thread_of(record.thread),
            )
        case Ran():
            return (
                *(rank, CALLEE, record.number, 0, -1, rank, 0, 0, 0, -1, -1, 0, texts.number(record.error)),
                *(moment.cell, record.begun_ns, record.ended_ns, record.done_ns, thread_of(record.thread)),
            )
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
