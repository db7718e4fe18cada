"""Warnings about collectives that cannot work, before the cell is sent."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import json
import random
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.run.lint import groups, statements
from ddp_notebook.run.lint import warnings as foreseeing
from ddp_notebook.run.lint.warnings import foresee
from ddp_notebook.run.rank_sets import parse_ranks
from tests.cell_table import TABLE

ROOT = Path(__file__).parents[1]


def foresee_on(ranks: str, code: str, world_size: int = 4) -> list[str]:
    return foresee(code, parse_ranks(ranks, world_size), world_size)


# ---- a cell for some of the ranks


def needs(where: str, what: str, ranks: str) -> str:
    return (
        f"{where}: {what} all 4 ranks, and this cell runs on {ranks}; the others will be waited for. "
        "Use a group of these ranks (group=...), or run it on all"
    )


@pytest.mark.parametrize(
    ("ranks", "code", "warning"),
    [
        ("0-1", "x = 1\ny = 2\ndist.all_reduce(x)", needs("line 3", "dist.all_reduce needs", "ranks 0-1")),
        (
            "0,2",
            "dist.barrier()\nfor x in xs:\n    dist.all_reduce(x)\n    if x: dist.barrier()",
            needs("lines 1, 3 and 4", "dist.barrier and dist.all_reduce need", "ranks 0,2"),
        ),
        ("1", "def f():\n    dist.barrier()\nf()", needs("line 2 (called in line 3)", "dist.barrier needs", "rank 1")),
        ("1", "f = lambda: dist.barrier()\n\nf()", needs("line 1 (called in line 3)", "dist.barrier needs", "rank 1")),
        ("0", "\n%%capture kept\n%%time\ndist.barrier()", needs("line 4", "dist.barrier needs", "rank 0")),
        ("0", "!echo a \\\n  b\nx = !ls\ndist.barrier()", needs("line 4", "dist.barrier needs", "rank 0")),
        ("0-1", "if rank == 0: dist.barrier()", needs("line 1", "dist.barrier needs", "ranks 0-1")),
        (
            "0-1",
            "g = dist.new_group([0, 1])",
            "line 1: dist.new_group must be called by all 4 ranks, and this cell runs on ranks 0-1. Run it on all",
        ),
        (
            "0-2",
            'init_device_mesh("cpu", (4,)); fully_shard(net)',
            "line 1: init_device_mesh and fully_shard must be called by all 4 ranks, and this cell runs on ranks 0-2. "
            "Run it on all",
        ),
        (
            "0-1",
            "g = dist.new_group([0, 1, 2], use_local_synchronization=True)\ndist.all_reduce(x, group=g)",
            "line 2: dist.all_reduce needs ranks 0-2, its group, and this cell runs on ranks 0-1; the others will be "
            "waited for. Run it on all of them",
        ),
        (
            "0-1",
            "a = dist.new_group([0, 1], use_local_synchronization=True)\n"
            "b = dist.new_group([1, 2], use_local_synchronization=True)\n"
            "if x: dist.barrier(a)\nelse: dist.barrier(b)",
            "line 4: dist.barrier needs ranks 1-2, its group, and this cell runs on ranks 0-1; the others will be "
            "waited for. Run it on all of them",
        ),
    ],
)
def test_a_collective_of_ranks_that_do_not_run_the_cell(ranks, code, warning):
    assert foresee_on(ranks, code) == [warning]


@pytest.mark.parametrize(
    "code",
    [
        "dist.barrier()",
        "torch.distributed.barrier()",
        "import torch.distributed\ntorch.distributed.barrier()",
        "import torch.distributed as td\ntd.barrier()",
        "from torch import distributed as d\nd.barrier()",
        "from torch.distributed import barrier as b\nb()",
        "from torch.distributed import *\nfrom math import *\nbarrier()",
        "b = dist.barrier\nb()",
        "dist.distributed_c10d.barrier()",
        "dist.barrier(None)",
        "dist.barrier(group=None)",
        "dist.barrier(group=dist.group.WORLD)",
        "group = None\ndist.barrier(group)",
        "work = dist.barrier(async_op=True)\nwork.wait()",
        "dist.all_reduce(x, dist.ReduceOp.SUM, None)",
        "dist.all_to_all_single(x, y, None, None, dist.group.WORLD)",
        "print(dist.broadcast(x, 0))",
        "x = [dist.broadcast(x, 0) for x in xs]",
        "if flag: dist.barrier()",
        "try:\n    dist.barrier()\nfinally:\n    pass",
        "await g()\ndist.barrier()",
        "%%time\ndist.barrier()",
        "\n%%capture kept\n%%time\ndist.barrier()",
        "!ls\nx = !ls\nlen?\n??len\n%matplotlib inline\nif x:\n    %time x\ndist.barrier()",
        "!echo a \\\n  b\ndist.barrier()",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)",
        "model = nn.parallel.DistributedDataParallel(net, process_group=None)",
        "model = DistributedDataParallel(net)",
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(net)",
        "from torch.distributed.fsdp import fully_shard\nfully_shard(net)",
        "dist.new_subgroups(2)",
        "dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])",
        "dist.split_group(split_ranks=[[0, 1], [2, 3]])",
    ],
)
def test_default_group_collectives_are_found_by_every_name(code):
    assert len(foresee_on("0-1", code)) == 1


# ---- a branch for some of the ranks


def alone(where: str, name: str = "barrier") -> str:
    return f"{where}: dist.{name} runs on rank 0 only; ranks 1-3 do not take part and are waited for"


@pytest.mark.parametrize(
    "test",
    [
        "rank == 0",
        "0 == rank",
        "local_rank == 0",
        "dist.get_rank() == 0",
        "torch.distributed.get_rank() == 0",
        "not rank",
        "rank < 1",
        "0 <= rank < 1",
        "rank in (0,)",
        "rank in {0}",
        "rank in range(1)",
        "rank not in [1, 2, 3]",
        "not (rank or rank == 2)",
        "rank % world_size == 0",
        "rank // 2 + rank % 2 == 0",
        "rank * -2 >= 0",
        "rank & 3 == 0",
        "bool(rank) is False",
        "rank == dist.get_world_size() - 4",
        "rank == min(3, 0)",
        "rank == 0 and not (debug and rank == 1)",
        "rank == (1 if world_size == 1 else 0)",
        "(0, 1, 1, 1)[rank] == 0",
        "(r := rank) == 0",
    ],
)
def test_a_collective_under_a_test_on_the_rank(test):
    assert foresee_on("all", f"if {test}: dist.barrier()") == [alone("line 1")]
    assert foresee_on("all", f"if {test}: pass\nelse: dist.barrier()") != []
    assert foresee_on("all", f"if {test}: dist.barrier()\nelse: dist.barrier()") == []


@pytest.mark.parametrize(
    ("code", "warning"),
    [
        ("if rank: pass\nelse: dist.barrier()", alone("line 2")),
        ("if rank == 1: pass\nelif rank == 0: dist.barrier()", alone("line 2")),
        ("if rank == 0: dist.barrier()\nelse: print('nothing')", alone("line 1")),
        ("if rank == 0: dist.barrier()\nelse: xs.append(x.item())", alone("line 1")),
        (
            "import time\nif rank == 0: dist.barrier()\nelse: torch.ones(1); dist.send(x, 0); time.sleep(1)",
            alone("line 2"),
        ),
        ("if x: dist.barrier()\nelse: dist.barrier()\nif rank == 0: dist.barrier()", alone("line 3")),
        (
            "try:\n    if rank == 0: raise x\nexcept E: pass\ndist.barrier()\nif not rank: dist.barrier()",
            alone("line 5"),
        ),
        ("for x in xs:\n    seen[rank] = x\n    if rank == 0: dist.barrier()", alone("line 3")),
        ("for x in xs:\n    if x: break\nelse:\n    if rank == 0: dist.barrier()", alone("line 4")),
        ("for x in xs: pass\nelse:\n    if rank == 0: dist.barrier()", alone("line 3")),
        ("try: pass\nexcept E: pass\nelse:\n    if rank == 0: dist.barrier()", alone("line 4")),
        ("def f():\n    if rank: return\nf()\nif rank == 0: dist.barrier()", alone("line 4")),
        ("def a(): dist.barrier()\ndef b(): pass\nf = a if rank == 0 else b\nf()", alone("line 1 (called in line 4)")),
        (
            "if rank == 0 or rank == 1 and flag: dist.barrier()",
            "line 1: dist.barrier runs on ranks 0-1 only; ranks 2-3 do not take part and are waited for",
        ),
        (
            "match rank:\n    case 0 if rank < 1: dist.barrier()\nif rank:\n    dist.barrier()\n    dist.barrier()",
            "line 5: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
        (
            "if rank == 0:\n    while True:\n        dist.barrier()\n        break\n"
            "else:\n    dist.barrier()\n    dist.barrier()",
            "line 7: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
        (
            "for _ in range(3):\n    dist.barrier()\n    if rank == 0: break",
            "line 2: dist.barrier does not run equally often on ranks 0-3",
        ),
        (
            "def n():\n    if rank == 0: return 2\n    return 1\nfor _ in range(n()): dist.barrier()",
            "line 4: dist.barrier does not run equally often on ranks 0-3",
        ),
        (
            "if x: n = rank\nelse: n = 0\nfor _ in range(n): dist.barrier()",
            "line 3: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
        (
            "a, b = dist.new_group([0, 1]), dist.new_group([1, 2])\ndist.barrier(a if rank == 0 else b)",
            "line 2: dist.barrier runs on rank 0 only; rank 1 does not take part and is waited for",
        ),
        ("rank == 0 and dist.barrier()", alone("line 1")),
        ("rank > 0 or dist.barrier()", alone("line 1")),
        ("dist.barrier() if rank == 0 else None", alone("line 1")),
        ("[dist.barrier() for _ in xs if rank == 0]", alone("line 1")),
        ("while rank == 0:\n    dist.barrier()", alone("line 2")),
        ("match rank:\n    case 0: dist.barrier()", alone("line 2")),
        ("match rank:\n    case 1 | 2: pass\n    case 3: pass\n    case _: dist.barrier()", alone("line 4")),
        ("match x:\n    case _ if rank == 0: dist.barrier()", alone("line 2")),
        ("import os.path\nif int(os.environ['RANK']) == 0: dist.barrier()", alone("line 2")),
        ("import os\nif os.environ.get('LOCAL_RANK') == '0': dist.barrier()", alone("line 2")),
        ("is_main = rank == 0\nif is_main: dist.barrier()", alone("line 2")),
        ("rank, size = dist.get_rank(), dist.get_world_size()\nif rank == size - 4: dist.barrier()", alone("line 2")),
        ("me: int = dist.get_rank()\nif me == 0: dist.barrier()", alone("line 2")),
        ("if rank == 0: n = 1\nelse: n = 0\nfor _ in range(n): dist.barrier()", alone("line 3")),
        ("if debug:\n    if rank == 0: dist.barrier()", alone("line 2")),
        ("if rank == 0 and debug: dist.barrier()", alone("line 1")),
        ("if debug and rank == 0: dist.barrier()", alone("line 1")),
        ("for x in xs:\n    dist.all_reduce(x)\n    if rank == 0: dist.barrier()", alone("line 3")),
        ("for x in xs:\n    dist.barrier()\n    if rank == 0: dist.barrier()", alone("line 3")),
        ("with torch.no_grad():\n    if rank == 0: dist.barrier()", alone("line 2")),
        ("for x in xs:\n    with torch.no_grad():\n        if rank == 0: torch.distributed.barrier()", alone("line 3")),
        ("try:\n    if rank == 0: dist.barrier()\nexcept ValueError: pass", alone("line 2")),
        ("if __name__ == '__main__':\n    if rank == 0: dist.barrier()", alone("line 2")),
        ("dist.barrier()\nif rank == 0: dist.barrier()", alone("line 2")),
        ("if rank == 0: dist.barrier()\ndist.barrier()", alone("line 1")),
        ("%time x\nif rank == 0: dist.barrier()", alone("line 2")),
        ("if rank == 0: work = dist.barrier(async_op=True); work.wait()", alone("line 1")),
        ("for rank in range(2): pass\nif dist.get_rank() == 0: dist.barrier()", alone("line 2")),
        (
            "if rank == 0:\n    dist.barrier()\n    dist.all_reduce(x)\n    dist.barrier()",
            "lines 2, 3 and 4: dist.barrier and dist.all_reduce run on rank 0 only; "
            "ranks 1-3 do not take part and are waited for",
        ),
        (
            "if x < 0 < rank: dist.barrier()",
            "line 1: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
        (
            "if rank < 3: dist.barrier()",
            "line 1: dist.barrier runs on ranks 0-2 only; rank 3 does not take part and is waited for",
        ),
        (
            "if rank == 0:\n    dist.all_reduce(x)\n    dist.barrier()\n"
            "else:\n    dist.barrier()\n    dist.all_reduce(x)",
            "lines 2 and 5: dist.all_reduce and dist.barrier come in another order on rank 0 than on ranks 1-3",
        ),
        (
            "for _ in range(rank): dist.barrier()",
            "line 1: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
        (
            "for _ in range(2 + rank // 3): dist.barrier()",
            "line 1: dist.barrier does not run equally often on ranks 0-3",
        ),
        (
            "if rank == 0: DistributedDataParallel(net)",
            alone("line 1").replace("dist.barrier", "DistributedDataParallel"),
        ),
        (
            "if rank < 2: g = dist.new_group([0, 1])",
            "line 1: dist.new_group runs on ranks 0-1 only, and all ranks must call it",
        ),
        (
            "g = dist.new_group(range(2))\nif rank == 0: dist.all_reduce(x, group=g)",
            "line 2: dist.all_reduce runs on rank 0 only; rank 1 does not take part and is waited for",
        ),
        (
            "g = dist.new_group(ranks=list(range(1, 4, 2)))\nif dist.get_rank(g) == 0: dist.reduce(x, 1, x, g)",
            "line 2: dist.reduce runs on rank 1 only; rank 3 does not take part and is waited for",
        ),
    ],
)
def test_a_collective_that_not_all_ranks_reach(code, warning):
    assert foresee_on("all", code) == [warning]


def test_different_collectives_in_two_branches():
    assert foresee_on("all", "if rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, 0)") == [
        alone("line 1", "all_reduce"),
        "line 2: dist.broadcast runs on ranks 1-3 only; rank 0 does not take part and is waited for",
    ]


@pytest.mark.parametrize(
    ("code", "warning"),
    [
        (
            "def f():\n    if rank == 0:\n        return\n    dist.barrier()\nf()",
            "line 4 (called in line 5): dist.barrier runs on ranks 1-3 only; "
            "rank 0 leaves in line 3, does not take part and is waited for",
        ),
        (
            "for x in xs:\n    if rank != 0: continue\n    dist.barrier()",
            "line 3: dist.barrier runs on rank 0 only; ranks 1-3 leave in line 2, do not take part and are waited for",
        ),
        (
            "while True:\n    if rank == 3: break\n    dist.barrier()",
            "line 3: dist.barrier runs on ranks 0-2 only; "
            "rank 3 leaves in line 2, does not take part and is waited for",
        ),
        (
            "if rank == 1:\n    raise ValueError('no')\ndist.barrier()",
            "line 3: dist.barrier runs on ranks 0,2-3 only; "
            "rank 1 leaves in line 2, does not take part and is waited for",
        ),
        (
            "def f():\n    for x in xs:\n        if rank == 0: return\n    dist.barrier()\n"
            "def g():\n    if rank: return\n    dist.barrier()\ng()",
            "line 7 (called in line 8): dist.barrier runs on rank 0 only; "
            "ranks 1-3 leave in line 6, do not take part and are waited for",
        ),
        (
            "def f():\n    try: x()\n    finally:\n        if rank == 0: return\n    dist.barrier()\nf()",
            "line 5 (called in line 6): dist.barrier runs on ranks 1-3 only; "
            "rank 0 leaves in line 4, does not take part and is waited for",
        ),
        (
            "def f():\n    if x: return\n    print(x)\nf()\nfor _ in range(rank): dist.barrier()",
            "line 5: dist.barrier runs on ranks 1-3 only; rank 0 does not take part and is waited for",
        ),
    ],
)
def test_an_early_end_for_some_of_the_ranks(code, warning):
    assert foresee_on("all", code) == [warning]


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("def f():\n    dist.barrier()\nif rank == 0: f()", "line 2 (called in line 3)"),
        ("def f():\n    dist.barrier()\ndef g():\n    f()\nif rank == 0: g()", "line 2 (called in line 5)"),
        (
            "def f():\n    dist.barrier()\n\nif rank == 0:\n    f()\n    f()",
            "lines 2 (called in line 5) and 2 (called in line 6)",
        ),
        ("def run(rank, size):\n    if not rank: dist.barrier()\nrun(rank, world_size)", "line 2 (called in line 3)"),
        ("def run(r, fn): fn(r)\ndef f(n):\n    if n == 0: dist.barrier()\nrun(rank, f)", "line 3 (called in line 4)"),
        ("def f(a, *, only=0):\n    if rank == only: dist.barrier()\nf(1)", "line 2 (called in line 3)"),
        ("def f(a, only=1):\n    if rank == only: dist.barrier()\nf(only=0, a=1)", "line 2 (called in line 3)"),
        ("def is_main(): return rank == 0\nif is_main(): dist.barrier()", "line 2"),
        ("@torch.no_grad()\ndef f():\n    dist.barrier()\nif rank == 0: f()", "line 3 (called in line 4)"),
        ("async def f():\n    dist.barrier()\nif rank == 0: await f()", "line 2 (called in line 3)"),
        ("def f(n):\n    dist.barrier()\n    if n: f(n - 1)\nif rank == 0: f(n)", "line 2 (called in line 4)"),
        ("def f():\n    def g(): dist.barrier()\n    if rank == 0: g()\nf()", "line 2 (called in line 4)"),
    ],
)
def test_functions_of_the_cell_are_followed(code, where):
    assert foresee_on("all", code) == [alone(where)]


# ---- what is as it should be

LEGAL = """
dist.barrier()
---
if world_size > 1: dist.barrier()
---
if dist.get_world_size() > 1 and rank >= 0: dist.barrier()
---
if rank < world_size: dist.barrier()
---
if rank in range(world_size): dist.barrier()
---
if rank == 4: dist.barrier()
---
if rank == src: dist.broadcast(x, src)
---
if rank in members: dist.barrier()
---
members = [0]
members.append(rank)
if rank in members: dist.barrier()
---
if flag: dist.barrier()
---
if rank == 0 or flag: dist.barrier()
---
if is_main: dist.broadcast(a, 0)
if rank != 0: dist.broadcast(b, 0)
---
if rank == 0: dist.barrier()
if rank > 1 or is_second: dist.barrier()
---
if flag: only = 0
if rank == only: dist.barrier()
---
if rank == 0:
    dist.all_reduce(x)
    if flag: dist.barrier()
