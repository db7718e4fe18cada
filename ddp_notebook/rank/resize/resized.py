"""What a rank answers where its session gets more or fewer ranks: before, and once the group of all has formed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported at run time

from ddp_notebook.messages.ranks import Form
from ddp_notebook.messages.resizing import Inspect, Resized
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.rank.resize import newcomers
from ddp_notebook.rank.resize.digests import digests
from ddp_notebook.rank.resize.obstacles import Obstacles
from ddp_notebook.rank.variables import samplers
from ddp_notebook.rank.variables.copying import names_of_user
from ddp_notebook.rank.variables.handover import Handover

_MEET = timedelta(seconds=60)


def inspect(message: Inspect, namespace: dict[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    """Answer `Inspect`.

    Args:
        namespace: the user's variables.
        hidden: names in it that are not the user's.
    """
    found = Obstacles(namespace)
    names = [name for name in names_of_user(namespace, hidden) if name not in found.sharded]
    compared = digests(namespace, names) if message.compares else {}
    in_order = [name for name in names if name in compared]  # so that a model and what it wraps are told as elsewhere
    compared = {name: compared.pop(name) for name in in_order} | compared
    return {"sharded": found.sharded, "others": found.others, "digests": compared}


def settle(message: Resized, place: Form, namespace: dict[str, Any]) -> dict[str, Any]:
    """Do what `Resized` says.

    Args:
        place: of this rank now.
        namespace: the user's variables.

    Raises:
        RuntimeError: another rank that takes part is gone.
        whatever the pickling of a variable raises.
    """
    given = newcomers.Given([], {})
    if message.number >= 0:
        at = PrefixStore(f"{place.store_prefix}/{place.epoch}", connect(place, _MEET))
        handover = Handover(at, message.meeting, number=message.number, size=message.size, timeout=_MEET)
        try:
            if message.number == 0:
                given = newcomers.give(handover, namespace, message.names, message.random)
            else:
                newcomers.take(handover, namespace)
        finally:
            handover.close()
    before, now = (message.was_rank, message.was_world_size), (place.rank, place.world_size)
    changes = [asdict(change) for change in samplers.resize(before, now, namespace)]
    return {"names": given.names, "left": given.left, "samplers": changes}
