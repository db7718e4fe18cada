"""Reading of a cell: the code of ranks, the text before the cursor, and the lines above it."""

import pytest

from ddp_notebook.run.completion.cursor import Cursor, assigned_above, name_at, read_cursor
from ddp_notebook.run.completion.rank_code import RankCode, rank_code


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", Cursor("variables")),
        ("x = mod", Cursor("variables", "", "mod")),
        ("print(mod", Cursor("variables", "print", "mod")),
        ("net.step(x,\n  sca", Cursor("variables", "net.step", "sca")),
        ("net.step(x, scale=mod", Cursor("variables", "", "mod")),
        ("net.step([1, mod", Cursor("variables", "", "mod")),
        ("print((1, mod", Cursor("variables", "", "mod")),
        ("y = [mod", Cursor("variables", "", "mod")),
        ("if x == 1 and y.", Cursor("attributes", "y")),
        ("model.layers[0].we", Cursor("attributes", "model.layers[0]", "we")),
        ("f(a, model['head'].we", Cursor("attributes", "model['head']", "we")),
        ("größe.sh", Cursor("attributes", "größe", "sh")),
        ("config['", Cursor("keys", "config", "'", "'")),
        ('config["optimizer"]["l', Cursor("keys", 'config["optimizer"]', '"l', '"')),
        ("config[", Cursor("keys", "config")),
        ("rows[1", Cursor("keys", "rows", "1")),
        ("x[0].f().sh", Cursor("attributes", "", "sh")),  # the value of a call is not known
        ("f(x).sh", Cursor("attributes", "", "sh")),
        ("1.", Cursor("attributes", "", "")),
        ("import torch.dist", Cursor("modules", "torch", "dist")),
        ("import os, tor", Cursor("modules", "", "tor")),
        ("from torch.nn import Linear, Con", Cursor("exports", "torch.nn", "Con")),
        ("from tor", Cursor("modules", "", "tor")),
        ("x = 'a' + mod", Cursor("variables", "", "mod")),
        ('"""text\n"""\nmod', Cursor("variables", "", "mod")),
        ("print('lo", None),
        ("x = 1  # mod", None),
        ('"""text\nmod', None),
        ("%time", None),
        ("!ls", None),
    ],
)
def test_the_text_before_the_cursor_is_read(before, expected):
    assert read_cursor(before) == expected


def test_lines_above_set_names():
    lines = [
        "import torch.nn as nn, os.path",
        "from torch import ones as make, zeros",
        "head = nn.Linear(",
        "    2, 1)",
        "same = model",
        "loss: float = head(x).mean()",
        "a, b = pair",
        "for step, batch in enumerate(loader):",
        "    with open('f') as file:",
        "def train(x): pass",
        "class Net(nn.Module):",
        "if x == 1: pass",
        "unfinished = nn.Linear(1, 1)",
    ]
    assert assigned_above("\n".join(lines)) == [
        ["nn", "module", "torch.nn"],
        ["os", "module", "os"],
        ["make", "export", "torch.ones"],
        ["zeros", "export", "torch.zeros"],
        ["head", "call", "nn.Linear"],
        ["same", "value", "model"],
        ["loss", "call", "head"],
        ["a", "other", ""],
        ["b", "other", ""],
        ["step", "other", ""],
        ["batch", "other", ""],
        ["file", "other", ""],
        ["train", "function", ""],
        ["Net", "class", ""],
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("model.st|ep(x)", "model.step"),
        ("y = model.step(x, sca|", "model.step"),
        ("y = model.step((1, 2), [x|", "model.step"),
        ("model.layers[0].weight|", "model.layers[0].weight"),
        ("(x|", "x"),
        ("f(x).y|", ""),
        ("|", ""),
    ],
)
def test_help_is_for_the_called_function_or_the_name(code, expected):
    assert name_at(code.replace("|", ""), code.index("|")) == expected


def test_cells_and_lines_of_ranks_are_found():
    cell = "%%on_all_ranks --ranks 2 --quiet\nmodel."
    assert rank_code(cell, len(cell)) == RankCode(33, "2")
    assert rank_code(cell, 20) is None, "the line of the magic"
    assert rank_code("\n%%on_ranks 1\nx", 15) == RankCode(14, "1")
    assert rank_code("%%on_ranks\nx", 12) == RankCode(11, None)
    assert rank_code("a = 1\n%on_all_ranks --ranks 1 mod", 32) == RankCode(30, "1")
    assert rank_code("%on_all_ranks mod\nmod", 21) is None
    assert rank_code("%%time\nx", 8) is None
    assert rank_code("%%ddp_twice\nx", 13) == RankCode(12, None)
    assert rank_code("%ddp_verify F.mse_loss(mod", 26) == RankCode(12, None)
    assert rank_code("x = 1\n%ddp_memory m.mod", 23) == RankCode(18, None)
    assert rank_code("%ddp_verify\nmod", 15) is None
    assert rank_code("%ddp_memory m\nmod", 17) is None
    assert rank_code("%ddp_memory --wh", 16) is None, "an option"


def test_lines_with_names_of_variables():
    assert rank_code("%ddp_whos en", 12) == RankCode(10, is_names=True)
    assert rank_code("%ddp_pull a b", 13) == RankCode(10, is_names=True)
    assert rank_code("%ddp_peek his", 13) == RankCode(10)
    for line in ("%ddp_whos --ex", "%ddp_pull a --as b", "%ddp_pull a --ranks=0"):
        assert rank_code(line, len(line)) is None
    assert rank_code("x", 1, is_auto=True) == RankCode(0)
