"""The lines of several ranks in one cell, as the front end shows them at its end."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from ddp_notebook.run.cells.cell import OutputItem
from ddp_notebook.run.output.screen import Screen

LINES = [
    "360 of 1437 images, starting with [{0}, {1}, {2}]",
    "tensor([{0}.25, {1}.5])",
    "a {0} {1} {2} {3} {4}",
    "of {0}",
]


class Page:
    """A sink that keeps text and displays as a front end does: in order, each display with its last content."""

    can_update = is_live = True
    is_captured = False

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self._text_ids = map("text {}".format, itertools.count())

    def write(self, stream: str, text: str) -> None:
        self.shown[next(self._text_ids)] = text

    def flush(self, stream: str) -> None:
        pass

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        assert display_id is not None and update == (display_id in self.shown)
        self.shown[display_id] = data["text/plain"] + "\n"

    def clear(self, wait: bool) -> None:
        raise AssertionError(wait)

    def fail(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("may_end", [True, False])
def test_lines_that_are_not_merged_are_in_the_order_of_ranks(world_size, may_end):
    """A rank may end before the others have written their first line."""
    expected = []
    for line in LINES[:3]:
        expected += [f"[{rank}] {line.format(*range(rank, rank + 5))}" for rank in range(world_size)]
    expected.append(f"[0-{world_size - 1}] of " + " | ".join(map(str, range(world_size))))
    for seed in range(100):
        choose, page = random.Random(seed), Page()
        screen = Screen(list(range(world_size)), page)
        waiting = {rank: [line.format(*range(rank, rank + 5)) + "\n" for line in LINES] for rank in range(world_size)}
        talking = set(waiting)
        while any(waiting.values()):
            rank = choose.choice([rank for rank in waiting if waiting[rank]])
            screen.show(OutputItem(rank, waiting[rank].pop(0)))
            if not waiting[rank] and may_end:
                talking.discard(rank)
            if choose.random() < 0.7:
                screen.refresh(talking)
        screen.finish()
        assert "".join(page.shown.values()).splitlines() == expected, f"seed {seed}"
