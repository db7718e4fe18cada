"""Right programs: the session reports nothing.

They are written after torch's tests of DDP, FSDP2, tensor parallel, pipelining, checkpoints and collectives, and after
the examples of torch's documentation. All run on CPUs with gloo on two ranks.
"""

from __future__ import annotations

import itertools

from tests.training_programs.program import MAKE, STEP, Program, loop

_DOCS = "https://docs.pytorch.org/docs/stable/"
_TESTS = "https://github.com/pytorch/pytorch/blob/main/test/distributed/"
_DDP = _TESTS + "test_c10d_gloo.py"
_FSDP = _TESTS + "_composable/fsdp/test_fully_shard_training.py"
_TP = _TESTS + "tensor/parallel/test_tp_examples.py"
_PIPELINE = _TESTS + "pipelining/test_schedule_multiproc.py"
_CHECKPOINT = _TESTS + "checkpoint/test_state_dict.py"
_GLOO = _TESTS + "test_c10d_gloo.py"

RIGHT: list[Program] = []


def _add(name: str, source: str, code: str) -> None:
    RIGHT.append(Program(name=name, source=source, code=code))


# ---- DDP: options, optimizers, schedulers

for _options in (
    "bucket_cap_mb=0.0001",
    "gradient_as_bucket_view=True",
    "static_graph=True",
    "find_unused_parameters=True",
    "broadcast_buffers=False",
    "init_sync=False",
    "static_graph=True, gradient_as_bucket_view=True",
):
    _add(f"DDP with {_options}", _DDP, loop(f"model = DDP(net(), {_options}); optimizer = sgd(model)", STEP))
for _optimizer in (
    "SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)",
    "Adam(model.parameters())",
    "AdamW(model.parameters(), lr=1e-3, amsgrad=True)",
    "AdamW(model.parameters(), foreach=True)",
    "AdamW(model.parameters(), fused=True)",
    "RMSprop(model.parameters())",
    "Adagrad(model.parameters())",
    "Adadelta(model.parameters())",
    "NAdam(model.parameters())",
    "Rprop(model.parameters())",
    "Adamax(model.parameters())",
):
    _add(
        f"DDP and {_optimizer}",
        _DOCS + "optim.html",
        loop(f"model = DDP(net()); optimizer = torch.optim.{_optimizer}", STEP),
    )
for _scheduler in (
    "StepLR(optimizer, 2)",
    "CosineAnnealingLR(optimizer, 5)",
    "OneCycleLR(optimizer, max_lr=0.1, total_steps=5)",
    "LambdaLR(optimizer, lambda step: min(1.0, step / 3))",
    "ExponentialLR(optimizer, 0.9)",
):
    _add(
        f"a schedule: {_scheduler}",
        _DOCS + "optim.html",
        loop(f"{MAKE}; scheduler = torch.optim.lr_scheduler.{_scheduler}", STEP + "scheduler.step()"),
    )
_add(
    "a schedule by the mean of the losses",
    _DOCS + "generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
    loop(
        f"{MAKE}; scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        STEP + "mean = loss.detach().clone(); dist.all_reduce(mean); scheduler.step(mean.item() / world_size)",
    ),
)
_add(
    "a new learning rate by hand",
    _DOCS + "optim.html",
    loop(MAKE, STEP + "for group in optimizer.param_groups: group['lr'] *= 0.9"),
)

# ---- gradient accumulation, clipping, mixed precision

_ACCUMULATE = """
for step in range(3):
    optimizer.zero_grad()
    for part in range(4):
        x, y = batch(4 * step + part)
        with contextlib.nullcontext() if part == 3 else model.no_sync():
            (F.mse_loss(model(x), y) / 4).backward()
    optimizer.step()
"""
_add(
    "accumulation with no_sync", _DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html", MAKE + _ACCUMULATE
)
_add(
    "accumulation with a flag of DDP",
    "https://github.com/karpathy/build-nanogpt/pull/30",
    MAKE
    + """
for step in range(3):
    optimizer.zero_grad()
    for part in range(3):
        x, y = batch(3 * step + part)
        model.require_backward_grad_sync = part == 2
        (F.mse_loss(model(x), y) / 3).backward()
    optimizer.step()
""",
)
_add(
    "accumulation that averages each time",
    "https://github.com/karpathy/nanochat/pull/33",
    MAKE
    + """
for step in range(3):
    optimizer.zero_grad()
    for part in range(2):
        x, y = batch(2 * step + part)
        (F.mse_loss(model(x), y) / 2).backward()
    optimizer.step()
""",
)
_add(
    "accumulation in FSDP2",
    _FSDP,
    """
model = net(); fully_shard(model); optimizer = sgd(model)
for step in range(3):
    for part in range(2):
        x, y = batch(2 * step + part)
        model.set_requires_gradient_sync(part == 1)
        (F.mse_loss(model(x), y) / 2).backward()
    optimizer.step(); optimizer.zero_grad()
""",
)
for _clip in ("clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_value_(model.parameters(), 0.1)"):
    _add(
        f"clipping: {_clip.partition('(')[0]}",
        _DOCS + "generated/torch.nn.utils.clip_grad_norm_.html",
        loop(MAKE, STEP.replace("optimizer.step()", f"nn.utils.{_clip}\noptimizer.step()")),
    )
