"""Errors at the creation of groups, meshes and stores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed import ProcessGroup, get_world_size

from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised

_C10D = r"^torch\.distributed\.distributed_c10d:"
_MESH = r"^torch\.distributed\.device_mesh:"
_ADDRESS_USED = ", useIpv6: {}, code: {}, name: EADDRINUSE"


def _world_size(_: Raised, __: Mapping[str, str]) -> Values:
    return {"size": get_world_size(), "last": get_world_size() - 1}


def _ranks_given(raised: Raised, _: Mapping[str, str]) -> Values | None:
    ranks = raised.local(_C10D + "_new_group_with_tag$", "ranks")
    return None if ranks is None else {"given": list(ranks), "count": len(ranks), **_world_size(raised, {})}


def _torch_version(_: Raised, __: Mapping[str, str]) -> Values:
    return {"torch": torch.__version__}


def _seconds(_: Raised, found: Mapping[str, str]) -> Values:
    return {"seconds": f"{int(found['ms']) / 1000:g}", **_key(found)}


def _key(found: Mapping[str, str]) -> Values:
    """Return the user's part of a key, which has a prefix for each attempt and each group."""
    return {"key": found.get("keys", "").rpartition("/")[2]}


def _of_this_process(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {} if raised.frames else None  # otherwise a worker process of a DataLoader has raised it


def _is_group(raised: Raised, _: Mapping[str, str]) -> Values | None:
    return {} if isinstance(raised.local(_C10D + "get_backend$", "group"), ProcessGroup) else None


def _is_no_group(raised: Raised, found: Mapping[str, str]) -> Values | None:
    return {} if _is_group(raised, found) is None else None


ENTRIES = (
    KnownError(
        name="no default group",
        text="Default process group has not been initialized, please make sure to call init_process_group.",
        kind="ValueError RuntimeError",
        where=_C10D + "_get_default_group$",
        facts=_of_this_process,
        cause="this rank has no default group, because it was destroyed",
        fix="dist.init_process_group() on all ranks forms it again",
    ),
    KnownError(
        name="default group twice",
        text="trying to initialize the default process group twice!",
        kind="ValueError RuntimeError",
        where=_C10D + "init_process_group$",
        cause="the ranks of a session form the default group at their start",
        fix="leave init_process_group out, or call destroy_process_group on all ranks before it",
    ),
    KnownError(
        name="group with too many ranks",
        text="the new group's world size should be less or equal to the world size set by init_process_group",
        kind="ValueError RuntimeError",
        where=_C10D + "_new_group_with_tag$",
        facts=_ranks_given,
        cause="the group has {count} ranks {given}, and the session has {size}",
        fix="use ranks from 0 to {last}, or %ddp_resize {count}",
    ),
    KnownError(
        name="group with an unknown rank",
        text="Rank {rank:d} is out of range. Valid ranks are 0 to ",
        kind="ValueError",
        where=_C10D + "_new_group_with_tag$",
        facts=_ranks_given,
        cause="the group {given} contains rank {rank}, and the session has {size} ranks",
        fix="use ranks from 0 to {last}",
    ),
    KnownError(
        name="group with an unknown rank, before torch 2.13",
        text="The new group's rank should be within the world_size set by init_process_group",
        kind="ValueError RuntimeError",
        where=_C10D + "_new_group_with_tag$",
        facts=_ranks_given,
        cause="the group {given} contains a rank that the session does not have; it has {size} ranks",
        fix="use ranks from 0 to {last}",
        other_texts=("the new group's rank should be within the world_size set by init_process_group",),
    ),
    KnownError(
        name="rank twice in a group",
        text="ranks list must not contain duplicate entries, got {ranks}",
        kind="ValueError",
        where=_C10D + "_new_group_with_tag$",
        cause="{ranks} contains a rank twice",
        fix="pass each rank once, for example sorted(set(ranks))",
    ),
    KnownError(
        name="something else as a group",
        text="Process group {group} is not initialized in the world group map.",
        kind="ValueError",
        where=_C10D + "get_backend$",
        facts=_is_no_group,
        cause="group={group} is no process group",
        fix="pass the return value of dist.new_group, or mesh.get_group()",
    ),
    KnownError(
        name="destroyed group",
        text="Process group {group} is not initialized in the world group map.",
        kind="ValueError",
        where=_C10D + "get_backend$",
        facts=_is_group,
        cause="torch does not know this process group any more, as after destroy_process_group(group)",
        fix="call g = dist.new_group(ranks) on all ranks again, and pass group=g",
    ),
    KnownError(
        name="list as a group",
        text="unhashable type: 'list'",
        kind="TypeError",
        where=_C10D + "get_backend$",
        cause="group= got a list of ranks instead of a process group",
        fix="call g = dist.new_group(ranks) once on all ranks, and pass group=g",
    ),
    KnownError(
        name="backend that torch lacks",
        text="Distributed package doesn't have {backend} built in",
        kind="RuntimeError",
        where=_C10D + "_new_process_group_helper$",
        facts=_torch_version,
        cause="torch {torch} is built without {backend}",
        fix="use backend='gloo' for CPU ranks, or a build of torch with CUDA for NCCL",
    ),
    KnownError(
        name="unknown backend",
        text="Unknown backend type {backend}",
        kind="AssertionError",
        where=_C10D + "_new_process_group_helper$",
        cause="no backend has the name {backend}",
        fix="use gloo or nccl, or dist.Backend.register_backend for another one",
    ),
    KnownError(
        name="names of mesh dimensions",
        text="mesh_shape and mesh_dim_names should have same length! Found len(mesh_dim_names): {names:d} and "
        "len(mesh_shape):{count:d}",
        kind="RuntimeError",
        where=_MESH + "init_device_mesh$",
        cause="the mesh has {count} dimensions and {names} names",
        fix="give one name for each number of mesh_shape",
    ),
    KnownError(
        name="part of a mesh without names",
        text="Cannot slice a DeviceMesh without mesh_dim_names!",
        kind="RuntimeError",
        where=_MESH + r"DeviceMesh\.__getitem__$",
        cause="the dimensions of this mesh have no names",
        fix="pass mesh_dim_names to init_device_mesh, such as ('dp', 'tp')",
    ),
    KnownError(
        name="mesh of one device",
        text="('Device type with index is not supported but got {device}. '",
        kind="RuntimeError",
        where=_MESH + "init_device_mesh$",
        cause="a mesh needs the type of the devices, and {device} is one device",
        fix="pass device.type, which is 'cpu' or 'cuda'",
        other_texts=("Device type with index is not supported but got {device}. ",),
    ),
    KnownError(
        name="group of a mesh with several dimensions",
        text="('Found the DeviceMesh have {count:d} dimensions', 'Optional kwarg `mesh_dim` needs to be specified",
        kind="RuntimeError",
        where=_MESH + r"DeviceMesh\.get_group$",
        cause="a mesh with {count} dimensions has a group for each of them",
        fix="pass the dimension, as in mesh.get_group('dp') or mesh.get_group(0)",
    ),
    KnownError(
        name="missing key of a store",
        text="wait timeout after {ms:d}ms, keys: {keys}",
        kind="DistStoreError",
        where="^$|^torch",
        facts=_seconds,
        cause="no rank has set the key {key} of this store within {seconds} s",
        fix="call store.set with this key on one rank, or pass a longer timeout",
    ),
    KnownError(
        name="used port",
        text="The server socket has failed to listen on any local network address. port: {port:d}" + _ADDRESS_USED,
        kind="DistNetworkError",
        where="^$|^torch",
        cause="another process, or an earlier store of this one, uses port {port} of this host",
        fix="use port 0 for a free one, and send store.port to the other ranks",
    ),
    KnownError(
        name="unreachable store",
        text="The client socket has timed out after {ms:d}ms while trying to connect to ({host}, {port:d})",
        kind="DistNetworkError",
        where="^$|^torch",
        facts=_seconds,
        cause="no store answers at {host}:{port} within {seconds} s",
        fix="start the store there with is_master=True before its clients, and check host name and firewall",
    ),
)
