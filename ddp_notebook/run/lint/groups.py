"""Groups, the collectives of torch with the position of their group argument, and collectives that a rank reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

# Position of the group argument -> collectives. tests/test_foresee.py compares it with torch.
NO_GROUP: Final = 99
_NAMES: Final = {
    0: "barrier monitored_barrier split_group",
    1: "new_subgroups",
    2: "_all_gather_base all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single "
    "all_reduce all_reduce_coalesced all_to_all broadcast broadcast_object_list",
    3: "_reduce_scatter_base gather gather_into_tensor gather_object gather_single reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list",
    4: "all_to_all_single",
    NO_GROUP: "new_group new_subgroups_by_enumeration",
}
GROUP_AT: Final = {name: at for at, names in _NAMES.items() for name in names.split()}
# Positions for calls in other modules of torch, with unambiguous names.
ELSEWHERE: Final = {
    **{"DistributedDataParallel": 6, "FullyShardedDataParallel": 1},
    **dict.fromkeys(("fully_shard", "init_device_mesh"), NO_GROUP),
}
GROUP_NAMES: Final = ("group", "process_group", "mesh", "device_mesh", "parent_pg")
# With gloo (torch 2.13) these may return although some ranks do not call them. Later uses of the group then block.
MAKE_GROUPS: Final = {
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh", "fully_shard")
}
C10D: Final = ("torch.distributed", "torch.distributed.distributed_c10d")
_VARIANT: Final = re.compile(r"^_|_(base|coalesced|into_tensor|single|tensor)$")


@dataclass(frozen=True, slots=True)
class ForeseenGroup:
    """A group with known members."""

    members: tuple[int, ...]
    made_at: int = 0  # line of the cell that creates it; 0: the default group


@dataclass(frozen=True, slots=True)
class ForeseenCollective:
    """A collective that a rank reaches in the cell."""

    name: str
    group: ForeseenGroup
    site: tuple[int, int, int]  # line, column, and the line of the outermost call, or 0
    is_async: bool
    is_branched: bool = field(compare=False)  # it is under a decided test
    # `*` for each enclosing loop, `?` for each test on data, `!` for a test on an unknown rank.
    within: str = field(default="", compare=False)

    @property
    def shape(self) -> tuple[str, str]:
        """Return a key that is equal for collectives that can match, such as `all_gather` and
        `all_gather_into_tensor`.
        """
        return _VARIANT.sub("", self.name), self.within
