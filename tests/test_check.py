"""Consistency of variables across ranks: the fingerprints of each rank, and their comparison in the notebook."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import random
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from ddp_notebook.rank.variables import comparison, summary
from ddp_notebook.rank.variables.summary import fingerprints, samples
from ddp_notebook.run.consistency.agreement import Agreement, compare
from ddp_notebook.run.consistency.differences import Difference, EqualRanks

EACH = "; each rank reads all of loader, without a DistributedSampler"
TAIL = "; random state is the same"  # all ranks of these tests are in one process


def agreement_of(*namespaces: Mapping[str, Any], names=()) -> Agreement:
    """Run both rounds on namespaces that represent ranks. Fingerprints are converted to JSON and back."""
    spaces = dict(enumerate(namespaces))
    found = compare({rank: json.loads(json.dumps(fingerprints(space, names))) for rank, space in spaces.items()}, names)
    if not found.differing_entries:
        return found
    answers = {rank: samples(space, found.differing_entries) for rank, space in spaces.items()}
    return found.with_samples({rank: json.loads(json.dumps(answer)) for rank, answer in answers.items()})


def lines_of(*namespaces: Mapping[str, Any], names=()) -> list[str]:
    """Return the lines of the differing entries."""
    return [line[2:] for line in repr(agreement_of(*namespaces, names=names)).split("\n") if line.startswith("  ")]


def line_of(*values: Any) -> str:
    """Return the line for a variable `x` with these values on the ranks."""
    (line,) = lines_of(*({"x": value} for value in values), names=["x"])
    return line


def same(*values: Any) -> bool:
    return agreement_of(*({"x": value} for value in values), names=["x"]).agrees


def trained(*, steps: int = 2, change: float = 0.0) -> dict[str, Any]:
    """Return the variables after a cell of a tutorial."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        x = torch.randn(6, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loss = None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        next(net.parameters())[3, 1] += change
    loader = DataLoader(TensorDataset(x), batch_size=4)
    return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "x": x, "loss": loss}


# ---- what is compared, and one line if it agrees


@pytest.mark.slow
def test_ranks_that_agree_are_one_line():
    assert repr(agreement_of(*(trained() for _ in range(4)))) == (
        "4 ranks agree: 6 parameters, 3 buffers (91 elements), 31 optimizer entries, 9 scheduler entries, data length, "
        "versions, settings" + TAIL + EACH
    )


def test_one_rank_has_nothing_to_compare():
    assert repr(agreement_of({})) == "1 rank: nothing to compare"
    assert repr(agreement_of()) == "no ranks: nothing to compare"


def test_without_variables_versions_and_settings_are_left():
    found = "2 ranks agree: versions, settings; no modules, optimizers or data were found" + TAIL
    assert repr(agreement_of({"a": 1, "_net": nn.Linear(1, 1)}, {"a": 2, "np": np})) == found


def test_elements_are_counted_in_millions():
    facts = fingerprints({"net": nn.Linear(3000, 1000)}, ["net"])
    assert repr(compare({0: facts, 1: facts})) == "2 ranks agree: 2 parameters (3.0 M elements)"


def test_what_was_not_compared_does_not_agree():
    facts = fingerprints({"net": nn.Linear(30, 10, device="meta")}, ["net"])
    expected = "2 ranks have nothing that can be compared; not compared: 2 meta (net.weight, net.bias)"
    assert repr(compare({0: facts, 1: facts})) == expected


def test_data_of_the_ranks_own_are_compared_only_if_asked_for():
    spaces = [{"x": torch.full((3,), float(rank)), "rank": rank} for rank in range(2)]
    assert agreement_of(*spaces).agrees
    assert lines_of(*spaces, names=["x", "rank"]) == [
        "x: rank 0 and rank 1 differ by up to 1 (relative 1)",
        "rank: 0 on rank 0, 1 on rank 1",
    ]


def test_a_leaf_that_requires_gradients_is_a_parameter():
    assert lines_of(*({"w": torch.full((2,), 0.5 + rank, requires_grad=True)} for rank in (0, 0, 2))) == [
        "w: rank 2 differs from ranks 0-1 by up to 2 (relative 0.8)"
    ]


