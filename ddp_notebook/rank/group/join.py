"""Take a place in the default process group. `connections.renewal` forms it anew."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # exported at run time
    HashStore,
    PrefixStore,
    Store,
    distributed_c10d,
    is_initialized,
)

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.group import cpp_log
from ddp_notebook.rank.group.calls import timeout_setter
from ddp_notebook.rank.group.stores import connect
from ddp_notebook.stdlib import contextlib, os

TORCHS = dist.init_process_group


def enter(place: Form) -> None:
    """Take the place: its variables, and its device in this thread. For the main thread, where cells run, before
    another one connects: see `kernel_api.settle_environment`."""
    os.environ.update(environment(place))
    use_device(place)


def use_device(place: Form) -> None:
    """Make the place's GPU, if it has one, the present one of this thread."""
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        torch.accelerator.set_device_index(device)


def join(place: Form, prefix: str, *, backend: str = "", timeout: timedelta | None = None, **options: Any) -> None:
    """Form the default group of the session's ranks. They meet at the session's store, under a prefix of this group.

    Without a timeout the group forms with a short one, which is raised to torch's default afterwards. With a wrong
    network interface one rank fails at once and the others wait five times the timeout (measured: 25 s for 5 s), which
    would be 2.5 hours with torch's half an hour.

    Args:
        prefix: the same on all ranks, and of no earlier group.
        backend: if empty, the session's.
        timeout: of the group, also while it forms.
        options: further arguments of `init_process_group`.

    Raises:
        whatever `init_process_group` raises; then the rank is in no group.
    """
    clear()
    backend = backend or place.backend
    forming = timedelta(seconds=place.form_timeout_s) if timeout is None else timeout
    store = connect(place, forming)
    prefixed = PrefixStore(prefix, store)
    if backend == "nccl":
        cpp_log.hush()
    is_bound = backend == "nccl" and place.device != "cpu" and "device_id" not in options
    if is_bound:  # then it connects now, and not at its first operation
        options["device_id"] = torch.device(place.device)
    try:
        TORCHS(backend, store=prefixed, rank=place.rank, world_size=place.world_size, timeout=forming, **options)
    except BaseException:
        if is_initialized():
            dist.destroy_process_group()
        raise
    if is_bound and dist.group.WORLD is not None:
        # Bound, other groups would be split from it: in torch 2.11 a second mesh of one shape then fails ("A process
        # group is already registered under the name"), and a group whose connections are new has nothing to split.
        with contextlib.suppress(AttributeError):
            dist.group.WORLD.bound_device_id = None
    if timeout is None and dist.group.WORLD is not None:
        set_timeout(dist.group.WORLD, default_timeout(backend), store, prefixed)


def clear() -> None:
    """Let nothing be left of a default group that did not form, or was not destroyed to its end, as where a stop came.

    torch numbers groups, and ranks meet under that number: a rank that has tried alone would never meet the others
    again. Destroying a default group resets the count, here one of this rank alone. Done before the next group and not
    after the failure, where the stop is still under way.
    """
    world = distributed_c10d._world
    if not is_initialized() and (world.group_count or world.pg_map):
        TORCHS("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def not_of_child(rank: int) -> str:
    """The error of a process that a rank has forked and that uses the group."""
    return (
        f"this process was forked from rank {rank}, whose group it cannot use. The ranks exist already: "
        "call the function in the cell, without a Process around it, and every rank runs it"
    )


def default_timeout(backend: str) -> timedelta:
    """Return the timeout that a group has by default."""
    return distributed_c10d._get_default_timeout(dist.Backend(backend))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta, *stores: Store) -> None:
    """Set the timeout of a group, and of the stores where later groups meet.

    Args:
        stores: by default that of the group.
    """
    set_of_group, _ = timeout_setter()
    set_of_group(timeout, group)
    for store in stores or [distributed_c10d._world.pg_map[group][1]]:
        store.set_timeout(timeout)


def environment(place: Form) -> dict[str, str]:
    """torchrun's variables, the interface that gloo, NCCL and RPC are to use, and what accelerate asks for.

    TORCHELASTIC_RUN_ID tells Lightning that it need not start the ranks. TORCHELASTIC_USE_AGENT_STORE is not set:
    processes that a rank starts would inherit it, and if they form a group at an address of their own, all of them
    would wait for a store that none of them starts.

    accelerate and transformers take ranks without a GPU for single processes unless ACCELERATE_USE_CPU is set, as
    `accelerate launch --cpu` does. FORK_LAUNCHED says that a notebook has started the rank, which lives on: then
    `Accelerator.end_training` keeps the group, which the next `Accelerator` of the process expects to exist.

    NCCL refuses ranks that share a GPU unless it takes them for ranks of different hosts, which then talk by sockets.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-hostid
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    interface = dict.fromkeys(names, place.interface) if place.interface else {}  # else each finds one by itself
    defaults = {**interface, "FORK_LAUNCHED": "1"}
    if place.shares_gpu:
        defaults["NCCL_HOSTID"] = uuid.uuid4().hex
    if place.device == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **of_torchrun(place)}


def of_torchrun(place: Form) -> dict[str, str]:
    """Return the variables by which torchrun tells a process its rank."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.store_host,
        "MASTER_PORT": str(place.store_port),
        "TORCHELASTIC_RUN_ID": f"ddp_notebook-{place.store_port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
