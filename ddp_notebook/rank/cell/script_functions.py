"""Replacements for functions with which scripts become ranks or start them, so that tutorial code runs unchanged.

| call | effect on a rank |
|---|---|
| `dist.init_process_group` | checks its arguments like torch; sets the timeout of the existing group |
| `dist.destroy_process_group` | destroys the group; it is freed later, see `deferred_destroy` |
| `mp.spawn`, `mp.Process` of a function of a cell, without fork | an error with a remedy |
| `mp.set_start_method` | may be called again, so that a cell can be run again |
| `sys.ps1` | is removed: IPython sets it, and Lightning then treats the process as unable to be a rank |

`install` replaces these functions in every module that has them, with the same signatures. Forked children of a rank
inherit the replacements, spawned ones have the originals.
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import reduction
from types import FunctionType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, get_backend, get_backend_config, get_world_size, is_initialized

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import deferred_destroy, join
from ddp_notebook.rank.group.arguments import InitArguments, Requested
from ddp_notebook.rank.group.calls import timeout_of
from ddp_notebook.rank.patching import look_for, replace
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, os

_dump = reduction.dump
_set_start_method = multiprocessing.set_start_method


def prepare(others: Iterable[Callable[..., Any]]) -> None:
    """Run the slow part of `install` before a fork.

    Args:
        others: functions that features will replace.
    """
    look_for([join.TORCHS, deferred_destroy.TORCHS, _dump, _set_start_method, *others])


def install(place: Callable[[], Form | None], running: Callable[[], tuple[int, float] | None]) -> None:
    """Replace the functions in this process.

    Args:
        place: returns the rank's place in the group, which changes when the group is formed again.
        running: returns number and start of the running cell.
    """
    replace(join.TORCHS, _around_init(place, running))
    deferred_destroy.install()
    replace(_dump, _dump_for_new_process)
    replace(_set_start_method, _set_start_method_again)
    vars(sys).pop("ps1", None)


# ---- groups


def _around_init(
    place: Callable[[], Form | None], running: Callable[[], tuple[int, float] | None]
) -> Callable[..., None]:
    pid = os.getpid()
    signature = inspect.signature(join.TORCHS)
    joined: Counter[str] = Counter()  # number of attempts to form a group, by epoch and cell
    read = _reader(place, signature)

    @functools.wraps(join.TORCHS)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        here = place()
        assert here is not None
        if os.getpid() != pid:
            raise RuntimeError(join.not_of_child(here.rank))
        asked = signature.bind(*args, **kwargs).arguments
        if not is_initialized() and (asked.get("store") is not None or str(asked.get("backend")).lower() == "fake"):
            join.clear()
            join.TORCHS(*args, **kwargs)  # a group of the user; this call also forms the session's group
            return
        requested = read(*args, **kwargs)
        _check(requested, here)
        if is_initialized():
            other = _other(requested, here)
            if not other:
                print(_as_requested(requested))  # the same line on all ranks, so that it is shown once
                return
            dist.destroy_process_group()
        else:
            other = ""
        # Equal on all ranks of this cell, independent of attempts in other cells.
        cell = f"{here.store_prefix}/{here.epoch}.{(running() or (0, 0.0))[0]}"
        joined[cell] += 1
        options = {
            name: value for name in ("pg_options", "device_id") if (value := getattr(requested, name)) is not None
        }
        join.join(here, f"{cell}.{joined[cell]}", backend=requested.backend, timeout=requested.timeout, **options)
        notes = [f"the group of {_ranks(here.world_size)} formed again with {other}"] * bool(other)
        if notes := [*notes, *_elsewhere(requested)]:
            print(f"init_process_group: {'; '.join(notes)}")

    return init_process_group


def _reader(place: Callable[[], Form | None], signature: inspect.Signature) -> Callable[..., Requested]:
    """Return a function that parses the arguments of a call. With an unknown torch version it does not check them."""
    try:
        return InitArguments(place).read
    except AttributeError as missing:
        print(
            f"ddp_notebook does not support this version of torch ({missing}): arguments of init_process_group "
            "are not checked",
            file=sys.stderr,
        )

    def read(*args: Any, **kwargs: Any) -> Requested:
        here, asked = place(), signature.bind(*args, **kwargs).arguments
        assert here is not None
        return Requested(
            backend=str(asked.get("backend") or "").lower(),
            backends={},
            timeout=asked.get("timeout"),
            address="",
            world_size=asked.get("world_size", -1),
            rank=asked.get("rank", -1),
            pg_options=asked.get("pg_options"),
            device_id=asked.get("device_id"),
        )

    return read


def _check(requested: Requested, here: Form) -> None:
    """Check that the requested rank and world_size match those of this rank.

    Raises:
        ValueError: they differ.
    """
    size, rank = requested.world_size, requested.rank
    if size not in (-1, here.world_size):
        of_some = (
            f". For a group of {size} of them, call dist.new_group({list(range(size))}) on all ranks and pass it on"
            if 0 < size < here.world_size
            else ""
        )
        more = f". %ddp_resize {size} changes the session to {_ranks(size)}" if size > 0 else ""
        raise ValueError(f"world_size must be {here.world_size}, as in the session, got {size}{of_some}{more}")
    if rank not in (-1, here.rank):
        raise ValueError(
            f"rank must be {here.rank} on this rank of {here.world_size}, got {rank}: leave the argument out"
        )


def _other(requested: Requested, here: Form) -> str:
    """Return the reason why the default group must be formed again for a call; "" if it matches the call.

    Raises:
        ValueError: the backend needs a GPU, or forming the group again would end other groups.
    """
    if here.device == "cpu" and "nccl" in requested.backends.values():
        raise ValueError(
            f"backend={requested.backend!r} needs a GPU, but this rank runs on the CPU; pass backend='gloo', or leave "
            "the argument out"
        )
    has = dict(one.split(":") for one in get_backend_config().split(","))
    devices = {"cpu", here.device.split(":")[0]}
    options = requested.pg_options is not None and {*requested.backends.values()} != {"gloo"}  # gloo has no options
    other = ""
    if requested.backend and any(has.get(d) != one for d, one in requested.backends.items() if d in devices):
        other = f"backend={requested.backend!r}, it had {get_backend()!r}"
    elif options:
        other = "pg_options"
    elif requested.device_id is not None and requested.device_id != torch.device(here.device):
        other = f"device_id={requested.device_id}"
    if other and (requested.backend == "fake" or len(distributed_c10d._world.pg_map) > 1):
        raise ValueError(
            f"{other.partition(',')[0]} differs from the session's group, whose backend is {get_backend()!r}; leave "
            "the argument out, or call dist.destroy_process_group() first, which ends all groups of this rank"
        )
    return other


def _as_requested(requested: Requested) -> str:
    """Set the timeout of the default group as requested. Return a line about it."""
    world = dist.group.WORLD
    assert world is not None
    backend, done = get_backend(), "nothing to do"
    try:
        timeout = timeout_of(world)
    except (AttributeError, RuntimeError):  # a backend without a timeout, such as "fake"
        timeout = requested.timeout or join.default_timeout(backend)
    if requested.timeout not in (None, timeout):
        join.set_timeout(world, requested.timeout)
        done = f"its timeout is {_seconds(requested.timeout)} now, it was {_seconds(timeout)}"
    elif requested.timeout is None and timeout != join.default_timeout(backend):
        done = f"its timeout stays {_seconds(timeout)}"
    line = f"init_process_group: the group of {_ranks(get_world_size())} exists already ({backend}); {done}"
    return "; ".join([line, *_elsewhere(requested)])


def _elsewhere(requested: Requested) -> list[str]:
    if not requested.address:
        return []
    return [f"the ranks use the session's store and not {requested.address}"]


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


# ---- processes


class _Importable(reduction.ForkingPickler):
    """Pickler for a process that is not forked. It must import its functions, and cannot import a cell."""

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
    """Replace the function with which `multiprocessing` pickles the objects of a process that is not forked."""
    _Importable(file, protocol).dump(obj)


@functools.wraps(_set_start_method)
def _set_start_method_again(method: str | None, force: bool = False) -> None:
    _set_start_method(method, force=True)