_AMP = """
optimizer.zero_grad()
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = F.mse_loss(model(x).float(), y)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""
_add(
    "mixed precision with a scaler",
    _DOCS + "notes/amp_examples.html",
    loop(f"{MAKE}; scaler = torch.amp.GradScaler('cpu')", _AMP),
)
_add(
    "a scaler that skips a step after inf",
    _DOCS + "notes/amp_examples.html",
    loop(
        f"{MAKE}; scaler = torch.amp.GradScaler('cpu', init_scale=2.0**16)",
        _AMP.replace("y)", "y) * (float('inf') if step == 1 and rank == 1 else 1.0)"),
    ),
)
_add(
    "autocast without a scaler",
    _DOCS + "amp.html",
    loop(
        MAKE,
        STEP.replace(
            "loss = F.mse_loss(model(x), y)",
            "with torch.autocast('cpu', dtype=torch.bfloat16): loss = F.mse_loss(model(x).float(), y)",
        ),
    ),
)
_add(
    "a model in bfloat16",
    _DDP,
    loop(
        "model = DDP(net().bfloat16()); optimizer = sgd(model)", STEP.replace("model(x)", "model(x.bfloat16()).float()")
    ),
)
_add(
    "a model in float64",
    _DDP,
    loop(
        "model = DDP(net().double()); optimizer = sgd(model)",
        STEP.replace("model(x), y", "model(x.double()), y.double()"),
    ),
)
_add(
    "set_to_none=False",
    _DOCS + "generated/torch.optim.Optimizer.zero_grad.html",
    loop(MAKE, STEP.replace("zero_grad()", "zero_grad(set_to_none=False)")),
)
_add("zero_grad of the model", _DDP, loop(MAKE, STEP.replace("optimizer.zero_grad()", "model.zero_grad()")))

# ---- models

for _name, _model in {
    "frozen first layer": "inner = net(); inner[0].requires_grad_(False); model = DDP(inner)",
    "frozen biases": "inner = net()\nfor name, p in inner.named_parameters(): p.requires_grad_('bias' not in name)\nmodel = DDP(inner)",
    "batch norm": "model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))",
    "dropout": "model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))",
    "layer norm": "model = DDP(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)))",
    "a shared layer": "inner = nn.Linear(4, 4); model = DDP(nn.Sequential(inner, nn.ReLU(), inner, nn.Linear(4, 2)))",
    "a recomputed layer": (
        "from torch.utils.checkpoint import checkpoint\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.a = nn.Linear(4, 8); self.b = nn.Linear(8, 2)\n"
        "    def forward(self, x): return self.b(checkpoint(self.a, x, use_reentrant=False))\nmodel = DDP(Net())"
    ),
    "a low-rank adapter": (
        "class LoRA(nn.Module):\n    def __init__(self):\n        super().__init__(); self.base = nn.Linear(4, 2).requires_grad_(False)\n"
        "        self.a = nn.Linear(4, 1, bias=False); self.b = nn.Linear(1, 2, bias=False); nn.init.zeros_(self.b.weight)\n"
        "    def forward(self, x): return self.base(x) + self.b(self.a(x))\ntorch.manual_seed(0); model = DDP(LoRA())"
    ),
    "a recurrent layer": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.rnn = nn.GRU(4, 8); self.out = nn.Linear(8, 2)\n"
        "    def forward(self, x): return self.out(self.rnn(x[None])[0][0])\nmodel = DDP(Net())"
    ),
    "attention": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.mix = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)\n"
        "        self.out = nn.Linear(4, 2)\n    def forward(self, x): return self.out(self.mix(x[:, None])[:, 0])\nmodel = DDP(Net())"
    ),
    "two heads of which both are used": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(4, 2); self.b = nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.a(x) + self.b(x)\nmodel = DDP(Net())"
    ),
    "an unused head with find_unused_parameters": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(4, 2); self.b = nn.Linear(4, 2)\n"
        "    def forward(self, x): return self.a(x)\nmodel = DDP(Net(), find_unused_parameters=True)"
    ),
    "layers that are skipped at random, on all ranks the same": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.a = nn.Linear(4, 4); self.b = nn.Linear(4, 2); self.count = 0\n"
        "    def forward(self, x):\n        self.count += 1\n        return self.b(self.a(x) if self.count % 2 else x)\n"
        "model = DDP(Net(), find_unused_parameters=True)"
    ),
}.items():
    _add(f"DDP of a model with {_name}", _DDP, loop(f"{_model}\noptimizer = sgd(model)", STEP))
_add(
    "only trainable parameters in the optimizer",
    _DOCS + "notes/autograd.html",
    loop(
        "inner = net(); inner[0].requires_grad_(False); model = DDP(inner)\n"
        "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)",
        STEP,
    ),
)
_add(
    "two parameter groups",
    _DOCS + "optim.html",
    loop(
        "model = DDP(net()); optimizer = torch.optim.SGD([{'params': model.module[0].parameters()}, {'params': model.module[2].parameters(), 'lr': 0.01}], lr=0.1)",
        STEP,
    ),
)
_add(
    "an optimizer made before DDP",
    _DOCS + "notes/ddp.html",
    loop("inner = net(); optimizer = sgd(inner); model = DDP(inner)", STEP),
)
_add(
    "two optimizers for two layers",
    _DOCS + "optim.html",
    loop(
        "model = DDP(net()); first, second = sgd(model.module[0]), sgd(model.module[2])",
        "loss = F.mse_loss(model(x), y); loss.backward()\nfor one in (first, second): one.step(); one.zero_grad()",
    ),
)
_add(
    "a layer that is unfrozen later",
    _DDP,
    loop(
        "inner = net(); inner[0].requires_grad_(False); model = DDP(inner); optimizer = sgd(inner)",
        "if step == 3:\n    inner.requires_grad_(True); model = DDP(inner)\n" + STEP.strip(),
    ),
)
_add(
    "the model is wrapped again in each cell",
    "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    "for again in range(2):\n    model = DDP(net()); optimizer = sgd(model)\n    for step in range(2):\n        x, y = batch(step); optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add("one step only", "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html", loop(MAKE, STEP, steps=1))
_add(
    "a step in a function",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    f"""
