"""Rank side of the guard: each group gets a board, and each call is compared before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group.guard.guard import Guard, make_board
from ddp_notebook.rank.group.guard.inputs import check_batch
from ddp_notebook.rank.group.guard.order import Order
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.patching import replace
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools


class CallComparison(Feature):
    """Comparison of the calls of all ranks, unless the session was started without a guard."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        network = core.network
        order = Order(network.recorder.identities, network.place_of_call, network.connections.cut_groups)
        network.recorder.differs, network.recorder.claim = order.differs, order.claim
        self._guard = Guard(lambda: network.release.loss, order)

    @classmethod
    def prepare(cls) -> Iterable[Callable[..., Any]]:
        return [dist.batch_isend_irecv]

    def engine_ready(self) -> None:
        """Check the tensors of a batch before its first message starts."""
        recorder, original = self.core.network.recorder, dist.batch_isend_irecv

        @functools.wraps(original)
        def checked(p2p_op_list: list[dist.P2POp]) -> Any:
            if recorder.guard is not None and all(isinstance(one, dist.P2POp) for one in p2p_op_list):
                unseen(check_batch, p2p_op_list)
            return original(p2p_op_list)

        replace(original, checked)

    def group_forms(self, place: Form) -> None:
        self.core.network.connections.make_board = make_board if place.guard else None

    def group_formed(self, place: Form) -> None:
        self.core.network.recorder.guard = self._guard if place.guard else None


FEATURE = CallComparison
