"""Duration of pipelines compared with their actions: `python -m tests.benchmarks.pipelines`, from the root.

Each schedule runs on four ranks as in notebook 12, with sleeps instead of computation, because stages that compute
would share the cores. Its span, from the first action to the last, is compared with the same actions in the same order
without messages. The name of the figure lists the causes of the difference: slow actions, and then messages and Python.
"""

from __future__ import annotations

import statistics

import ddp_notebook
from ddp_notebook import lessons
from ddp_notebook.observe.steps.pipelines import orders_of, scheduled
from ddp_notebook.observe.views import Pipeline
from tests.benchmarks.results import Figure, moment, table

WORLD_SIZE, MICROBATCHES = 4, 8
BAR, LOOSE = 1.10, 1.40  # for GPipe and 1F1B; LOOSE for the others, which send twice as many messages
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def measure(blocks: int = 3) -> list[Figure]:
    """Run every schedule, in alternation."""
    found: dict[str, list[Pipeline]] = {}
    with ddp_notebook.start(WORLD_SIZE):
        pipe = lessons.pipeline()
        for _ in range(blocks):
            for schedule in SCHEDULES:
                found.setdefault(schedule, []).append(pipe.run(schedule, MICROBATCHES).measured)
    return [_figure(schedule, some) for schedule, some in found.items()]


def _figure(schedule: str, some: list[Pipeline]) -> Figure:
    ideal = statistics.median(one.ideal_span_ns for one in some) / 1e6
    longer = statistics.median(_with_own_times_ns(one) - one.ideal_span_ns for one in some) / 1e6
    messages = statistics.median(one.span_ns - _with_own_times_ns(one) for one in some) / 1e6
    return Figure(
        what=f"one step of {schedule} (+{longer:.0f} ms for slow actions, +{messages:.0f} ms for messages and Python)",
        value=statistics.median(one.span_ns for one in some) / 1e6,
        unit="ms",
        bar=BAR if schedule in ("GPipe", "1F1B") else LOOSE,
        baseline=ideal,
        against="the same actions without messages",
        blocks=tuple(one.span_ns / 1e6 for one in some),
    )


def _with_own_times_ns(one: Pipeline) -> int:
    """Return the span without messages, with the measured duration of each action."""
    lasts_ns = {
        (action.kind, action.stage, action.microbatch): action.end_ns - action.start_ns for action in one.actions
    }
    return max(action.end_ns for action in scheduled(orders_of(one.actions), lasts_ns))


def main() -> None:
    print(moment(), "", *table(measure()), sep="\n")


if __name__ == "__main__":
    main()
