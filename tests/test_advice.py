"""Errors of torch without a hint: the last line of the cell's error gives one."""

from __future__ import annotations

import pytest
import torch

from ddp_notebook.errors import RankError
from ddp_notebook.run.cells.result import advice

_NO_GPU = "These ranks have no GPU: replace cuda by `device`"


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks have a GPU here")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("torch.ones(2).cuda()", _NO_GPU),
        ("torch.ones(2).to(f'cuda:{rank}')", _NO_GPU),
        ("torch.cuda.set_device(rank)", _NO_GPU),
        ("raise ValueError('x')", ""),
    ],
)
def test_what_a_tutorial_for_gpus_does_on_a_cpu(session, code, says):
    with pytest.raises(RankError) as caught:
        session.run(code)
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith(says) if says else len(lines) == 1, lines


def test_a_group_that_is_not_there(session):
    session.run("dist.destroy_process_group()")
    with pytest.raises(RankError, match=r"initialized.*because it was destroyed: dist.init_process_group\(\)"):
        session.run("dist.barrier()")
    session.run("dist.init_process_group()\ndist.barrier()")


@pytest.mark.parametrize(
    "error",
    ["RuntimeError: Found no NVIDIA driver on your system.", "RuntimeError: No CUDA GPUs are available"],
)
def test_words_of_a_build_with_cuda(error):
    assert advice([error, error], ()).startswith(_NO_GPU)


def test_names_that_the_notebook_has():
    errors = [f"NameError: name '{name}' is not defined" for name in ("b", "a", "c", "b")]
    assert advice(errors, {"a": 1, "b": 2}) == "The notebook has 'a' and 'b': %ddp_push a b sends it to the ranks."
    assert advice(errors, ()) == ""