class Trainer:
    def __init__(self): self.model = DDP(net()); self.optimizer = sgd(self.model)
    def run(self, steps):
        for step in range(steps):
            x, y = batch(step)
            self.optimizer.zero_grad(); F.mse_loss(self.model(x), y).backward(); self.optimizer.step()
trainer = Trainer(); trainer.run(4)
""",
)
_add(
    "torch.compile with the eager backend",
    _DOCS + "torch.compiler.html",
    loop("model = DDP(torch.compile(net(), backend='eager')); optimizer = sgd(model)", STEP, steps=3),
)
_add(
    "a compiled step of a DDP model",
    _DOCS + "torch.compiler.html",
    loop("model = torch.compile(DDP(net()), backend='eager'); optimizer = sgd(model)", STEP, steps=3),
)
_add(
    "LBFGS with a closure",
    _DOCS + "optim.html",
    """
model = DDP(net()); optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
x, y = batch(0)
def closure():
    optimizer.zero_grad(); loss = F.mse_loss(model(x), y); loss.backward()
    mean = loss.detach().clone(); dist.all_reduce(mean)
    return mean / world_size
for step in range(2): optimizer.step(closure)
""",
)
_add(
    "a communication hook",
    _DOCS + "ddp_comm_hooks.html",
    loop(
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\nmodel = DDP(net()); model.register_comm_hook(None, default_hooks.fp16_compress_hook); optimizer = sgd(model)",
        STEP,
    ),
)
_add(
    "a hook that averages by hand",
    _DOCS + "ddp_comm_hooks.html",
    loop(
        "def mean(_, bucket):\n    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n    return future.then(lambda done: done.value()[0] / world_size)\nmodel = DDP(net()); model.register_comm_hook(None, mean); optimizer = sgd(model)",
        STEP,
    ),
)
_add(
    "a zero redundancy optimizer",
    _DOCS + "distributed.optim.html",
    loop(
        "from torch.distributed.optim import ZeroRedundancyOptimizer\nmodel = DDP(net()); optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)",
        STEP,
        steps=3,
    ),
)
_add(
    "uneven batches with Join",
    "https://docs.pytorch.org/tutorials/advanced/generic_join.html",
    "model = DDP(net()); optimizer = sgd(model)\nwith model.join():\n    for step in range(3 + rank):\n        x, y = batch(step)\n        optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "a generative adversarial network",
    "https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html",
    """
maker, judge = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))
of_maker, of_judge = sgd(maker), sgd(judge)
for step in range(4):
    x, _ = batch(step)
    of_judge.zero_grad()
    (F.softplus(-judge(x)).mean() + F.softplus(judge(maker(x).detach())).mean()).backward()
    of_judge.step()
    of_maker.zero_grad()
    F.softplus(-judge(maker(x))).mean().backward()
    of_maker.step()
""",
)
_add(
    "a judge that is frozen for the maker's step",
    "https://docs.pytorch.org/tutorials/beginner/dcgan_faces_tutorial.html",
    """
