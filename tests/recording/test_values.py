"""Recorded values of an operation's tensors, compared with plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ddp_notebook.lessons.collectives.theory import HAS_LISTS_TO_ALL
from ddp_notebook.observe.views import Collective, Preview
from ddp_notebook.records.schema import FIRST_BYTES, SAMPLE
from ddp_notebook.run.cells.cell_options import FULL_BYTES, what_to_record

# A tensor of each rank, from its generator `g`. The second ones have more elements than are inspected.
SMALL = {
    "float32": "torch.randn(7, 5, generator=g)",
    "float64": "torch.randn(3, 4, 5, generator=g, dtype=torch.float64)",
    "float16": "torch.randn(40, generator=g).half()",
    "bfloat16": "torch.randn(40, generator=g).bfloat16()",
    "int64": "torch.randint(-(2**40), 2**40, (9,), generator=g)",
    "int32": "torch.randint(-9, 9, (64,), generator=g, dtype=torch.int32)",
    "int8": "torch.randint(-9, 9, (200,), generator=g, dtype=torch.int8)",
    "uint8": "torch.randint(0, 99, (5,), generator=g, dtype=torch.uint8)",
    "bool": "torch.rand(50, generator=g) > 0.5",
    "empty": "torch.empty(0, 3)",
    "0-dim": "torch.randn((), generator=g)",
    "transposed": "torch.randn(6, 4, generator=g).t()",
    "channels last": "torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last)",
    "requires_grad": "torch.randn(8, generator=g, requires_grad=True)",
    "of a graph": "torch.randn(8, generator=g, requires_grad=True) * 2",
    "parameter": "torch.nn.Parameter(torch.randn(8, generator=g))",
    "nan and inf": "torch.tensor([1.0, float('nan'), 3.0, float('inf'), -float('inf'), float('nan')])",
    "only nan": "torch.full((3,), float('nan'))",
    "nan in bfloat16": "torch.tensor([float('nan'), 2.0]).bfloat16()",
    "as many as are looked at": f"torch.randn({SAMPLE}, generator=g)",
}
LARGE = {
    "one more": f"torch.randn({SAMPLE + 1}, generator=g)",
    "matrix": "torch.randn(300, 200, generator=g)",
    "bfloat16 matrix": "torch.randn(300, 200, generator=g).bfloat16()",
    "transposed matrix": "torch.randn(300, 200, generator=g).t()",
    "thin": "torch.randn(20_000, 2, generator=g).t()",
    "bool": "torch.rand(5000, generator=g) > 0.5",
    "with one nan": "torch.where(torch.arange(3000) == 0, float('nan'), torch.randn(3000, generator=g))",
}
COMPLEX = {
    "complex64": "torch.randn(20, generator=g, dtype=torch.complex64)",
    "complex128": "torch.randn(20, generator=g, dtype=torch.complex128)",
}
_SET_UP = """
import warnings
warnings.simplefilter("ignore")
g = torch.Generator().manual_seed(17 + rank)
def flat(*tensors):
    return [one for tensor in tensors for one in tensor.detach().reshape(-1).tolist()]
def spoil(*tensors):
    for tensor in tensors: tensor.detach().fill_(1)
"""


@pytest.fixture(scope="module")
def ranks(session) -> Any:
    session.run(_SET_UP, quiet=True)
    return session


STRETCH = 32  # adjacent elements in a sample


def calls_of(session: Any, code: str, op: str, **record: Any) -> list[list[Any]]:
    """Run a cell. Return its calls of `op`, by rank."""
    session.run(code, quiet=True, record=what_to_record(**record))
    recording = session.recording
    cell = int(recording.rows("call")["cell"].max())
    return [list(recording.collectives(op, rank=rank, cell=cell)) for rank in range(session.world_size)]


def _numbers(values: list[Any]) -> list[float]:
    return [abs(one) if isinstance(one, complex) else float(one) for one in values]


def check(seen: Preview | None, values: list[Any], itemsize: int, *, is_sample: bool = False) -> None:
    """Check the preview of tensors with these elements."""
    assert seen is not None
    assert seen.numel == len(values)
    first = values[: FIRST_BYTES // itemsize][: STRETCH if is_sample else None]
    assert repr(seen.first.tolist()) == repr(first), "the first elements, bit by bit"
    numbers = _numbers(values)
    finite = [one for one in numbers if not math.isnan(one)]
    nans, infs = len(numbers) - len(finite), sum(map(math.isinf, numbers))
    assert seen.is_sample == is_sample
    if is_sample:
        assert len(first) < seen.looked_at <= SAMPLE
        assert {seen.low, seen.high} <= set(finite), "elements that are there"
        spread = np.nanstd(numbers)
        assert seen.low < np.nanmean(numbers) - spread / 2 and seen.high > np.nanmean(numbers) + spread / 2
        assert abs(seen.mean - np.nanmean(numbers)) < 6 * spread / math.sqrt(seen.looked_at)
        assert (seen.nans, seen.infs) == (nans, infs), "these are among the first ones"
        return
    assert (seen.looked_at, seen.nans, seen.infs) == (len(values), nans, infs)
    if not finite:
        assert math.isnan(seen.low) and math.isnan(seen.high) and math.isnan(seen.mean)
        return
    expected = [min(finite), max(finite), sum(finite) / len(finite)]
    assert [seen.low, seen.high, seen.mean] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def _pairs(calls: list[Collective]) -> Iterator[Collective]:
    """Every operation is done twice: the first time to see its result."""
    assert len(calls) % 2 == 0
    yield from calls[1::2]


def _in_place(session: Any, kinds: dict[str, str], how: str, operation: str, op: str) -> dict[str, list[Any]]:
    """Run `operation` on `x` of each kind. Return by kind, for each rank, the call and the values of `x` before and
    after."""
    made = "\n".join(f"    {kind!r}: lambda: {code}," for kind, code in kinds.items())
    code = f"""
