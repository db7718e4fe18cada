"""Names and help from stored values: no code of the user runs."""

import types
from collections import UserDict, defaultdict

import pytest
import torch
from torch import nn

from ddp_notebook.rank.completion.description import describe
from ddp_notebook.rank.completion.names import names_at
from ddp_notebook.rank.variables.static_lookup import Known, Lookup

calls: list[str] = []


class Meta(type):
    def __getattribute__(cls, name):
        calls.append(f"metaclass {name}")
        return super().__getattribute__(name)

    def __eq__(cls, other):
        calls.append("metaclass ==")
        return False

    __hash__ = type.__hash__

    def __dir__(cls):
        calls.append("metaclass dir")
        return []


class Hostile(metaclass=Meta):
    """Every access runs code."""

    def __init__(self):
        object.__setattr__(self, "stored", 1)

    def __getattribute__(self, name):
        calls.append(f"attribute {name}")
        return super().__getattribute__(name)

    def __getattr__(self, name):
        calls.append(f"missing {name}")
        raise AttributeError(name)

    def __dir__(self):
        calls.append("dir")
        return ["invented"]

    def __repr__(self):
        calls.append("repr")
        return ""

    def __len__(self):
        calls.append("len")
        return 3

    def __eq__(self, other):
        calls.append("==")
        return False

    __hash__ = object.__hash__

    @property
    def danger(self):
        calls.append("property")

    def method(self, x, scale=2):
        """Scale it."""


class HostileDict(dict[str, object]):
    def __len__(self):
        calls.append("len of dict")
        return super().__len__()

    def __iter__(self):
        calls.append("iter of dict")
        return super().__iter__()

    def __getitem__(self, key):
        calls.append("item of dict")
        return super().__getitem__(key)

    def items(self):
        calls.append("items of dict")
        return super().items()

    def keys(self):
        calls.append("keys of dict")
        return super().keys()


class HostileKey(str):
    def __eq__(self, other):
        calls.append("key ==")
        return super().__eq__(other)

    __hash__ = str.__hash__


def _own_dict(self):
    calls.append("own __dict__")
    return {}


OwnDict = type("OwnDict", (), {"__dict__": property(_own_dict)})


class HostileDescriptor:
    def __get__(self, instance, owner=None):
        calls.append("descriptor")


class Net(nn.Module):
    """A net of mine."""

    descriptor = HostileDescriptor()

    def __init__(self):
        super().__init__()
        self.layer_one = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.ReLU(), nn.Linear(2, 3)])
        self.register_buffer("mean_seen", torch.zeros(2))

    @property
    def danger(self):
        calls.append("property")

    @staticmethod
    def fixed(a):
        """A static one."""


def described(lookup, path, detail=0):
    """Return the help of a path that the lookup finds."""
    known = lookup.find(path)
    assert known is not None
    return describe(known, path, detail)


def names(kind, path, namespace, assigned=()):
    found = names_at(kind, path, namespace, (), assigned)
    return None if found is None else {name: type_ for name, type_ in found}


@pytest.fixture
def hostile():
    net = Net()
    net.__dict__["extra"] = Hostile()
    found = {
        "one": Hostile(),
        "kind": Hostile,
        "table": HostileDict(a=Hostile(), b=2),
        "keyed": {HostileKey("a"): 1, "b": 2},
        "own": OwnDict(),
        "net": net,
        "rows": [Hostile()],
        HostileKey("odd"): 1,
    }
    calls.clear()
    return found


def test_no_code_of_the_user_runs(hostile):
    paths = [
        "one",
        "one.stored",
        "one.danger",
        "one.invented",
        "one.method",
        "kind",
        "kind.method",
        "table",
        "table['a']",
    ]
    paths += ["keyed", "keyed['a']", "own", "own.x", "net", "net.danger", "net.descriptor", "net.extra", "rows[0].x"]
    for path in paths:
        names_at("attributes", path, hostile)
        names_at("keys", path, hostile)
        found = Lookup(hostile, [["y", "call", path], ["z", "value", path]])
        for name in (path, "y", "z"):
            if (known := found.find(name)) is not None:
                describe(known, name, 1)
    names_at("variables", "", hostile, (), [["y", "call", "kind"], ["odd", "value", "one"]])
    assert calls == []
    hostile["one"].danger  # noqa: B018 - the recording of calls works
    assert "property" in calls


def test_attributes_of_values(hostile):
    one = names("attributes", "one", hostile)
    assert (one["stored"], one["danger"], one["method"]) == ("int", "property", "function")
    assert "invented" not in one
    net = names("attributes", "net", hostile)
    assert (net["layer_one"], net["mean_seen"], net["forward"], net["danger"]) == (
        "Linear",
        "Tensor",
        "function",
        "property",
    )
    assert names("attributes", "net.layer_one.weight", hostile)["requires_grad"] == "property"
    assert names("attributes", "net.blocks[1]", hostile)["weight"] == "Parameter"
    assert names("attributes", "net.blocks[-1]", hostile)["weight"] == "Parameter"
    assert names("attributes", "net.danger", hostile) is None
    assert names("attributes", "torch.nn", {"torch": torch})["Linear"] == "class"
    assert names("attributes", "nowhere", {}) is None