maker, judge = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))
of_maker, of_judge = sgd(maker), sgd(judge)
for step in range(4):
    x, _ = batch(step)
    judge.requires_grad_(True)
    of_judge.zero_grad(); (judge(x).mean() - judge(maker(x).detach()).mean()).backward(); of_judge.step()
    judge.requires_grad_(False)
    of_maker.zero_grad(); judge.module(maker(x)).mean().backward(); of_maker.step()
judge.requires_grad_(True)
""",
)
_add(
    "a moving average of the model",
    _DOCS + "optim.html",
    loop(
        "model = DDP(net()); optimizer = sgd(model)\nfrom torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\naverage = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))",
        STEP + "average.update_parameters(model.module)",
    ),
)
_add(
    "a teacher without gradients",
    "https://docs.pytorch.org/tutorials/beginner/knowledge_distillation_tutorial.html",
    loop(
        "teacher = net().eval().requires_grad_(False); model = DDP(nn.Linear(4, 2)); optimizer = sgd(model)",
        STEP.replace("y)", "teacher(x))"),
    ),
)
_add(
    "policy gradients with few steps",
    "https://docs.pytorch.org/tutorials/intermediate/reinforcement_q_learning.html",
    loop(
        "policy = DDP(nn.Linear(4, 3)); optimizer = torch.optim.Adam(policy.parameters())",
        "chosen = torch.distributions.Categorical(logits=policy(x)); action = chosen.sample()\nreward = (action == step % 3).float()\noptimizer.zero_grad(); (-chosen.log_prob(action) * (reward - reward.mean())).mean().backward(); optimizer.step()",
        steps=2,
    ),
)
_add(
    "evaluation between steps",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    loop(
        MAKE,
        STEP
        + "if step % 2:\n    model.eval()\n    with torch.no_grad(): total = F.mse_loss(model(x), y)\n    dist.all_reduce(total); model.train()",
    ),
)
_add(
    "evaluation of the inner model in inference mode",
    _DOCS + "generated/torch.autograd.grad_mode.inference_mode.html",
    loop(MAKE, STEP + "with torch.inference_mode(): score = model.module(x).mean()"),
)
_add(
    "prediction only",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    "model = net().eval()\nwith torch.no_grad(): parts = [model(batch(step)[0]) for step in range(3)]\ngathered = [None] * world_size\ndist.all_gather_object(gathered, [part.mean().item() for part in parts])",
)
_add(
    "a double backward",
    _DDP,
    loop(
        MAKE,
        "x.requires_grad_(True)\noptimizer.zero_grad(); loss = F.mse_loss(model(x), y)\n(slope,) = torch.autograd.grad(loss, x, create_graph=True)\nloss = loss + 0 * slope.square().sum()\nloss.backward(); optimizer.step()",
    ).replace("0 * slope.square().sum()", "1e-3 * slope.detach().square().sum()"),
)

# ---- gradients averaged by hand

_BY_HAND = "model = net(); optimizer = sgd(model)"
_add(
    "gradients averaged one by one",
    "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
    loop(
        _BY_HAND,
        STEP.replace(
            "optimizer.step()",
            "for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= world_size\noptimizer.step()",
        ),
    ),
)
_add(
    "gradients averaged in one tensor",
    "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
    loop(
        _BY_HAND,
        STEP.replace(
            "optimizer.step()",
            "flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()]); dist.all_reduce(flat); flat /= world_size\nat = 0\nfor p in model.parameters(): p.grad.copy_(flat[at:at + p.numel()].view_as(p)); at += p.numel()\noptimizer.step()",
        ),
    ),
)
_add(
    "gradients averaged asynchronously",
    _DOCS + "distributed.html",
    loop(
        _BY_HAND,
        STEP.replace(
            "optimizer.step()",
            "works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]\nfor work in works: work.wait()\nfor p in model.parameters(): p.grad /= world_size\noptimizer.step()",
        ),
    ),
)
_add(
    "parameters averaged each second step",
    "https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html",
    loop(
        _BY_HAND,
        STEP + "if step % 2:\n    for p in model.parameters(): dist.all_reduce(p.data); p.data /= world_size",
        steps=4,
    ),
)
_add(
    "the same data on all ranks of a model that is averaged by hand",
    "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
    loop(
        _BY_HAND + "; dist.barrier()",
        STEP.replace(
            "optimizer.step()",
            "for p in model.parameters(): dist.all_reduce(p.grad, op=dist.ReduceOp.SUM); p.grad.div_(world_size)\noptimizer.step()",
        ),
    ),
)

# ---- data

for _options in ("shuffle=True", "shuffle=False", "shuffle=True, drop_last=True", "shuffle=True, seed=3"):
    _add(
        f"DistributedSampler with {_options}",
        _DOCS + "data.html",
        f"""
