"""Every collective on 2, 3 and 4 real ranks, compared with an independent NumPy computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp_notebook
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.collectives import theory
from ddp_notebook.lessons.collectives.explorer import Explorer, Happened
from tests.lessons.test_algorithms import EXAMPLES

OPS = [op for op in theory.OPS if op != "barrier"]
REDUCE = {
    "SUM": lambda a: a.sum(axis=0),
    "PRODUCT": lambda a: a.prod(axis=0),
    "MIN": lambda a: a.min(axis=0),
    "MAX": lambda a: a.max(axis=0),
    "AVG": lambda a: a.mean(axis=0),
    "BAND": lambda a: np.bitwise_and.reduce(a.astype(np.int64), axis=0),
    "BOR": lambda a: np.bitwise_or.reduce(a.astype(np.int64), axis=0),
    "BXOR": lambda a: np.bitwise_xor.reduce(a.astype(np.int64), axis=0),
}


def by_hand(explorer: Explorer) -> dict[int, np.ndarray]:
    """Return the specified results, computed without the lessons."""
    call, inputs = explorer.call, explorer.inputs
    ranks, root = call.ranks, call.root
    size = len(ranks)
    if call.op in ("reduce", "all_reduce", "reduce_scatter"):
        whole = REDUCE[call.reduce_op](np.array([inputs[rank] for rank in ranks]))
        if call.op == "reduce":
            return {root: whole}
        if call.op == "all_reduce":
            return dict.fromkeys(ranks, whole)
        return dict(zip(ranks, whole.reshape(size, -1), strict=True))
    if call.op in ("send/recv", "isend/irecv"):
        return {root: np.array(inputs[root]), call.peer: np.array(inputs[root])}
    if call.op == "broadcast":
        return dict.fromkeys(ranks, np.array(inputs[root]))
    if call.op in ("gather", "all_gather"):
        whole = np.array([inputs[rank] for rank in ranks]).reshape(-1)
        return {rank: whole if call.op == "all_gather" or rank == root else np.array([]) for rank in ranks}
    if call.op == "scatter":
        return dict(zip(ranks, np.array(inputs[root]).reshape(size, -1), strict=True))
    ends = np.cumsum([0, *call.chunk_sizes])  # all_to_all
    return {
        rank: np.concatenate([inputs[src][ends[at] : ends[at + 1]] for src in ranks]) for at, rank in enumerate(ranks)
    }


@st.composite
def calls(draw: st.DrawFn, world_size: int, op: str) -> dict[str, Any]:
    members = list(range(world_size))
    if world_size > 2 and op not in theory.POINT_TO_POINT and draw(st.booleans()):
        members = sorted(draw(st.permutations(members))[:2])
    dtype = draw(st.sampled_from(theory.DTYPES))
    sizes: Any = draw(st.integers(1, 4))
    if op == "all_to_all" and draw(st.booleans()):
        sizes = draw(st.lists(st.integers(0, 3), min_size=len(members), max_size=len(members)).filter(sum))
    asked: dict[str, Any] = {
        "op": op,
        "dtype": dtype,
        "sizes": sizes,
        "group": members,
        "root": draw(st.sampled_from(members)),
    }
    call = Explorer(**asked).call
    low = 0 if dtype == "uint8" else -3
    asked["inputs"] = {
        rank: draw(st.lists(st.integers(low, 3), min_size=call.input_size(rank), max_size=call.input_size(rank)))
        for rank in range(world_size)
    }
    return asked


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
@EXAMPLES
@given(data=st.data())
def test_a_collective_gives_what_numpy_says(ranks, op, data):
    asked = data.draw(calls(ranks, op))
    for reduce_op in theory.legal_reduce_ops(asked["dtype"]) if op in theory.REDUCING else ("SUM",):
        explorer = Explorer(**{**asked, "reduce_op": reduce_op})

        result = explorer.run()

        for rank, wanted in by_hand(explorer).items():
            assert result[rank].dtype == asked["dtype"] or not len(wanted)
            slack = 1e-2 if asked["dtype"] == "float16" else 1e-5
            assert np.allclose(result[rank], wanted, rtol=slack), (reduce_op, rank)
        assert explorer.agrees, reduce_op


def test_a_prediction_is_marked_cell_by_cell(ranks):
    explorer = Explorer("all_reduce", inputs={rank: [rank + 1, 10] for rank in range(ranks)})
    total = sum(range(1, ranks + 1))
    explorer.predict({0: [total, 10 * ranks], 1: [total, 10]})
    with pytest.raises(UsageError, match=r"^the collective was not run yet: call explorer\.run\(\)$"):
        explorer.right  # noqa: B018

    explorer.run()

    assert explorer.right[0] == [True, True]
    assert explorer.right[1] == [True, False]
    if ranks > 2:
        assert explorer.right[2] == [False, False], "nothing was predicted"
    assert repr(explorer).endswith(f"run, 3 of {2 * ranks} cells right>")


def test_all_leave_a_barrier_when_the_last_one_has_come(ranks):
    explorer = Explorer("barrier", inputs={rank: [150 if rank == ranks - 1 else 0] for rank in range(ranks)})
    left = explorer.run()
    assert explorer.agrees and all(values[0] >= 150 for values in left.values()), left


def test_a_barrier_is_judged_correctly_if_a_rank_starts_late(ranks):
    """Rank 0 leaves the first barrier 100 ms after the others, as on a busy machine."""
    session = ddp_notebook.current()
    assert session is not None
    session.run(
        "import time\n"
        "plain, is_first = dist.barrier, True\n"
        "def late(*args, **kwargs):\n"
        "    global is_first\n"
        "    plain(*args, **kwargs)\n"
        "    if is_first and rank == 0: time.sleep(0.1)\n"
        "    is_first = False\n"
        "dist.barrier = late"
    )
    last = session.world_size - 1
    explorer = Explorer("barrier", inputs={rank: [150 if rank == last else 0] for rank in range(last + 1)})
    explorer.predict({rank: [150] for rank in range(last + 1)})
    left = explorer.run()
    session.run("dist.barrier = plain")
    assert explorer.agrees and all(values[0] >= 150 for values in left.values()), left
    assert all(all(marks) for marks in explorer.right.values())


def test_leaving_a_barrier_early_is_no_barrier():
    call = theory.CollectiveCall(op="barrier", world_size=2, sizes=(1,))
    assert theory.agree(call, np.array([80.0]), np.array([300.0])) == [True]
    assert theory.agree(call, np.array([80.0]), np.array([50.0])) == [False]
    assert theory.is_right(call, np.array([300.0]), np.array([300.0]), np.array([80.0])) == [False]


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "kind", "words"),
    [
        ("all_reduce", "operation", "calls broadcast(float32[4], root 0). Nothing was sent"),
        ("all_reduce", "size", "calls all_reduce(SUM, float32[5]). Nothing was sent"),
        ("all_to_all", "size", "4 bytes less than it receives. Nothing was sent"),
        ("broadcast", "dtype", "calls broadcast(int32[4], root 0). Nothing was sent"),
        ("broadcast", "root", "calls broadcast(float32[4], root 1). Nothing was sent"),
        ("all_gather", "missing rank", "waiting in all_gather"),
    ],
)
def test_wrong_use_raises_an_error_and_leaves_the_group_usable(ranks, op, kind, words):
    explorer = Explorer(op)
    happened = explorer.wrong(kind)
    assert words in happened.message
    assert happened.rank == ranks - 1 and f"if rank == {ranks - 1}:" in happened.code
    assert happened.seconds < 5
    explorer.run()
    assert explorer.agrees


def test_a_message_of_another_type_is_told(ranks):
    """gloo itself checks neither the size nor the type of a message."""
    explorer = Explorer("send/recv", inputs={0: [1.0, 2.0]})
    happened = explorer.wrong("dtype")
    assert (
        "rank 0 sends 2 float32 (8 bytes), rank 1 receives 2 int32 (8 bytes). No tensor was changed" in happened.message
    )
    explorer.run()
    assert explorer.agrees


def test_what_nobody_notices_is_shown_by_its_values():
    values = {0: np.array([1.0, 2.0]), 1: np.array([1065353216, 1073741824])}
    happened = Happened(
        kind="dtype",
        rank=1,
        code="",
        error="",
        message="",
        by_rank={},
        values=values,
        seconds=0.1,  # between hosts
    )
    assert repr(happened) == (
        "wrong dtype on rank 1, after 0.1 s: no error was raised: rank 0: [1.0, 2.0]; rank 1: [1065353216, 1073741824]"
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"op": "allreduce"}, "op must be one of broadcast, reduce, "),
        ({"reduce_op": "BAND"}, "reduce_op for float32 must be one of SUM, PRODUCT, MIN, MAX, AVG, got BAND"),
        ({"op": "broadcast", "root": 7}, "root 7 is not in the group of ranks [0, 1"),
        ({"sizes": [1, 2]}, "all_reduce needs the same size on all ranks; only all_to_all"),
        ({"dtype": "int32", "inputs": {0: [0.5], 1: [1]}}, "inputs of int32 must be whole numbers from"),
        ({"inputs": {9: [1]}}, "rank 9 does not exist; the ranks are 0 to "),
        ({"sizes": 100}, "a rank must have at most 64 elements, got 100: pass smaller sizes"),
    ],
)
def test_what_cannot_be_says_so(ranks, asked, words):
    with pytest.raises(UsageError) as caught:
        Explorer(**{"op": "all_reduce", **asked})
    assert words in str(caught.value)