def test_random_state_may_differ_unless_it_is_asked_for():
    def facts(seed: int, names=()) -> dict[str, Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        return fingerprints({"random": random}, names)

    with torch.random.fork_rng():
        found = compare({rank: facts(rank) for rank in range(2)})
        assert found.agrees
        differ = "differs (as it should where ranks draw their own)"
        assert repr(found).endswith(f"; random state of torch and Python {differ}, of NumPy it is the same")
        drawn = []
        for rank in range(2):  # only torch was seeded: all ranks draw the same batches
            np.random.seed(rank)
            drawn.append({**facts(rank), "random state of torch": facts(0)["random state of torch"]})
        found = compare(dict(enumerate(drawn)))
        assert repr(found).endswith(f"; random state of NumPy and Python {differ}, of torch it is the same")
        asked = compare({rank: facts(rank, ["random"]) for rank in range(2)})
    assert repr(asked).split("\n") == [
        "2 ranks differ in 2 of 3 entries:",
        "  random state of torch: seed 0 on rank 0, seed 1 on rank 1",
        "  random state of Python: rank 0 and rank 1 differ",
        "the rest agrees: random state of NumPy",
    ]


def test_random_may_be_a_variable_too():
    assert lines_of({"random": 1}, {"random": 2}, names=["random"]) == ["random: 1 on rank 0, 2 on rank 1"]


def test_versions_and_settings(monkeypatch):
    before = fingerprints({})
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    after = fingerprints({})
    text = repr(compare({0: before, 1: before, 2: after}))
    assert f"torch version: {before['torch version']['value']} on ranks 0-1, 2.12.1 on rank 2" in text
    assert "cuDNN benchmark: False on ranks 0-1, True on rank 2" in text


# ---- how much differs, and where


def test_which_rank_differs_in_which_entry_and_by_how_much():
    spaces = [trained(), trained(), trained(change=3.1e-4), trained()]
    scale = spaces[0]["net"][0].weight.abs().max().item()
    text = repr(agreement_of(*spaces))
    assert text.split("\n") == [
        "4 ranks differ in 1 of 63 entries:",
        f"  net.0.weight: rank 2 differs from ranks 0-1,3 by up to 0.00031 (relative {3.1e-4 / scale:.1g})",
        "the rest agrees: 5 parameters, 3 buffers (59 elements), 31 optimizer entries, 9 scheduler entries, "
        "data length, versions, settings" + TAIL + EACH,
    ]


def test_optimizers_that_made_another_number_of_steps():
    lines = lines_of(trained(), trained(steps=1), trained())
    assert "optimizer.state[0].step: 2.0 on ranks 0,2, 1.0 on rank 1" in lines
    assert lines_of(trained(), trained(steps=0))[-2:] == [
        "scheduler.last_epoch: 2 on rank 0, 0 on rank 1",
        "scheduler._step_count: 3 on rank 0, 1 on rank 1",
    ]
    assert "optimizer.state[0].step is missing on rank 1" in lines_of(trained(), trained(steps=0))


def test_hyperparameters_and_groups():
    def optimizer(rate: float) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(n))]} for n in (2, 3)]
        made = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        made.param_groups[1]["lr"] = torch.tensor(rate)
        for group in groups:
            group["params"][0].sum().backward()
        made.step()
        return made

    assert lines_of({"sgd": optimizer(0.1)}, {"sgd": optimizer(0.01)}) == [
        "sgd.param_groups[1].lr: 0.1 on rank 0, 0.01 on rank 1"
    ]
    assert {"sgd.state[0].momentum_buffer", "sgd.state[1].momentum_buffer"} <= fingerprints(
        {"sgd": optimizer(0.1)}
    ).keys()


def test_gradient_scalers():
    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale)

    assert lines_of({"scaler": scaler(4.0)}, {"scaler": scaler(2.0)}) == ["scaler.scale: 4.0 on rank 0, 2.0 on rank 1"]


def test_shape_dtype_gradients_and_mode():
    scale = nn.Parameter(torch.tensor(1.0))
    assert lines_of({"scale": scale}, {"scale": nn.Parameter(torch.tensor(1.0), requires_grad=False)}) == [
        "scale: 1.0 on rank 0, 1.0 without requires_grad on rank 1"
    ]
    plain, frozen = nn.Linear(2, 2), nn.Linear(2, 3).double().requires_grad_(False)
    dropout = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Dropout(), nn.Dropout(), nn.Dropout())
    half = copy.deepcopy(dropout)
    for key in "1234":
        half.get_submodule(key).eval()
    assert lines_of({"net": plain, "mlp": dropout}, {"net": frozen.eval(), "mlp": half}) == [
        "net: Linear in train mode on rank 0, Linear in eval mode on rank 1",
        "net.weight: float32 (2, 2) on cpu on rank 0, float64 (3, 2) on cpu without requires_grad on rank 1",
        "net.bias: float32 (2,) on cpu on rank 0, float64 (3,) on cpu without requires_grad on rank 1",
        "mlp: Sequential in train mode on rank 0, Sequential in train mode except 1, 2, 3 and 1 more on rank 1",
    ]


def test_a_difference_that_no_sample_shows():
    x = torch.linspace(-1, 1, 20_000)
    other = x.clone()
    other[1234] += 1e-6
    assert (
        line_of(x, other, x)
        == "x: rank 1 differs from ranks 0,2 in few elements: not in 4096 of 20.0 k elements compared"
    )
    other[1234] = 100.0
    assert line_of(x, other) == (
        "x: rank 0 and rank 1 differ by 99 or more (relative 1e+02; 4096 of 20.0 k elements compared)"
    )
    assert line_of(x, x + 1).endswith(" by 1 or more (relative 0.5; 4096 of 20.0 k elements compared)")


def test_samples_are_the_same_on_all_ranks_and_of_all_columns():
    x = torch.arange(8192.0 * 16).reshape(8192, 16)
    found = samples({"x": x}, ["x"])["x"]
    assert found == samples({"x": x}, ["x"])["x"] == sorted(found)
    assert len(found) == 4096
    assert {value % 16 for value in found} == set(range(16))
    assert samples({"x": torch.tensor([1 + 2j])}, ["x", "x.y", "z"]) == {"x": [1.0, 2.0]}