makers, seen = {{
{made}
}}, {{}}
with torch.no_grad():
    for kind in makers:
        state = g.get_state()
        for again in range(2):
            g.set_state(state)
            with torch.enable_grad(): x = makers[kind]()
            before = before if again else flat(x)
            work = {operation}
            if work is not None: work.wait()
            after = after if again else flat(x)
        spoil(x)
        seen[kind] = before, after, x.element_size()
"""
    calls = calls_of(session, code.replace("HOW", how), op)
    told = session["seen"]
    return {
        kind: [(call, *told[rank][kind]) for rank, call in enumerate(both)]
        for kind, both in zip(kinds, zip(*map(_pairs, calls), strict=True), strict=True)
    }


_ALL_REDUCE = "dist.all_reduce(x, async_op=HOW)"


@pytest.fixture(scope="module", params=["False", "True"], ids=["sync", "async"])
def reduced(request, ranks) -> dict[str, list[Any]]:
    return _in_place(ranks, SMALL, request.param, _ALL_REDUCE, "all_reduce")


@pytest.mark.parametrize("kind", SMALL)
def test_all_reduce(reduced, kind):
    for call, before, after, itemsize in reduced[kind]:
        check(call.input, before, itemsize)
        check(call.output, after, itemsize)


@pytest.fixture(scope="module")
def sampled(ranks) -> dict[str, list[Any]]:
    return _in_place(ranks, LARGE, "False", _ALL_REDUCE, "all_reduce")


@pytest.mark.parametrize("kind", LARGE)
def test_of_large_ones_a_sample(sampled, kind):
    for call, before, after, itemsize in sampled[kind]:
        check(call.input, before, itemsize, is_sample=True)
        check(call.output, after, itemsize, is_sample=True)


@pytest.mark.parametrize(
    "x",
    [
        "torch.full((4,), 0x7FA00000, dtype=torch.int32).view(torch.float32)",  # NaN that signal
        "torch.full((4,), torch.finfo(torch.float64).max, dtype=torch.float64)",  # their sum overflows
        "torch.full((4,), 1e308 + 1e308j, dtype=torch.complex128)",
    ],
)
def test_no_warning_of_numpys_comes_from_values(ranks, x, capsys):
    ranks.run("import warnings; warnings.simplefilter('always')", quiet=True)
    calls_of(ranks, f"x = {x}\ndist.group.WORLD.broadcast(x, 0).wait()", "broadcast")
    ranks.run("pass")  # shows the output after the cell
    assert capsys.readouterr().err == ""


def test_complex_ones_by_their_modulus(ranks):
    broadcast = "dist.group.WORLD.broadcast(x, 0)"  # `dist.broadcast` sends pairs of real numbers
    for kind, by_rank in _in_place(ranks, COMPLEX, "False", broadcast, "broadcast").items():
        for call, before, after, itemsize in by_rank:
            assert call.dtype == kind
            check(call.input, before, itemsize)
            check(call.output, after, itemsize)


def test_complex_ones_as_pairs_where_torch_sends_pairs(ranks):
    code = "x = torch.tensor([1 + 2j, 3 - 4j])\ndist.all_reduce(x)\nspoil(x)"
    for (call,) in calls_of(ranks, code, "all_reduce"):
        assert (call.dtype, call.shapes) == ("float32", ((2, 2),))
        check(call.input, [1.0, 2.0, 3.0, -4.0], 4)
        check(call.output, [2.0, 4.0, 6.0, -8.0], 4)


def test_of_sparse_ones_the_values(ranks):
    code = """