else:
    if flag: dist.barrier()
    dist.all_reduce(x)
---
for x in xs: only = 0
if rank == only: dist.barrier()
---
only = 0
for x in xs:
    if rank == only: dist.barrier()
    if x: only += 1
---
only = 0
for x in xs:
    if rank == only: dist.barrier()
    with x as (only, other): pass
---
only = 0
any((only := x) for x in xs)
if rank == only: dist.barrier()
---
a, *only = 0, 0
if rank == only: dist.barrier()
---
if rank == 0: dist.broadcast(a, 0)
else: dist.broadcast(b, 0)
---
dist.broadcast(a, 0) if rank == 0 else dist.broadcast(b, 0)
---
if rank == 0:
    dist.scatter(x, parts, src=0)
else:
    dist.scatter(x, src=0)
---
if rank == 0:
    dist.gather(x, [torch.zeros(1) for _ in range(world_size)])
elif rank == 1:
    dist.gather(x)
else:
    dist.gather(x, dst=0)
---
match rank:
    case 0: dist.broadcast(a, 0)
    case 1 | 2: dist.broadcast(b, 0)
    case _: dist.broadcast(c, 0)
---
if rank == 0: dist.all_gather_into_tensor(y, x)
else: dist.all_gather(ys, x)
---
# let rank 0 download first
if rank != 0: dist.barrier()
data = download()
if rank == 0: dist.barrier()
---
def f():
    if rank == 0:
        dist.broadcast(a, 0)
        return
    dist.broadcast(b, 0)