def test_without_a_second_round_the_bounds_say_how_much():
    facts = [fingerprints({"x": torch.tensor(values)}, ["x"]) for values in ([0.0, 1.0], [0.0, 1.5], [-2.0, 1.0])]
    assert "x: rank 0 and rank 1 differ by 0.5 or more" in repr(compare(dict(enumerate(facts[:2]))))
    assert "x: all 3 ranks differ by 2 or more" in repr(compare(dict(enumerate(facts))))
    with_nan = fingerprints({"x": torch.tensor([float("nan"), 9.0])}, ["x"])
    found = compare({0: facts[0], 1: facts[0], 2: with_nan, 3: facts[1]})
    assert "x: rank 2 and rank 3 differ from ranks 0-1 and from each other; 1 NaN on rank 2" in repr(found)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 1, 2, 1], "rank 2 differs from ranks 0-1,3 by up to 1 (relative 0.5)"),
        ([1, 1, 2, 2, 1], "ranks 2-3 differ from ranks 0-1,4 by up to 1 (relative 0.5)"),
        ([1, 1, 2, 2], "ranks 0-1 and ranks 2-3 differ by up to 1 (relative 0.5)"),
        ([1, 2, 4], "all 3 ranks differ by up to 3 (relative 0.8)"),
        ([1, 1, 4, 0], "rank 2 and rank 3 differ from ranks 0-1 and from each other by up to 3 (relative 0.8)"),
        ([1, 1, 2, 2, 3], "ranks 0-1, ranks 2-3 and rank 4 differ by up to 2 (relative 0.7)"),
    ],
)
def test_sides(values, words):
    assert line_of(*(torch.tensor([float(value), 0.0]) for value in values)) == f"x: {words}"


def test_many_values_are_cut():
    assert line_of(*range(10)) == (
        "x: " + ", ".join(f"{rank} on rank {rank}" for rank in range(6)) + ", other values on ranks 6-9"
    )


def test_nan_infinity_and_zero():
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, 2.0, -4.0])
    assert line_of(x, x, torch.tensor([nan, nan, -4.0])) == "x: rank 2 differs from ranks 0-1; 2 NaN on rank 2"
    assert line_of(x, torch.tensor([nan, 2.5, -4.0])) == (
        "x: rank 0 and rank 1 differ by up to 0.5 (relative 0.1); 1 NaN on rank 1"
    )
    assert line_of(x, torch.tensor([1.0, inf, -4.0])) == "x: rank 0 and rank 1 differ by up to inf"
    assert line_of(torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0])) == (
        "x: rank 0 and rank 1 differ by up to 1 (relative 0.5)"
    )
    assert line_of(x * 0, -x * 0) == "x: rank 0 and rank 1 differ in bits only, such as 0.0 and -0.0"
    assert line_of(torch.tensor(nan), torch.tensor(1.0)) == "x: nan on rank 0, 1.0 on rank 1"
    spaces = [{"x": torch.tensor([nan, 1.0]), "y": x} for _ in range(2)]
    assert repr(agreement_of(*spaces, names=["x", "y"])) == "2 ranks agree: x, y; NaN on all ranks in x"


def test_many_differences_are_cut_and_no_variable_hides_another():
    def space(rank: int) -> dict[str, Any]:
        net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
        for parameter in net.parameters():
            nn.init.constant_(parameter, rank)
        return {"net": net, "loader": DataLoader(TensorDataset(torch.zeros(99 + rank)), batch_size=1)}

    found = agreement_of(*map(space, (0, 1, 1)))
    lines = repr(found).split("\n")
    assert lines[0] == f"3 ranks differ in 43 of {found.compared} entries:"
    assert lines[1] == "  net.0.weight: rank 0 differs from ranks 1-2 by up to 1 (relative 1)"
    assert lines[10:-1] == [
        "  ... and 31 more of net",
        "  loader: 100 batches on ranks 1-2, 99 batches on rank 0",
        "  loader.dataset: 100 items on ranks 1-2, 99 items on rank 0",
        "  loader.sampler: 100 items on ranks 1-2, 99 items on rank 0",
    ]
    assert found.differing_entries == tuple(f"net.{i // 2}.{('weight', 'bias')[i % 2]}" for i in range(9))


def test_many_variables_are_cut_too():
    names = [f"x{i}" for i in range(20)]
    lines = lines_of(*(dict.fromkeys(names, rank) for rank in range(2)), names=names)
    assert lines[11:] == ["x11: 0 on rank 0, 1 on rank 1", "... and of x12, x13, x14, x15, x16, x17, ..."]


def test_a_model_with_other_parameters_agrees_in_type_and_mode():
    def space(rank: int) -> dict[str, Any]:
        net = nn.Linear(1, 1)
        for parameter in net.parameters():
            nn.init.constant_(parameter, rank)
        return {"net": net}

    last = repr(agreement_of(*map(space, (0, 1)), names=["net"])).split("\n")[-1]
    assert last == "the rest agrees: type and mode of net"


# ---- what is not everywhere


def test_a_name_that_a_rank_does_not_have():
    assert lines_of({"x": 1}, {"x": 1}, {}, names=["x", "y"]) == [
        "x is not defined on rank 2",
        "y is not defined on any rank",
    ]


def test_ranks_do_not_differ_in_what_none_of_them_has():
    assert repr(agreement_of({"x": 1}, {"x": 1}, names=["y"])) == "y is not defined on any rank"
    assert repr(agreement_of({"x": 1}, {"x": 1}, names=["x", "y"])).startswith(
        "y is not defined on any rank; 2 ranks agree: "
    )


def test_a_model_that_a_rank_does_not_have_is_one_line():
    assert lines_of({"net": nn.Linear(1, 1)}, {"net": None}, {}) == ["net is on rank 0 only"]
    assert lines_of(trained(), trained(), {})[0] == "net is missing on rank 2"
    assert lines_of({"net": nn.Linear(1, 1)}, {"net": None}, names=["net"]) == [
        "net: Linear in train mode on rank 0, None on rank 1"
    ]


