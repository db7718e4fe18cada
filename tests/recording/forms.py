"""Every way to call `torch.distributed` on two ranks, one line each, and the expected recording."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from ddp_notebook.lessons.collectives.theory import HAS_LISTS_TO_ALL
from ddp_notebook.observe.views import Collective


class Row(NamedTuple):
    """One operation on one rank."""

    op: str
    api: str
    dtype: str
    shapes: list[tuple[int, ...]]
    nbytes_in: int
    nbytes_out: int
    reduce_op: str = ""
    peer: int | None = None
    tag: int = 0
    is_async: bool = False
    origin: str = "user"
    group: str = "default"


class Form(NamedTuple):
    """One line of a cell."""

    line: str
    rows: list[Row]  # of rank 0
    others: list[Row] | None = None  # those of rank 1, if they differ

    def of(self, rank: int) -> list[Row]:
        return self.others if rank and self.others is not None else self.rows


def row_of(one: Collective) -> Row:
    """Convert a recorded operation for comparison."""
    values = {name: getattr(one, name) for name in Row._fields}
    return Row(**{**values, "shapes": list(one.shapes)})


def _f(op: str, api: str, nbytes_in: int, nbytes_out: int, *shapes: tuple[int, ...], **rest: Any) -> Row:
    return Row(op, api, "float32", list(shapes or [(4,)]), nbytes_in, nbytes_out, **rest)


def _int(op: str, api: str, nbytes_in: int, nbytes_out: int, **rest: Any) -> Row:
    """Return the row for the lengths of pickled objects."""
    return Row(op, api, "int64", [(1,)], nbytes_in, nbytes_out, **rest)


def _pickled(op: str, api: str, nbytes_in: int, nbytes_out: int, **rest: Any) -> Row:
    return Row(op, api, "uint8", [(5,)], nbytes_in, nbytes_out, **rest)


def _functional(op: str, api: str, nbytes_in: int, nbytes_out: int, *shapes: tuple[int, ...], **rest: Any) -> Row:
    return _f(op, api, nbytes_in, nbytes_out, *shapes, is_async=True, origin="functional", **rest)


_MODULES = {"dist": dist, "funcol": funcol}


def is_there(line: str) -> bool:
    """Return whether this torch has all functions that a line calls."""
    calls = re.findall(r"\b(dist|funcol)\.(\w+)\(", line)
    return all(hasattr(_MODULES[module], name) and (name != "all_to_all" or HAS_LISTS_TO_ALL) for module, name in calls)


GATHERS_OBJECTS = "all_gather_single" if hasattr(dist, "gather_single") else "all_gather"  # from torch 2.15 on

# `x` has four float32 elements, `pair` is a group of both ranks, and a pickled int has five bytes.
SET_UP = """
import threading, warnings
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import P2POp, ReduceOp, all_reduce as all_reduce_by_another_name
warnings.simplefilter("ignore")
other, world = 1 - rank, dist.group.WORLD
pair = dist.new_group([0, 1], group_desc="pair")
alone = [dist.new_group([one], group_desc=f"only {one}") for one in range(2)][rank]
def new(*shape):
    return torch.zeros(*shape)
