"""Reasons of a wait for ranks that have ended the cell, from recorded facts: messages, training loops, stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_notebook.records.operation import Operation
from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.run.groups.rank_view import RankView, Views, counted

# ---- messages


def is_on_its_way(views: Views, other: int, rank: int, operation: Operation) -> bool:
    """Return whether another rank has started the send or receive that this send or receive waits for.

    Args:
        other: rank that must send or receive.
        rank: waiting rank.
    """
    if operation.name == "send":
        begun = sum(_messages(views[other], operation, "recv", peer) for peer in (rank, None))
        return begun >= operation.pair_number if operation.pair_number else _is_unsure(views[other], operation)
    if operation.root is not None:
        if not operation.pair_number:
            return _is_unsure(views[other], operation)
        return _messages(views[other], operation, "send", rank) >= operation.pair_number
    sent = {one: _messages(views[one], operation, "send", rank) for one in operation.ranks if one in views}
    received = sum(
        n for kind, _, tag, n in _all_messages(views[rank], operation) if (kind, tag) == ("recv", operation.tag)
    )
    return bool(sent.get(other)) and sum(sent.values()) >= received


def _is_unsure(view: RankView, operation: Operation) -> bool:
    """Return whether the messages of a rank that has ended the cell were too many to be counted."""
    return view.state == "ended" and not view.counts.get(operation.key, {}).get("is_complete", True)


def _all_messages(view: RankView, operation: Operation) -> Sequence[Any]:
    found: Sequence[Any] = view.counts.get(operation.key, {}).get("messages", ())
    return found


def _messages(view: RankView, operation: Operation, kind: str, peer: int | None) -> int:
    """Return the number of messages of a rank with a peer and the tag of an operation."""
    wanted = kind, peer, operation.tag
    return sum(n for of, with_, tag, n in _all_messages(view, operation) if (of, with_, tag) == wanted)


def missing_message(views: Views, missing: Sequence[int], waiter: int, operation: Operation) -> str:
    """Describe the message that a rank waits for and that these ranks have not sent or received.

    Example: `"a send to rank 0 with tag 3"`.
    """
    what = f"a receive from rank {waiter}" if operation.name == "send" else f"a send to rank {waiter}"
    tag = f" with tag {operation.tag}" if operation.tag else ""
    return f"{what}{tag}{_other_tags(views, missing, waiter, operation)}"


def _other_tags(views: Views, missing: Sequence[int], waiter: int, operation: Operation) -> str:
    """Name tags of unreceived messages, if the only awaited rank has sent some with other tags."""
    if len(missing) != 1 or operation.name != "recv":
        return ""
    taken = {
        tag: n for kind, peer, tag, n in _all_messages(views[waiter], operation) if (kind, peer) == ("recv", missing[0])
    }
    left = [
        tag
        for kind, peer, tag, n in _all_messages(views[missing[0]], operation)
        if (kind, peer) == ("send", waiter) and n > taken.get(tag, 0)
    ]
    return f"; it has sent one with tag {min(left)}" if left else ""


# ---- training loops


def loop_facts(views: Views, missing: Sequence[int], waiters: Sequence[int], operation: Operation) -> str:
    """Return what is known about ranks that left a training loop at different times, and the advice that follows.

    Args:
        missing: ranks that have ended the cell without the operation.
        waiters: ranks that wait in it.
    """
    if operation.origin == "checkpoint":
        return "; a distributed checkpoint is saved, and loaded, by all ranks of its group"
    if operation.origin not in ("ddp", "fsdp"):
        return ""
    ended, waits = views[missing[0]].loop, views[waiters[0]].loop
    if ended is None or waits is None:
        return ""
    made = f"after {counted(waits.steps, 'step', 'steps')}" if waits.steps else "in its first step"
    facts = f": {list_ranks(missing[:1])} has made {ended.words}, and rank {waiters[0]} waits {made}"
    for name in sorted(ended.ended):
        number, fewer = ended.passes.get(name, (0, 0))
        its_number, more = waits.passes.get(name, (0, 0))
        if number == its_number and fewer < more:
            facts += f". The data of rank {missing[0]} ended after {counted(fewer, 'batch', 'batches')}, and rank "
            facts += f"{waiters[0]} has taken {more}"
            return facts + (_JOIN if operation.origin == "ddp" else _NO_JOIN)
    return facts


_JOIN = ": put `with Join([model]):` around the loop, or give all ranks as many batches"
_NO_JOIN = ": give all ranks as many batches, because FSDP supports no Join"


# ---- stores


def in_stores(views: Views) -> str:
    """Describe the ranks that wait at stores, and what the other ranks do; "" if none waits."""
    waits = {rank: view.store for rank, view in views.items() if view.store is not None}
    if not waits:
        return ""
    by_text = group_by_value({rank: str(store) for rank, store in waits.items() if store is not None})
    parts = [f"{list_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {text}" for text, ranks in by_text.items()]
    return "; ".join([*parts, *_others(views, waits)])


def _others(views: Views, waits: Mapping[int, Any]) -> Iterator[str]:
    ended = [rank for rank, view in views.items() if rank not in waits and view.state == "ended"]
    if ended:
        yield f"{list_ranks(ended)} {'has' if len(ended) == 1 else 'have'} ended the {views[ended[0]].runs}"
    rest = {rank: view.doing for rank, view in views.items() if rank not in waits and view.state == "running"}
    for doing, ranks in group_by_value(rest).items():
        yield f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {doing}"
