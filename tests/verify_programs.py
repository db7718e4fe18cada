"""Code of cells for tests of `%ddp_verify`."""

from __future__ import annotations

from pathlib import Path

SETUP = """
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
def net(norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(32) if norm else nn.GELU()
    return nn.Sequential(nn.Linear(20, 32), middle, nn.Dropout(0.3), nn.Linear(32, 4))
def sharded(**options):
    model = net()
    fully_shard(model[0], **options)
    return fully_shard(model, **options)
def parted():
    global x, y
    torch.manual_seed(0)
    x, y = torch.randn(8, 20), torch.randint(0, 4, (8,))
    model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    plan = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
def attention():
    global x, y
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(20, 32) for _ in range(4))
            self.out = nn.Linear(32, 4)
        def forward(self, x):
            q, k, v = (one(x).unflatten(-1, (-1, 8)).transpose(1, 2) for one in (self.q, self.k, self.v))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)
    torch.manual_seed(0)
    x, y = torch.randn(8, 5, 20), torch.randint(0, 4, (8,))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}
    return parallelize_module(Attention(), init_device_mesh("cpu", (world_size,)), plan)
def language(tie):
    global x, y
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.inner = nn.Embedding(30, 16, padding_idx=0), nn.LSTM(16, 16, batch_first=True)
            self.out = nn.Linear(16, 30, bias=False)
            if tie:
                self.out.weight = self.words.weight
        def forward(self, x): return self.out(self.inner(self.words(x))[0])
    torch.manual_seed(20 + rank)
    x, y = torch.randint(1, 30, (8, 6)), torch.randint(1, 30, (8, 6))
    torch.manual_seed(0)
    return Language()
torch.manual_seed(10 + rank)
x, y = torch.randn(8, 20), torch.randint(0, 4, (8,))
"""

STATE = """
import hashlib
import random as pyrandom
import numpy as np
def digest():
    found = hashlib.sha256()
    def add(tensor):
        if tensor is None:
            found.update(b"none")
            return
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(repr((local.dtype, tuple(local.shape), local.requires_grad)).encode())
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {type(parameter).__name__}".encode())
        add(parameter)
        add(parameter.grad)
    for buffer in model.buffers():
        add(buffer)
    for name, module in model.named_modules():
        hooks = sorted(module._forward_hooks), sorted(module._forward_pre_hooks)
        flags = getattr(module, "require_backward_grad_sync", 0), getattr(module, "require_forward_param_sync", 0)
        found.update(repr((name, module.training, hooks, flags)).encode())
    states = torch.get_rng_state().tolist(), pyrandom.getstate(), np.random.get_state()
    found.update(repr(states).encode())
    add(x)
    add(y)
    found.update(repr((sorted(k for k in globals() if k[0] != "_"), counter, world_size, rank)).encode())
    return found.hexdigest()
"""

