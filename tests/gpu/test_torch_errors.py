"""Errors of NCCL that the catalogue of torch's errors explains."""

from __future__ import annotations

from typing import Any

import pytest

import ddp_notebook
from ddp_notebook.errors import COLORS, RankError
from ddp_notebook.rank.torch_errors import catalogue, nccl, raised

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ranks(gpus, waiting_host_server):
    waiting_host_server()
    options: dict[str, Any] = {} if len(gpus) > 1 else {"gpus": ("0",), "share_gpus": True}
    with ddp_notebook.start(2, backend="nccl", guard=False, **options) as session:
        yield session


def test_a_tensor_on_the_cpu(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run("dist.all_reduce(torch.ones(4))", quiet=True)
    shown = COLORS.sub("", "\n".join(failed.value.tracebacks[0]))
    assert "has no backend for tensors on cpu" in shown or "NCCL sends dense tensors on GPUs" in shown


@pytest.mark.parametrize("entry", nccl.ENTRIES, ids=lambda entry: entry.name)
def test_the_text_of_nccl_is_recognized(gpus, entry):
    """The errors themselves need a broken machine: their texts are those of torch and NCCL."""
    values = {"one": 0, "two": 1, "device": "18000"}
    text = entry.text.replace(":d}", "}").replace("{}", "x").format_map(values)
    found = raised.Raised(entry.kind.split()[0], text, "torch.distributed.distributed_c10d:all_reduce")
    if entry.facts is None:
        assert entry.explain(found) == f"{entry.cause}: {entry.fix}".format_map(values)
    assert entry in list(catalogue.entries())