f()
---
if rank == 0:
    for x in xs: dist.broadcast(x, 0)
else:
    for y in ys: dist.broadcast(y, 0)
---
if rank == 0:
    for x in xs: dist.broadcast(x, 0)
    dist.broadcast(end, 0)
else:
    for y in ys: dist.broadcast(y, 0)
---
if rank == 0:
    for x in range(3): dist.broadcast(x, 0)
else:
    dist.broadcast(a, 0)
    dist.broadcast(b, 0)
    dist.broadcast(c, 0)
---
# print in turn
for r in range(world_size):
    if r == rank: print(rank)
    dist.barrier()
---
for src in range(world_size):
    if rank == src: dist.broadcast(x, src)
    else: dist.broadcast(y, src)
---
for r in range(world_size):
    if r == rank: dist.barrier()
---
for rank in range(4):
    if rank == 0: dist.barrier()
---
[dist.barrier() for rank in range(4) if rank == 0]
---
rank = 0
if rank == 0: dist.barrier()
---
rank -= 1
if rank == -1: dist.barrier()
---
with open(name) as rank:
    if rank == 0: dist.barrier()
---
if rank == 0:
    dist.send(x, 1); dist.isend(x, 1).wait()
elif rank == 1:
    dist.recv(x, 0); dist.irecv(x, 0).wait()
    dist.send_object_list([x], 2)
