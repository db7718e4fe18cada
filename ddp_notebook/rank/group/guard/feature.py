"""Rank side of the guard: each group gets a board, and each call is compared before it starts."""

from __future__ import annotations

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group.guard.guard import Guard, make_board
from ddp_notebook.rank.group.guard.order import Order
from ddp_notebook.rank.hooks import Core, Feature


class CallComparison(Feature):
    """Comparison of the calls of all ranks, unless the session was started without a guard."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        network = core.network
        order = Order(network.recorder.identities, network.place_of_call, network.connections.cut_groups)
        network.recorder.differs, network.recorder.claim = order.differs, order.claim
        self._guard = Guard(lambda: network.release.loss, order)

    def group_forms(self, place: Form) -> None:
        self.core.network.connections.make_board = make_board if place.guard else None

    def group_formed(self, place: Form) -> None:
        self.core.network.recorder.guard = self._guard if place.guard else None


FEATURE = CallComparison
