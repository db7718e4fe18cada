"""Errors of NCCL. Their tests need GPUs (`tests/gpu/test_torch_errors.py`) and have not been run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed import get_rank

from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised

_CALL = r"^$|^torch\.distributed\."


def _device(raised: Raised, _: Mapping[str, str]) -> Values | None:
    tensor = raised.argument("tensor", "input", "input_tensor", "object_list")
    return {"operation": raised.operation, "device": tensor.device} if isinstance(tensor, torch.Tensor) else None


def _here(_: Raised, __: Mapping[str, str]) -> Values:
    return {"here": get_rank()}


ENTRIES = (
    KnownError(
        name="two ranks on one GPU",
        text="{}Duplicate GPU detected : rank {one:d} and rank {two:d} both on CUDA device {device}\n",
        kind="DistBackendError RuntimeError ValueError",
        where=_CALL,
        cause="ranks {one} and {two} use the same GPU ({device})",
        fix="call torch.cuda.set_device(device) first and create tensors with device=device, or start with "
        "--share-gpus",
        other_texts=("{}Duplicate GPU detected : rank {one:d} and rank {two:d} both on CUDA device {device}",),
    ),
    KnownError(
        name="tensor on the CPU with NCCL",
        text="Tensors must be CUDA and dense",
        kind="ValueError RuntimeError",
        where=_CALL,
        facts=_device,
        cause="NCCL sends dense tensors on GPUs, and {operation} got one on {device}",
        fix="call tensor.to(device), and to_dense() for a sparse tensor",
    ),
    KnownError(
        name="NCCL with wrong arguments",
        text="NCCL error in: {}, invalid usage",
        kind="DistBackendError RuntimeError",
        where=_CALL,
        facts=_here,
        cause="NCCL refused the arguments on rank {here}: operations differ, or two ranks use one GPU",
        fix="compare operation, shape and device on all ranks; NCCL_DEBUG=WARN prints the reason",
        other_texts=("NCCL Error {:d}: invalid usage",),
    ),
    KnownError(
        name="NCCL after an error of CUDA",
        text="NCCL error in: {}, unhandled cuda error",
        kind="DistBackendError RuntimeError",
        where=_CALL,
        facts=_here,
        cause="a CUDA call in NCCL failed on rank {here}, perhaps because of an earlier kernel or missing memory",
        fix="start with CUDA_LAUNCH_BLOCKING=1 to find the kernel; NCCL_DEBUG=WARN prints the CUDA call",
        other_texts=("NCCL Error {:d}: unhandled cuda error",),
    ),
    KnownError(
        name="NCCL after an error of the system",
        text="NCCL error in: {}, unhandled system error",
        kind="DistBackendError RuntimeError",
        where=_CALL,
        facts=_here,
        cause="a system call in NCCL failed on rank {here}: a socket, shared memory or a file descriptor",
        fix="check space in /dev/shm, ulimit -n, and NCCL_SOCKET_IFNAME; NCCL_DEBUG=WARN prints the call",
        other_texts=("NCCL Error {:d}: unhandled system error",),
    ),
    KnownError(
        name="NCCL lost another rank",
        text="NCCL error in: {}, remote process exited or there was a network error",
        kind="DistBackendError RuntimeError",
        where=_CALL,
        cause="the connection to another rank broke: its process ended, or the network failed",
        fix="%ddp_status shows ranks that have died; %ddp_heal replaces them",
    ),
)
