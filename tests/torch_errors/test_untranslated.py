"""Errors that look like those of the catalogue and have another cause: they are shown as they are."""

from __future__ import annotations

import re
import sys

import pytest

from ddp_notebook import api
from ddp_notebook.errors import COLORS, RankError
from ddp_notebook.rank.torch_errors import catalogue
from ddp_notebook.rank.torch_errors.raised import Raised
from tests.torch_errors.programs import SETUP

_FIELD = re.compile(r"\{[^{}]*\}")
# The longest part of each cause and each fix that contains no value.
_SENTENCES = [
    max(_FIELD.split(text.replace("{{", "").replace("}}", "")), key=len)
    for entry in catalogue.entries()
    for text in (entry.cause, entry.fix)
]


# Raised by the user's own code with the words of torch.
_BY_THE_USER = {
    "group": "raise ValueError('Global rank 0 is not part of group <ProcessGroup>')",
    "scatter": "raise ValueError('Argument ``scatter_list`` must be specified on source rank.')",
    "timeout": "raise RuntimeError('Timed out waiting 1800000ms for recv operation to complete')",
    "closed": "raise RuntimeError('[pair.cc:1] Connection closed by peer [127.0.0.1]:1')",
    "contiguous": "raise RuntimeError('Tensors must be contiguous')",
    "mat1": "raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (2x4 and 8x4)')",
    "mixed": (
        "raise RuntimeError('aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all "
        "torch.Tensor to DTensor before calling distributed operators!')"
    ),
    "missing key": "raise RuntimeError('Missing key in checkpoint state_dict: x.')",
    "shuffle": "raise ValueError('sampler option is mutually exclusive with shuffle')",
    "store": "raise type(dist.DistStoreError())('wait timeout after 1000ms, keys: /a/b')",
    "no len": "raise TypeError(\"object of type 'Stream' has no len()\")",
    "attribute": "raise AttributeError(\"'DistributedDataParallel' object has no attribute 'left'\")",
    "default group": (
        "raise ValueError('Default process group has not been initialized, please make sure to call "
        "init_process_group.')"
    ),
    "an own class": "class DistStoreError(Exception): pass\nraise DistStoreError('wait timeout after 1000ms, keys: k')",
    "an own subclass": "class RuntimeError(RuntimeError): pass\nraise RuntimeError('Tensors must be contiguous')",
    "in a hook of autograd": (
        "def hook(grad): raise RuntimeError('Expected to mark a variable ready only once. Parameter at "
        "index 0 with name a has been marked as ready twice.')\n"
        "w = torch.ones(1, requires_grad=True)\n"
        "w.register_hook(hook)\n"
        "w.sum().backward()"
    ),
    "in a forward": (
        "class Model(nn.Module):\n"
        "    def forward(self, x): raise RuntimeError('mat1 and mat2 shapes cannot be multiplied (2x4 "
        "and 8x4)')\n"
        "Model()(x)"
    ),
    "in a worker": (
        "def get(index): raise RuntimeError('stack expects each tensor to be equal size, but got [1] at "
        "entry 0 and [2] at entry 1')\n"
        "first(Samples(get), num_workers=1)"
    ),
    "in a dataset": "def get(index): raise TypeError(\"object of type 'Stream' has no len()\")\nfirst(Samples(get))",
    "in a collate_fn": (
        "def collate(batch): raise RuntimeError('each element in list of batch should be of equal size')\n"
        "first(pairs, collate_fn=collate)"
    ),
    "in a thread": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def work(): raise ValueError('Rank 5 is out of range. Valid ranks are 0 to 1 (world_size=2)')\n"
        "ThreadPoolExecutor(1).submit(work).result()"
    ),
    "in a future": (
        "future = torch.futures.Future()\n"
        "future.set_exception(RuntimeError('RPC has not been initialized. Call "
        "torch.distributed.rpc.init_rpc first.'))\n"
        "future.wait()"
    ),
    "into a generator": (
        "def numbers():\n"
        "    yield 1\n"
        "one = numbers()\n"
        "next(one)\n"
        "one.throw(RuntimeError('[a] Timed out waiting 1000ms for recv operation to complete'))"
    ),
    "by exec": "exec(\"raise RuntimeError('Tensors must be contiguous')\")",
    "during the handling of torch's error": "try: dist.broadcast(x)\nexcept ValueError: raise KeyError('mine')",
}
# Raised by torch or Python for another cause.
_BY_ANOTHER_CAUSE = {
    "shapes of a plain model": "linears(4, 8)(torch.ones(2, 5))",
    "shapes of a plain product": "torch.ones(2, 4) @ torch.ones(8, 4)",
    "shapes before a columnwise layer": (
        "model = nn.Sequential(nn.Linear(4, 8), nn.Linear(3, 4))\n"
        "parallelize_module(model, mesh, {'0': ColwiseParallel()})(xx)"
    ),
    "a view of a plain tensor": "torch.ones(8).view(3, 3)",
    "a wrong view after a columnwise layer": (
        "class Other(Query):\n"
        "    def forward(self, x): return self.q(x).view(3, 5)\n"
        "parallelize_module(Other(), mesh, {'q': ColwiseParallel()})(xx)"
    ),
    "a norm of a plain model": "nn.LayerNorm(8)(xx)",
    "an attribute that no model has": "DDP(Two()).middle",
    "an attribute of a plain model": "Two().middle",
    "other keys in a state_dict": "Two().load_state_dict({'left.weight': torch.ones(4, 4)})",
    "other shapes in a state_dict": "linears(4, 4).load_state_dict(linears(4, 5).state_dict())",
    "stack of the user": "torch.stack([torch.ones(1), torch.ones(2)])",
    "list of the user": "[0, 1][2]",
    "hash of the user": "{[0]: 1}",
    "pickle of the user": "import pickle\npickle.dumps(lambda: 0)",
    "len of the user": "len(Stream())",
    "a folder of the user": "os.makedirs(folder, exist_ok=True)\ntorch.load(folder)",
    "a file that is missing": "torch.load(f'{folder}.pt')",
    "item on meta": "torch.ones(1, device='meta').item()",
    "missing argument of a model": "nn.Linear(4, 4)()",
    "an operator without a kernel": "torch.ones(4).to_sparse().flip(0)",
    "a scalar type": "torch.linalg.inv(torch.ones(2, 2, dtype=torch.int64))",
    "not none elsewhere": "from torch.utils._typing_utils import not_none\nnot_none(None)",
    "a program that asserts": "assert False, 'FSDP does not support deepcopy.'",
    "no samples": "first(Samples(lambda index: {}[index]))",
}


