"""Bytes per second of each operation, by group and size, as defined by nccl-tests.

A transfer lasts from the arrival of the last rank to the end of the slowest rank. Waiting for a slow rank is not part
of it.

The message size is the total: all output together for all_gather and gather, all input for reduce_scatter and scatter.
Algorithm bandwidth is size / time. Bus bandwidth is the traffic on each rank's link to the others, if the operation
sends as little as possible. It can be compared with the hardware specification for any number of ranks n.

| operation | bus bandwidth / algorithm bandwidth |
|---|---|
| all_reduce | 2 (n - 1) / n |
| all_gather, reduce_scatter, all_to_all, gather, scatter | (n - 1) / n |
| broadcast, reduce, send | 1 |

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; of gather and scatter `GatherGetBw` and
`ScatterGetBw` in its `src/`, of a message `src/sendrecv.cu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.tables.matching import Matched, RowSource, Times, calls_of, match_collectives, match_messages
from ddp_notebook.observe.views import Bandwidth
from ddp_notebook.records.operation import POINT_TO_POINT
from ddp_notebook.records.schema import STATES, Rows

_FEWEST_ALONE = 3  # if at least this number of transfers overlapped no other, only these count
_FAILED = STATES.index("failed")
_OF_ALL_BUT_ONE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


class _Key(NamedTuple):
    """Key of transfers that are counted together."""

    op: str
    group_name: str
    group: str
    world_size: int
    nbytes: int


def bandwidth(recording: RowSource, cell: int | None = None) -> list[Bandwidth]:
    """Return bandwidths by operation, group and size.

    A send counts together with its receive. Transfers that overlap look slower than they are, so they are left out if
    at least three did not overlap.

    Args:
        recording: the recorded tables.
        cell: number of a cell; None: all cells.

    Example:
        >>> from tests.observe.synthetic import simulate
        >>> run = simulate(is_ddp=False, buckets=4, bucket_nbytes=1_000_000, transfer_ms=1)
        >>> [(one.op, one.nbytes, one.count, one.algorithm_gb_s, one.bus_gb_s) for one in bandwidth(run)]
        [('all_reduce', 4000000, 20, 1.0, 1.5)]
    """
    calls = calls_of(recording, cell)
    found: list[tuple[_Key, int, int, bool]] = []  # begin, end, whether it succeeded on all ranks
    for matched in (match_collectives(recording, calls), match_messages(recording, calls)):
        if len(matched):
            found += _transfers(recording, matched, calls[matched.index])
    if not found:
        return []
    begins, ends = np.array([[begin, end] for _, begin, end, _ in found], np.int64).T
    is_alone = _alone(begins, ends)
    of_key: dict[_Key, list[int]] = {}
    for at, (key, begin, end, is_sound) in enumerate(found):
        if key.nbytes and is_sound and end > begin:
            of_key.setdefault(key, []).append(at)
    result = []
    for key, places in of_key.items():
        alone = [at for at in places if is_alone[at]]
        chosen = alone if len(alone) >= _FEWEST_ALONE else places
        transfer_ns = float(np.median((ends - begins)[chosen]))
        algorithm = key.nbytes / transfer_ns  # bytes per ns equal 1e9 bytes per s
        result.append(
            Bandwidth(
                op=key.op,
                group=key.group,
                world_size=key.world_size,
                nbytes=key.nbytes,
                count=len(chosen),
                transfer_ns=round(transfer_ns),
                algorithm_gb_s=algorithm,
                bus_gb_s=algorithm * bus_factor(key.op, key.world_size),
            )
        )
    return sorted(result, key=lambda one: (one.op, one.group, one.nbytes))


def bus_factor(op: str, world_size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth.

    Args:
        op: name as users call it: "all_reduce", "all_gather_single_coalesced".
        world_size: number of ranks in the group.

    Example:
        >>> bus_factor("all_reduce", 4), bus_factor("reduce_scatter_single", 4), bus_factor("broadcast", 4)
        (1.5, 0.75, 1.0)
    """
    if op.startswith("all_reduce"):
        return 2 * (world_size - 1) / world_size
    if op.startswith(_OF_ALL_BUT_ONE):
        return (world_size - 1) / world_size
    return 1.0


def _transfers(recording: RowSource, matched: Matched, rows: Rows) -> Iterator[tuple[_Key, int, int, bool]]:
    last, first = rows[matched.last], matched.first[:-1]
    sizes = np.maximum.reduceat(np.maximum(rows["nbytes_in"], rows["nbytes_out"]), first)
    is_sound = np.logical_and.reduceat((rows["end_ns"] >= 0) & (rows["state"] != _FAILED), first)
    groups = {number: recording.group_of(number) for number in np.unique(last["group"]).tolist()}
    ops = {number: recording.text(number) for number in np.unique(last["op"]).tolist()}
    columns = (last["op"], last["group"], sizes, matched.all_arrived_ns, matched.ended_ns, is_sound)
    for op, number, nbytes, begin, end, well in zip(*(column.tolist() for column in columns), strict=True):
        is_message, group = ops[op] in POINT_TO_POINT, groups[number]
        key = _Key(
            op="send" if is_message else ops[op],
            group_name=group["name"],
            group=group["title"],
            world_size=2 if is_message else len(group["ranks"]),
            nbytes=nbytes,
        )
        yield key, begin, end, well


def _alone(begins: Times, ends: Times) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the intervals that overlap no other.

    Example:
        >>> _alone(np.array([0, 5, 20]), np.array([10, 8, 30])).tolist()
        [False, False, True]
    """
    order = np.argsort(begins, kind="stable")
    begun, ended = begins[order], ends[order]
    latest = np.maximum.accumulate(ended)
    is_alone = np.ones(len(order), bool)
    is_alone[1:] &= begun[1:] >= latest[:-1]
    is_alone[:-1] &= begun[1:] >= ended[:-1]
    result = np.empty(len(order), bool)
    result[order] = is_alone
    return result
