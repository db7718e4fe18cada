"""Algorithms on 2, 3 and 4 real ranks: results compared with NumPy, and moved bytes compared with formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.algorithms.plans import ALGORITHMS
from ddp_notebook.lessons.algorithms.stepping import Stepper

EXAMPLES = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def chunked(draw: st.DrawFn, world_size: int) -> tuple[list[int], dict[int, list[float]], str]:
    """Draw the sizes of the chunks, which may be empty, and whole numbers for each rank."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size).filter(sum))
    dtype = draw(st.sampled_from(["float32", "float64", "int32", "int64"]))
    numbers = st.lists(st.integers(-1000, 1000), min_size=sum(sizes), max_size=sum(sizes))
    return sizes, {rank: [float(x) for x in draw(numbers)] for rank in range(world_size)}, dtype


def by_hand(name: str, sizes: list[int], inputs: dict[int, list[float]]) -> dict[int, np.ndarray]:
    """Return the expected result of each rank, computed without the lessons."""
    data = np.array([inputs[rank] for rank in sorted(inputs)])  # (N, elements)
    ends = np.cumsum(sizes)
    if name == "ring all_gather":
        owner = np.repeat(np.arange(len(sizes)), sizes)  # (elements,) rank whose chunk contains each element
        return dict.fromkeys(inputs, data[owner, np.arange(data.shape[1])])
    total = data.sum(axis=0)
    if name == "ring reduce_scatter":
        return {rank: total[ends[rank] - sizes[rank] : ends[rank]] for rank in inputs}
    return dict.fromkeys(inputs, total)


def sent_in_steps(name: str, sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return the sum of the chunk sizes that each step sends, computed from the rules that the lesson prints."""
    n = len(sizes)
    links: dict[tuple[int, int], int] = {}

    def add(i: int, j: int, size: int) -> None:
        if size:
            links[i % n, j % n] = links.get((i % n, j % n), 0) + size

    for i in range(n):
        if name == "ring all_reduce":
            for s in range(n - 1):
                add(i, i + 1, sizes[(i - s) % n] + sizes[(i + 1 - s) % n])
        elif name == "ring all_gather":
            for s in range(n - 1):
                add(i, i + 1, sizes[(i - s) % n])
        elif name == "ring reduce_scatter":
            for s in range(n - 1):
                add(i, i + 1, sizes[(i - s - 1) % n])
        elif name == "naive all_reduce":
            for s in range(1, n):
                add(i, i + s, sum(sizes))
        elif name == "parameter server" and i:
            add(i, 0, sum(sizes))
            add(0, i, sum(sizes))
        elif name == "tree all_reduce" and i:  # 1 and 3 to their left neighbour, then 2 to 0; and back down
            add(i, {1: 0, 2: 0, 3: 2}[i], sum(sizes))
            add({1: 0, 2: 0, 3: 2}[i], i, sum(sizes))
    if name == "halving and doubling":
        blocks = sizes if n != 3 else [sizes[0], sizes[1] + sizes[2]]
        if n == 4:
            for i in range(4):  # with i xor 2 the half that is not mine, and back the kept half; with i xor 1 one block
                half, pair = [2, 3] if i < 2 else [0, 1], [0, 1] if i < 2 else [2, 3]
                add(i, i ^ 2, sum(blocks[b] for b in half + pair))
                add(i, i ^ 1, sum(blocks[b] for b in pair))
        else:
            for i in range(2):
                add(i, i ^ 1, blocks[0] + blocks[1])
            if n == 3:
                add(2, 0, sum(sizes))
                add(0, 2, sum(sizes))
    return links


@pytest.mark.parametrize("name", ALGORITHMS)
@EXAMPLES
@given(data=st.data())
def test_an_algorithm_matches_numpy_and_the_theoretical_traffic(ranks, name, data):
    sizes, inputs, dtype = data.draw(chunked(ranks))
    stepper = Stepper(name, inputs=inputs, sizes=sizes, dtype=dtype)

    result = stepper.result()

    for rank, wanted in by_hand(name, sizes, inputs).items():
        assert result[rank].dtype == dtype
        assert np.array_equal(result[rank], wanted), rank
    item = np.dtype(dtype).itemsize
    sent = {link: size * item for link, size in sent_in_steps(name, sizes).items()}
    assert stepper.bytes_moved == sent, "as the session has recorded its sends"
    assert stepper.theory() == sent
    assert stepper.taken == stepper.steps == plans.steps(name, ranks)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_agrees_with_torchs_own_call(ranks, name):
    sizes = [3, 1, 2, 4][:ranks]
    inputs = {rank: [float(rank * 7 + at) for at in range(sum(sizes))] for rank in range(ranks)}
    stepper = Stepper(name, sizes=sizes, inputs=inputs)
    assert stepper.agrees
    for rank, values in stepper.real().items():
        assert np.array_equal(values, by_hand(name, sizes, inputs)[rank])


def test_a_ring_moves_2_times_n_minus_1_nth_of_the_data_per_rank(ranks):
    stepper = Stepper("ring all_reduce", nbytes=48_000).play()
    assert set(stepper.bytes_moved.values()) == {2 * (ranks - 1) * 48_000 // ranks}
    assert len(stepper.bytes_moved) == ranks


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_step_tells_who_has_contributed(ranks, name):
    """Rank r has multiples of 10^r, so the digits of each number show the ranks whose data it contains."""
    stepper = Stepper(name, elements=ranks)  # one element per chunk
    stepper.play()
    assert len(stepper.states) == stepper.steps + 1
    for state in stepper.states:
        for rank, chunks in state.chunks.items():
            for at, chunk in enumerate(chunks):
                digits = f"{int(chunk[0]):04d}"
                of = {3 - place for place, digit in enumerate(digits) if digit != "0"}
                assert of == set(state.who[rank][at]), (state.rule, rank, at)
