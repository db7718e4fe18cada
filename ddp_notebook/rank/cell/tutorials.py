"""Tutorial code runs as it is: the functions by which scripts become ranks or start them, on a process that is a rank.

| call | on a rank |
|---|---|
| `dist.init_process_group` | says that the group exists; after `destroy_process_group` it forms the next one |
| `dist.destroy_process_group` | destroys the group, which is freed later, see `keeping` |
| `rpc.init_rpc`, `rpc.shutdown` | may be called again, see `rank/rpc` |
| `mp.spawn`, `mp.Process` of a cell's function, not by fork | an error that says what to do instead |
| `mp.set_start_method` | may be called again, so that a cell can be run again |
| `sys.ps1` | is gone: where IPython has set it, Lightning takes the process for one that cannot be a rank |

`install` replaces these functions by others of the same signature, in every module that has the original. Forked
children of a rank inherit them, spawned ones have the originals.
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import reduction
from types import FunctionType
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_notebook.rank import rpc
from ddp_notebook.rank.group import join, keeping
from ddp_notebook.rank.replacing import look_for, replace
from ddp_notebook.rank.rpc.serving import Serving
from ddp_notebook.stdlib import functools, os
from ddp_notebook.wire.events import Form

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.stretches import Training

_dump = reduction.dump
_set_start_method = multiprocessing.set_start_method


def prepare() -> None:
    """What `install` takes time for, done before a fork."""
    look_for([join.TORCHS, keeping.TORCHS, _dump, _set_start_method, *rpc.prepare()])


def install(
    place: Callable[[], Form | None],
    running: Callable[[], tuple[int, float] | None],
    training: Training,
    loss: Callable[[], BaseException | None],
) -> Serving | None:
    """Replace the functions in this process. Returns the calls that the rank makes and serves by RPC.

    Args:
        place: tells the rank's place, which changes when the group is formed anew.
        running: tells the cell that runs, and since when.
        training: of the rank's recording.
        loss: tells what to raise where all ranks are needed and some have died; None: all are there.
    """
    replace(join.TORCHS, _around_init(place, running))
    keeping.install()
    serving = rpc.install(place, running, training, loss)
    replace(_dump, _dump_for_new_process)
    replace(_set_start_method, _set_start_method_again)
    vars(sys).pop("ps1", None)
    return serving


# ---- groups


def _around_init(
    place: Callable[[], Form | None], running: Callable[[], tuple[int, float] | None]
) -> Callable[..., None]:
    pid = os.getpid()
    signature = inspect.signature(join.TORCHS)
    joined: Counter[str] = Counter()  # tries to form a group, by epoch and cell

    @functools.wraps(join.TORCHS)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        here = place()
        assert here is not None
        asked = signature.bind(*args, **kwargs).arguments
        backend = str(asked.get("backend") or "").lower()
        if os.getpid() != pid:
            raise RuntimeError(join.not_of_child(here.rank))
        if not dist.is_initialized() and (asked.get("store") is not None or backend == "fake"):
            join.clear()
            join.TORCHS(*args, **kwargs)  # a group of their own; the session's is formed by this call too
            return
        _check(asked, here)
        if dist.is_initialized():
            print(_nothing_to_do(backend))  # the same line on all ranks, so that it is shown once
            return
        # The same on all ranks of this cell, whatever some of them have tried in other cells.
        cell = f"{here.store_prefix}/{here.epoch}.{(running() or (0, 0.0))[0]}"
        joined[cell] += 1
        options = {name: asked[name] for name in ("pg_options", "device_id") if name in asked}
        if getattr(options.get("device_id"), "type", "") == "cpu":
            del options["device_id"]  # torch refuses the CPU here, and scripts pass whatever device they find
        join.join(here, f"{cell}.{joined[cell]}", backend=backend, timeout=asked.get("timeout"), **options)

    return init_process_group


def _check(asked: dict[str, Any], here: Form) -> None:
    """Raise unless the place that a cell asks for is the one that the rank has."""
    size, rank = asked.get("world_size", -1), asked.get("rank", -1)
    if size not in (None, -1, here.world_size):
        of_some = (
            f"for a group of {size} of them call dist.new_group({list(range(size))}) on all ranks and pass it on; "
            if 0 < size < here.world_size
            else ""
        )
        raise ValueError(
            f"world_size={size}, but the session has {_ranks(here.world_size)}; {of_some}run with "
            f"world_size={here.world_size}, or have {_ranks(size)}: %ddp_resize {size}"
        )
    if rank not in (None, -1, here.rank):
        raise ValueError(
            f"rank={rank}, but this is rank {here.rank} of {here.world_size}; leave rank out, the session knows it"
        )


def _nothing_to_do(backend: str) -> str:
    there = dist.get_backend()
    line = f"init_process_group: the group of {_ranks(dist.get_world_size())} exists already ({there}); nothing to do"
    return line if backend in ("", there) else f"{line}, {there} stays the backend instead of {backend}"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


# ---- processes


class _Importable(reduction.ForkingPickler):
    """Pickles for a process that is not forked: it imports what it needs, and cannot import a cell."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType | type) or getattr(obj, "__module__", "") != "__main__":
            return NotImplemented
        name = obj.__qualname__
        to_do = (
            f"The ranks exist already: call {name}(dist.get_rank(), ...) in the cell, and every rank runs it. "
            if isinstance(obj, FunctionType)
            else ""
        )
        raise RuntimeError(
            f"{name} was defined in a cell, and a new process cannot import it. {to_do}For other child processes "
            f"use the start method fork, mp.set_start_method('fork'), or put {name} in a module"
        )


@functools.wraps(_dump)
def _dump_for_new_process(obj: Any, file: IO[bytes], protocol: int | None = None) -> None:
    """`multiprocessing` uses this to start every process that is not forked, and for nothing else."""
    _Importable(file, protocol).dump(obj)


@functools.wraps(_set_start_method)
def _set_start_method_again(method: str | None, force: bool = False) -> None:
    _set_start_method(method, force=True)