elif rank == 2:
    dist.recv_object_list(xs, 1)
---
if rank < 2:
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops): work.wait()
---
if rank == 0:
    print(dist.get_rank(), dist.is_initialized(), dist.get_backend(), dist.get_world_size())
    dist.destroy_process_group()
---
if rank < 2: dist.all_reduce(x, group=g)
---
if rank < 2:
    dist.all_reduce(x, dist.ReduceOp.SUM, g); dist.broadcast(x, 0, g); dist.barrier(g); dist.gather(x, None, 0, g)
    dist.all_to_all_single(x, y, None, None, g); dist.reduce(x, 0, dist.ReduceOp.SUM, g); dist.all_gather(xs, x, g)
---
if rank < 2: dist.all_reduce(x, **how); dist.all_reduce(*everything)
---
g = dist.new_group([0, 1])
if rank < 2: dist.all_reduce(x, group=g)
---
g = dist.new_group([0, 1])
dist.all_reduce(x, group=g)
---
row, column = dist.new_group([0, 1]), dist.new_group((2, 3))
dist.all_reduce(x, group=row if rank < 2 else column)
dist.barrier((row, column)[rank // 2])
---
row, column = dist.new_group([0, 1]), dist.new_group([2, 3])
if rank < 2: dist.all_reduce(x, group=row)
else: dist.all_reduce(x, group=column); dist.barrier(column)
---
groups = [dist.new_group([i, i + 1]) for i in range(0, world_size, 2)]
g = groups[rank // 2]
if dist.get_rank(g) == 0: print(dist.get_world_size(g))
dist.all_reduce(x, group=g)
---
g = dist.new_group([0, 1])
if dist.get_rank(g) >= 0: dist.all_reduce(x, group=g)
---
if rank < 2: g = dist.new_group([0, 1], use_local_synchronization=True)
---
if rank == 0: DistributedDataParallel(net, process_group=g)
---
if rank == 0: DistributedDataParallel(net, device_mesh=mesh); fully_shard(net, mesh=mesh)
---
if rank == 0: DistributedDataParallel(net, init_sync=False)
---
def f():
    if rank == 0: dist.barrier()
---
if rank == 0:
    def sync(): dist.barrier()
    later = lambda: dist.barrier()
---
class Trainer:
    def step(self):
        if rank == 0: dist.barrier()
---
def f(): dist.barrier()
if rank == 0: f
---
def sync():
    dist.barrier()
if rank == 0: sync()
else: dist.barrier()
---
if rank == 0: dist.barrier()
else: sync()
---
if rank == 0: dist.barrier()
else: trainer.sync()
---
if rank == 0: dist.barrier()
else:
    %time dist.barrier()
---
if rank == 0: dist.barrier()
else:
    __import__("torch").distributed.barrier()
---
def gather(x): return x
if rank == 0: gather(x)
---
from functools import reduce
if rank == 0: reduce(lambda a, b: a + b, [1]); torch.gather(x, 0, i); pool.scatter(x); x.broadcast(); my.gather(x)
---
from mine import barrier, dist
if rank == 0: barrier(); dist.barrier()
---
from . import barrier
if rank == 0: barrier()
---
if rank == 0: barrier(); all_reduce(x); DDP(net)
---
import mpi as dist
if rank == 0: dist.barrier()
---
dist.barrier = print
if rank == 0: dist.barrier()
---
def barrier_of(dist):
    dist.barrier()
if rank == 0: barrier_of(fake)
---
@only_on_rank_0
def f(): dist.barrier()
if rank != 0: f()
---
from contextlib import contextmanager
@contextmanager
def main_first():
    if rank != 0: dist.barrier()
    yield
    if rank == 0: dist.barrier()
with main_first(): download()
---
def steps():
    dist.barrier()
    yield 1
if rank == 0: all_steps = steps()
---
def nothing(): pass
def steps():
    yield 1
    nothing()
    dist.barrier()
if rank == 0: all_steps = steps()
---
only = (*xs, 1, 0)[1]
if rank == only: dist.barrier()
---
import torch.distributed.checkpoint as dcp
if rank == 0: dist.barrier()
else: dcp.save(state)
---
def f(x=None):
    if x is not None: dist.barrier()
if rank == 0: f()
---
def f(rank):
    if rank == 0: dist.barrier()
f(*everything)
---
def f(x, only=0):
    if rank == only: dist.barrier()
f(*everything)
---
def f(x, only=0):
    if rank == only: dist.barrier()
f(x, **how)
---
def f():
    while True:
        if x: return
    if rank == 0: dist.barrier()
f()
---
def f():
    global rank
    rank = 0
f()
if rank == 0: dist.barrier()
---
if rank == 0: work = dist.all_reduce(x, async_op=True)
---
import os
os.environ["RANK"] = "0"
if os.environ["RANK"] == "0": dist.barrier()
---
import os
os.environ["RANK"] = "0"
if os.getenv("RANK") == "0": dist.barrier()
---
from contextlib import suppress
with suppress(ValueError):
    if rank == 0: raise ValueError
dist.barrier()
---
try:
    if rank == 0: raise ValueError
except ValueError:
    dist.barrier()
else:
    dist.barrier()
---
while True:
    dist.barrier()
    if done: break
---
while True:
    dist.barrier()
    if done: break
    if rank == 0: break
---
for x in xs:
    if x is None: continue
    dist.all_reduce(x)
    if x > 3: break
else:
    dist.barrier()
if rank == 0: print("done")
---
if rank == 0 and not path.exists(): raise FileNotFoundError
dist.barrier()
---
assert rank == dist.get_rank()
dist.barrier()
---
"if rank == 0: dist.barrier()"
---
if rank == 0: print("dist.barrier()")  # dist.barrier()
---
%%bash
if rank == 0: dist.barrier()
---
%%writefile train.py
if rank == 0: dist.barrier()
---
for rank == 0: dist.barrier()
---
if rank == 10 ** 10 ** 10 or rank in range(10 ** 12): dist.barrier()
---
if rank == 0 and 1 / 0: dist.barrier()
else: dist.barrier()
---
def f(n):
    if n: f(n - 1)
    dist.barrier()
if rank < 9: f(3)
"""


@pytest.mark.parametrize("code", LEGAL.split("---\n"))
def test_a_cell_that_works_gives_no_warning(code):
    assert foresee_on("all", code) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        "dist.all_reduce(x, group=g)",
        "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)",
        "if rank == 3: dist.barrier()",
        "if rank == world_size - 1: dist.barrier()",
        "if world_size == 1: dist.barrier()",
        "def f():\n    dist.barrier()",
        "class A:\n    def f(self): dist.barrier()",
        "import functools\nfunctools.reduce(max, [1]); torch.gather(x, 0, i)",
        "dist.get_rank(), dist.get_world_size(), dist.is_initialized(), dist.destroy_process_group()",
        "dist.init_process_group('gloo')",
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\ndist.barrier()",
        "dist.init_process_group(backend='fake')\ndist.barrier()",
        "work = dist.all_reduce(x, async_op=True)\nwork.is_completed()",
        "work = dist.all_reduce(x, dist.ReduceOp.SUM, None, True)",
        "g = dist.new_group([0, 1], use_local_synchronization=True)\ndist.all_reduce(x, group=g)",
        "g = dist.new_group([2, 3], use_local_synchronization=True)\ndist.all_reduce(x, group=g)",
        "DistributedDataParallel(net, None, None, 0, True, True, g)",
        "%%writefile x.py\nimport torch.distributed as dist\ndist.barrier()",
        "%%bash\ndist.barrier()",
    ],
)
def test_a_cell_that_works_on_some_ranks_gives_no_warning(code):
    assert foresee_on("0-1", code) == []


def test_ranks_may_come_in_any_order():
    assert foresee("dist.barrier()", [2, 0, 2], 4) == [needs("line 1", "dist.barrier needs", "ranks 0,2")]


def test_one_rank_is_never_alone():
    assert foresee_on("all", "if rank == 0: dist.barrier()", world_size=1) == []
    assert foresee_on("all", "if rank == 0: dist.barrier()", world_size=2) != []


# ---- what the project shows and tests


def cells() -> Iterator[tuple[str, str, str]]:
    """Yield every cell of the notebooks, the README and the table of cells: source, ranks, code."""
    sources = [(f"cell_table, {case.name}", case.prefix + case.code) for case in TABLE]
    for notebook in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
            if cell["cell_type"] == "code":
                sources.append((f"{notebook.stem}, cell {number}", "".join(cell["source"])))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    sources += [(f"README, block {number}", block) for number, block in enumerate(blocks)]
    sources += [("README, session.run", code) for code in re.findall(r'session\.run\("(.*?)"', "".join(blocks))]
    for name, source in sources:
        first, _, rest = source.partition("\n")
        some = re.match(r"%%on_ranks (\S+)|%%on_all_ranks.*--ranks (\S+)", first)
        asked = (some[1] or some[2]) if some else "all"
        yield name, "all" if asked == "9" else asked, rest if first.startswith("%%on_") else source


CELLS = list(cells())


def test_all_cells_of_the_project_are_looked_at():
    names = [name.partition(",")[0] for name, _, _ in CELLS]

    assert {"cell_table", "01_first_process_group", "02_cells_on_every_rank", "03_watch_it_train", "README"} <= set(
        names
    )
    assert sum("dist." in code for _, _, code in CELLS) >= 12
    assert {ranks for _, ranks, _ in CELLS} >= {"all", "0-1", "::2"}


MISTAKES_OF_LESSONS = {  # cells that are wrong on purpose -> their warning
    "23_it_hangs, cell 6": (
        "line 3: dist.all_reduce runs on rank 0 only; ranks 1-3 do not take part and are waited for"
    ),
}


@pytest.mark.parametrize(("name", "ranks", "code"), CELLS, ids=[name for name, _, _ in CELLS])
def test_no_cell_of_the_project_gives_a_warning(name, ranks, code):
    expected = [MISTAKES_OF_LESSONS[name]] if name in MISTAKES_OF_LESSONS else []
    assert foresee_on(ranks, code) == expected
    assert foresee_on("all", code) == expected


# ---- cells at random, run for real on four ranks that only note what they pass

TESTS = [
    *("rank == 0", "rank != 1", "not rank", "rank % 2 == 0", "rank in (0, 2)", "rank < world_size", "0 < rank < 3"),
    *("dist.get_rank() > 1", "first", "p", "q", "p", "q"),
]


class Writer:
    """Writes random cells of branches, loops, functions and early ends around two collectives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.functions = 0

    def cell(self) -> str:
        return "\n".join(["first = rank == 0", *self.block(3)])

    def test(self, depth: int = 2) -> str:
        kind = self.random.random() if depth else 0
        if kind < 0.7:
            return self.random.choice(TESTS)
        if kind < 0.8:
            return f"(not {self.test(depth - 1)})"
        return f"({self.test(depth - 1)} {self.random.choice(['and', 'or'])} {self.test(depth - 1)})"

    def block(self, depth: int, ends: tuple[str, ...] = ()) -> list[str]:
        return [line for _ in range(self.random.randint(1, 3)) for line in self.statement(depth, ends)]

    def statement(self, depth: int, ends: tuple[str, ...]) -> list[str]:
        def inner(head: str, *more: str) -> list[str]:
            return [head, *textwrap.indent("\n".join(self.block(depth - 1, (*ends, *more))), "    ").split("\n")]

        collective = self.random.choice(["dist.barrier()", "dist.all_reduce(x)"])
        kind = self.random.random()
        if depth == 0 or kind < 0.3:
            return [collective]
        if kind < 0.55:
            return [*inner(f"if {self.test()}:"), *(inner("else:") if kind < 0.42 else [])]
        if kind < 0.68:
            items = self.random.choice(["xs", "ys", "range(2)", "range(rank)", "range(world_size)"])
            return [*inner(f"for i in {items}:", "break", "continue"), *(inner("else:") if kind < 0.58 else [])]
        if kind < 0.75:
            return [self.random.choice([f"{self.test()} and {collective}", f"{collective} if {self.test()} else None"])]
        if kind < 0.84 and ends:
            return [f"if {self.test()}: {self.random.choice(ends)}"]
        if kind < 0.93 and "return" not in ends:
            self.functions += 1
            head = f"def f{self.functions}(first={self.random.choice(['True', 'rank', 'p'])}):"
            body = textwrap.indent("\n".join(self.block(depth - 1, ("return",))), "    ")
            return [head, *body.split("\n"), f"f{self.functions}({self.random.choice(['', self.test()])})"]
        return [f"first = {self.test()}", *inner("try:"), "except ValueError: pass"]


class Noted:
    """Replaces `dist` on one rank, and records which line calls what."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.passed: list[tuple[str, int]] = []

    def get_rank(self) -> int:
        return self.rank

    def barrier(self) -> None:
        self.passed.append(("barrier", sys._getframe(1).f_lineno))

    def all_reduce(self, x: object) -> None:
        self.passed.append(("all_reduce", sys._getframe(1).f_lineno))


def passed_by_ranks(code: str, chance: random.Random) -> list[list[tuple[str, int]]]:
    """Return one path through the cell, with random data that are equal on all ranks."""
    data: dict[str, object] = {"p": chance.random() < 0.5, "q": chance.random() < 0.5, "x": 0}
    data |= {"xs": range(chance.randint(0, 3)), "ys": range(chance.randint(0, 3))}
    ranks = [Noted(rank) for rank in range(4)]
    for rank, noted in enumerate(ranks):
        exec(code, {"rank": rank, "world_size": 4, "dist": noted, **data})
    return [noted.passed for noted in ranks]


def warned(found: list[str]) -> set[tuple[str, int]]:
    pairs = set()
    for warning in found:
        where, _, what = re.sub(r" \(called in line \d+\)", "", warning).partition(":")
        pairs |= set(itertools.product(re.findall(r"dist\.(\w+)", what), map(int, re.findall(r"\d+", where))))
    return pairs


@pytest.mark.long
@pytest.mark.parametrize("first_seed", range(0, 500, 100))
def test_what_works_by_trying_it_out_is_never_warned_about(first_seed):
    """A cell that warns may still work if its data avoid the error, but not if the error is reached."""
    seen = {"wrong and warned": 0, "right and silent": 0}
    for seed in range(first_seed, first_seed + 100):
        code = Writer(seed).cell()
        lines = warned(foresee_on("all", code))
        chance = random.Random(seed)
        always_wrong = always_right = True
        for _ in range(12):
            passed = passed_by_ranks(code, chance)
            works = all([name for name, _ in each] == [name for name, _ in passed[0]] for each in passed)
            always_wrong &= not works
            always_right &= works
            assert not (works and lines & {each for rank in passed for each in rank}), f"seed {seed}\n{code}"
        seen["wrong and warned"] += always_wrong and bool(lines)
        seen["right and silent"] += always_right and not lines
    assert min(seen.values()) >= 10, seen


# ---- names, speed, safety


def position_of_group(function: object) -> int:
    """Return the position of the group argument in a function of torch."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]
    found = [names.index(name) for name in ("group", "process_group", "parent_pg") if name in names]
    return found[0] if found else groups.NO_GROUP


@pytest.mark.parametrize("name", [name for name in groups.GROUP_AT if hasattr(dist, name)])
def test_the_group_of_a_collective_is_where_torch_has_it(name):
    assert groups.GROUP_AT[name] == position_of_group(getattr(dist, name))


def test_only_the_newest_collectives_may_be_missing():
    """The first two are from torch 2.15, the others from 2.12."""
    newest = {"gather_into_tensor", "gather_single", "all_gather_single", "reduce_scatter_single"}
    assert {name for name in groups.GROUP_AT if not hasattr(dist, name)} <= newest


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_the_group_of_a_wrapper_is_where_torch_has_it(wrapper):
    assert groups.ELSEWHERE[wrapper.__name__] == position_of_group(wrapper.__init__)


def test_every_collective_of_torch_is_known():
    """Functions that take or make a group but are not collectives: point to point, queries, the end, and calls of some
    ranks."""
    public = {name for name, value in vars(dist).items() if type(value) is FunctionType and name[0] != "_"}
    takes_group = {name for name in public if position_of_group(getattr(dist, name)) != groups.NO_GROUP}
    others = {name for name in takes_group if name.startswith(("get_", "send", "recv", "isend", "irecv"))}

    assert takes_group - others - {"destroy_process_group", "set_timeout", "shrink_group"} <= groups.GROUP_AT.keys()


def test_each_name_is_found_by_a_quick_search():
    for name in (*groups.GROUP_AT, *groups.ELSEWHERE):
        assert any(stem in name for stem in foreseeing._STEMS), name


@pytest.mark.parametrize("code", ["pass", "x = 1\n" * 50, "rank, dist.get_rank()", "x = dist.all_reduce(x)"])
def test_most_cells_are_not_even_parsed(code, monkeypatch):
    def parse(code: str) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(foreseeing, "parse_cell", parse)

    assert foresee_on("all", code) == []
    with pytest.raises(AssertionError, match="parsed"):
        foresee_on("all", f"{code}; dist.barrier(), rank")


def test_a_cell_on_which_the_rank_has_no_bearing_is_read_once(monkeypatch):
    read: list[int | None] = []

    class Counting(statements.Reader):
        def __init__(self, rank: int | None, world_size: int, local_rank: int | None = None) -> None:
            read.append(rank)
            super().__init__(rank, world_size, local_rank)

    monkeypatch.setattr(foreseeing, "Reader", Counting)

    assert foresee_on("all", "for x in xs:\n    if rank == 0: print(x)\n    dist.all_reduce(x)") == []
    assert read == [None]
    assert foresee_on("all", "if rank == 0: dist.barrier()") == [alone("line 1")]
    assert read == [None, None, 0, 1, 2, 3]


def test_the_local_rank_is_the_one_of_the_host():
    """The ranks are on two hosts with two ranks each."""

    def on_two_hosts(code: str) -> list[str]:
        return foreseeing.foresee(code, range(4), 4, local_rank=lambda rank: rank % 2)

    assert on_two_hosts("if local_rank == 0: dist.barrier()") == [
        "line 1: dist.barrier runs on ranks 0,2 only; ranks 1,3 do not take part and are waited for"
    ]
    assert on_two_hosts("if local_rank < 2: dist.barrier()") == []


@pytest.mark.parametrize(
    "code",
    [
        "\0",
        "(" * 500,
        "rank" + " + 1" * 600,
        "rank" + " + 1" * 100_000,
        "f = lambda g: lambda: g(g)\nf(f)()",
        "def f(): f()\nf()",
        "".join(f"def f{n + 1}():\n    f{n}()\n    f{n}()\n" for n in range(30)) + "f30()",
        "".join(f"f{n + 1} = lambda: (f{n}(), f{n}())\n" for n in range(30)) + "f30()",
        "x = 9 ** 9 ** 9 ** 9, 1 << 1000000000000, int('9' * 5000)",
        "x = [0] * 1000000000000000, 'x' * 1000000000000000",
        "x = max(range(1000000000000000))",
        "x = (0, 1)[rank], (0, 1)[-3]",
        "for _ in range(1000000000000000000000000000000): dist.barrier()",
        "f(*a, **b); (lambda x, /, y=1, *z, k, **w: x)(*a, **b)",
        "(lambda: 0)(1, 2, 3, c=4)",
        "a, *b = c = d.e = f[0] = 1, 2\ndel a, d.e, f[0]",
    ],
)
def test_no_cell_stops_it(code):
    assert foresee_on("all", code + "\nif rank < 4: dist.barrier()\n") == []


def test_a_warning_about_an_escape_is_left_to_the_rank():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        assert foresee_on("0", r"x = '\d'; dist.barrier()") != []
    assert caught == []


@pytest.mark.processes
def test_it_imports_no_torch():
    code = "import sys, ddp_notebook.run.lint.warnings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


def test_where_a_rank_has_died_it_is_to_be_healed():
    code = "dist.all_reduce(x)\ng = dist.new_group([0, 2])\ndist.barrier(group=g)"
    assert foresee(code, [0, 2], 3, gone=[1]) == [
        "line 1: dist.all_reduce needs all 3 ranks, and rank 1 died. %ddp_heal replaces dead ranks",
        "line 2: dist.new_group must be called by all 3 ranks, and rank 1 died. %ddp_heal replaces dead ranks",
    ]
    [other] = foresee("dist.barrier()", [0], 3, gone=[])
    assert other.endswith("Use a group of these ranks (group=...), or run it on all")


def test_a_parser_that_fails_does_not_fail_the_cell(monkeypatch):
    """Python 3.11 raises SystemError if another `ast.parse` runs inside or during one."""
    code = "if rank == 0:\n    dist.barrier()"

    def parse_too(phase: str, _: dict[str, int]) -> None:
        gc.disable()
        ast.parse("[" * 9 + "]" * 9)
        gc.enable()

    threshold = gc.get_threshold()
    gc.callbacks.append(parse_too)
    gc.set_threshold(5)
    try:
        warned = foresee(code, range(2), 2)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(parse_too)
    assert warned in ([], foresee(code, range(2), 2))