seen = []
for _ in range(2):
    x = torch.sparse_coo_tensor([[rank, 5]], [1.5, 2.0 + rank], (10,)).coalesce()
    before = flat(x.values())
    dist.all_reduce(x)
    after = flat(x.coalesce().values())
    seen = before, after
    x._values().fill_(1)
"""
    for calls, (before, after) in zip(calls_of(ranks, code, "all_reduce"), ranks["seen"].values(), strict=True):
        for side, values in ((calls[-1].input, before), (calls[-1].output, after)):
            assert (side.numel, side.looked_at) == (10, len(values))
            assert side.first.tolist() == values
            assert (side.low, side.high) == (min(values), max(values))


# For lists: input, output, and the call. Both are functions, so that each pass starts with new tensors.
LISTS = {
    "all_gather": ("[torch.randn(3, generator=g)]", "[torch.empty(3), torch.empty(3)]", "dist.all_gather(out, x[0])"),
    "all_gather_single": (
        "[torch.randn(3, generator=g)]",
        "[torch.empty(6)]",
        "dist.all_gather_into_tensor(out[0], x[0])",
    ),
    "all_to_all": (
        "[torch.randn(3, generator=g), torch.randn(3, generator=g)]",
        "[torch.empty(3), torch.empty(3)]",
        "dist.all_to_all(out, x)",
    ),
    "all_to_all_single": ("[torch.randn(4, generator=g)]", "[torch.empty(4)]", "dist.all_to_all_single(out[0], x[0])"),
    "scatter": (
        "[torch.randn(3, generator=g), torch.randn(3, generator=g)] if rank == 1 else []",
        "[torch.empty(3)]",
        "dist.scatter(out[0], x or None, src=1)",
    ),
    "gather": (
        "[torch.randn(3, generator=g)]",
        "[torch.empty(3), torch.empty(3)] if rank == 0 else []",
        "dist.gather(x[0], out or None, dst=0)",
    ),
    "reduce_scatter": (
        "[torch.randn(3, generator=g), torch.randn(3, generator=g)]",
        "[torch.empty(3)]",
        "dist.reduce_scatter(out[0], x)",
    ),
    "reduce_scatter_single": (
        "[torch.randn(6, generator=g)]",
        "[torch.empty(3)]",
        "dist.reduce_scatter_tensor(out[0], x[0])",
    ),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("op", [op for op in LISTS if op != "all_to_all" or HAS_LISTS_TO_ALL])
def test_lists(ranks, op, is_async):
    given, comes, call = LISTS[op]
    again = call[:-1] + ", async_op=True)" if is_async else call
    code = f"""
x = {given}
before, kept = flat(*x), [one.clone() for one in x]
for n in range(2):
    out = {comes}
    work = {again}
    if work is not None: work.wait()
    if n == 0: after, x = flat(*out), kept
spoil(*x, *out)
seen = before, after
"""
    by_rank = calls_of(ranks, code, op)
    for calls, (before, after) in zip(by_rank, ranks["seen"].values(), strict=True):
        for one in calls:
            assert one.is_async == is_async
            for side, values in ((one.input, before), (one.output, after)):
                if values:
                    check(side, values, 4)
                else:
                    assert side is None


def test_of_a_long_list_the_first_eight(ranks):
    code = """
pair = dist.new_group([0, 1])
x = [torch.full((2,), float(at)) for at in range(10)]
with dist._coalescing_manager(group=pair):
    for one in x: dist.all_reduce(one, group=pair)
"""
    for (call,) in calls_of(ranks, code, "all_reduce_coalesced"):
        assert (call.input.numel, call.input.looked_at, call.input.high) == (20, 16, 7.0)
        assert call.input.is_sample
        assert call.output.first.tolist() == [2.0 * (at // 2) for at in range(16)]


@pytest.mark.parametrize("prefix", ["", "i"])
def test_send_and_receive(ranks, prefix):
    code = f"""