@pytest.fixture(scope="module")
def ranks(waiting_host_server):
    waiting_host_server()
    with api.start(2, guard=False) as session:
        session.run(SETUP, quiet=True)
        yield session


_QUICK = {"group", "timeout", "mixed", "no len", "in a forward", "in a future", "into a generator", "mat1"}
_QUICK |= {"shapes of a plain model", "an attribute of a plain model", "other keys in a state_dict"}


def sentences_in(failed: pytest.ExceptionInfo[RankError], code: str) -> list[str]:
    """Return the sentences of the catalogue in the tracebacks of all ranks."""
    shown = COLORS.sub("", "\n".join("\n".join(lines) for lines in failed.value.tracebacks.values()))
    return [one for one in _SENTENCES if one in shown and one not in code]


@pytest.mark.parametrize(
    "name",
    [
        one if one in _QUICK else pytest.param(one, marks=pytest.mark.long)
        for one in [*_BY_THE_USER, *_BY_ANOTHER_CAUSE]
    ],
)
def test_a_similar_error_stays_as_it_is(ranks, name, tmp_path):
    code = {**_BY_THE_USER, **_BY_ANOTHER_CAUSE}[name]
    ranks.run(f"folder = {str(tmp_path / 'none')!r}", quiet=True)
    with pytest.raises(RankError) as failed:
        ranks.run(code, quiet=True, timeout_s=60)
    assert sentences_in(failed, code) == []
    ranks.run(_NO_CHILDREN, quiet=True, timeout_s=30)


# Workers of a DataLoader notice after up to 5 s that their loader is gone.
_NO_CHILDREN = "import multiprocessing\nwhile multiprocessing.active_children(): time.sleep(0.1)"


def test_a_sentence_would_be_found(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run("dist.broadcast(x)", quiet=True)
    assert len(sentences_in(failed, "dist.broadcast(x)")) == 2, "cause and fix"


def test_a_spawned_worker_has_never_had_a_group():
    entry = next(one for one in catalogue.entries() if one.name == "no default group")
    place = "torch.distributed.distributed_c10d:_get_default_group"
    assert entry.explain(Raised("ValueError", entry.text, place)) == "", "without frames another process has raised it"
    assert entry.explain(Raised("ValueError", entry.text, place, [sys._getframe()])).startswith("this rank has no")
