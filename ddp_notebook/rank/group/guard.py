"""Do all ranks call the same? Compared before the user's own collectives, so that nothing is sent when they do not.

Without a check, gloo kills the rank with the smaller buffer, and accepts a wrong dtype: silent garbage. torch's own
check (`TORCH_DISTRIBUTED_DEBUG=DETAIL`) costs 3 ms a call and makes DDP wait for each bucket. This one compares a hash
h of each rank's call, by one MIN all_reduce of (h, -h) in a private group of the same ranks: all are equal if the
minimum is the maximum. Only if they differ do the ranks exchange descriptions of their calls. The sizes that ranks give
to all_to_all may differ, but each must be what its receiver takes: that takes a second all_reduce, a SUM. The second
comparison runs only if every rank's call blocks; the first one carries that flag. Calls that do not block may be waited
for in a different order on each rank.

Operations of DDP, FSDP and DTensor are not compared: they are equal by construction, and overlap with the backward. An
asynchronous call is compared when its caller waits for it; by then it has sent its data.
"""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.origin import USER, origin
from ddp_notebook.rank.unseen import unseen
from ddp_notebook.records.words import group_by_value, name_ranks

_UNCHECKED = {"monitored_barrier"}  # which is a check of its own
_WORDS_BYTES = 256
_FRAMES_OF_OURS = 3  # `origin`, `Guard.__call__` and the kernel


class CollectiveMismatchError(RuntimeError):
    """Ranks call different collectives, or the same on different tensors. Nothing was sent; the group can be used."""


class Check(NamedTuple):
    """A comparison under way."""

    work: Any
    smallest: npt.NDArray[np.int64]  # (3,) the minima of h, of -h, and of whether the caller waits


class Guard:
    """Compares what the ranks of a group call. `guard(call)` goes before the call.

    Raises:
        CollectiveMismatchError: on every rank, with the difference in words.
    """

    def __init__(self) -> None:
        self._smallest, self._sum = AllreduceOptions(), AllreduceOptions()
        self._smallest.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # torch's stub: its own enum
        self._sum.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]

    def __call__(self, call: Call) -> None:
        kernel, group = call.kernel, call.group
        if kernel.spec.kind != "collective" or kernel.spec.name in _UNCHECKED or len(group.ranks) < 2:
            return
        if (call.site[0] if call.site else origin(_FRAMES_OF_OURS)) != USER:
            return
        if (twin := group.twin) is None:
            return
        began_ns = time.monotonic_ns()
        blocks = kernel.blocks(call.arguments[kernel.at_rest :])
        if blocks:
            unseen(self._compare, twin, call)
            call.blocked_ns += time.monotonic_ns() - began_ns  # here it waits for ranks that come later
        else:
            check = unseen(self._begin, twin, call, blocks)
            call.check = lambda: unseen(self._finish, check, twin, call)

    def _compare(self, twin: Any, call: Call) -> None:
        self._finish(self._begin(twin, call, True), twin, call)

    def _begin(self, twin: Any, call: Call, blocks: bool) -> Check:
        words = _signature(call)
        h = zlib.crc32(words) << 31 ^ zlib.adler32(words)
        smallest = np.array((h, -h, int(blocks)))  # NumPy's memory, which no profile of torch's shows
        return Check(twin.allreduce([torch.from_numpy(smallest)], self._smallest), smallest)

    def _finish(self, check: Check, twin: Any, call: Call) -> None:
        check.work.wait()
        low, high, all_wait = check.smallest.tolist()
        if low == -high:
            if all_wait and call.kernel.spec.uneven:
                self._compare_sizes(twin, call)
            return
        if not all_wait:
            raise CollectiveMismatchError(
                f"{call.describe().short} {_words(call)} is not what another rank calls there"
            )
        raise CollectiveMismatchError(self._difference(twin, call))

    def _compare_sizes(self, twin: Any, call: Call) -> None:
        """Raise unless each rank takes as many bytes from each other rank as that rank gives it."""
        gives, takes = _exchanged(call, twin.size())
        # The bytes that a rank (row) gives another one (column), minus those that this one takes.
        more = np.zeros((twin.size(), twin.size()), np.int64)
        if len(gives) == len(takes) == twin.size():  # else they cannot fit
            more[twin.rank()] += gives
            more[:, twin.rank()] -= takes
        twin.allreduce([torch.from_numpy(more)], self._sum).wait()
        if more.any():
            giver, taker = np.argwhere(more)[0]
            count, ranks = int(more[giver, taker]), call.group.ranks
            raise CollectiveMismatchError(
                f"collective #{call.number} of group {call.group.title} does not fit: rank {ranks[giver]} gives rank "
                f"{ranks[taker]} {abs(count)} bytes {'more' if count > 0 else 'less'} than that one takes. "
                "Nothing was sent, and the group can be used"
            )

    def _difference(self, twin: Any, call: Call) -> str:
        mine = torch.zeros(_WORDS_BYTES, dtype=torch.uint8)
        words = f"{call.number} {_words(call)}".encode()[:_WORDS_BYTES]
        mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in call.group.ranks]
        twin.allgather([everybody], [mine]).wait()
        said = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace").partition(" ") for one in everybody]
        numbers = {rank: number for rank, (number, _, _) in zip(call.group.ranks, said, strict=True)}
        calls = {rank: what for rank, (_, _, what) in zip(call.group.ranks, said, strict=True)}
        if len(set(calls.values())) == 1 and len(set(numbers.values())) > 1:
            parts = [f"#{number} on {name_ranks(ranks)}" for number, ranks in group_by_value(numbers).items()]
            return (
                f"{call.kernel.spec.name} is collective {' and '.join(parts)} of group {call.group.title}: some ranks "
                "have called more than others before it. Nothing was sent"
            )
        parts = [
            f"{name_ranks(ranks)} call{'s' * (len(ranks) == 1)} {what}" for what, ranks in group_by_value(calls).items()
        ]
        return (
            f"collective #{call.number} of group {call.group.title} is not the same on all ranks: {'; '.join(parts)}. "
            "Nothing was sent, and the group can be used"
        )