def test_a_layer_that_a_rank_does_not_have():
    assert lines_of(*({"net": nn.Linear(1, 1, bias=bias)} for bias in (True, True, False)))[1:] == [
        "net.bias is missing on rank 2"
    ]


def test_a_second_name_for_a_model_changes_nothing():
    one, other = trained(), trained()
    one["best"] = one["net"]
    assert agreement_of(one, other).agrees


# ---- variables of any kind


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        (1, 1.0, "x: 1 on rank 0, 1.0 on rank 1"),
        ("a", "b", "x: 'a' on rank 0, 'b' on rank 1"),
        ("a b", "a  b", "x: rank 0 and rank 1 differ"),
        ("a" * 1000, "a" * 500 + "b" + "a" * 499, "x: rank 0 and rank 1 differ"),
        (b"a", b"b", "x: b'a' on rank 0, b'b' on rank 1"),
        (None, True, "x: None on rank 0, True on rank 1"),
        ([1, 2], [1, 3], "x: [1, 2] on rank 0, [1, 3] on rank 1"),
        ({3, 1}, {1, 2}, "x: [1, 3] on rank 0, [1, 2] on rank 1"),
        (["a"] * 9, ["a"] * 8 + ["b"], "x: rank 0 and rank 1 differ"),
        ([0.0] * 9, [0.0] * 8 + [0.5], "x: rank 0 and rank 1 differ by up to 0.5 (relative 1)"),
        ([0] * 9, [0] * 10, "x: list int64 (9,) on rank 0, list int64 (10,) on rank 1"),
        ([10**30] * 9, [10**30] * 8 + [1], "x: rank 0 and rank 1 differ"),
        ({"lr": {"a": 1}}, {"lr": {"a": 2}}, "x['lr']['a']: 1 on rank 0, 2 on rank 1"),
        ([[1], [2], Plain(1)], [[1], [3], Plain(1)], "x[1]: [2] on rank 0, [3] on rank 1"),
        (Config(), Config(lr=0.2), "x.lr: 0.1 on rank 0, 0.2 on rank 1"),
        (argparse.Namespace(a=1), argparse.Namespace(a=2), "x.a: 1 on rank 0, 2 on rank 1"),
        (Plain(Plain(1)), Plain(Plain(2)), "x.x.x: 1 on rank 0, 2 on rank 1"),
        (np.arange(3), np.arange(1, 4), "x: rank 0 and rank 1 differ by up to 1 (relative 0.3)"),
        (np.zeros(2), np.zeros(3), "x: ndarray float64 (2,) on rank 0, ndarray float64 (3,) on rank 1"),
        (np.array(["a"]), np.array(["b"]), "x: rank 0 and rank 1 differ"),
        (torch.tensor(2), torch.tensor(3), "x: 2 on rank 0, 3 on rank 1"),
        (torch.tensor(0.1), torch.tensor(0.5), "x: 0.1 on rank 0, 0.5 on rank 1"),
        (torch.tensor(2), torch.tensor(2.0), "x: 2 on rank 0, 2.0 on rank 1"),
        (torch.tensor(2.0), torch.tensor(2.0).double(), "x: 2.0 on rank 0, 2.0 (float64) on rank 1"),
        (torch.tensor(1j), torch.tensor(3j), "x: rank 0 and rank 1 differ by up to 2 (relative 0.7)"),
        (torch.device("cpu"), torch.float16, "x: device(type='cpu') on rank 0, torch.float16 on rank 1"),
        (np.random.default_rng(0), np.random.default_rng(1), "x: rank 0 and rank 1 differ"),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), "x: seed 1 on rank 0, seed 2 on rank 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_kind_of_variable(a, b, line):
    assert line_of(a, b) == line
    assert same(a, copy.deepcopy(a))


def test_sets_have_no_order():
    assert list({0, 8}) != list({8, 0})
    assert same({0, 8}, {8, 0})


def test_what_is_named_and_agrees():
    spaces = [{"config": {"lr": 0.1, "sizes": [1, 2]}, "n": 3, "net": nn.ReLU()} for _ in range(2)]
    assert repr(agreement_of(*spaces, names=["n"])) == "2 ranks agree: n"
    assert repr(agreement_of(*spaces, names=["n", "config"])) == "2 ranks agree: n, config (4 entries)"
    assert repr(agreement_of(*spaces, names=["net"])) == "2 ranks agree: type and mode of net"


def test_an_array_that_is_read_only():
    x = np.arange(3.0)
    x.flags.writeable = False
    assert same(x, np.arange(3.0))
    assert same(x[::-1], np.arange(3.0)[::-1].copy())


def test_long_and_deep_containers():
    deep = [[[[[[1]], "a"]]]]
    assert "not compared: 1 nested too deep" in repr(agreement_of({"x": deep}, {"x": deep}, names=["x"]))
    loop = Plain(None)
    loop.x = loop
    assert lines_of({"x": loop}, {"x": Plain(1)}, names=["x"]) == ["x.x: the Plain around it on rank 0, 1 on rank 1"]
    long = [[i] for i in range(1500)]
    assert repr(agreement_of({"x": long}, {"x": long}, names=["x"])) == (
        "2 ranks agree: x (1001 entries); not compared: 1 after 1000 items (x[1000:])"
    )


def test_very_many_entries(monkeypatch):
    monkeypatch.setattr(comparison, "_MOST_ENTRIES", 10)
    x = [[[i], []] for i in range(5)]
    assert repr(agreement_of({"x": x}, {"x": x}, names=["x"])) == (
        "2 ranks agree: x (10 entries); not compared: 1 after 10 entries (x[...])"
    )


