"""The schedule of a pipeline without messages, and the steps that are reported."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook.observe.report.bubbles import bubbles
from ddp_notebook.observe.steps.pipelines import pipelines, scheduled
from ddp_notebook.observe.views import bubble_of
from ddp_notebook.records.schema import SPANS
from tests.observe.synthetic import MS, Synthetic

_F, _B = "forward", "backward"


def gpipe(stages: int, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    every = range(microbatches)
    return {stage: [*((_F, stage, m) for m in every), *((_B, stage, m) for m in every)] for stage in range(stages)}


def one_f_one_b(stages: int, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    orders = {}
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order = [(_F, stage, m) for m in range(ahead)]
        for m in range(microbatches):
            order.append((_B, stage, m))
            if ahead + m < microbatches:
                order.append((_F, stage, ahead + m))
        orders[stage] = order
    return orders


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 8), (3, 16), (8, 8)])
def test_the_ideal_bubble_is_that_of_the_literature(make, stages, microbatches):
    """(p - 1) / (m + p - 1) for both GPipe and 1F1B, if all stages take the same time.

    Source: https://arxiv.org/abs/2104.04473, section 2.2.1 (as a share of the whole time, not of the ideal one).
    """
    orders = make(stages, microbatches)
    found = scheduled(orders, {key: 10 if key[0] == _F else 20 for order in orders.values() for key in order})
    assert len(found) == 2 * stages * microbatches
    assert bubble_of(found, stages) == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_orders_that_wait_for_each_other_end():
    orders = {0: [(_F, 0, 0), (_B, 0, 0), (_F, 0, 1), (_B, 0, 1)], 1: [(_F, 1, 1), (_B, 1, 1), (_F, 1, 0), (_B, 1, 0)]}
    found = scheduled(orders, {key: 1 for order in orders.values() for key in order})
    assert [(one.kind, one.stage, one.microbatch) for one in found] == [(_F, 0, 0)]


def run(steps: int = 3, late_ns: int = 0, lost: int = 0, name: str = "ScheduleGPipe") -> Synthetic:
    """GPipe on two ranks with two microbatches; each action takes 10 ms and each message `late_ns`.

    Args:
        lost: Number of the oldest rows of rank 1 that were dropped.
    """
    found = Synthetic(world_size=2)
    begins = {(_F, 0): 0, (_F, 1): 10, (_B, 0): 40, (_B, 1): 50}
    rows = []
    for step in range(steps):
        for rank in (0, 1):
            parent = 100 * (step + 1) + rank
            at_ns = step * 1000 * MS
            shared = {"rank": rank, "cell": 5, "pipeline": parent}
            for number, ((kind, microbatch), begin) in enumerate(begins.items()):
                shift = (1 if kind == _F else -1) * rank * (10 * MS + late_ns)
                start = at_ns + begin * MS + shift + (2 * late_ns if kind == _B else 0)
                own = {"span": parent * 10 + number, "kind": SPANS.index(kind), "stage": rank, "microbatch": microbatch}
                rows.append({**shared, **own, "start_ns": start, "end_ns": start + 10 * MS})
            own = {"span": parent, "kind": SPANS.index("pipeline"), "stage": 2, "microbatch": 2}
            rows.append({**shared, **own, "start_ns": at_ns, "end_ns": at_ns + 100 * MS})
    kept = [row for row in rows if row["rank"] == 0] + [row for row in rows if row["rank"] == 1][lost:]
    for row in kept:
        found.add("span", **row, name=name if row["kind"] == SPANS.index("pipeline") else "")
    return found


def test_steps_of_ranks_are_merged_and_partial_steps_left_out():
    found = pipelines(run(steps=3))
    assert [(one.step, one.ranks, len(one.actions)) for one in found] == [(step, (0, 1), 8) for step in range(3)]
    assert [one.step for one in pipelines(run(steps=3, lost=2))] == [1, 2]  # the first one lacks actions
    assert [one.step for one in pipelines(run(steps=3, lost=5))] == [1, 2]  # and does not exist on rank 1
    assert [one.step for one in pipelines(run(steps=3), last=1)] == [2]
    assert pipelines(run(), cell=4) == []


def test_what_messages_take_is_in_the_measured_bubble_only():
    (one, *_) = pipelines(run(late_ns=5 * MS))
    assert one.ideal_span_ns == 60 * MS and one.ideal_bubble == pytest.approx(1 / 3)
    assert one.span_ns > one.ideal_span_ns and one.bubble > one.ideal_bubble
    (bubble,) = bubbles(run(late_ns=5 * MS), 5)
    assert bubble.note.startswith("Bubble of ScheduleGPipe with 2 stages and 2 microbatches: ")
    assert bubble.suggestions() == [
        "more microbatches: with n_microbatches=4 of the same size the schedule's own bubble would be 20 % instead of "
        "33 %"
    ]


def test_two_pipelines_beside_each_other_are_two():
    both = run(name="Schedule1F1B on ranks 0,1")
    others = both.rows("span").copy()
    others["rank"] += 2
    others["name"] = np.where(others["kind"] == SPANS.index("pipeline"), len(both._texts), others["name"])
    both._texts["Schedule1F1B on ranks 2,3"] = len(both._texts)
    both.world_size, both._tables["span"] = 4, np.concatenate([both.rows("span"), others])
    assert [(one.schedule, one.ranks) for one in pipelines(both, last=1)] == [
        ("Schedule1F1B on ranks 0,1", (0, 1)),
        ("Schedule1F1B on ranks 2,3", (2, 3)),
    ]
    assert len(bubbles(both, 5)) == 2