def test_attributes_that_a_class_declares():
    """Python 3.14 evaluates annotations when they are read, which would run code of the user."""

    def note():
        calls.append("annotation")
        return int

    class Declared:
        rate: float
        head: nn.Linear
        sizes: list[int]
        later: "nn.Module"
        noted: note()  # type: ignore[valid-type]

    calls.clear()
    found = names("attributes", "it", {"it": Declared()})
    declared = [found[name] for name in ("rate", "head", "sizes", "later")]
    assert declared == ["float", "Linear", "", "Module"] and "noted" in found and not calls


def test_keys_of_values():
    namespace = {
        "config": {"lr": 0.1, 3: None, 2.5: "no literal"},
        "counts": defaultdict(int, a=1),
        "batch": UserDict(ids=torch.ones(1)),
        "heads": nn.ModuleDict({"first": nn.Linear(1, 1)}),
    }
    assert names("keys", "config", namespace) == {"'lr'": "float", "3": "NoneType"}
    assert names("keys", "counts", namespace) == {"'a'": "int"}
    assert names("keys", "batch", namespace) == {"'ids'": "Tensor"}
    assert names("keys", "heads", namespace) == {"'first'": "Linear"}
    assert names("attributes", "heads['first']", namespace)["weight"] == "Parameter"


@pytest.mark.parametrize(
    ("how", "path", "attribute"),
    [
        ("call", "torch.ones", "requires_grad"),
        ("call", "torch.nn.functional.cross_entropy", "backward"),
        ("call", "x.sum", "requires_grad"),
        ("call", "torch.nn.Linear", "in_features"),
        ("value", "x", "requires_grad"),
        ("module", "torch.nn", "Linear"),
        ("export", "torch.nn", "Linear"),
    ],
)
def test_attributes_of_a_name_set_above(how, path, attribute):
    assert attribute in names("attributes", "y", {"torch": torch, "x": torch.ones(1)}, [["y", how, path]])


def test_an_unknown_call_leaves_the_earlier_value():
    earlier = {"f": lambda: None, "y": torch.ones(1), "torch": torch, "net": nn.Sequential(nn.ReLU())}
    assert "requires_grad" in names("attributes", "y", earlier, [["y", "call", "f"]])
    assert names("attributes", "z", earlier, [["z", "call", "torch.topk"]]) is None  # it returns two tensors
    assert names("attributes", "net[0]", earlier, [["net", "call", "torch.nn.Sequential"]])["inplace"] == "bool"


def test_variables_and_modules():
    above = [["y", "other", ""], ["f", "function", ""]]
    found = dict(names_at("variables", "", {"x": 1, "In": []}, {"In"}, above) or [])
    assert (found["x"], found["y"], found["f"], found["len"], found["while"]) == (
        "int",
        "",
        "function",
        "function",
        "keyword",
    )
    assert "In" not in found
    assert names("modules", "torch", {})["distributed"] == "module"
    assert {"json", "torch"} <= set(names("modules", "", {}))
    assert names("exports", "torch.nn", {})["Linear"] == "class"


def test_parameters_of_the_called_function(hostile):
    assert names("variables", "one.method", hostile)["scale="] == "param"
    linear = names("variables", "torch.nn.Linear", {"torch": torch})
    assert linear["in_features="] == "param" and "self=" not in linear
    assert not [name for name in names("variables", "nowhere", {}) if name.endswith("=")]


def test_help_of_values(hostile):
    lookup = Lookup(hostile | {"torch": torch, "x": torch.ones(2, 3), "lr": 0.1, "text": "long" * 100})
    texts = {path: described(lookup, path) for path in ("one.method", "net", "x", "lr", "net.fixed")}
    assert (
        texts["one.method"] == f"Signature: method(x, scale=2)\nDocstring: Scale it.\nFile: {__file__}\nType: function"
    )
    assert texts["net"] == "Docstring: A net of mine.\nType: Net"
    assert texts["x"].startswith("Value: float32 (2, 3) on cpu\n")
    assert texts["lr"] == "Value: 0.1\nType: float"
    assert texts["net.fixed"].startswith("Signature: fixed(a)\nDocstring: A static one.")
    assert described(lookup, "one.method", 1).count("def method(self, x, scale=2):") == 1
    assert described(lookup, "torch.nn.Linear").startswith("Signature: Linear(in_features, out_")


def test_signatures_have_all_kinds_of_parameters():
    def f(a, /, b, c=1, *rest, d, e=None, **more): ...

    def g(self, *, x=calls): ...

    class Made:
        @classmethod
        def of(cls, /, size): ...

    assert describe(Known.of(f), "f").startswith("Signature: f(a, /, b, c=1, *rest, d, e=None, **more)\n")
    assert describe(Known.of(types.MethodType(g, 1)), "g").startswith("Signature: g(*, x=...)\n")
    assert described(Lookup({"Made": Made}), "Made.of").startswith("Signature: of(size)\n")
    assert "cls=" not in names("variables", "Made.of", {"Made": Made})