# ---- data


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter([])


class Broken(Dataset[int]):
    def __len__(self) -> int:
        raise OSError("no such file: data.bin")


def test_lengths_of_data_and_the_epoch_of_samplers():
    def space(rank: int) -> dict[str, Any]:
        dataset = TensorDataset(torch.zeros(100))
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=rank)
        sampler.set_epoch(3 - rank)
        return {"dataset": dataset, "loader": DataLoader(dataset, batch_size=10 + rank, sampler=sampler)}

    assert lines_of(space(0), space(1)) == [
        "loader.batch_size: 10 on rank 0, 11 on rank 1",
        "loader.sampler.epoch: 3 on rank 0, 2 on rank 1",
    ]


@pytest.mark.parametrize(
    ("ranks", "parts", "wrong"),
    [
        ([0, 1], 2, ""),
        ([0, 0, 1, 1], 2, ""),  # a model is spread over two ranks each
        ([0, 1], 4, "is 0 on rank 0, 1 on rank 1, so of 4 parts of the data 2 are read by no rank"),
        ([0, 0], 2, "is 0 on ranks 0-1, so of 2 parts of the data 1 is read by no rank: make it"),
        ([0, 0, 2, 2], 4, "is 0 on ranks 0-1, 2 on ranks 2-3, so of 4 parts of the data 2 are read by no rank"),
    ],
)
def test_a_part_of_the_data_that_no_rank_reads(ranks, parts, wrong):
    dataset = TensorDataset(torch.zeros(100))
    spaces = []
    for rank in ranks:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=parts, rank=rank)
        spaces.append({"loader": DataLoader(dataset, batch_size=10, sampler=sampler)})
    agreement = compare({rank: fingerprints(space) for rank, space in enumerate(spaces)})
    assert agreement.agrees and "data length" in repr(agreement)
    assert [wrong in mistake for mistake in agreement.mistakes] == [True] * bool(wrong), agreement
    assert all("loader.sampler.rank is " in mistake for mistake in agreement.mistakes)
    answers = {rank: fingerprints(space) for rank, space in enumerate(spaces)}
    assert not compare(answers, is_whole=False).mistakes  # the other ranks may have different parts


def test_a_loader_of_which_each_rank_reads_everything():
    dataset = TensorDataset(torch.zeros(100))
    space = {
        "loader": DataLoader(dataset, batch_size=10, shuffle=True),
        "part": DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset, num_replicas=2, rank=0)),
    }
    other = {
        **space,
        "part": DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset, num_replicas=2, rank=1)),
    }
    answers = {0: fingerprints(space), 1: fingerprints(other)}
    assert "; each rank reads all of loader, without a DistributedSampler" in repr(compare(answers))
    assert "each rank reads" not in repr(compare(answers, is_whole=False))
    assert "each rank reads" not in repr(compare({0: answers[0]}))


def test_a_part_of_another_variable_is_not_reported_as_missing():
    dataset, model = TensorDataset(torch.zeros(100)), nn.Linear(1, 1)
    inner = {"dataset": dataset, "layer": model}
    outer = {"loader": DataLoader(dataset, batch_size=10), "model": nn.Sequential(model)}
    for names in ([], ["dataset", "layer", "loader", "model"], ["loader", "dataset", "model", "layer"]):
        answers = {0: fingerprints({**outer, **inner}, names), 1: fingerprints(inner, names)}
        found = [str(one) for one in compare(answers).differences]
        assert not any(one.startswith(("dataset", "layer")) and "missing" in one for one in found), found
        assert sum("missing on rank 1" in one or "not defined on rank 1" in one for one in found) == 2, found


def test_a_rank_that_lacks_a_variable_and_its_part_lacks_both():
    dataset = TensorDataset(torch.zeros(100))
    space = {"loader": DataLoader(dataset, batch_size=10), "dataset": dataset}
    answers = {rank: fingerprints(one, ["loader", "dataset"]) for rank, one in enumerate((space, space, {}))}
    found = [str(one) for one in compare(answers).differences]
    assert found == ["loader is not defined on rank 2", "dataset is not defined on rank 2"]


def test_data_without_a_length_and_data_that_break():
    facts = fingerprints({"loader": DataLoader(Stream()), "broken": Broken()})
    assert facts["loader"]["value"] == "DataLoader without a length"
    assert facts["loader.dataset"]["value"] == "Stream without a length"
    assert facts["broken"]["value"] == "unreadable: OSError: no such file: data.bin"
    assert repr(compare({0: facts, 1: facts})).endswith("not compared: 1 unreadable (broken)" + TAIL)
    assert lines_of({"d": Broken()}, {"d": TensorDataset(torch.zeros(2))}) == [
        "d: unreadable: OSError: no such file: data.bin on rank 0, 2 items on rank 1"
    ]


@pytest.mark.parametrize(
    ("kind", "values", "line"),
    [
        ("missing", (None, ""), "a\\x1b[2J is not defined on rank 0"),
        ("value", ("1", None), "a\\x1b[2J is missing on rank 1"),
        ("value", ("1", "1"), "a\\x1b[2J: rank 0 and rank 1 differ"),
        ("value", ("1", "b\x1b"), "a\\x1b[2J: 1 on rank 0, b\\x1b on rank 1"),
    ],
)
def test_control_characters_of_a_name_or_value_are_escaped(kind, values, line):
    parts = tuple(EqualRanks(ranks=(rank,), value=value) for rank, value in enumerate(values))
    assert repr(Difference(entry="a\x1b[2J", kind=kind, parts=parts)) == line


