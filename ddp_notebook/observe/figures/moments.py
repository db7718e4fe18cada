"""Calls between ranks as plain data, for the browser. `widgets/js/calls.d.ts` has their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.observe.remote import AutogradContext, Reference, RemoteCall

MOST_CALLS = 24  # calls in a figure; the first ones
_MOST_REFERENCES = 8


def drawn_references(references: Sequence[Reference]) -> list[Reference]:
    """Return the first eight references that another rank has or had, with the last use by each rank."""
    found = []
    for one in references:
        users = {user.rank: user for user in sorted(one.users, key=lambda user: user.since_ns)}
        others = tuple(user for rank, user in sorted(users.items()) if rank != one.owner)
        if others:
            found.append(replace(one, users=others))
    return found[:_MOST_REFERENCES]


def calls_drawn(
    calls: Sequence[RemoteCall], references: Sequence[Reference], contexts: Sequence[AutogradContext]
) -> dict[str, Any]:
    """Return the data of the browser's figure of calls. Times are milliseconds since the first call.

    Args:
        calls: in the order in which they were made.
        references: references to draw below.
        contexts: distributed autograd contexts, whose pairs of send and recv are drawn.
    """
    origin = min((call.sent_ns for call in calls), default=0)

    def ms(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns - origin) / 1e6

    places = {call.id: at for at, call in enumerate(calls)}
    return {
        "calls": [
            {
                "src": call.src,
                "dst": call.dst,
                "function": call.function,
                "kind": call.kind,
                "site": call.site,
                "parent": None if call.parent is None else places.get(call.parent),
                "nbytes": call.nbytes,
                "sent": ms(call.sent_ns),
                "begun": ms(call.begun_ns),
                "ended": ms(call.ended_ns),
                "done": ms(call.done_ns),
                "returned": ms(call.returned_ns),
                "error": call.error,
            }
            for call in calls
        ],
        "references": [
            {
                "owner": one.owner,
                "what": one.what,
                "made": ms(one.made_ns),
                "deleted": ms(one.deleted_ns),
                "users": [
                    {
                        "rank": user.rank,
                        "parent": user.parent,
                        "since": ms(user.since_ns),
                        "deleted": ms(user.deleted_ns),
                    }
                    for user in one.users
                ],
            }
            for one in drawn_references(references)
        ],
        "pairs": [
            {"src": pair.src, "dst": pair.dst, "at": ms(pair.backward_ns)}
            for context in contexts
            for pair in context.pairs
        ],
    }
