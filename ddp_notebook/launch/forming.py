"""Form the group of all ranks, at the start and again later, each time in the next epoch.

Every process sends Hello. Then each gets its rank and joins the group of the first epoch. Forming again sends each its
rank in the next epoch. An answer to an earlier call is dropped.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

from ddp_notebook.errors import HostError, StartError, StartTimeoutError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import COMER, CONTROLLER, RANK, STORE, Process, Processes
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.messages.processes import StoreSpec
from ddp_notebook.messages.ranks import Form, Formed, Hello, Ready, Registered
from ddp_notebook.records.words import name_ranks
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.store import KEY_BYTES

Check = Callable[[], None]

_LOOK_S = 0.2  # between two checks of a wait
_LOOK_EACH_S = 1e-5  # per rank, at least: checking all ranks on every message would take quadratic time
_HANGS_S = 5.0  # a wait fails after this time without an answer of a host server; generous for loaded machines
_STOPPED_S = 1.0  # a wait fails if a process has been stopped for this long
_SLOW_S = 2.5  # seconds until a message about the wait is shown
_SLOW_EACH_S = 0.05  # added for each rank
_REPORT_S = 0.5  # between the first and the last rank that reports that others did not join
_FORM_TIMEOUT_S = 10.0  # time limit of a group that forms; longer with many ranks
_PART_OF_START = 1 / 12  # the first group gets this part of the start timeout: 10 s of the default 120 s

_BUSY = "the main thread is busy: %ddp_interrupt ends a cell, or a call of session.client; then try again"
_LOADED = (
    "the host is overloaded or has little free memory: check its load and memory, or give the start more time "
    "(--timeout, timeout_s)"
)


class Forming:
    """Forms the group, and waits for messages of the ranks during a start.

    Args:
        processes: of the session.
        wire: to the ranks.
        is_alone: all processes run on one host.
        ports: for the store.
        store_prefix: of all keys in the store.
        guard: whether ranks compare their calls.

    Attributes:
        epoch: of the last group that was called to form; 0 if none.
        has_started: whether the session's start is over. A later end of the store or controller is not a failed start.
        start_timeout_s: time limit of the session's start.
        on_slow: called with a sentence that names what a group that forms again still waits for.
    """

    def __init__(
        self,
        processes: Processes,
        wire: Endpoint,
        is_alone: bool,
        ports: range,
        *,
        store_prefix: str,
        guard: bool,
    ) -> None:
        self.epoch = 0
        self.has_started = False
        self.start_timeout_s = 0.0
        self.processes_so_far = 0  # processes that have had a rank
        self.on_slow: Callable[[str], object] = lambda _: None
        self._processes = processes
        self._is_alone = is_alone
        self._ports = ports
        self._wire = wire
        self._store_prefix = store_prefix
        self._guard = guard
        self._lacks_since_s = 0.0  # when a rank reported missing ranks for the first time; 0.0: none has

    def address_of(self, host: Host) -> str:
        """Return the address of a host's ranks and store for all others. A single host uses loopback only."""
        return LOOPBACK if self._is_alone else host.address

    def store_at(self, host: Host) -> StoreSpec:
        """Return the specification of a store on this host. A store that listens on a network has its own key."""
        key = "" if self._is_alone else secrets.token_hex(KEY_BYTES)
        return StoreSpec(host=self.address_of(host), ports=(self._ports.start, self._ports.stop), key=key)

    def call(self, store: Process, placement: Placement) -> None:
        """Send every rank its position in the group of the next epoch."""
        assert store.store is not None
        self.epoch += 1
        self._wire.epoch = self.epoch
        at_start_s = 0.0 if self.has_started else self.start_timeout_s * _PART_OF_START
        for rank, process in sorted(self._processes.by_rank.items()):
            if process.serial < 0:
                process.serial, self.processes_so_far = self.processes_so_far, self.processes_so_far + 1
            process.said.discard("Formed")
            process.error, process.lacks_others = "", False
            process.notes = []
            self._wire.send(
                Form(
                    epoch=self.epoch,
                    rank=rank,
                    local_rank=placement.local_rank(rank),
                    world_size=placement.world_size,
                    local_world_size=placement.local_world_size(rank),
                    group_rank=placement.group_rank(rank),
                    group_world_size=placement.group_world_size,
                    backend=placement.backend,
                    device=placement.devices[rank],
                    store_host=self.address_of(store.host),
                    store_port=store.port,
                    store_at=store.store.at,
                    store_key=store.store.key,
                    store_prefix=self._store_prefix,
                    interface=process.host.interface(self.address_of(process.host)),
                    form_timeout_s=max(_FORM_TIMEOUT_S, placement.world_size / 2, at_start_s),
                    threads=placement.threads,
                    guard=self._guard,
                    shares_gpu=placement.shares_gpus,
                    process=process.serial,
                ),
                process.name,
            )

    def wait(self, deadline: float, check: Check) -> list[str]:
        """Wait until the group is formed.

        Returns:
            Descriptions of state that the ranks could not restore.
        """
        self.wait_for("the group to form", "Formed", deadline, check)
        notes = [note for process in self._processes.by_rank.values() for note in process.notes]
        return list(dict.fromkeys(notes))

    def wait_for(
        self, stage: str, said: str, deadline: float, check: Check, those: Sequence[Process] | None = None
    ) -> None:
        """Wait until every rank, or each of `those` processes, has sent the message `said`.

        Raises:
            StartError: a process ended or could not do its part.
            StartTimeoutError: the deadline passed.
        """
        say_at = time.monotonic() + _SLOW_S + _SLOW_EACH_S * len(self._processes.by_rank)
        while True:
            with self._processes.changed:
                check()
                self.raise_failures(stage)
                waited_for = list(self._processes.by_rank.values()) if those is None else those
                missing = [process.rank for process in waited_for if said not in process.said]
                if not missing:
                    return
                if time.monotonic() >= deadline:
                    raise StartTimeoutError(
                        f"this took too long: it was waiting for {stage}, and {name_ranks(missing)} did not answer. "
                        "Give it more time (--timeout, timeout_s), or look at the host's load and memory"
                    )
                self._processes.changed.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            if self.has_started and time.monotonic() > say_at:
                say_at = float("inf")
                self.on_slow(self._slow_in_words(stage, missing, deadline))
            time.sleep(_LOOK_EACH_S * len(waited_for))

    def raise_failures(self, stage: str) -> None:
        """Raise StartError if the wait for `stage` cannot succeed."""
        for host in dict.fromkeys(process.host for process in self._processes.current if process.is_alive):
            if not host.is_alive:
                raise StartError(f"the host server ended while waiting for {stage}; try again with %ddp_start")
            trouble = host.pulse()
            if trouble and (host.is_stopped or host.unanswered_s > _HANGS_S):
                raise StartError(f"{trouble} (it was waiting for {stage})")
        for process in self._processes.current:
            is_rank = process.kind in (RANK, COMER)
            name = f"rank {process.rank}" if is_rank else f"the {process.kind}"
            if not process.is_alive and (is_rank or not self.has_started):
                raise StartError(f"{name} died while waiting for {stage}: {process.how_it_ended()}")
            if process.stopped_s > _STOPPED_S and process.kind != CONTROLLER:
                raise StartError(f"{process.stopped} (it was waiting for {stage})")
            if process.error and not process.lacks_others:
                raise StartError(f"{name} failed while waiting for {stage}: {process.error}")
        self._raise_absence(stage)

    def _raise_absence(self, stage: str) -> None:
        """Raise StartError if ranks have waited in vain for others. All waiting ranks first get a moment to report."""
        ranks = self._processes.by_rank.values()
        if not any(one.lacks_others for one in ranks):
            self._lacks_since_s = 0.0
            return
        now_s = time.monotonic()
        self._lacks_since_s = self._lacks_since_s or now_s
        absent = [one.rank for one in ranks if "Formed" not in one.said]
        if not absent:
            raise StartError(f"the ranks did not find each other in time (it was waiting for {stage})")
        if now_s - self._lacks_since_s > _REPORT_S:
            why = _BUSY if self.has_started else _LOADED
            raise StartError(f"{name_ranks(absent)} did not join the group in time, probably because {why}")

    def _slow_in_words(self, stage: str, missing: Sequence[int], deadline: float) -> str:
        """Name the stage, the missing ranks, and the debuggers that hold processes."""
        by_host: dict[Host, list[Process]] = {}
        for process in self._processes.current:
            if process.is_alive and (process.kind == STORE or process.rank in missing):
                by_host.setdefault(process.host, []).append(process)
        held = []
        for host, those in by_host.items():
            if trouble := host.pulse():
                held.append(trouble)
            with contextlib.suppress(HostError):
                seen = host.inspect([process.number for process in those])
                names = {one.number: f"rank {one.rank}" if one.kind != STORE else "the store" for one in those}
                held += [f"{names[number]}: {one.held}" for number, one in seen.items() if one.held]
        why = "; ".join(held) or f"{name_ranks(missing)} did not answer yet"
        return f"still waiting for {stage}, for at most {deadline - time.monotonic():.0f} s more: {why}"

    # ---- I/O threads

    def on_said(self, process: Process, message: Hello | Formed | Ready | Registered) -> None:
        """Record that a process has completed a step of its start."""
        if isinstance(message, Formed) and message.epoch != self.epoch:
            return  # an answer to an earlier attempt
        with self._processes.changed:
            process.said.add(type(message).__name__)
            if isinstance(message, Registered):
                process.not_registered = message.error
            if isinstance(message, Formed):
                process.error, process.notes = message.error, message.notes
                process.lacks_others = message.lacks_others
            self._processes.changed.notify_all()