LOSS = "F.cross_entropy(model(x), y)"
_MODELS = [
    "DDP(net())",
    "DDP(net(norm=True))",
    "DDP(net(), gradient_as_bucket_view=True)",
    "DDP(net(), find_unused_parameters=True)",
    "DDP(net(), bucket_cap_mb=0.001)",
    "DDP(net().eval())",
    "DDP(net(), broadcast_buffers=False)",
    "sharded()",
    "sharded(reshard_after_forward=False)",
]
_HALF = "torch.autocast('cpu', dtype=torch.bfloat16)"
_LOSSES = [
    LOSS,
    "F.mse_loss(model(x), F.one_hot(y, 4).float())",
    "F.cross_entropy(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())",
    "F.cross_entropy(model(x), y, reduction='sum') / len(x)",
    "-F.log_softmax(model(x), 1).gather(1, y[:, None]).mean()",
]
_TRAINED = "\nopt = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(3):\n    opt.zero_grad(); {}.backward(); opt.step()"
_SPARSE = """
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.EmbeddingBag(9, 16, sparse=True), nn.Linear(16, 4)))
x = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(rank))
"""
_PADDED = "; x[:, 4:] = 0; y[:, 4:] = 0"
_PADDED_UNEVENLY = "; x[:, 3 + 2 * rank:] = 0; y[:, 3 + 2 * rank:] = 0"
_TOKENS = "F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0"
_FLOAT16 = """
def scaled():
    with torch.autocast("cpu", dtype=torch.float16):
        return scaler.scale(F.cross_entropy(model(x), y))
"""
_SCALED = f"model = DDP(net()); scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n{_FLOAT16}"
_TORCHS = """
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
class Branches(nn.Module):  # an output that the loss may leave out
    def __init__(self):
        super().__init__(); self.a, self.b = net(), net()
    def forward(self, x): return self.a(x), self.b(x)
class Repeated(nn.Module):  # a layer that is used several times
    def __init__(self):
        super().__init__(); self.layer, self.out = nn.Linear(20, 20), nn.Linear(20, 4)
    def forward(self, x): return self.out(self.layer(self.layer(x).relu()))
class Recomputed(Repeated):
    def forward(self, x): return self.out(checkpoint(self.layer, x, use_reentrant=False))
class Frozen(Repeated):
    def __init__(self):
        super().__init__(); self.layer.requires_grad_(False)
class Nested(Repeated):  # inputs and outputs in containers
    def forward(self, x): return {"out": super().forward(x["in"][0]), "other": [x]}
"""
MODELS = """
from torch.utils.checkpoint import checkpoint
class Reentrant(nn.Module):
    def __init__(self):
        super().__init__(); self.first, self.last = net(), nn.Linear(4, 4)
    def forward(self, x): return self.last(checkpoint(self.first, x, use_reentrant=True))
class LazyBuffer(nn.Module):  # makes a buffer of the rank's own data in its first forward pass
    def __init__(self):
        super().__init__(); self.inner = net()
    def forward(self, x):
        if not hasattr(self, "scale"): self.register_buffer("scale", x.detach().abs().max().reshape(1))
        return self.inner(x / self.scale)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 4)
        self.b.weight = self.a.weight
    def forward(self, x): return self.c(self.b(self.a(x).relu()))
class Outputs(dict):
    __getattr__ = dict.__getitem__
class Labelled(nn.Module):  # returns its loss, as models of Hugging Face do
    def __init__(self, reduction="mean"):
        super().__init__(); self.inner, self.reduction = net(), reduction
    def forward(self, x, labels):
        logits = self.inner(x)
        return Outputs(loss=F.cross_entropy(logits, labels, reduction=self.reduction), logits=logits)
class Synchronized(nn.Module):  # as SyncBatchNorm, which needs a GPU
    def forward(self, x):
        import torch.distributed.nn.functional as functional
        return x - functional.all_reduce(x.mean(0)) / world_size
def synchronized():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), Synchronized(), nn.Linear(32, 4))
def step_in_backward(model, kind):
    for one in model.parameters():
        optimizer = torch.optim.SGD([one], 0.1, momentum=0.9)
        if kind == "accumulated":
            def hook(p, optimizer=optimizer): optimizer.step(); optimizer.zero_grad()
            one.register_post_accumulate_grad_hook(hook)
        else:
            def hook(gradient, p=one): p.data.add_(gradient, alpha=-0.1)
            one.register_hook(hook)
    return model
torch.manual_seed(0)
"""
_APPLIES = "from torch.distributed.optim import _apply_optimizer_in_backward\nmodel = net()\n"
_APPLIES += "_apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {'lr': 0.1}); model = DDP(model)"
_LABELLED = f"{MODELS}model = DDP(Labelled())"
# Code, loss and words of the refusal.
REFUSED = [
    (f"{MODELS}model = step_in_backward(DDP(net()), 'accumulated')", LOSS, "0.weight has a hook that runs after"),
    (f"{MODELS}model = step_in_backward(DDP(net()), 'hook')", LOSS, "a hook changes 0.weight during backward"),
    ("model = DDP(net())\nmodel._register_fused_optim(torch.optim.SGD, 0.1)", LOSS, "a hook changes 0.weight during"),
    (_LABELLED, "model(x, labels=y)", "is of type Outputs: use model.x, labels=y..loss"),
    (_LABELLED, "tuple(model(x, labels=y).values())", "is of type tuple: use .*[0]"),
    (_APPLIES, LOSS, "an optimizer steps 0.weight in backward"),
    (f"{MODELS}model = step_in_backward(sharded(), 'accumulated')", LOSS, "0.weight has a hook that runs after"),
    (
        f"{MODELS}class Trainer: pass\ntrainer, model = Trainer(), nn.Linear(1, 1)\n"
        "trainer.model = step_in_backward(DDP(net()), 'accumulated')",
        "F.cross_entropy(trainer.model(x), y)",
        "unnamed parameter 1 has a hook that runs after",
    ),
    (
        "model = DDP(net())",
        "F.cross_entropy(x[:, :4].detach().requires_grad_(), y)",
        "no parameter of a model takes part",
    ),
]
_CLOSURE = """
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
def closure():
    opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); return loss
for _ in range(2): opt.step(closure)
"""
# Code, loss and options of `verify`.
RIGHT = [
    *(
        (f"{MODELS}model = {model}{more}", LOSS, {})
        for model, more in (
            ("DDP(Reentrant())", "; x.requires_grad_()"),
            ("DDP(LazyBuffer())", _TRAINED.format(LOSS)),
            ("fully_shard(LazyBuffer())", _TRAINED.format(LOSS)),
            ("DDP(Tied())", _TRAINED.format(LOSS)),
            ("fully_shard(Tied())", _TRAINED.format(LOSS)),
            ("DDP(nn.DataParallel(net()))", ""),
            ("DDP(synchronized())", ""),
            ("DDP(net())", _CLOSURE),
            ("torch.compile(DDP(Tied()), backend='aot_eager')", ""),
        )
    ),
    (_LABELLED, "model(x, labels=y).loss", {}),
    (_LABELLED, "model(x, labels=y)['loss']", {"micro": 4}),
    (
        "model = DDP(net())\n@torch.compile(backend='aot_eager')\ndef half(): return 0.5 * F.cross_entropy(model(x), y)",
        "half()",
        {},
    ),
    *(
        (f"model = {model}", loss, {})
        for model in _MODELS
        for loss in _LOSSES
        if "square" not in loss or "DDP" in model
    ),
    *((f"model = {model}{_TRAINED.format(LOSS)}", LOSS, {}) for model in _MODELS),
    *((f"model = {model}", LOSS, {"micro": 2}) for model in _MODELS),
    *(
        (f"model = {model}\ndef half():\n    with {_HALF}:\n        return {LOSS}", "half()", {})
        for model in _MODELS[:4]
    ),
    *((f"model = DDP(net().to({kind})); x = x.to({kind})", LOSS, {}) for kind in ("torch.float64", "torch.bfloat16")),
    ("model = DDP(net()); model.register_comm_hook(None, hooks.fp16_compress_hook)", LOSS, {}),
    ("model = DDP(net()); model.register_comm_hook(None, hooks.allreduce_hook)", LOSS, {}),
    ("model = torch.compile(DDP(net()), backend='aot_eager')", LOSS, {}),
    ("model = DDP(torch.compile(net(), backend='aot_eager'))", LOSS, {}),
    ("model = parted()", LOSS, {}),
    (f"model = parted(){_TRAINED.format(LOSS)}", LOSS, {}),
    (f"model = attention(){_TRAINED.format(LOSS)}", LOSS, {}),
    (f"model = DDP(net(), static_graph=True){_TRAINED.format(LOSS)}", LOSS, {}),
    (f"model = DDP(net(), static_graph=True){_TRAINED.format(LOSS)}", LOSS, {"micro": 4}),
    # a language model with padding, with tied weights, and with a loss that is divided by all tokens
    *(
        (f"model = {wrap}(language(tie={tie})){padded}", f"{_TOKENS}{ending}", {})
        for tie in (False, True)
        for wrap in ("DDP", "fully_shard")
        for padded, ending in ((_PADDED, ")"), (_PADDED_UNEVENLY, ", reduction='sum') * world_size / 64"))
    ),
    # float16 with a scaler, whose gradients are scaled
    (_SCALED, "scaled()", {}),
    # networks like those in the DDP tests of torch
    *(
        (f"{_TORCHS}\nmodel = DDP({name}(), find_unused_parameters={finds})", loss, {"micro": micro})
        for name, loss, finds in (
            ("Branches", "F.cross_entropy(model(x)[0], y)", True),
            ("Branches", "sum(F.cross_entropy(one, y) for one in model(x))", False),
            ("Repeated", LOSS, False),
            ("Recomputed", LOSS, False),
            ("Frozen", LOSS, False),
            ("Nested", "F.cross_entropy(model({'in': [x]})['out'], y)", False),
        )
        for micro in (1, 4)
    ),
    (_SPARSE, LOSS, {}),
]
_WEIGHTS = "\nif rank == <R>: model.get_parameter('<P>').data.mul_(1.1)\n"
_IGNORES = "model = net(); DDP._set_params_and_buffers_to_ignore_for_model(model, ['<P>']); model = DDP(model)"
_TOTAL = """
def total(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
model.register_comm_hook(None, total)
"""
_MESH = "init_device_mesh('cpu', (2, 1), mesh_dim_names=('replica', 'shard'))"
# ruff: noqa: E501 - each fault is one line
# Cause, code with a random rank <R> and parameter <P>, and loss.
FAULTS = {
    "ddp": [
        ("weights", f"model = net()\nmodel = DDP(model){_WEIGHTS.replace('model.get', 'model.module.get')}", LOSS),
        ("ignored", _IGNORES, LOSS),
        (
            "outside",
            "model = DDP(net()); torch.manual_seed(1); head = nn.Linear(4, 4)",
            "F.cross_entropy(head(model(x)), y)",
        ),
        (
            "late",
            "model = net()\np = model.get_parameter('<P>')\np.requires_grad_(False)\nmodel = DDP(model)\np.requires_grad_(True)",
            LOSS,
        ),
        ("bypassed", "model = DDP(net())", "F.cross_entropy(model.module(x), y)"),
        ("no_sync", "model = DDP(net())\nleft = model.no_sync(); left.__enter__()", LOSS),
        ("comm_hook", f"model = DDP(net()){_TOTAL}", LOSS),
        (
            "clipped",
            "model = DDP(net())\nmodel.module.get_parameter('<P>').register_hook(lambda g: g.clamp(-1e-4, 1e-4))",
            LOSS,
        ),
        ("sum", "model = DDP(net())", "F.cross_entropy(model(x), y, reduction='sum')"),
        ("world_size", "model = DDP(net())", f"{LOSS} * dist.get_world_size()"),
        ("unequal", "model = DDP(net())\nif rank == <R>: x, y = x[:5], y[:5]", LOSS),
        ("tokens", "model = DDP(net())\nif rank == <R>: y[:5] = -100", LOSS),
        (
            "same_batch",
            "model = DDP(net())\ntorch.manual_seed(5); x, y = torch.randn(8, 20), torch.randint(0, 4, (8,))",
            LOSS,
        ),
        ("no_wrapper", "model = net()", LOSS),
        ("no_wrapper", "model = nn.DataParallel(net())", LOSS),
        ("converted", "model = DDP(net()).bfloat16(); x = x.bfloat16()", LOSS),
        ("sum", f"{MODELS}model = DDP(Labelled('sum'))", "model(x, labels=y).loss"),
        ("sum", f"{MODELS}model = DDP(Tied()){_CLOSURE}", "F.cross_entropy(model(x), y, reduction='sum')"),
        ("bypassed", f"{MODELS}model = DDP(Reentrant()); x.requires_grad_()", "F.cross_entropy(model.module(x), y)"),
        ("ignored", f"{_IGNORES.replace('DDP(model)', 'torch.compile(DDP(model), backend=')}'aot_eager')", LOSS),
        ("unequal", f"{MODELS}model = DDP(LazyBuffer())\n{LOSS}.backward()\nif rank == <R>: x, y = x[:5], y[:5]", LOSS),
        ("weights", f"{_SCALED}if rank == <R>: model.get_parameter('module.<P>').data.mul_(1.1)", "scaled()"),
        (
            "no_gradient",
            "class M(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a = net(); self.b = net()\n"
            "    def forward(self, x): return self.a(x) + (self.b(x) if rank == <R> else 0)\nmodel = DDP(M())",
            LOSS,
        ),
    ],
    "sharded": [
        ("no_sync", "model = sharded(); model.set_requires_gradient_sync(False)", LOSS),
        ("unmanaged", "model = net(); model = fully_shard(model, ignored_params={model.get_parameter('<P>')})", LOSS),
        ("outside", "model = net(); fully_shard(model[0])", LOSS),
        (
            "outside",
            "model = sharded(); torch.manual_seed(1); head = nn.Linear(4, 4)",
            "F.cross_entropy(head(model(x)), y)",
        ),
        ("sum", "model = sharded()", "F.cross_entropy(model(x), y, reduction='sum')"),
        ("world_size", "model = sharded()", f"{LOSS} / dist.get_world_size()"),
        ("unequal", "model = sharded()\nif rank == <R>: x, y = x[:5], y[:5]", LOSS),
        ("tokens", "model = sharded()\nif rank == <R>: y[:5] = -100", LOSS),
        ("other_batch", "model = parted()\nif rank == <R>: x = x + 1", LOSS),
        ("weights", "model = parted()\nif rank == <R>: model[1].weight.data.mul_(1.1)", LOSS),
        (
            "weights",
            f"model = sharded(mesh={_MESH})\nif rank == <R>: model.get_parameter('<P>').to_local().data.add_(0.1)",
            LOSS,
        ),
    ],
}


