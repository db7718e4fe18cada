"""A row per variable, from stored values: type, shape, bytes, digest."""

import random
import time
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from ddp_notebook.rank.whos.digests import Digests
from ddp_notebook.rank.whos.rows import Rows
from tests.completion.test_lookup import Hostile, HostileDict, Net, calls


def rows_of(namespace, *, exact=False, pattern=""):
    return Rows(Digests(exact)).of(namespace, pattern, ())["rows"]


def digest_of(value, *, exact=False):
    return rows_of({"x": value}, exact=exact)["x"]["digest"]


def test_forms_of_values():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = rows_of(
        {
            "x": torch.ones(2, 3, dtype=torch.float64),
            "model": model,
            "optimizer": optimizer,
            "array": np.ones((4, 2), np.int16),
            "batches": [torch.ones(2), (torch.ones(3), {"y": torch.ones(4)})],
            "text": "abc",
        }
    )
    parts = ("type", "shape", "dtype", "device", "nbytes")
    forms = {name: tuple(row[part] for part in parts) for name, row in found.items()}
    assert forms["x"] == ("Tensor", "(2, 3)", "float64", "cpu", 48)
    assert forms["model"] == ("Sequential", "4 tensors", "float32", "cpu", 4 * (15 + 5 + 5 + 1))
    assert forms["optimizer"][:2] == ("SGD", "4 parameters") and forms["optimizer"][4] >= 4 * 26
    assert forms["array"] == ("ndarray", "(4, 2)", "int16", "", 16)
    assert forms["batches"][:4] == ("list", "2 items", "float32", "cpu") and forms["batches"][4] > 36
    assert forms["text"][:2] == ("str", "3 characters")


def test_expanded_tensors_have_the_bytes_of_their_storage():
    found = rows_of({"x": torch.ones(3, 1).expand(3, 1000), "part": torch.ones(1000)[:1].expand(7)})
    assert found["x"]["nbytes"] == 12 and "of_nbytes" not in found["x"]
    assert found["part"]["nbytes"] == 28 and found["part"]["of_nbytes"] == 4000


def test_requires_grad_is_compared():
    model = nn.Linear(2, 2)
    before = rows_of({"x": torch.ones(2), "model": model})
    model.bias.requires_grad_(False)
    after = rows_of({"x": torch.ones(2, requires_grad=True), "model": model})
    for name in before:
        assert before[name]["digest"] == after[name]["digest"]
        assert before[name].get("requires_grad") != after[name].get("requires_grad")


def test_code_is_listed_by_name_only():
    found = Rows(None).of({"f": lambda: 0, "torch": torch, "Net": Net, "x": 1, "_private": 2}, "", ())
    assert (list(found["rows"]), found["code"]) == (["x"], ["Net", "f", "torch"])
    assert list(Rows(None).of({"f": lambda: 0, "_private": 2}, "[f_]*", ())["rows"]) == ["f", "_private"]
    assert "digest" not in found["rows"]["x"], "contents are not read while a cell runs"


def test_storages_count_once():
    x = torch.ones(1000)
    model = nn.Linear(10, 10)
    model(torch.ones(1, 10)).sum().backward()
    found = Rows(None).of({"x": x, "same": x, "part": x[:10], "model": model, "weights": model.weight}, "", ())
    assert found["memory"] == {"variables": 4000 + 440, "gradients": 440}
    assert (found["rows"]["part"]["nbytes"], found["rows"]["part"]["of_nbytes"]) == (40, 4000)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(20_000.0),
        lambda: torch.arange(20_000.0).reshape(100, 200).t(),
        lambda: torch.arange(20_000.0).to(torch.bfloat16),
        lambda: torch.arange(20_000.0) > 3,
        lambda: torch.complex(torch.ones(9000), torch.zeros(9000)).conj(),
        lambda: torch.ones(()),
        lambda: torch.ones(0),
        lambda: np.arange(20_000),
        lambda: {"a": [1, "b", None, 2.5], "t": torch.ones(5)},
        lambda: {3, 1, 2},
        lambda: nn.BatchNorm1d(4),
    ],
)
def test_equal_contents_have_equal_digests(make, exact):
    assert digest_of(make(), exact=exact) == digest_of(make(), exact=exact)
    assert rows_of({"x": make()}, exact=exact)["x"]["complete"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(5), torch.tensor([0, 0, 0, 0, 1e-30])),
        (torch.zeros(100_000), torch.ones(100_000)),
        (np.zeros(9), np.ones(9)),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"b": 1}),
        ("text", "Text"),
        (1, True),
        (nn.Dropout(0.1).train(), nn.Dropout(0.1).eval()),
    ],
)
def test_other_contents_have_other_digests(one, other):
    assert digest_of(one) != digest_of(other)


def test_layout_does_not_count():
    x = torch.randn(200, 300)
    assert digest_of(x) == digest_of(x.t().contiguous().t())


def test_samples_miss_one_element_and_exact_does_not():
    x = torch.zeros(1_000_000)
    y = x.clone()
    y[[3, 77_777]] = 1
    assert rows_of({"x": x})["x"]["sampled"] and not rows_of({"x": x}, exact=True)["x"]["sampled"]
    assert digest_of(x) == digest_of(y)
    assert digest_of(x, exact=True) != digest_of(y, exact=True)