data = dataset(); sampler = DistributedSampler(data, {_options}); loader = DataLoader(data, batch_size=4, sampler=sampler)
{MAKE}
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()
""",
    )
_add(
    "one epoch without set_epoch",
    _DOCS + "data.html",
    f"data = dataset(); loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "epochs of a sampler that does not shuffle",
    _DOCS + "data.html",
    f"data = dataset(); loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))\n{MAKE}\nfor epoch in range(3):\n    for x, y in loader:\n        optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "a loader with workers",
    _DOCS + "data.html",
    f"data = dataset(); sampler = DistributedSampler(data); loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)\n{MAKE}\nsampler.set_epoch(0)\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "a share by slicing",
    "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
    f"data = dataset(); share = torch.utils.data.Subset(data, range(rank, len(data), world_size)); loader = DataLoader(share, batch_size=4, shuffle=False)\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()".replace(
        "loader = DataLoader(share, batch_size=4, shuffle=False)",
        "loader = [share.dataset[torch.tensor(list(share.indices)[i:i + 4])] for i in range(0, len(share), 4)]",
    ),
)
_add(
    "a stream with a share for each rank",
    _DOCS + "data.html",
    f"class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        for step in range(4): yield batch(step)\nloader = DataLoader(Stream(), batch_size=None)\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "a validation loader read by all ranks after training",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    f"data = dataset(); sampler = DistributedSampler(data); loader = DataLoader(data, batch_size=8, sampler=sampler)\n{MAKE}\nsampler.set_epoch(0)\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()\nmodel.eval()\nwith torch.no_grad(): score = sum(F.mse_loss(model.module(x), y).item() for x, y in zip(*[t.split(8) for t in data.tensors]))\nmodel.train()",
)
_add(
    "a seed for each rank",
    _DOCS + "notes/randomness.html",
    loop(f"torch.manual_seed(100 + rank)\n{MAKE}", STEP.replace("model(x)", "model(x + 0.1 * torch.randn_like(x))")),
)
_add(
    "data made by rank 0 and scattered",
    _DOCS + "distributed.html",
    loop(
        MAKE,
        "x = torch.empty(4, 4); parts = list(torch.randn(2, 4, 4)) if rank == 0 else None\ndist.scatter(x, parts)\ny = y[:4]\n"
        + STEP.strip(),
    ),
)
_add(
    "a number of batches that all ranks agree on",
    "https://github.com/pytorch/pytorch/issues/33148",
    f"{MAKE}\ncount = torch.tensor(3 + rank); dist.all_reduce(count, op=dist.ReduceOp.MIN)\nfor step in range(int(count)):\n    x, y = batch(step)\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "a bad batch skipped by all ranks",
    "https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
    f"{MAKE}\nfor step in range(5):\n    x, y = batch(step)\n    bad = torch.tensor(float(step == 2 and rank == 1)); dist.all_reduce(bad)\n    if bad: continue\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
_add(
    "early stopping that all ranks agree on",
    "https://docs.pytorch.org/docs/stable/distributed.html",
    f"{MAKE}\nfor step in range(6):\n    x, y = batch(step)\n    optimizer.zero_grad(); loss = F.mse_loss(model(x), y); loss.backward(); optimizer.step()\n    stop = torch.tensor(float(step == 3)) if rank == 0 else torch.zeros(())\n    dist.broadcast(stop, 0)\n    if stop: break",
)
_add(
    "a loss averaged for the log",
    "https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html",
    loop(MAKE, STEP + "mean = loss.detach().clone(); dist.all_reduce(mean); mean /= world_size"),
)
_add("different batch sizes on the ranks", _DDP, loop(MAKE, "x, y = batch(step, 4 + rank)\n" + STEP.strip()))

# ---- collectives and messages

_COLLECTIVES = {
    "all_reduce of a contiguous row": "x = torch.ones(4, 2); dist.all_reduce(x[1])",
    "all_reduce of a contiguous copy": "x = torch.ones(4, 2); y = x[:, 0].contiguous(); dist.all_reduce(y); x[:, 0] = y",
    "all_reduce with MAX": "x = torch.tensor(float(rank)); dist.all_reduce(x, op=dist.ReduceOp.MAX)",
    "all_reduce of booleans": "x = torch.tensor([rank == 0, True]); dist.all_reduce(x, op=dist.ReduceOp.MAX)",
    "all_reduce of complex numbers": "x = torch.ones(3, dtype=torch.complex64); dist.all_reduce(x)",
    "all_reduce of integers": "x = torch.arange(5); dist.all_reduce(x)",
    "all_reduce of no elements": "x = torch.empty(0); dist.all_reduce(x)",
    "broadcast": "x = torch.full((3,), float(rank)); dist.broadcast(x, src=1)",
    "broadcast of an object": "box = [{'a': 1} if rank == 0 else None]; dist.broadcast_object_list(box, src=0)",
    "all_gather": "parts = [torch.empty(2) for _ in range(world_size)]; dist.all_gather(parts, torch.ones(2) * rank)",
    "all_gather into rows of a tensor": "x = torch.empty(world_size, 2); dist.all_gather(list(x), torch.ones(2) * rank)",
    "all_gather_into_tensor": "x = torch.empty(2 * world_size); dist.all_gather_into_tensor(x, torch.ones(2) * rank)",
    "gather": "parts = [torch.empty(2) for _ in range(world_size)] if rank == 0 else None; dist.gather(torch.ones(2), parts, dst=0)",
    "scatter": "x = torch.empty(2); dist.scatter(x, list(torch.ones(world_size, 2)) if rank == 0 else None, src=0)",
    "reduce, used on its destination": "x = torch.ones(2); dist.reduce(x, dst=0)\nif rank == 0: assert x[0] == world_size",
    "reduce_scatter_tensor": "x = torch.empty(2); dist.reduce_scatter_tensor(x, torch.ones(2 * world_size))",
    "all_to_all_single": "x = torch.empty(world_size); dist.all_to_all_single(x, torch.arange(world_size) * 1.0)",
    "all_to_all_single with sizes": "n = [1, 2] if rank == 0 else [3, 1]; m = [1, 3] if rank == 0 else [2, 1]\nx = torch.empty(sum(m)); dist.all_to_all_single(x, torch.ones(sum(n)), m, n)",
    "send and recv": "x = torch.ones(3)\nif rank == 0: dist.send(x, 1)\nelse: dist.recv(x, 0)",
    "an exchange with isend and irecv": "x, y = torch.ones(3), torch.empty(3)\nworks = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]\nfor work in works: work.wait()",
    "a batch of messages": "x, y = torch.ones(3), torch.empty(3)\nfor work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]): work.wait()",
    "messages with tags": "a, b = torch.ones(1), torch.ones(2)\nif rank == 0: dist.send(a, 1, tag=1); dist.send(b, 1, tag=2)\nelse: dist.recv(a, 0, tag=1); dist.recv(b, 0, tag=2)",
    "objects of ranks": "found = [None] * world_size; dist.all_gather_object(found, {'rank': rank})",
    "an asynchronous operation that is waited for": "x = torch.ones(1000); work = dist.all_reduce(x, async_op=True); y = torch.ones(3).sum(); work.wait(); assert x[0] == world_size",
    "an operation whose future is waited for": "x = torch.ones(8); dist.all_reduce(x, async_op=True).get_future().wait()",
    "functional collectives": "import torch.distributed._functional_collectives as funcol\nx = funcol.all_reduce(torch.ones(3), 'sum', dist.group.WORLD); assert x[0] == world_size",
    "a group of all ranks for messages of another thread": "other = dist.new_group()\nwith ThreadPoolExecutor(1) as pool:\n    done = pool.submit(dist.all_reduce, torch.ones(2), group=other); dist.all_reduce(torch.ones(2)); done.result()\ndist.destroy_process_group(other)",
    "a group of one rank": "groups = [dist.new_group([one]) for one in range(world_size)]; dist.all_reduce(torch.ones(1), group=groups[rank])",
    "barriers": "for _ in range(3): dist.barrier()",
    "the branch that all ranks take": "flag = torch.tensor(1.0 if rank == 0 else 0.0); dist.broadcast(flag, 0)\nif flag: dist.all_reduce(torch.ones(2))\nelse: dist.barrier()",
    "the same collective from two branches": "x = torch.ones(2)\nif rank == 0:\n    x = x * 2; dist.all_reduce(x)\nelse:\n    dist.all_reduce(x)\nassert x[0] == 3",
    "work of rank 0 before a barrier": "if rank == 0: time.sleep(0.2)\ndist.barrier()",
    "a store": "store = dist.distributed_c10d._get_default_store()\nif rank == 0: store.set('ready', '1')\nstore.wait(['ready']); dist.barrier()",
    "a gradient through all_reduce": "from torch.distributed.nn import functional as with_gradient\nw = torch.ones(2, requires_grad=True); with_gradient.all_reduce(w * (rank + 1)).sum().backward(); assert w.grad is not None",
    "a gradient through all_gather": "from torch.distributed.nn import functional as with_gradient\nw = torch.ones(2, requires_grad=True); torch.stack(with_gradient.all_gather(w * 2)).sum().backward(); assert w.grad is not None",
}
for _name, _code in _COLLECTIVES.items():
    _add(_name, _DOCS + "distributed.html", _code)

# ---- FSDP2

_SHARDED = {
    "the root only": "fully_shard(model)",
    "each layer": "[fully_shard(model[i]) for i in (0, 2)]; fully_shard(model)",
    "each layer, kept after the forward": "[fully_shard(model[i], reshard_after_forward=False) for i in (0, 2)]; fully_shard(model)",
    "a mesh of replicas": "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('replica', 'shard')); fully_shard(model, mesh=mesh)",
    "bfloat16": "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))",
    "a layer that is ignored": "fully_shard(model, ignored_params={model[2].bias}); model[2].bias.requires_grad_(False)",
}
for (_name, _how), _optimizer in itertools.product(
    _SHARDED.items(), ("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters())")
):
    _add(
        f"FSDP2 of {_name}, {_optimizer.partition('(')[0]}",
        _FSDP,
        loop(f"model = net(); {_how}\noptimizer = torch.optim.{_optimizer}", STEP, steps=3),
    )
_FULLY = "model = net(); fully_shard(model); optimizer = sgd(model)"
_add(
    "FSDP2 with a clipped norm",
    _FSDP,
    loop(
        _FULLY,
        STEP.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()"),
        steps=3,
    ),
)
_add(
    "FSDP2 with a frozen layer",
    _FSDP,
    loop(
        "model = net(); model[0].requires_grad_(False); [fully_shard(model[i]) for i in (0, 2)]; fully_shard(model); optimizer = sgd(model[2])",
        STEP,
        steps=3,
    ),
)
_add(
    "FSDP2 that is used before the optimizer is made",
    "https://github.com/pytorch/pytorch/issues/149205",
    loop(
        "model = net(); fully_shard(model); out = model(torch.ones(1, 4)); model.reshard(); optimizer = sgd(model)",
        STEP,
        steps=3,
    ),
)
_add(
    "FSDP2 with batch norm",
    _FSDP,
    loop(
        "torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)); fully_shard(model); optimizer = sgd(model)",
        STEP,
        steps=3,
    ),
)
_add(
    "FSDP2 from the meta device",
    _FSDP,
    loop(
        "with torch.device('meta'): model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))\nfully_shard(model); model.to_empty(device='cpu'); torch.manual_seed(0)\nfor layer in model: layer.reset_parameters()\noptimizer = sgd(model)",
        STEP,
        steps=3,
    ),
)
_add(
    "experts that all ranks use",
    "https://github.com/pytorch/pytorch/issues/158719",
    loop(
        "class Experts(nn.Module):\n    def __init__(self):\n        super().__init__(); self.parts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))\n    def forward(self, x): return self.parts[0](x) + 0.5 * self.parts[1](x)\ntorch.manual_seed(0); model = Experts()\nfor part in model.parts: fully_shard(part)\nfully_shard(model); optimizer = sgd(model)",
        STEP,
        steps=3,
    ),
)
_add(
    "experts that belong to ranks",
    "https://github.com/pytorch/pytorch/issues/126616",
    loop(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.dense = DDP(nn.Linear(4, 4)); torch.manual_seed(rank); self.expert = nn.Linear(4, 2)\n    def forward(self, x): return self.expert(self.dense(x))\nmodel = Net(); optimizer = sgd(model)",
        STEP,
        steps=3,
    ),
)
_add(
    "a whole state dict on rank 0",
    _CHECKPOINT,
    loop(_FULLY, STEP, steps=2)
    + "\nfrom torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\nstate = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\nif rank == 0:\n    with tempfile.TemporaryDirectory() as folder: torch.save(state, folder + '/model.pt')\ndist.barrier()",
)

# ---- tensor parallel and DTensor

_PAIR = "mesh = init_device_mesh('cpu', (2,)); model = net(); parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})"
_SAME = "torch.manual_seed(step); x, y = torch.randn(8, 4), torch.randn(8, 2)\n"
for _optimizer in ("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters(), foreach=False)"):
    _add(
        f"tensor parallel layers, {_optimizer.partition('(')[0]}",
        _TP,
        loop(f"{_PAIR}; optimizer = torch.optim.{_optimizer}", _SAME + STEP.strip(), steps=3),
    )
_add(
    "sequence parallel layers",
    _TP,
    loop(
        "mesh = init_device_mesh('cpu', (2,)); torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))\nparallelize_module(model, mesh, {'0': ColwiseParallel(output_layouts=Shard(0), use_local_output=True), '1': SequenceParallel(sequence_dim=0), '2': ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())}); optimizer = sgd(model)",
        _SAME + STEP.strip(),
        steps=3,
    ),
)
_add(
    "a layer by columns with a whole output",
    _TP,
    loop(
        "mesh = init_device_mesh('cpu', (2,)); torch.manual_seed(0); model = nn.Sequential(nn.Linear(4, 2)); parallelize_module(model, mesh, {'0': ColwiseParallel(output_layouts=Replicate())}); optimizer = sgd(model)",
        _SAME + STEP.strip(),
        steps=3,
    ),
)
_add(
    "products of distributed tensors",
    _TESTS + "tensor/test_matrix_ops.py",
    "mesh = init_device_mesh('cpu', (2,)); torch.manual_seed(0)\na = distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]); b = distribute_tensor(torch.randn(6, 2), mesh, [Replicate()])\nc = (a @ b).redistribute(mesh, [Replicate()]).to_local()",
)
_add(
    "a distributed tensor from shards",
    _TESTS + "tensor/test_dtensor.py",
    "mesh = init_device_mesh('cpu', (2,)); x = DTensor.from_local(torch.ones(2, 3) * rank, mesh, [Shard(0)]); total = x.sum().full_tensor()",
)
_add(
    "a whole tensor on all ranks, saved by one",
    "https://github.com/pytorch/pytorch/issues/148756",
    "mesh = init_device_mesh('cpu', (2,)); x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]); whole = x.full_tensor()\nif rank == 0: kept = whole.clone()\ndist.barrier()",
)

# ---- pipelines

_STAGE = "from torch.distributed.pipelining import PipelineStage, {0}\ntorch.manual_seed(rank); part = nn.Linear(4, 4) if rank == 0 else nn.Linear(4, 2); optimizer = sgd(part)\nstage = PipelineStage(part, rank, 2, torch.device('cpu')); schedule = {0}(stage, n_microbatches={1}, loss_fn=F.mse_loss)\n"
_PIPE = "for step in range(3):\n    torch.manual_seed(step); x, y = torch.randn(8, 4), torch.randn(8, 2)\n    optimizer.zero_grad()\n    if rank == 0: schedule.step(x)\n    else: schedule.step(target=y, losses=[])\n    optimizer.step()\n"
for _schedule, _count in (("ScheduleGPipe", 2), ("ScheduleGPipe", 4), ("Schedule1F1B", 4), ("Schedule1F1B", 2)):
    _add(f"a pipeline with {_schedule} and {_count} microbatches", _PIPELINE, _STAGE.format(_schedule, _count) + _PIPE)
_add(
    "a pipeline by hand",
    "https://docs.pytorch.org/docs/stable/distributed.html",
    """