# Right and wrong programs whose local steps are counted: code, loss and number of micro-steps.
_ONE_RANK = "\nif rank == 1: "
_SUM = "F.cross_entropy(model(x), y, reduction='sum')"
_OTHER = f"{_ONE_RANK}model.get_parameter('module.3.weight').data.mul_(1.1)"
_OWN = """
class Own(nn.Module):  # dropout outside of the layers of torch
    def __init__(self):
        super().__init__(); self.inner = net()
    def forward(self, x): return self.inner(F.dropout(x, 0.2, self.training))
model = DDP(Own())
"""
_DROPS = "model = parted(); model.append(nn.Dropout(0.2))"
COUNTED = [
    ("model = DDP(net(norm=True))", LOSS, 1),
    ("model = sharded()", LOSS, 4),
    (_DROPS, LOSS, 1),
    (_OWN, f"{LOSS} * dist.get_world_size()", 1),
    ("model = DDP(net())", _SUM, 4),
    ("model = DDP(net())", f"{_SUM.replace('model(', 'model.module(')} * world_size", 1),
    (f"model = DDP(net()){_ONE_RANK}x, y = x[:5], y[:5]", LOSS, 1),
    (f"model = DDP(net()){_OTHER}", f"{LOSS} / world_size", 1),
    ("model = sharded(); model.set_requires_gradient_sync(False)", f"{_SUM} * world_size", 1),
    (f"model = parted(){_ONE_RANK}x = x + 1", LOSS, 1),
]
MORE_COUNTED = [
    *(
        (code, LOSS, micro)
        for code in ("model = DDP(net())", "model = parted()", "model = sharded()")
        for micro in (1, 4)
    ),
    (_OWN, LOSS, 4),
    *(("model = DDP(net())", loss, micro) for loss in (_SUM, f"{LOSS} * world_size") for micro in (1, 4)),
    *(("model = sharded()", loss, 1) for loss in (_SUM, f"{LOSS} / dist.get_world_size()")),
    (f"model = DDP(net()){_ONE_RANK}y[:5] = -100", LOSS, 1),
    (f"model = DDP(net().bfloat16()); x = x.bfloat16(){_OTHER}", LOSS, 4),
    (f"model = sharded(){_ONE_RANK}x, y = x[:3], y[:3]", LOSS, 1),
    (f"{_DROPS}{_ONE_RANK}model[1].weight.data.mul_(1.1)", LOSS, 1),
]


def counting(folder: Path) -> str:
    """Return code that lets ranks append the number of samples of each forward of the model to a file of the folder."""
    return f"""
def count(module, inputs):
    with open(f"{folder}/{{rank_of_file}}", "a") as file:
        file.write(f"{{len(inputs[0])}} ")
rank_of_file = rank
getattr(model, "module", model).register_forward_pre_hook(count)
"""


def steps_of(session, folder: Path, code: str, loss: str, micro: int) -> list[float]:
    """Return the number of local steps that each rank has computed for a comparison.

    A local step is a forward and a backward pass of the largest part. Each forward pass has its backward pass.
    """
    session.run(f"{SETUP}{code}\n{counting(folder)}", quiet=True)
    assert session.verify(loss, ["x", "y"], micro=micro).is_compared
    steps = []
    for rank in range(session.world_size):
        sizes = [int(one) for one in (folder / str(rank)).read_text().split()]
        assert sizes.count(8 * session.world_size) <= 1
        steps.append(sum(sizes) / 8)
        (folder / str(rank)).unlink()
    return steps
