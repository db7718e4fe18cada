"""Faults, and the states of the other ranks when they occur. Data only, see `harness`.

Ranks have the variables `rank`, `world_size`, `victim` (the rank with the fault) and the modules that a cell needs.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from itertools import product

GRACE_S = 1.0  # grace period of the sessions
HANG_AFTER_S = 2.0
AT_ONCE_S = 1.0  # limit if the other ranks are blocked on the victim, and for the stop button
END_S = 2.0  # time for ranks to end a cell after an interrupt
HOLD_S = 2.5  # time for which a state holds the interpreter


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of the ranks when a fault occurs."""

    name: str
    enter: str = ""  # code with which a rank enters the state and stays there; "": no cell runs
    line: str = ""  # pattern of the message about a rank in this state
    setup: str = ""  # code before, on all ranks
    again: str = ""  # code that uses the objects of `setup` again, on all ranks
    leave: str = ""  # code at the end, on all ranks
    is_wait: bool = True  # waits for the victim and so ends at once on a failure; otherwise there is a grace period
    is_blocked: bool = True  # the main thread sleeps
    polls: bool = False  # in a call that polls every few milliseconds, so it is not blocked
    holds_interpreter: bool = False  # nothing can end it before it returns
    takes_victim: bool = False  # all ranks can be in it together; otherwise the victim stays out
    outlives_death: bool = True  # a new rank can take part in `again` after `%ddp_heal --from`


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault of the victim."""

    name: str
    code: str = ""  # code that the victim runs
    signal: int = 0  # signal sent to its process
    presses: int = 0  # presses of the stop button
    ename: str = "KeyboardInterrupt"  # exception that ends the cell
    text: str = ""  # pattern of the message about the victim
    is_death: bool = False

    @property
    def is_interrupt(self) -> bool:
        """Return whether the fault affects all ranks alike."""
        return not (self.code or self.signal)


def _waits(operation: str) -> str:
    return rf"^waited in {operation}, cell line \d+\)$"


_AT_LINE = r"cell line \d+"
_EVENT = "event = threading.Event()"
_LEAVE_EVENT = "if 'event' in globals(): event.set()"  # a new rank has none: it cannot be copied

STATES = [
    State(name="idle"),
    State(
        name="Python loop",
        enter="n = 0\nwhile True: n += 1",  # Python 3.11 skips the `finally` around an empty loop
        line=rf"^interrupted at {_AT_LINE}$",
        is_wait=False,
        is_blocked=False,
        takes_victim=True,
    ),
    State(
        name="await",
        enter="await asyncio.sleep(600)",
        line=rf"^interrupted at {_AT_LINE}, in sleep$",
        is_wait=False,
        takes_victim=True,
    ),
    State(
        name="all_reduce",
        enter="dist.all_reduce(torch.ones(1024))",
        line=_waits(r"all_reduce #\d+ of group default \(float32\[1024\]"),
    ),
    State(name="barrier", enter="dist.barrier()", line=rf"^waited in barrier #\d+ of group default \({_AT_LINE}\)$"),
    State(
        name="send",
        enter="dist.send(torch.ones(8_000_000), (rank + 1) % world_size)",
        line=_waits(r"send #\d+ to rank \d+ \(float32\[8000000\]"),
        takes_victim=True,
    ),
    State(
        name="recv",
        enter="dist.recv(torch.ones(2), (rank + 1) % world_size)",
        line=_waits(r"recv #\d+ from rank \d+ \(float32\[2\]"),
        takes_victim=True,
    ),
    State(
        name="DDP backward",
        setup="model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(2): model(torch.ones(2, 4)).sum().backward()",  # the second one rebuilds the buckets
        enter="model(torch.ones(2, 4)).sum().backward()",
        line=_waits(r"all_reduce #\d+ of group default(, by DDP)? \(float32\[20\]"),
        again="model.zero_grad()\nfor _ in range(3): model((rank + 1) * torch.ones(2, 4)).sum().backward()\n"
        "assert model.module.weight.grad.unique().tolist() == [3.0 * (world_size + 1)], model.module.weight.grad",
    ),
    State(
        name="sub-group",  # contains the victim and its neighbour; the others have continued
        setup="pair = dist.new_group(sorted({victim, (victim + 1) % world_size}))",
        enter="if rank == (victim + 1) % world_size: dist.all_reduce(torch.ones(8), group=pair)\nelse: dist.barrier()",
        line=r"^waited in (all_reduce #\d+ of group \[\d+,\d+\] \(float32\[8\], |barrier #\d+ of group default \()"
        rf"{_AT_LINE}\)$",
        again="y = torch.ones(8)\nif victim in (rank, (rank - 1) % world_size): dist.all_reduce(y, group=pair)\n"
        "assert y[0] == 1 + (victim in (rank, (rank - 1) % world_size))",
        leave="if 'pair' in globals(): dist.destroy_process_group(pair); del pair",
        outlives_death=False,  # the new rank is only in the default group, and a message states this
    ),
    State(
        name="FSDP forward",
        setup="mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (world_size,))\n"
        "sharded = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 64), mesh=mesh)\n"
        "sharded(torch.ones(2, 64)).sum().backward()",
        enter="sharded(torch.ones(2, 64))",
        line=_waits(r"all_gather\w* #\d+ of group default(, by FSDP)? \(float32\[\d+\]"),
        again="sharded(torch.ones(2, 64)).sum().backward()",
        leave="sharded = mesh = None",
        outlives_death=False,  # the victim's part of every parameter is lost
    ),
    State(
        name="init_process_group",  # without the victim
        enter="dist.destroy_process_group(); dist.init_process_group('gloo')",
        line=rf"^interrupted at {_AT_LINE}, in init_process_group$",
        is_wait=False,  # not detectable as a wait
    ),
    State(
        name="monitored_barrier",
        enter="dist.monitored_barrier()",
        line=rf"^waited in monitored_barrier #\d+ of group default \({_AT_LINE}\)$",
    ),
    State(
        name="TCPStore, nobody listens",
        enter="dist.TCPStore('localhost', 1, 2, is_master=False)",
        line=rf"^interrupted at {_AT_LINE}, in TCPStore$",
        is_wait=False,
        takes_victim=True,
    ),
    State(
        name="TCPStore, workers are missing",
        enter="dist.TCPStore('localhost', 0, 2, is_master=True)",
        line=rf"^interrupted at {_AT_LINE}(, in TCPStore)?$",  # it may not have entered the call yet
        is_wait=False,
        is_blocked=False,
        polls=True,
        takes_victim=True,
    ),
    State(
        name="FileStore.wait",
        enter="dist.FileStore(str(scene.directory / f'store-{rank}'), 2).wait(['never'])",
        line=rf"^interrupted at {_AT_LINE}(, in wait)?$",
        is_wait=False,
        is_blocked=False,
        polls=True,
        takes_victim=True,
    ),
    State(
        name="torch future",
        enter="torch.futures.wait_all([torch.futures.Future()])",
        line=rf"^interrupted at {_AT_LINE}, in wait_all$",
        is_wait=False,
        takes_victim=True,
    ),
    State(
        name="future in a pool",  # its `with` joins the worker after the wait was interrupted
        setup=_EVENT,
        enter="with concurrent.futures.ThreadPoolExecutor() as pool: pool.submit(event.wait).result()",
        line=rf"^interrupted at {_AT_LINE}, in result$",
        leave=_LEAVE_EVENT,
        is_wait=False,
        takes_victim=True,
    ),
    State(
        name="thread join",
        setup=_EVENT,
        enter="thread = threading.Thread(target=event.wait)\nthread.start()\n"
        "try: thread.join()\nfinally: thread.join()",
        line=rf"^interrupted at {_AT_LINE}, in join$",
        leave=_LEAVE_EVENT,
        is_wait=False,
        takes_victim=True,
    ),
    State(
        name="interpreter held",
        enter=f"on_rank.hold_interpreter({HOLD_S})\ntime.sleep(600)",
        line=rf"^interrupted at .*{_AT_LINE}$",
        is_wait=False,
        is_blocked=False,
        holds_interpreter=True,
        takes_victim=True,
    ),
]

FAULTS = [
    Fault(name="raise", code="raise ValueError('bad batch')", ename="RankError", text="ValueError: bad batch"),
    Fault(
        name="sys.exit",
        code="sys.exit(3)",
        ename="RankError",
        text=r"SystemExit: 3: sys.exit\(\) does not end a rank; %ddp_stop in the notebook ends them all",
    ),
    Fault(name="MemoryError", code="bytearray(1 << 60)", ename="RankError", text="MemoryError"),
    Fault(name="os._exit", code="os._exit(3)", ename="RankDiedError", text="exited with status 3", is_death=True),
    Fault(name="SIGSEGV", code="ctypes.string_at(0)", ename="RankDiedError", text="killed by SIGSEGV", is_death=True),
    Fault(name="SIGKILL", signal=signal.SIGKILL, ename="RankDiedError", text="killed by SIGKILL", is_death=True),
    # The first press ends the cell on the other ranks, the second replaces the stopped rank.
    Fault(name="SIGSTOP", signal=signal.SIGSTOP, presses=2, text="killed by the second press of stop", is_death=True),
    Fault(name="interrupt", presses=1),
    Fault(name="double interrupt", presses=2),  # 0.2 s apart, so they count as one
]

STATE = {state.name: state for state in STATES}
FAULT = {fault.name: fault for fault in FAULTS}


def makes_sense(state: State, fault: Fault) -> bool:
    """Return whether a combination is possible: an exception needs a running cell."""
    return state.name != "idle" or fault.ename != "RankError"


PAIRS = [(state, fault) for state, fault in product(STATES, FAULTS) if makes_sense(state, fault)]


def limit_s(state: State, fault: Fault) -> float:
    """Return the time limit of the cell, from the fault or the last press."""
    held_s = HOLD_S if state.holds_interpreter else 0.0
    if fault.presses or state.is_wait:
        return AT_ONCE_S + held_s
    return max(GRACE_S + END_S, AT_ONCE_S + held_s)