x = torch.randn(5, generator=g)
seen = flat(x)
work = dist.{prefix}send(x, 1) if rank == 0 else dist.{prefix}recv(x, 0)
if {prefix == "i"}: work.wait()
spoil(x)
"""
    sent, _ = calls_of(ranks, code, "send")
    _, received = (list(of) for of in _of_last_cell(ranks, "recv"))
    values = ranks["seen"][0]
    check(sent[-1].input, values, 4)
    check(received[-1].output, values, 4)
    assert sent[-1].output is None and received[-1].input is None


def _of_last_cell(session: Any, op: str) -> list[list[Any]]:
    recording = session.recording
    cell = int(recording.rows("call")["cell"].max())
    return [list(recording.collectives(op, rank=rank, cell=cell)) for rank in range(session.world_size)]


def test_a_barrier_has_no_values(ranks):
    for (call,) in calls_of(ranks, "dist.barrier()", "barrier"):
        assert call.input is None and call.output is None


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bool", "transposed", "0-dim", "empty", "nan and inf"])
def test_whole_tensors_on_demand(ranks, kind):
    code = f"x = {SMALL[kind]}\nbefore = x.tolist()\ndist.broadcast(x, 0)\nafter = x.tolist()\nspoil(x)"
    by_rank = calls_of(ranks, code, "broadcast", tensors="full")
    recording, before, after = ranks.recording, ranks["before"], ranks["after"]
    for rank, (call,) in enumerate(by_rank):
        for side, expected in ((0, before[rank]), (1, after[rank])):
            (whole,) = recording.tensor(rank, call.call, side)
            assert whole.shape == call.shapes[0]
            assert repr(whole.tolist()) == repr(expected)


def test_whole_tensors_up_to_one_megabyte(ranks):
    at_most = FULL_BYTES // 4
    code = f"for n in ({at_most}, {at_most + 1}):\n    x = torch.arange(n, dtype=torch.float32); dist.broadcast(x, 0)"
    by_rank = calls_of(ranks, code, "broadcast", tensors="full")
    recording = ranks.recording
    for rank, (fits, is_larger) in enumerate(by_rank):
        (whole,) = recording.tensor(rank, fits.call, 1)
        assert np.array_equal(whole, np.arange(at_most, dtype=np.float32))
        assert recording.tensor(rank, is_larger.call, 1) == []
        assert is_larger.output.is_sample and fits.output.is_sample


def test_whole_tensors_of_that_cell_only(ranks):
    calls_of(ranks, "dist.broadcast(torch.ones(3), 0)", "broadcast", tensors="full")
    for rank, (call,) in enumerate(calls_of(ranks, "dist.broadcast(torch.ones(3), 0)", "broadcast")):
        assert ranks.recording.tensor(rank, call.call, 0) == []


def test_the_gradient_before_and_after_it_is_averaged(ranks):
    code = """
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
ddp = torch.nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
own, averaged = [], []
for step in range(4):
    x = torch.randn(5, 3, generator=g)
    (mine,) = torch.autograd.grad(plain(x).square().mean(), [plain[0].weight])  # without DDP
    own.append(mine)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    averaged.append(plain[0].weight.grad.clone())
    optimizer.step()
own, averaged = [one.flatten().tolist() for one in own], [one.flatten().tolist() for one in averaged]
"""
    ranks.run(code, quiet=True, record=what_to_record(gradient="0.weight"))
    own, averaged = ranks["own"], ranks["averaged"]
    found = ranks.recording.gradients("0.weight")
    for rank in (0, 1):
        mine = [one for one in found if one.rank == rank]
        assert [one.step for one in mine] == [0, 1, 2, 3]
        for step, one in enumerate(mine):
            assert one.local.first.tolist() == pytest.approx(own[rank][step], rel=1e-4, abs=1e-7)
            assert one.synchronised.first.tolist() == averaged[rank][step]
            mean = np.add(own[0][step], own[1][step]) / 2
            assert averaged[rank][step] == pytest.approx(mean.tolist(), rel=1e-4, abs=1e-7)
    assert ranks.recording.gradients("2.weight") == []


def test_a_gradient_that_was_not_seen_is_told(ranks):
    """After the test above, whose model still exists."""
    for code, name, words in (
        ("pass", "0.wieght", "recorded nothing: the models in DDP have 0.weight, 0.bias, 2.weight, 2.bias"),
        ("pass", "0.weight", "recorded nothing: no backward pass has averaged its gradient"),
        ("del ddp; import gc; gc.collect()", "0.weight", "recorded nothing: no model is in DDP"),
    ):
        result = ranks.run(code, quiet=True, record=what_to_record(gradient=name))
        assert result[1].stderr == f"ddp_notebook: --gradient {name} {words}\n"


def test_no_values_with_meta(ranks):
    ranks.record("meta")
    try:
        for (call,) in calls_of(ranks, "dist.all_reduce(torch.ones(3))", "all_reduce"):
            assert call.input is None and call.output is None and call.shapes == ((3,),)
    finally:
        ranks.record("values")
