"""Times of all events in simulated steps.

The backward pass completes the gradients bucket by bucket. The all-reduce of a bucket starts when every rank has issued
it and the previous one has finished. So waiting, hidden and exposed communication are as on a real network:

    rank 0   |in|forward    |backward  .b0  .b1  .b2|~~waits~~|=exposed=|opt|
    rank 2   |in|forward, slower         |backward  .b0  .b1  .b2|=exposed=|opt|
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.widgets.simulated.shape import BUCKETS, Shape, has_messages, has_sum

Times = npt.NDArray[np.int64]

_INPUT_MS, _BETWEEN_MS, _FORWARD_MS, _BACKWARD_MS, _OPTIMIZER_MS = 1.2, 0.3, 10.0, 20.0, 2.5
_TRANSFERS_MS = 21.0  # all buckets in sequence
_LATENCY_MS = 0.06
_FIRST_STEP = 5.0  # duration relative to other steps: the first one allocates buffers and compiles
_SLOW = 1.8  # duration of the slow forward relative to the others


class StepTimes(NamedTuple):
    """Times of all events in nanoseconds, of shape (steps, world_size) unless noted otherwise."""

    numbers: npt.NDArray[np.int64]  # (steps,)
    start: Times
    input_end: Times
    forward: Times
    backward: Times
    issued: Times  # (steps, world_size, BUCKETS)
    through: Times  # (steps, BUCKETS)
    optimizer: Times
    end: Times
    summed: Times  # end of the all_reduce in the code of the cell, in steps that have one
    passed: Times  # end of the messages in the code of the cell


def times_of(
    shape: Shape, numbers: npt.NDArray[np.int64], now_ns: Times, elements: Times, random: np.random.Generator
) -> tuple[StepTimes, Times]:
    """Return the times of the next steps, and the time when each rank has finished them.

    Args:
        shape: Parameters of the simulation.
        numbers: (steps,) Numbers of the steps in the training run.
        now_ns: (world_size,) Start time of each rank.
        elements: (BUCKETS,) Elements of each bucket.
        random: Source of the jitter.
    """
    count, world, ms = len(numbers), shape.world_size, shape.scale * 1e6
    took = np.empty((count, 5, world))  # input, between, forward, backward, optimizer: time of the rank without waiting
    took[:] = np.array([_INPUT_MS, _BETWEEN_MS, _FORWARD_MS, _BACKWARD_MS, _OPTIMIZER_MS])[:, None]
    took *= np.exp(random.normal(0, 0.02, took.shape))
    # Occasionally another process uses the core.
    took += random.exponential(2.5, took.shape) * (random.random(took.shape) < 0.002)
    if shape.straggler is not None:
        took[numbers >= shape.slow_from, 2, shape.straggler] *= _SLOW
    took[numbers == 0] *= _FIRST_STEP
    input_ns, between_ns, forward_ns, backward_ns, optimizer_ns = (took * ms).astype(np.int64).swapaxes(0, 1)
    transfer_ms = _TRANSFERS_MS * elements / elements.sum()
    transfer_ns = (transfer_ms * np.exp(random.normal(0, 0.05, (count, BUCKETS))) * ms).astype(np.int64)
    parts = np.cumsum(random.dirichlet(np.full(BUCKETS, 200.0), (count, world)), axis=2)  # shares of the backward pass
    latency_ns = int(_LATENCY_MS * ms)

    start, forward, backward = (np.empty((count, world), np.int64) for _ in range(3))
    issued, through = np.empty((count, world, BUCKETS), np.int64), np.empty((count, BUCKETS), np.int64)
    optimizer, end, summed, passed = (np.empty((count, world), np.int64) for _ in range(4))
    now = now_ns
    for at, number in enumerate(numbers.tolist()):
        start[at] = now
        forward[at] = now + input_ns[at] + between_ns[at]
        backward[at] = forward[at] + forward_ns[at]
        issued[at] = backward[at][:, None] + (parts[at] * backward_ns[at][:, None]).astype(np.int64)
        before = 0
        for bucket, arrived in enumerate(issued[at].max(axis=0).tolist()):
            before = through[at, bucket] = max(arrived, before) + int(transfer_ns[at, bucket]) * (world > 1)
        optimizer[at] = np.maximum(before, issued[at, :, -1]) + latency_ns
        end[at] = now = optimizer[at] + optimizer_ns[at]
        if has_sum(number):
            summed[at] = now = np.full(world, int(now.max()) + latency_ns)
        if has_messages(number, world):
            # wait for the message of the previous rank
            passed[at] = now = np.maximum(now, np.roll(now, 1)) + 2 * latency_ns
    ends = (optimizer, end, summed, passed)
    return StepTimes(numbers, start, start + input_ns, forward, backward, issued, through, *ends), now