torch.manual_seed(0); part = nn.Linear(4, 4); optimizer = sgd(part)
for step in range(3):
    x, y = batch(step); optimizer.zero_grad()
    if rank == 0:
        out = part(x); dist.send(out.detach(), 1); slope = torch.empty_like(out); dist.recv(slope, 1); out.backward(slope)
    else:
        got = torch.empty(8, 4); dist.recv(got, 0); got.requires_grad_(True)
        part(got).square().mean().backward(); dist.send(got.grad, 0)
    for p in part.parameters(): dist.all_reduce(p.grad)
    optimizer.step()
""",
)

# ---- checkpoints

_FOLDER = "box = [tempfile.mkdtemp() if rank == 0 else None]; dist.broadcast_object_list(box, 0); folder = box[0]\n"
_add(
    "a checkpoint of DDP by rank 0",
    "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    loop(_FOLDER + MAKE, STEP, steps=2)
    + "if rank == 0: torch.save(model.module.state_dict(), folder + '/model.pt')\ndist.barrier()\nmodel.module.load_state_dict(torch.load(folder + '/model.pt'))",
)
_add(
    "a distributed checkpoint of FSDP2",
    _CHECKPOINT,
    loop(_FOLDER + _FULLY, STEP, steps=2)
    + "from torch.distributed.checkpoint.state_dict import get_state_dict\nstate = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer)))\ndcp.save(state, checkpoint_id=folder); dcp.load(state, checkpoint_id=folder)",
)
_add(
    "a distributed checkpoint of DDP",
    _CHECKPOINT,
    loop(_FOLDER + MAKE, STEP, steps=2) + "dcp.save({'model': model.module.state_dict()}, checkpoint_id=folder)",
)
_add(
    "an asynchronous checkpoint with a group of its own",
    "https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html",
    loop(
        _FOLDER + _FULLY + "; own = dist.new_group(); future = None",
        STEP
        + "if future: future.result()\nfuture = dcp.async_save({'model': model.state_dict()}, checkpoint_id=f'{folder}/{step}', process_group=own)",
        steps=3,
    )
    + "future.result(); dist.destroy_process_group(own)",
)
_add(
    "a shard of each rank in a file of its own",
    "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html",
    loop(_FOLDER + _FULLY, STEP, steps=2)
    + "torch.save({name: p.to_local() for name, p in model.state_dict().items()}, f'{folder}/{rank}.pt')",
)
_add(
    "resuming with the optimizer's state",
    "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    loop("model = DDP(net()); optimizer = torch.optim.AdamW(model.parameters())", STEP, steps=2)
    + "kept = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))\nmodel = DDP(net()); optimizer = torch.optim.AdamW(model.parameters()); model.module.load_state_dict(kept[0]); optimizer.load_state_dict(kept[1])\nfor step in range(2, 4):\n    x, y = batch(step); optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
)