def make_twin(group: ProcessGroup, store: Store, timeout: timedelta) -> Any:
    """The guard's private group of a group, made together with it. If it were made at the group's first use, that would
    wait for ranks which a correct program may have waiting for something else."""
    return ProcessGroupGloo(PrefixStore("guard/", store), group.rank(), group.size(), timeout=timeout)


def _signature(call: Call) -> bytes:
    """What must be equal on all ranks of the group, and nothing else."""
    kernel = call.kernel
    shapes: Any = ""
    dtype: Any = ""
    if kernel.at_tensors is not None:
        tensors = call.arguments[kernel.at_tensors]
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if tensors else None
        while isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        if tensor is not None:
            dtype = tensor.dtype
            if not kernel.spec.uneven:
                shapes = tensor.shape
    rest = call.arguments[kernel.at_rest :]
    root = kernel.root_of(rest)
    return f"{call.number} {kernel.spec.name}{dtype}{kernel.reduce_op_of(rest)}{root}{shapes}".encode()


def _exchanged(call: Call, size: int) -> tuple[list[int], list[int]]:
    """The bytes that an all_to_all gives to each rank, and those that it takes from each."""
    kernel, arguments = call.kernel, call.arguments
    assert kernel.at_input is not None and kernel.at_output is not None
    tensors = arguments[kernel.at_input], arguments[kernel.at_output]
    if kernel.spec.name == "all_to_all":
        gives, takes = ([one.nbytes for one in some] for some in tensors)
        return gives, takes
    splits = arguments[kernel.at_rest + 1], arguments[kernel.at_rest]  # the output's come first
    gives, takes = (
        [rows * (one.nbytes // max(len(one), 1)) for rows in sizes] if sizes else [one.nbytes // size] * size
        for one, sizes in zip(tensors, splits, strict=True)
    )
    return gives, takes


def _words(call: Call) -> str:
    operation = call.describe()
    parts = [operation.reduce_op, "" if call.kernel.spec.uneven else operation.what]
    parts += [] if operation.root is None else [f"root {operation.root}"]
    inside = ", ".join(part for part in parts if part) or operation.dtype
    return f"{operation.name}({inside})"
