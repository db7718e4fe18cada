"""Check the arguments of `init_process_group` and of the rendezvous of `init_rpc` with the code of torch.

The default group of a rank usually exists, and torch refuses a second call before it reads any argument. So copies of
torch's functions run, in which the steps that meet other ranks or form a group are replaced. They raise the errors of
the installed version of torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # exported at run time
    HashStore,
    PrefixStore,
    distributed_c10d,
    is_backend_available,
)

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import join
from ddp_notebook.rank.group.calls import check_longest
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os

_NATIVE = ("gloo", "nccl", "mpi", "xccl")  # torch raises RuntimeError for them if they are not built in
_SHORTEST = timedelta(milliseconds=1)  # timeouts have this resolution


class Requested(NamedTuple):
    """Arguments of a call that torch accepts.

    Args:
        backend: as passed; "" if not passed.
        backends: backend of each device type.
        timeout: None if not passed.
        address: the `init_method`; "" if not passed, or "env://".
        world_size, rank: with "env://", those of the rank's place.
    """

    backend: str
    backends: dict[str, str]
    timeout: timedelta | None
    address: str
    world_size: int
    rank: int
    pg_options: Any
    device_id: torch.device | None


class _Accepted(BaseException):
    """Raised where the copied function would form a group."""


class InitArguments:
    """Reader of the arguments of `init_process_group`.

    Args:
        place: returns the place of this rank.

    Raises:
        AttributeError: this version of torch has other functions.
    """

    def __init__(self, place: Callable[[], Form | None]) -> None:
        self._place = place
        self._signature = inspect.signature(join.TORCHS)
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        store = _copy(rendezvous, "_create_c10d_store", TCPStore=lambda **_: HashStore())
        handlers = {
            "env": _copy(rendezvous, "_env_rendezvous_handler", os=self._environment(), _create_c10d_store=store),
            "tcp": _copy(rendezvous, "_tcp_rendezvous_handler", _create_c10d_store=store),
            "file": _copy(rendezvous, "_file_rendezvous_handler", FileStore=_file),
        }
        known = _Handlers(rendezvous._rendezvous_handlers, handlers, self._registered)
        helper = _copy(rendezvous, "_rendezvous_helper", _rendezvous_handlers=known)
        self._meet_as_one_of_any = helper
        self._meet = _copy(rendezvous, "rendezvous", _rendezvous_helper=helper)
        self._accept = _copy(
            distributed_c10d,
            "_new_process_group_helper",
            _world=SimpleNamespace(pg_names={}),
            is_initialized=lambda: False,
            PrefixStore=_accepted,
        )
        self._init = _copy(
            distributed_c10d,
            "init_process_group",
            GroupMember=SimpleNamespace(WORLD=None),
            rendezvous=self._meet,
            _process_group_name=lambda *_, **__: "0",
            _new_process_group_helper=self._form,
        )

    def read(self, *args: Any, **kwargs: Any) -> Requested:
        """Check the arguments of a call as torch does.

        Raises:
            Any exception that `init_process_group` raises for them in a process without a group.
        """
        try:
            self._init(*args, **kwargs)
        except _Accepted as accepted:
            (formed,) = accepted.args
        backend = "" if formed["backend"] == "undefined" else str(formed["backend"])
        asked = self._signature.bind(*args, **kwargs).arguments
        timeout, address = asked.get("timeout"), asked.get("init_method") or ""
        check_longest(timeout)
        if timeout is not None and timeout < _SHORTEST:
            raise dist.DistNetworkError(f"timeout must be at least {_SHORTEST}, got {timeout}")
        return Requested(
            backend,
            _backends(formed["backend"]),
            timeout,
            "" if urlparse(address).scheme == "env" else address,
            formed["world_size"],
            formed["rank"],
            asked.get("pg_options"),
            formed["device_id"],
        )

    def check_rendezvous(self, address: str, rank: Any, world_size: Any) -> None:
        """Check the rendezvous arguments of `init_rpc` as torch does.

        Args:
            address: the `init_method`.
            rank, world_size: as `init_rpc` takes them.

        Raises:
            Any exception that torch raises for them before workers meet.
        """
        next(
            self._meet(address, rank=rank, world_size=world_size)
            if world_size
            else self._meet_as_one_of_any(address, rank, None)
        )

    def _form(self, world_size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> NoReturn:
        """Validate the arguments of a group that torch would form. It replaces torch's function in the copies."""
        try:
            self._accept(world_size, rank, ranks, backend, *args, **options)
        except _Accepted:
            formed = {"backend": backend, "world_size": world_size, "rank": rank}
            raise _Accepted({**formed, "device_id": options.get("device_id")}) from None
        raise AssertionError("torch has formed a group")

    def _environment(self) -> SimpleNamespace:
        """Return a replacement of the module `os` for `env://`: a script may set RANK and MASTER_ADDR for its own
        processes."""

        def get(name: str, default: Any = None) -> Any:
            place = self._place()
            assert place is not None
            return join.environment(place).get(name, default)

        return SimpleNamespace(environ=SimpleNamespace(get=get))

    def _registered(self, _: str, **__: Any) -> Iterator[tuple[Any, int, int]]:
        """Meet at once, in place of a rendezvous handler that a program has registered."""
        place = self._place()
        assert place is not None
        yield HashStore(), place.rank, place.world_size


class _Handlers(NamedTuple):
    """Handlers of addresses, by scheme."""

    torchs: dict[str, Any]
    ours: dict[str, Any]
    registered: Any

    def __contains__(self, scheme: object) -> bool:
        return scheme in self.torchs

    def __getitem__(self, scheme: Any) -> Any:
        return self.ours.get(scheme, self.registered)


def _copy(module: Any, name: str, **replaced: Any) -> Any:
    """Copy a function, with other values for some of its global names.

    Raises:
        AttributeError: the module has no such function, or the function does not use such a name.
    """
    original = inspect.unwrap(getattr(module, name))
    used = {*original.__code__.co_names}
    used.update(*(part.co_names for part in original.__code__.co_consts if hasattr(part, "co_names")))
    for one in replaced:
        if one not in used:
            raise AttributeError(f"{name} does not use {one}")
    copy = FunctionType(original.__code__, {**original.__globals__, **replaced}, name, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _accepted(prefix: str, store: Any) -> NoReturn:
    PrefixStore(prefix, store)
    raise _Accepted


def _file(path: str, *_: Any) -> Any:
    """Check that a `FileStore` could be at this path, without creating its file."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise dist.DistStoreError(f"init_method must name a writable file, got {path}")
    return HashStore()


def _backends(named: Any) -> dict[str, str]:
    """Return the backend of each device type.

    Raises:
        ValueError: the text cannot be parsed.
        AssertionError: a backend is unknown.
        RuntimeError: a backend is not built in, or the device type is unknown.
    """
    known = distributed_c10d.Backend
    named = known(named)
    is_one = not {",", ":"} & {*named}
    if is_one and named not in known.backend_type_map:
        raise AssertionError(f"Unknown backend type {named}")
    found = {str(device): str(one) for device, one in distributed_c10d.BackendConfig(named).device_backend_map.items()}
    for one in found.values():
        if one in _NATIVE and not is_backend_available(one):
            raise RuntimeError(f"Distributed package doesn't have {one.upper()} built in")
        if one not in (*_NATIVE, "fake") and not is_backend_available(one):
            raise AssertionError(f"Unknown c10d backend type {one.upper()}")
    for device in found:
        torch.device(device)
    return found
