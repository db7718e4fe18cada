"""A recording of ranks that do not exist, for documentation, talks and tests of whatever draws recordings."""

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

_BEGIN_NS = 1_000_000_000_000  # where a recording that was made at once begins
_STEPS = 120
_SLOW_FROM = 150  # of a training without end
_COURSE = 100.0
_BLOCK_S = 0.1  # what ranks send together: they send as often
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
    """Training of a transformer of 19 million parameters in DDP, as so many ranks would have recorded it.

    Its first half is cell 1; it goes on in cell 2, where one rank takes nearly twice as long for its forward. The same
    arguments give the same recording (if live, apart from the times).

    Args:
        world_size: ranks.
        steps: optimizer steps in all; None: 120, or without end if live (cell 2 begins at step 150).
        seed: of everything random.
        straggler: the rank that becomes slow; None, or a rank that does not exist: none does.
        nan_at: a rank and a step in which its gradients are not a number; a step later nobody's loss is one.
        rate: steps per second, about; None: 24. All durations scale with it.
        values: whether the values of tensors are recorded too, which are three quarters of all rows' bytes.
        live: feed the recording in a thread, as time passes.

    Raises:
        UsageError: there are no ranks or no steps to simulate.

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
            raise UsageError(f"simulate({name}={value}) has nothing to simulate; {name} is more than 0")
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
    while not ranks.is_over:  # as often as ranks send, so that rows come in the order of time
        for batch in ranks.batches(_block(shape)):
            recording.feed(batch)
    return recording


class Simulation:
    """Simulated ranks that go on until they are stopped, or their steps are over. Made by `simulate(live=True)`.

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
        """Whether more comes."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Feed no more. What was fed stays."""
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
                self.recording.feed(batch)
            behind_ns = time.monotonic_ns() - int(ranks.now_ns.max())
            if behind_ns > _BEHIND_NS:  # this machine is too slow for so many
                ranks.delay(behind_ns)


def _block(shape: Shape) -> int:
    """Steps that are sent together."""
    return max(1, round(_BLOCK_S / (STEP_MS * shape.scale / 1000)))
