"""Recordings of simulated ranks, for documentation, talks and tests of code that draws recordings."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Literal, overload

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.widgets.simulated.shape import STEP_MS, Shape
from ddp_notebook.widgets.simulated.training import SimulatedRanks

_BEGIN_NS = 1_000_000_000_000  # start of recordings that are not live
_STEPS = 120
_SLOW_FROM = 150  # first slow step of an unlimited run
_COURSE = 100.0
_BLOCK_S = 0.1  # ranks send once per period
_BEHIND_NS = 500_000_000
_log = logging.getLogger(__name__)


@overload
def simulate(
    world_size: int = ...,
    *,
    steps: int | None = ...,
    seed: int = ...,
    straggler: int | None = ...,
    nan_at: tuple[int, int] | None = ...,
    rate: float | None = ...,
    values: bool = ...,
    live: Literal[False] = ...,
) -> Recording: ...


@overload
def simulate(
    world_size: int = ...,
    *,
    steps: int | None = ...,
    seed: int = ...,
    straggler: int | None = ...,
    nan_at: tuple[int, int] | None = ...,
    rate: float | None = ...,
    values: bool = ...,
    live: Literal[True],
) -> Simulation: ...


def simulate(
    world_size: int = 64,
    *,
    steps: int | None = None,
    seed: int = 0,
    straggler: int | None = 2,
    nan_at: tuple[int, int] | None = None,
    rate: float | None = None,
    values: bool = True,
    live: bool = False,
) -> Recording | Simulation:
    """Simulate the training of a transformer with 19 million parameters in DDP, and return its recording.

    The first half is cell 1. The second half is cell 2, where the forward of one rank takes nearly twice as long. The
    same arguments give the same recording (except for the times of a live one).

    Args:
        world_size: Number of ranks.
        steps: Optimizer steps in total. None for 120, or for no limit if live (cell 2 starts at step 150).
        seed: Seed of the random numbers.
        straggler: Rank that becomes slow. None, or a rank that does not exist, for no slow rank.
        nan_at: A rank and a step in which its gradients become NaN. From the next step on, all losses are NaN.
        rate: Approximate steps per second; None for 24. Scales all durations.
        values: Record the values of tensors too, which make up three quarters of the bytes.
        live: Feed the recording in a thread, in real time.

    Raises:
        UsageError: `world_size`, `steps` or `rate` is not positive.

    Example:
        >>> recording = simulate(world_size=4)
        >>> recording
        <Recording of 4 ranks: 2960 calls, 1928 spans, 960 values of metrics>
        >>> print(recording.straggler().evidence)
        rank 2 came last in 58 of 58 steps, and the others waited 8.06 ms of each step for it (mean); its forward \
    takes 18.1 ms, theirs 10.0 ms (medians)
    """
    for name, value in (("world_size", world_size), ("steps", steps), ("rate", rate)):
        if value is not None and value <= 0:
            raise UsageError(f"{name} must be greater than 0, got {value}")
    if steps is None and not live:
        steps = _STEPS
    shape = Shape(
        world_size=world_size,
        steps=steps,
        seed=seed,
        straggler=straggler if straggler is not None and straggler < world_size else None,
        slow_from=_SLOW_FROM if steps is None else max(steps // 2, 1),
        scale=1.0 if rate is None else 1000 / rate / STEP_MS,
        nan_at=nan_at,
        values=values,
        course=_COURSE if steps is None else steps / 6,
    )
    if live:
        return Simulation(shape)
    recording = Recording(world_size)
    ranks = SimulatedRanks(shape, _BEGIN_NS)
    while not ranks.is_over:  # same block size as ranks use, so that rows arrive in the order of time
        for batch in ranks.batches(_block(shape)):
            recording._feed(batch)
    return recording


class Simulation:
    """Simulated ranks that run until they are stopped, or until their steps are over. Created by `simulate(live=True)`.

    Example:
        >>> with simulate(world_size=2, live=True, rate=50) as simulation:
        ...     while len(simulation.recording.store.rings["metric"]) < 8:
        ...         time.sleep(0.01)
        >>> simulation.is_running
        False
    """

    def __init__(self, shape: Shape) -> None:
        self.recording = Recording(shape.world_size)
        self._shape = shape
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="ddp_notebook-simulate", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Simulation of {self._shape.world_size} ranks, {'running' if self.is_running else 'stopped'}>"

    def __enter__(self) -> Simulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Return whether more data will be fed."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop feeding. The recording keeps its data."""
        self._is_stopped.set()
        self._thread.join()

    def _go_on(self) -> None:
        ranks = SimulatedRanks(self._shape, time.monotonic_ns())
        count = _block(self._shape)
        while not ranks.is_over:
            batches = list(ranks.batches(count))
            ends_ns = max(int(batch.tables["span"]["end_ns"].max()) for batch in batches)
            if self._is_stopped.wait(max(0.0, (ends_ns - time.monotonic_ns()) / 1e9)):
                return
            for batch in batches:
                self.recording._feed(batch)
            behind_ns = time.monotonic_ns() - int(ranks.now_ns.max())
            if behind_ns > _BEHIND_NS:  # this machine is too slow for this rate
                ranks.delay(behind_ns)


def _block(shape: Shape) -> int:
    """Return the number of steps per batch."""
    return max(1, round(_BLOCK_S / (STEP_MS * shape.scale / 1000)))