"""

FORMS = [
    Form("dist.all_reduce(x)", [_f("all_reduce", "all_reduce", 16, 16, reduce_op="SUM")]),
    Form(
        "dist.all_reduce(x, op=ReduceOp.MAX, group=pair)",
        [_f("all_reduce", "all_reduce", 16, 16, reduce_op="MAX", group="pair")],
    ),
    Form("dist.all_reduce(x, op=ReduceOp.AVG)", [_f("all_reduce", "all_reduce", 16, 16, reduce_op="AVG")]),
    Form(
        "dist.all_reduce(x.int(), op=ReduceOp.BAND)",
        [Row("all_reduce", "all_reduce", "int32", [(4,)], 16, 16, reduce_op="BAND")],
    ),
    Form(
        "dist.all_reduce(x, group=alone)",
        [_f("all_reduce", "all_reduce", 16, 16, reduce_op="SUM", group="only 0")],
        [_f("all_reduce", "all_reduce", 16, 16, reduce_op="SUM", group="only 1")],
    ),
    Form(
        "dist.all_reduce(x, async_op=True).wait()",
        [_f("all_reduce", "all_reduce", 16, 16, reduce_op="SUM", is_async=True)],
    ),
    Form("all_reduce_by_another_name(x)", [_f("all_reduce", "all_reduce", 16, 16, reduce_op="SUM")]),
    Form(
        "dist.all_reduce_coalesced([new(2), new(3)])",
        [_f("all_reduce_coalesced", "all_reduce_coalesced", 20, 20, (2,), (3,), reduce_op="SUM")],
    ),
    Form("dist.broadcast(x, 1)", [_f("broadcast", "broadcast", 16, 16, peer=1)]),
    Form("dist.broadcast(x, group=pair, group_src=0)", [_f("broadcast", "broadcast", 16, 16, peer=0, group="pair")]),
    Form("dist.reduce(x, 1, op=ReduceOp.PRODUCT)", [_f("reduce", "reduce", 16, 16, peer=1, reduce_op="PRODUCT")]),
    Form(
        "dist.gather(x, None if rank else [new(4), new(4)])",
        [_f("gather", "gather", 16, 32, peer=0)],
        [_f("gather", "gather", 16, 0, peer=0)],
    ),
    Form(
        "dist.scatter(x, [new(4), new(4)] if rank else None, src=1)",
        [_f("scatter", "scatter", 0, 16, peer=1)],
        [_f("scatter", "scatter", 32, 16, peer=1)],
    ),
    Form("dist.all_gather([new(4), new(4)], x)", [_f("all_gather", "all_gather", 16, 32)]),
    Form("dist.all_gather_single(new(8), x)", [_f("all_gather_single", "all_gather_single", 16, 32)]),
    Form("dist.all_gather_into_tensor(new(8), x)", [_f("all_gather_single", "all_gather_into_tensor", 16, 32)]),
    Form(
        "dist.all_gather_coalesced([[new(4)], [new(4)]], [x])",
        [_f("all_gather_coalesced", "all_gather_coalesced", 16, 32)],
    ),
    Form(
        "dist.reduce_scatter(x, [new(4), new(4)])",
        [_f("reduce_scatter", "reduce_scatter", 32, 16, reduce_op="SUM")],
    ),
    Form(
        "dist.reduce_scatter_single(x, new(8))",
        [_f("reduce_scatter_single", "reduce_scatter_single", 32, 16, reduce_op="SUM")],
    ),
    Form(
        "dist.reduce_scatter_tensor(x, new(8), async_op=True).wait()",
        [_f("reduce_scatter_single", "reduce_scatter_tensor", 32, 16, reduce_op="SUM", is_async=True)],
    ),
    Form("dist.all_to_all_single(new(4), x)", [_f("all_to_all_single", "all_to_all_single", 16, 16)]),
    Form(
        "dist.all_to_all_single(new(4), x, [1, 3][::1 - 2 * rank], [1, 3][::1 - 2 * rank])",
        [_f("all_to_all_single", "all_to_all_single", 16, 16)],
    ),
    Form(
        "dist.all_to_all([new(2), new(2)], [new(2), new(2)])",
        [_f("all_to_all", "all_to_all", 16, 16, (2,), (2,))],
    ),
    Form("dist.barrier()", [Row("barrier", "barrier", "", [], 0, 0)]),
    Form("dist.monitored_barrier()", [Row("monitored_barrier", "monitored_barrier", "", [], 0, 0)]),
    Form(
        "dist.recv(x, 0, tag=3) if rank else dist.send(x, 1, tag=3)",
        [_f("send", "send", 16, 0, peer=1, tag=3)],
        [_f("recv", "recv", 0, 16, peer=0, tag=3)],
    ),
    Form(
        "(dist.isend(x, 0) if rank else dist.irecv(x, 1)).wait()",
        [_f("recv", "irecv", 0, 16, peer=1, is_async=True)],
        [_f("send", "isend", 16, 0, peer=0, is_async=True)],
    ),
    Form(
        "dist.send(x, 0) if rank else dist.recv(x)",
        [_f("recv", "recv", 0, 16)],
        [_f("send", "send", 16, 0, peer=0)],
    ),
    Form(
        "[w.wait() for w in dist.batch_isend_irecv([P2POp(dist.isend, x, other), P2POp(dist.irecv, new(4), other)])]",
        [
            _f("send", "batch_isend_irecv", 16, 0, peer=1, is_async=True),
            _f("recv", "batch_isend_irecv", 0, 16, peer=1, is_async=True),
        ],
        [
            _f("send", "batch_isend_irecv", 16, 0, peer=0, is_async=True),
            _f("recv", "batch_isend_irecv", 0, 16, peer=0, is_async=True),
        ],
    ),
    Form(
        "dist.all_gather_object([None, None], rank)",
        [_int(GATHERS_OBJECTS, "all_gather_object", 8, 16), _pickled(GATHERS_OBJECTS, "all_gather_object", 5, 10)],
    ),
    Form(
        "dist.broadcast_object_list([rank], 0)",
        [
            _int("broadcast", "broadcast_object_list", 8, 8, peer=0),
            _pickled("broadcast", "broadcast_object_list", 5, 5, peer=0),
        ],
    ),
    Form(
        "dist.gather_object(rank, None if rank else [None, None])",
        [_int("all_gather", "gather_object", 8, 16), _pickled("gather", "gather_object", 5, 10, peer=0)],
        [_int("all_gather", "gather_object", 8, 16), _pickled("gather", "gather_object", 5, 0, peer=0)],
    ),
    Form(
        "dist.scatter_object_list([None], None if rank else [1, 2])",
        [
            _int("broadcast", "scatter_object_list", 8, 8, peer=0),
            _pickled("scatter", "scatter_object_list", 10, 5, peer=0),
            _int("scatter", "scatter_object_list", 16, 8, peer=0),
        ],
        [
            _int("broadcast", "scatter_object_list", 8, 8, peer=0),
            _pickled("scatter", "scatter_object_list", 0, 5, peer=0),
            _int("scatter", "scatter_object_list", 0, 8, peer=0),
        ],
    ),
    Form(
        "dist.recv_object_list([None], 0) if rank else dist.send_object_list([1], 1)",
        [_int("send", "send_object_list", 8, 0, peer=1), _pickled("send", "send_object_list", 5, 0, peer=1)],
        [_int("recv", "recv_object_list", 0, 8, peer=0), _pickled("recv", "recv_object_list", 0, 5, peer=0)],
    ),
    Form(
        "with dist._coalescing_manager(): dist.all_reduce(new(2)); dist.all_reduce(new(3))",
        [_f("all_reduce_coalesced", "_coalescing_manager", 20, 20, (2,), (3,), reduce_op="SUM")],
    ),
    Form(
        "funcol.all_reduce(x, 'sum', world) + 1",
        [_functional("all_reduce", "all_reduce", 16, 16, reduce_op="SUM")],
    ),
    Form(
        "funcol.all_gather_single(x, 0, world) + 1",
        [_functional("all_gather_single_coalesced", "all_gather_single", 16, 32)],
    ),
    Form(
        "funcol.reduce_scatter_single(new(8), 'sum', 0, world) + 1",
        [_functional("reduce_scatter_single_coalesced", "reduce_scatter_single", 32, 16, reduce_op="SUM")],
    ),
    Form(
        "funcol.all_to_all_single(x, None, None, world) + 1",
        [_functional("all_to_all_single", "all_to_all_single", 16, 16)],
    ),
    Form("funcol.broadcast(x, 0, world) + 1", [_functional("broadcast", "broadcast", 16, 16, peer=0)]),
    Form(
        "[y + 1 for y in funcol.all_reduce_coalesced([x, new(2)], 'sum', world)]",
        [_functional("all_reduce_coalesced", "all_reduce_coalesced", 24, 24, (4,), (2,), reduce_op="SUM")],
    ),
]
FORMS = [form for form in FORMS if is_there(form.line)]
FIRST_LINE = 3  # first line of the calls in the cell


def cell(in_thread: bool) -> str:
    """Return a cell that calls all of them, in the main thread or in another one."""
    lines = ["def work():", "    x = torch.ones(4)", *[f"    {form.line}" for form in FORMS]]
    call = "t = threading.Thread(target=work); t.start(); t.join()" if in_thread else "work()"
    return "\n".join([*lines, call])
