"""Take a place in the default process group. `connections.reconnect` re-forms the group."""

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
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os

TORCHS = dist.init_process_group


def enter(place: Form) -> None:
    """Set the environment variables of the place, and its device in this thread.

    Call it in the main thread, where cells run, before another thread connects. See `kernel_api.settle_environment`.
    """
    os.environ.update(environment(place))
    use_device(place)


def use_device(place: Form) -> None:
    """Select the place's GPU, if it has one, as this thread's current device."""
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        torch.accelerator.set_device_index(device)


def join(place: Form, prefix: str, *, backend: str = "", timeout: timedelta | None = None, **options: Any) -> None:
    """Form the default group of the session's ranks. They meet at the session's store, under a prefix of this group.

    Without `timeout`, the group forms with a short timeout, which is raised to torch's default afterwards. With a wrong
    network interface, one rank fails at once and the others wait for five times the timeout (measured: 25 s for 5 s).
    With torch's default of 30 minutes this would be 2.5 hours.

    Args:
        prefix: the same on all ranks, and different for each group.
        backend: the session's backend if empty.
        timeout: timeout of the group, also while it forms.
        options: further arguments of `init_process_group`.

    Raises:
        Any exception of `init_process_group`. The rank is then in no group.
    """
    clear()
    backend = backend or place.backend
    forming = timedelta(seconds=place.form_timeout_s) if timeout is None else timeout
    store = connect(place, forming)
    prefixed = PrefixStore(prefix, store)
    if backend == "nccl":
        cpp_log.hush()
    is_bound = backend == "nccl" and place.device != "cpu" and "device_id" not in options
    if is_bound:  # the group connects now, and not at its first operation
        options["device_id"] = torch.device(place.device)
    try:
        TORCHS(backend, store=prefixed, rank=place.rank, world_size=place.world_size, timeout=forming, **options)
    except BaseException:
        if is_initialized():
            dist.destroy_process_group()
        raise
    if is_bound and dist.group.WORLD is not None:
        # If it stays bound, torch splits other groups from it. Then in torch 2.11 a second mesh of the same shape fails
        # ("A process group is already registered under the name"), and a reconnected group cannot be split.
        with contextlib.suppress(AttributeError):
            dist.group.WORLD.bound_device_id = None
    if timeout is None and dist.group.WORLD is not None:
        set_timeout(dist.group.WORLD, default_timeout(backend), store, prefixed)


def clear() -> None:
    """Remove the rest of a default group that did not form or was not completely destroyed, for example after a stop.

    torch numbers groups, and ranks meet under this number. A rank that has tried alone would never meet the others
    again. Destroying a default group, here one of this rank only, resets the count. This is done before the next group
    and not after the failure, since the stop may still be in progress then.
    """
    world = distributed_c10d._world
    if not is_initialized() and (world.group_count or world.pg_map):
        TORCHS("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def not_of_child(rank: int) -> str:
    """Return the error for a process that a rank has forked and that uses the group."""
    return (
        f"this process was forked from rank {rank}, whose group it cannot use. The ranks exist already: "
        "call the function in the cell, without a Process around it, and every rank runs it"
    )


def default_timeout(backend: str) -> timedelta:
    """Return the default timeout of a group."""
    return distributed_c10d._get_default_timeout(dist.Backend(backend))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta, *stores: Store) -> None:
    """Set the timeout of a group, and of the stores where later groups meet.

    Args:
        stores: the group's store if empty.
    """
    set_of_group, _ = timeout_setter()
    set_of_group(timeout, group)
    for store in stores or [distributed_c10d._world.pg_map[group][1]]:
        store.set_timeout(timeout)


def environment(place: Form) -> dict[str, str]:
    """Return the environment variables of a place: those of torchrun, network interfaces, and those for accelerate and
    NCCL.

    With TORCHELASTIC_RUN_ID, Lightning does not start the ranks itself. TORCHELASTIC_USE_AGENT_STORE is not set. Child
    processes of a rank would inherit it. If they formed a group at their own address, all of them would wait for a
    store that none of them starts.

    accelerate and transformers treat ranks without a GPU as single processes unless ACCELERATE_USE_CPU is set, as
    `accelerate launch --cpu` does. FORK_LAUNCHED means that a notebook has started the rank, which continues to run.
    `Accelerator.end_training` then keeps the group, which the next `Accelerator` of the process expects to exist.

    NCCL refuses ranks that share a GPU, unless NCCL_HOSTID makes them ranks of different hosts. They then communicate
    by sockets.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables,
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-hostid
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    interface = dict.fromkeys(names, place.interface) if place.interface else {}  # else libraries choose one
    defaults = {**interface, "FORK_LAUNCHED": "1"}
    if place.shares_gpu:
        defaults["NCCL_HOSTID"] = uuid.uuid4().hex
    if place.device == "cpu":
        defaults["ACCELERATE_USE_CPU"] = "true"
    return {**{name: value for name, value in defaults.items() if name not in os.environ}, **of_torchrun(place)}


def of_torchrun(place: Form) -> dict[str, str]:
    """Return the variables with which torchrun describes the rank of a process."""
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
