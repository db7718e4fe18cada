"""The table of variables from the answers of ranks."""

import pytest

from ddp_notebook.run.whos.variables import variables_of

MEMORY = {"variables": 1000, "gradients": 0}


def row(**changes):
    usual = {"type": "Tensor", "shape": "(3,)", "dtype": "float32", "device": "cpu", "nbytes": 12}
    return {**usual, "digest": "a", "complete": True, "sampled": False, **changes}


def table(*rows, code=(), memory=MEMORY, **options):
    """Return the table of a variable `x` with one row per rank; None: the rank does not have it."""
    answers = {
        rank: {"rows": {} if one is None else {"x": one}, "code": list(code), "memory": memory}
        for rank, one in enumerate(rows)
    }
    return variables_of(answers, **options)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(), row()], "same"),
        ([row(sampled=True), row(sampled=True)], "same (sampled)"),
        ([row(), row(shape="(4,)"), row(), row(shape="(4,)")], "ranks 0,2 / 1,3: shape"),
        ([row(), row(dtype="int64", type="Parameter")], "ranks 0 / 1: type, dtype"),
        ([row(), row(digest="b"), row(digest="c"), row()], "ranks 0,3 / 1 / 2: values"),
        ([row(device="cuda:0"), row(device="cuda:1")], "same"),
        ([row(device="cuda:0"), row(device="cpu")], "ranks 0 / 1: device"),
        ([row(), None, row(digest="b"), None], "missing on ranks 1,3"),
        ([row(complete=False), row(complete=False)], "contents not compared"),
        ([row(complete=False), row(complete=False, digest="b")], "ranks 0 / 1: values"),
        ([row(sharded=True), row(sharded=True, digest="b")], "sharded"),
        ([{"type": "Odd", "unread": "RuntimeError"}] * 2, "contents not compared"),
        ([row(requires_grad="a"), row(), row(requires_grad="a")], "ranks 0,2 / 1: requires_grad"),
        ([row()], ""),
    ],
)
def test_differences_between_ranks(rows, expected):
    found = table(*rows)["x"]
    assert found.ranks == expected
    assert found.differs == (expected.startswith(("ranks", "missing")))


def test_a_running_cell_has_no_comparison():
    found = table(*[{key: value for key, value in row().items() if key != "digest"}] * 2, notes=["a cell runs"])
    assert found["x"].ranks == ""
    assert repr(found).splitlines()[-1] == "a cell runs"


def test_the_table_is_sorted_and_aligned():
    answer = {
        "rows": {"b": row(nbytes=5_000_000, of_nbytes=9_000_000), "a": row(nbytes=5_000_000), "lr": row(nbytes=28)},
        "code": [f"f{i}" for i in range(10)],
        "memory": {"variables": 9_000_000, "gradients": 4_000_000, "other": 2_000, "cached": 1_000},
    }
    assert repr(variables_of({0: answer, 1: answer})).splitlines() == [
        "name  type    shape  dtype    device             bytes  ranks",
        "a     Tensor  (3,)   float32  cpu               5.0 MB  same",
        "b     Tensor  (3,)   float32  cpu     5.0 MB of 9.0 MB  same",
        "lr    Tensor  (3,)   float32  cpu                 28 B  same",
        "functions, classes and modules: f0, f1, f2, f3, f4, f5, f6, f7 and 2 more",
        "ranks 0,1: tensors of these variables 9.0 MB (each storage once), their gradients 4.0 MB, "
        "other memory of torch on the GPU 2.0 kB, and 1.0 kB cached",
    ]


def test_no_variable_and_too_many():
    assert repr(table(None, None, pattern="y*")) == "no variable matches 'y*'"
    assert repr(table(None, None)) == "no variables"
    many = {f"x{i:03}": row() for i in range(203)}
    found = variables_of({0: {"rows": many, "code": [], "memory": MEMORY}})
    assert "... and 3 smaller ones: %ddp_whos PATTERN lists some" in repr(found).splitlines()
    assert len(found) == 203
    with pytest.raises(KeyError):
        found["y"]


def test_pandas():
    frame = table(row(), row(shape="(4,)")).to_pandas()
    assert list(frame.columns) == ["name", "type", "shape", "dtype", "device", "nbytes", "ranks"]
    assert frame.iloc[0].to_list() == ["x", "Tensor", "(3,) / (4,)", "float32", "cpu", 12, "ranks 0 / 1: shape"]