def test_contents_that_cannot_be_read_are_not_complete():
    meta, sparse = torch.ones(2, device="meta"), torch.eye(3).to_sparse()
    deep: list[object] = [1]
    for _ in range(20):
        deep = [deep]
    found = rows_of({"meta": meta, "sparse": sparse, "obj": object(), "deep": deep, "lazy": nn.LazyLinear(2)})
    assert [name for name, row in found.items() if row["complete"]] == []


def test_an_object_twice_has_the_digest_of_two_equal_ones():
    x, y = torch.ones(2), torch.ones(2)
    assert digest_of([x, x]) == digest_of([x, y])
    inner = [1]
    assert digest_of({"a": [1], "b": [1]}) == digest_of({"a": inner, "b": inner})
    tied, untied = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    tied.one = tied.two = nn.BatchNorm1d(2)
    untied.one, untied.two = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert digest_of(tied) == digest_of(untied)
    assert rows_of({"x": [x, x]})["x"]["nbytes"] < rows_of({"x": [x, y]})["x"]["nbytes"]
    cyclic: list[object] = [1]
    cyclic.append(cyclic)
    assert rows_of({"x": cyclic})["x"]["complete"]


def test_no_code_of_the_user_runs():
    net = Net()
    net.__dict__["extra"] = Hostile()
    values = {"one": Hostile(), "table": HostileDict(a=Hostile(), b=torch.ones(2)), "rows": [Hostile()], "net": net}
    values |= {"unread": Hostile, "tensor": Unreadable._make_subclass(Unreadable, torch.ones(2))}
    calls.clear()
    for digests in (None, Digests(False), Digests(True)):
        found = Rows(digests).of(values, "*", ())["rows"]
        assert found["table"]["nbytes"] >= 8
    assert calls == []


class Unreadable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        calls.append("torch function")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        calls.append("torch dispatch")
        return func(*args, **(kwargs or {}))


def test_many_variables_take_little_time():
    many = {f"x{i}": torch.ones(100_000) for i in range(200)}
    rows_of(many)
    began_s = time.thread_time()
    rows_of(many)
    assert time.thread_time() - began_s < 0.05


class Slots:
    __slots__ = ("__dict__", "value")

    def __init__(self, value):
        self.value, self.name = value, "a"


class WithName(dict[str, int]):
    def __init__(self, name):
        super().__init__(x=1)
        self.name = name


class Number(int):
    def __init__(self, _):
        self.name = "a"


@pytest.mark.parametrize("kind", [random.Random, Slots, WithName, Number])
def test_state_outside_attributes_is_not_called_the_same(kind):
    one, other = (rows_of({"x": kind(seed)})["x"] for seed in (1, 2))
    assert one["digest"] != other["digest"] or not one["complete"]


def test_objects_with_very_many_tensors_are_not_called_the_same():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(10_001)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.state.update((one, {"momentum_buffer": torch.ones(1)}) for one in parameters)
    found = rows_of({"model": nn.ParameterList(parameters), "optimizer": optimizer})
    assert [row["complete"] for row in found.values()] == [False, False]


def test_order_of_a_dict_makes_no_difference():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 2, "b": 1})


def test_a_long_list_is_not_copied():
    value = [0] * 2_000_000
    tracemalloc.start()
    row = rows_of({"x": value})["x"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16e6
    assert (row["shape"], row["complete"]) == ("2,000,000 items", False)


class Keep(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)


@pytest.mark.parametrize("make", [lambda x: [torch.full((1000,), x)], lambda x: x, lambda x: {"a": (x,)}, Slots])
def test_attributes_of_modules_and_optimizers_are_compared(make):
    def optimizer(x):
        found = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        found.__dict__["kept"] = make(x)
        return found

    for of in (lambda x: Keep(kept=make(x)), lambda x: nn.Sequential(Keep(kept=make(x))), optimizer):
        one, other = (rows_of({"x": of(x)})["x"] for x in (1.0, 2.0))
        assert one["digest"] != other["digest"] or not one["complete"]
    found = Rows(None).of({"x": Keep(hist=[torch.ones(1000)])}, "", ())
    assert (found["rows"]["x"]["shape"], found["rows"]["x"]["nbytes"]) == ("1 tensor", 4000)
    assert found["memory"]["variables"] == 4000


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 8),
        lambda: nn.LSTM(2, 2),
        lambda: nn.Conv2d(1, 1, 3),
        lambda: nn.Sequential(nn.GELU(), nn.LayerNorm(3), nn.Embedding(3, 2), nn.MultiheadAttention(4, 2)),
        lambda: Keep(sizes=[1, 2], act=torch.relu),
    ],
)
def test_usual_modules_are_compared_completely(make):
    torch.manual_seed(0)
    row = rows_of({"x": make()})["x"]
    torch.manual_seed(0)
    assert row["complete"] and row["digest"] == digest_of(make())
    assert row["nbytes"] == sum(4 * one.numel() for one in make().parameters())
    scheduled = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert rows_of({"x": scheduled})["x"]["complete"]