# ---- what cannot be read


class Hostile:
    @property  # type: ignore[misc]  # that it is so strange is the point
    def __class__(self):
        raise RuntimeError("no class")

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __repr__(self):
        raise RuntimeError("no repr")


class Refuses(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # as torch documents it
        raise RuntimeError("waits for other ranks")


class Tagged(torch.Tensor):
    """A tensor subclass, as in torchvision."""


class BrokenState(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self) -> None:
        pass

    def state_dict(self):
        raise KeyError("optimizer")


def test_what_cannot_be_read_is_said_and_breaks_nothing():
    tensors = {
        "meta": torch.zeros(2, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "own": torch.Tensor._make_subclass(Refuses, torch.zeros(2)),
    }
    facts = fingerprints({**tensors, "lazy": nn.LazyLinear(2)}, [*tensors, "lazy"])
    assert {entry: fact.get("skipped") for entry, fact in facts.items()} == {
        "meta": "meta",
        "sparse": "sparse",
        "own": "of class Refuses",
        "lazy": None,
        "lazy.weight": "uninitialized",
        "lazy.bias": "uninitialized",
    }
    objects = {"hostile": Hostile(), "scheduler": BrokenState(), "net": nn.Linear(1, 1), "own": tensors["own"]}
    assert fingerprints(objects)["scheduler"]["value"] == "unreadable: KeyError: 'optimizer'"
    assert {"net", "net.weight"} <= fingerprints(objects).keys()
    assert fingerprints(objects, ["hostile"])["hostile"]["skipped"] == "unreadable"
    assert samples(objects, ["hostile", "own"]) == {}


def test_a_quantized_tensor_is_left_out():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated from torch 2.12 on
        x = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    assert fingerprints({"x": x}, ["x"])["x"]["skipped"] == "quantized"


def test_what_is_known_by_its_repr_only():
    text = repr(agreement_of({"f": len, "g": print}, {"f": len, "g": print}, names=["f", "g"]))
    assert text == "2 ranks agree: f, g; not compared: 2 beyond its repr (f, g)"
    masked = np.ma.masked_array([1, 2], mask=[True, False])
    assert fingerprints({"x": masked}, ["x"])["x"]["skipped"] == "beyond its repr"


def test_a_subclass_that_only_has_a_name_is_compared():
    a, b = (torch.zeros(2).as_subclass(Tagged) for _ in range(2))
    assert same(a, b)
    assert not same(a, b + 1)


# ---- modules around modules


@pytest.fixture
def four_ranks():
    """Make this process rank 1 of a fake group: every operation succeeds without effect."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_ddp_wraps_the_same_parameters(four_ranks):
    net = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel(net)
    found = fingerprints({"net": net, "model": wrapped})
    own = [entry for entry, fact in found.items() if entry[0] in "nm" and fact["kind"] != "within"]
    assert own == ["net", "net.weight", "net.bias", "model"]
    assert found["model"]["value"] == "DistributedDataParallel(Linear) in train mode"
    assert lines_of({"model": wrapped}, {"model": net}) == [
        "model: DistributedDataParallel(Linear) in train mode on rank 0, Linear in train mode on rank 1"
    ]


def test_buffers_that_ddp_has_not_sent_yet(four_ranks):
    spaces = [{"net": nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))} for _ in range(2)]
    spaces[1]["net"].module.running_mean += 1
    why = (
        "net.running_mean may differ: DistributedDataParallel sends buffers of rank 0 at the next forward pass, not "
        "after it"
    )
    found = agreement_of(*spaces)
    assert found.agrees and why in repr(found)
    assert lines_of(*spaces, names=["net"]) == [
        "net.running_mean: rank 0 and rank 1 differ by up to 1 (relative 1)",
        why,
    ]


def test_parameters_that_ddp_does_not_average(four_ranks):
    def space(rank: int) -> dict[str, Any]:
        model: Any = nn.Module()
        model.dense = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        model.expert = nn.Linear(2, 2)
        marked: Any = nn.Linear(2, 2)
        ignoring: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ignoring._ddp_params_and_buffers_to_ignore = ["1.weight"]
        for parameter in (*model.parameters(), *marked.parameters(), *ignoring.parameters()):
            nn.init.zeros_(parameter)
        for parameter in (*model.expert.parameters(), marked.weight, ignoring[1].weight):
            nn.init.constant_(parameter, rank)
        marked.weight.allreduce = False
        return {"model": model, "marked": marked, "ignoring": nn.parallel.DistributedDataParallel(ignoring)}

    spaces = [space(0), space(1)]
    text = repr(agreement_of(*spaces))
    assert text.startswith("2 ranks agree: ") and text.count("\n") == 0
    assert "model.expert.weight, model.expert.bias may differ: outside DistributedDataParallel" in text
    assert "marked.weight may differ: marked as local to the rank" in text
    assert "ignoring.1.weight may differ: ignored by DistributedDataParallel" in text
    nn.init.ones_(spaces[1]["model"].dense.module.weight)
    assert lines_of(*spaces) == ["model.dense.module.weight: rank 0 and rank 1 differ by up to 1 (relative 1)"]


def test_stages_of_a_pipeline_do_not_differ(four_ranks):
    from torch.distributed.pipelining import PipelineStage

    kept = []

    def facts(stage: int, bias: float, names=()) -> dict[str, Any]:
        part = nn.Linear(2, 2 + stage)
        nn.init.constant_(part.weight, stage)
        nn.init.constant_(part.bias, bias)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1 * (1 + stage))
        kept.append(PipelineStage(part, stage, 4, torch.device("cpu")))
        own = {"first": part} if stage == 0 else {"second": part}
        return fingerprints({"part": part, **own, "optimizer": optimizer}, names)

    found = compare({0: facts(0, 0.0), 1: facts(1, 1.0)})
    assert found.agrees, found
    assert "of one pipeline stage (part, part.weight, ...)" in repr(found)
    equal = compare({0: facts(0, 0.0), 1: facts(0, 0.0), 2: facts(1, 1.0), 3: facts(1, 1.0)})
    assert equal.agrees and "2 parameters" in repr(equal), equal
    other = compare({0: facts(0, 0.0), 1: facts(0, 0.5), 2: facts(1, 1.0), 3: facts(1, 1.0)})
    assert [str(one) for one in other.differences] == ["part.bias: rank 0 and rank 1 differ by 0.5 or more"]


def test_compiled_and_checkpointed_modules_keep_parameter_names():
    class OptimizedModule(nn.Module):  # like that of torch.compile, whose import takes seconds
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    class CheckpointWrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

    net = OptimizedModule(nn.Sequential(CheckpointWrapper(nn.Linear(1, 1)), nn.Linear(1, 1)))
    found = fingerprints({"net": net})
    assert [entry for entry in found if entry.startswith("net")] == [
        "net",
        *("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"),
    ]
    assert found["net"]["value"] == "OptimizedModule(Sequential) in train mode"


def test_what_is_sharded_is_described_without_a_checksum(four_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    x = torch.arange(8.0)
    net, old, original = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    fully_shard(net, mesh=mesh)
    flat = FullyShardedDataParallel(old, device_id=torch.device("cpu"))
    shards = FullyShardedDataParallel(original, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW([*net.parameters(), *flat.parameters(), *shards.parameters()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    facts = fingerprints(
        {
            "shard": distribute_tensor(x, mesh, [Shard(0)]),
            "replica": distribute_tensor(x, mesh, [Replicate()]),
            **{"x": x, "net": net, "flat": flat, "shards": shards, "optimizer": optimizer},
        },
        ["shard", "replica", "x", "net", "flat", "shards", "optimizer"],
    )
    assert facts["shard"] == {
        **{"kind": "variable", "value": "float32 (8,) on cpu, Shard(dim=0) of mesh (4,)"},
        **{"elements": 8, "skipped": "sharded"},
    }
    assert facts["replica"]["checksum"] == facts["x"]["checksum"]
    sharded = {entry for entry, fact in facts.items() if fact.get("skipped") == "sharded"}
    assert sharded == {
        *("shard", "net.weight", "net.bias", "flat._flat_param", "shards.weight", "shards.bias"),
        *(f"optimizer.state[{i}].{key}" for i in range(2) for key in ("exp_avg", "exp_avg_sq")),
    }
    assert facts["optimizer.state[0].step"]["value"] == "1.0"


def test_the_state_of_an_optimizer_that_each_rank_has_a_share_of():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": 1}
    assert not any("state" in entry for entry in fingerprints({"optimizer": optimizer}) if entry.startswith("opt"))


# ---- order of findings


def facts_of(told: Mapping[str, list[str]] = {}, stepped: Mapping[str, int] = {}, **values: Any) -> dict[str, Any]:
    """Return the facts of a rank: its variables, its mistakes with their variables, and the cells of steps."""
    own = {"kind": "mistake", "told": list(told), "about": dict(told), "stepped": dict(stepped)}
    return {**fingerprints(values), "": own}


_OLD = "o7 holds 4 parameters that no model uses"
_NEW = "optimizer holds 2 parameters that no model uses"


def net_of(value: float) -> nn.Module:
    net = nn.Linear(1, 1)
    for parameter in net.parameters():
        nn.init.constant_(parameter, value)
    return net


def test_findings_are_listed_by_importance_with_old_models_last():
    def space(rank: int) -> dict[str, Any]:
        toys = {f"m{i}": net_of(rank) for i in range(9)}
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * 64**rank)
        steps = {**dict.fromkeys(toys, 3), "m8": 5, "net": 7}
        told = {_OLD: ["o7", "m7"], _NEW: ["optimizer", "net"]}
        return facts_of(told, {**steps, "o7": 3}, **toys, net=net_of(rank), late=net_of(rank), scaler=scaler)

    lines = repr(compare({rank: space(rank) for rank in range(2)})).split("\n")
    assert lines[1:8] == [
        "  scaler.scale: 1024.0 on rank 0, 65536.0 on rank 1",
        "  net.weight: rank 0 and rank 1 differ by 1 or more",
        "  net.bias: rank 0 and rank 1 differ by 1 or more",
        "  late.weight: rank 0 and rank 1 differ by 1 or more",
        "  late.bias: rank 0 and rank 1 differ by 1 or more",
        "  of models that only earlier cells trained:",
        "  m8.weight: rank 0 and rank 1 differ by 1 or more",
    ]
    assert lines[-2:] == [f"wrong on ranks 0,1: {_NEW}", f"wrong on ranks 0,1: {_OLD}"]
    assert any(line.startswith("  ... and of m") for line in lines)


def test_an_input_that_requires_gradients_is_no_parameter():
    def space(rank: int, stepped: Mapping[str, int]) -> dict[str, Any]:
        return facts_of({}, stepped, x=torch.full((2,), float(rank), requires_grad=True), net=net_of(1.0))

    assert not compare({rank: space(rank, {}) for rank in range(2)}).agrees
    assert compare({rank: space(rank, {"net": 3}) for rank in range(2)}).agrees
    assert not compare({rank: space(rank, {"net": 3, "x": 2}) for rank in range(2)}).agrees


def test_trained_models_with_other_layers_do_not_differ():
    def space(rank: int, stepped: Mapping[str, int]) -> dict[str, Any]:
        return facts_of({}, stepped, part=nn.Linear(2, 2 + rank), net=net_of(rank))

    both = {"part": 3, "net": 3}
    found = compare({rank: space(rank, both) for rank in range(2)})
    assert {str(one).partition(":")[0] for one in found.differences} == {"net.weight", "net.bias"}
    assert "part may differ: ranks have trained models with other layers" in repr(found)
    one_rank = compare({0: space(0, both), 1: space(1, {"net": 3})})
    assert "part.weight: float32 (2, 2) on cpu on rank 0, float32 (3, 2) on cpu on rank 1" in repr(one_rank)


def test_a_check_of_names_has_no_finding_of_other_variables():
    answers = {rank: {**facts_of({_OLD: ["o7", "m7"]}), "x": {"kind": "variable", "value": "1"}} for rank in range(2)}
    assert compare(answers, ["x"]).mistakes == ()
    assert compare(answers, ["o7"]).mistakes == compare(answers, ["m7", "x"]).mistakes == (f"ranks 0,1: {_OLD}",)
    saved = [{"cell": 1, "how": "distributed", "path": path, "ranks": [0, 1]} for path in ("/a", "/b")]
    for rank, one in enumerate(saved):
        answers[rank][""]["saves"] = [one]
    assert compare(answers, ["x"]).mistakes == ()
    assert len(compare(answers).mistakes) == 2


def test_a_finding_is_shown_once():
    def found(value: float, told: str = _OLD) -> Agreement:
        return compare(
            {rank: facts_of({told: ["o7"]}, net=net_of(rank * value), other=net_of(rank)) for rank in (0, 1)}
        )

    first = found(1.0)
    assert "as before" not in repr(first.folded({}))
    assert repr(found(1.0).folded(first.findings)).split("\n") == [
        "2 ranks differ in 4 of 15 entries:",
        repr(first).split("\n")[5],
        "3 findings as before: net, other, ranks 0,1: o7 holds 4 parameters that no model uses "
        "(%ddp_check NAME shows all)",
    ]
    lines = repr(found(2.0, _NEW).folded(first.findings)).split("\n")
    assert lines[1:3] == [
        "  net.weight: rank 0 and rank 1 differ by 2 or more",
        "  net.bias: rank 0 and rank 1 differ by 2 or more",
    ]
    assert lines[-2:] == [f"wrong on ranks 0,1: {_NEW}", "1 finding as before: other (%ddp_check NAME shows all)"]


# ---- checksums


def checksum(x: torch.Tensor, rows: int = 1) -> str:
    checksums = summary.Checksums()
    if rows > 1:
        checksums._on[x.device] = checksums._numbers, torch.empty(rows, summary._ROW, dtype=torch.int64)
    return checksums.of(x)


@pytest.mark.long
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 1000, summary._ROW, 5 * summary._ROW + 3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_a_checksum_sees_every_element_and_only_the_elements(dtype, n):
    x = (torch.arange(n) % 3).to(dtype)
    whole = checksum(x)
    assert whole == checksum(x.clone()) == checksum(torch.cat([x[:1], x])[1:]) == checksum(x, rows=2)
    if n:
        assert whole == checksum(torch.stack([x, x], 1)[:, 0])  # with strides
    for i in {0, n // 2, n - 1} & set(range(n)):
        other = x.clone()
        other[i] = ~other[i] if dtype == torch.bool else other[i] + 1
        assert checksum(other) != whole, i


def test_a_checksum_sees_signs_and_order():
    x = torch.randn(2, 4096)
    assert len({checksum(y) for y in (x, -x, x.flip(0), x.flip(1), x.roll(1), x * torch.tensor([[1], [-1]]))}) == 6
    for bit in range(32):  # each bit, in two elements at once
        y = x.clone()
        y.view(torch.int32)[:, 7] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        assert checksum(y) != checksum(x), bit


def test_conjugates_and_negatives_are_compared_by_value():
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert same(x.conj(), x.conj().resolve_conj())
    assert not same(x, x.conj())


def test_a_default_device_changes_nothing():
    before = fingerprints({"x": [0.5] * 9, "y": torch.ones(3)}, ["x", "y"])
    torch.set_default_device("meta")
    try:
        assert fingerprints({"x": [0.5] * 9, "y": torch.ones(3, device="cpu")}, ["x", "y"]) == before
    finally:
        torch.set_default_device(None)


# ---- what is left behind


@pytest.mark.slow
def test_no_reference_is_kept_and_nothing_is_changed():
    space = trained()
    states = random_states()
    gc.collect()
    gc.disable()
    try:
        facts = fingerprints(space)
        samples(space, list(facts))
        fingerprints({"x": Broken(), "net": space["net"]}, ["x", "net"])
        assert random_states() == states
        moments = [weakref.ref(state["exp_avg"]) for state in space["optimizer"].state.values()]
        data = [weakref.ref(value) for value in (space["x"], space["loader"].dataset)]
        space["optimizer"].state.clear()
        del space["x"], space["loader"]
        assert [reference() for reference in moments + data] == [None] * 8
    finally:
        gc.enable()


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]]
