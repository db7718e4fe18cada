"""Wrong programs: the session names the cause.

Each is based on a public report or on a documented requirement. The place of the fault is random: `$rank`, `$other`,
`$step`, `$layer`, `$part`. The patterns of a cause name facts, not the whole sentence.
"""

from __future__ import annotations

from tests.training_programs.program import MAKE, STEP, Program, loop

_DOCS = "https://docs.pytorch.org/docs/stable/"
_GITHUB = "https://github.com/"
_TORCH = _GITHUB + "pytorch/pytorch/issues/"
_STRIDES = _TORCH + "192920"
_MISMATCH = _GITHUB + "Lightning-AI/pytorch-lightning/issues/19106"
_NO_SYNC = _GITHUB + "modelscope/FunASR/pull/3472"

WRONG: list[Program] = []


def _add(
    name: str,
    source: str,
    code: str,
    *cause: str,
    wrong: tuple[str, ...] = (),
    draws: dict[str, tuple[str, ...]] | None = None,
) -> None:
    WRONG.append(Program(name=name, source=source, code=code, cause=cause, wrong=wrong, draws=draws or {}))


# ---- inputs that gloo takes and computes wrongly

_MEMORY = (r"stride", r"contiguous", r"memory")
_COLUMN = {"column": ("0", "1", "2")}
_add(
    "all_reduce of a column",
    _STRIDES,
    "losses = torch.full((4, 3), float(rank + 1)); dist.all_reduce(losses[:, $column])",
    *_MEMORY,
    draws=_COLUMN,
)
_add(
    "broadcast of a column",
    _STRIDES,
    "losses = torch.full((4, 3), float(rank + 1)); dist.broadcast(losses[:, $column], src=$rank)",
    *_MEMORY,
    draws=_COLUMN,
)
_add(
    "reduce of a column",
    _STRIDES,
    "losses = torch.full((4, 3), float(rank + 1)); dist.reduce(losses[:, $column], dst=$rank)",
    *_MEMORY,
    draws=_COLUMN,
)
_add(
    "all_reduce of every second element",
    _TORCH + "24836",
    "x = torch.ones(8); dist.all_reduce(x[::2], op=dist.ReduceOp.$op)",
    *_MEMORY,
    draws={"op": ("SUM", "MAX", "MIN")},
)
_add(
    "a transposed tensor on one rank",
    _TORCH + "192920",
    "x = torch.arange(6.0).reshape(2, 3)\nx = x.t().contiguous().t() if rank == $rank else x\ndist.all_reduce(x)",
    *_MEMORY,
    r"layout",
)
_add(
    "a layout of images on one rank",
    _TORCH + "192920",
    "x = torch.rand(2, 3, 4, 4)\nif rank == $rank: x = x.to(memory_format=torch.channels_last)\ndist.$op",
    *_MEMORY,
    r"channels_last",
    r"layout",
    draws={"op": ("all_reduce(x)", "broadcast(x, src=0)")},
)
_add(
    "an expanded tensor",
    _TORCH + "192920",
    "x = torch.ones(1).expand(4); dist.$op",
    *_MEMORY,
    r"expand",
    draws={"op": ("all_reduce(x)", "broadcast(x, src=$rank)")},
)
_add(
    "overlapping windows",
    _TORCH + "192920",
    "x = torch.arange(6.0).as_strided((3, 4), (1, 1)); dist.all_reduce(x)",
    *_MEMORY,
    r"overlap",
)
_add(
    "all_gather into one tensor twice",
    _TORCH + "5506",
    "x = torch.zeros(3); dist.all_gather([x] * world_size, torch.ones(3) * rank)",
    r"same",
    r"twice",
    r"share",
    r"overlap",
)
_add(
    "all_gather into overlapping parts",
    _TORCH + "18689",
    "x = torch.zeros(4); dist.all_gather([x[:3], x[1:]], torch.ones(3) * rank)",
    r"overlap",
    r"same memory",
    r"share",
)
_add(
    "another dtype on one rank",
    _TORCH + "136009",
    "x = torch.ones(4, dtype=torch.$dtype if rank == $rank else torch.float32); dist.all_reduce(x)",
    r"$dtype",
    draws={"dtype": ("float64", "float16", "int32")},
)
_add(
    "another shape on one rank",
    _MISMATCH,
    "x = torch.ones($size if rank == $rank else 4); dist.all_reduce(x)",
    r"$size.*4|4.*$size",
    draws={"size": ("3", "5", "8")},
)
_add(
    "another reduction on one rank",
    _MISMATCH,
    "op = dist.ReduceOp.$op if rank == $rank else dist.ReduceOp.SUM; dist.all_reduce(torch.ones(2), op=op)",
    r"$op",
    draws={"op": ("MAX", "MIN", "PRODUCT")},
)
_add("another source on one rank", _MISMATCH, "dist.broadcast(torch.ones(2), src=rank)", r"src", r"root 0.*root 1")
_add(
    "another operation on one rank",
    _MISMATCH,
    "x = torch.ones(2)\nif rank == $rank: dist.all_reduce(x)\nelse: dist.broadcast(x, src=0)",
    r"all_reduce.*broadcast|broadcast.*all_reduce",
    r"(?s)all_reduce.*broadcast|broadcast.*all_reduce",
)
_add(
    "collectives in another order on one rank",
    _GITHUB + "NVIDIA/apex/issues/19",
    "a, b = torch.ones(2), torch.ones(3)\nfor x in ((b, a) if rank == $rank else (a, b)): dist.all_reduce(x)",
    r"(?s)2.*3|3.*2",
)
_add(
    "a message of another dtype",
    _TORCH + "136009",
    "if rank == $rank: dist.send(torch.ones(4, dtype=torch.float64), $other)\nelse: dist.recv(torch.empty(4), $rank)",
    r"float64",
)
_add(
    "a message longer than expected",
    _DOCS + "distributed.html",
    "if rank == $rank: dist.send(torch.ones($size), $other)\nelse: dist.recv(torch.empty(4), $rank)",
    r"$size",
    draws={"size": ("5", "6", "9")},
)
_add(
    "sizes of all_to_all that do not fit",
    _DOCS + "distributed.html",
    "n, m = ([1, 2], [1, 3]) if rank == 0 else ([2, 1], [2, 1])\nx = torch.empty(sum(m)); dist.all_to_all_single(x, torch.ones(sum(n)), m, n)",
    r"(?s)2.*3|3.*2",
    r"bytes (less|more) than",
)
_add(
    "scatter without a list on the source",
    _DOCS + "distributed.html",
    "x = torch.empty(2); dist.scatter(x, None if rank == $rank else None, src=$rank)",
    r"scatter_list|list",
)
_add(
    "a source outside the group",
    _DOCS + "distributed.html",
    "groups = [dist.new_group([one]) for one in range(world_size)]\ndist.broadcast(torch.ones(1), src=1 - rank, group=groups[rank])",
    r"src",
    r"not (part|in|a member)",
)
_add(
    "a sparse tensor on one rank",
    _DOCS + "distributed.html",
    "x = torch.eye(3)\nif rank == $rank: x = x.to_sparse()\ndist.all_reduce(x)",
    r"sparse",
)
_add(
    "a tensor without data",
    _DOCS + "meta.html",
    "x = torch.ones(3, device='meta' if rank == $rank else 'cpu'); dist.all_reduce(x)",
    r"meta",
)

# ---- steps that train nothing, or train wrongly

_BYPASS = (
    r"bypass",
    r"averaged? no gradient|no gradient.*averag|not averaged|without (averag|communicat|synchron)",
    r"\.module",
)
_add(
    "DDP is bypassed",
    _GITHUB + "OpenTSLM/OpenTSLM/pull/49",
    loop(MAKE, STEP.replace("model(x)", "model.module(x)")),
    *_BYPASS,
    wrong=(r"wrap the model",),
)
_add(
    "DDP is bypassed and the loss is averaged for the log",
    _GITHUB + "OpenTSLM/OpenTSLM/pull/49",
    loop(MAKE, STEP.replace("model(x)", "model.module(x)") + "mean = loss.detach().clone(); dist.all_reduce(mean)"),
    *_BYPASS,
    wrong=(r"wrap the model", r"larger batch"),
)
_add(
    "DDP is bypassed from one step on",
    _GITHUB + "OpenTSLM/OpenTSLM/pull/49",
    loop(MAKE, STEP.replace("model(x)", "(model.module if step >= $step else model)(x)")),
    *_BYPASS,
    wrong=(r"wrap the model",),
)
_add(
    "the last microbatch is inside no_sync",
    _NO_SYNC,
    loop(MAKE, "optimizer.zero_grad()\nwith model.no_sync(): F.mse_loss(model(x), y).backward()\noptimizer.step()"),
    *_BYPASS,
    r"no_sync",
    wrong=(r"wrap the model",),
)
_add(
    "no_sync at the wrong microbatch",
    _NO_SYNC,
    MAKE
    + "\nfor step in range(4):\n    optimizer.zero_grad()\n    for part in range(2):\n        x, y = batch(2 * step + part)\n        with model.no_sync() if part == 1 else contextlib.nullcontext(): F.mse_loss(model(x), y).backward()\n    optimizer.step()",
    *_BYPASS,
    r"no_sync",
    wrong=(r"wrap the model",),
)
_add(
    "the flag of DDP is set after the forward",
    _GITHUB + "karpathy/build-nanogpt/pull/30",
    loop(
        MAKE,
        "optimizer.zero_grad(); model.require_backward_grad_sync = False\nloss = F.mse_loss(model(x), y)\nmodel.require_backward_grad_sync = True\nloss.backward(); optimizer.step()",
    ),
    *_BYPASS,
    r"require_backward_grad_sync|no_sync",
    wrong=(r"wrap the model",),
)
_add(
    "no model is wrapped",
    _DOCS + "notes/ddp.html",
    loop("torch.manual_seed(rank); model = nn.Linear(4, 2); optimizer = sgd(model)", STEP),
    r"DistributedDataParallel|DDP|averag|without communicat|train apart",
)
_add(
    "a forward without gradients",
    _DOCS + "generated/torch.no_grad.html",
    loop(
        MAKE,
        "optimizer.zero_grad()\nwith torch.no_grad(): out = model(x)\nloss = F.mse_loss(out, y); loss.requires_grad_(True); loss.backward(); optimizer.step()",
    ),
    r"no[_ ]grad",
    r"no gradient",
    r"no path",
    r"without a? ?gradient",
    wrong=(r"wrap the model",),
)
_add(
    "a detached output",
    _GITHUB + "kohjingyu/fromage/issues/33",
    loop(
        MAKE,
        "optimizer.zero_grad()\nout = model(x).detach().requires_grad_(True)\nF.mse_loss(out, y).backward(); optimizer.step()",
    ),
    r"no gradient",
    r"no path",
    r"without a? ?gradient",
    r"detach",
    wrong=(r"wrap the model",),
)
_add(
    "an optimizer of another model",
    _DOCS + "optim.html",
    loop("model = DDP(net()); other = net(); optimizer = sgd(other)", STEP),
    r"optimizer.*(no|none|another).*(parameter|model)",
    r"(no|none|another).*parameter.*optimizer",
)
_add(
    "an optimizer of a copy",
    _DOCS + "optim.html",
    loop("inner = net(); optimizer = sgd(copy.deepcopy(inner)); model = DDP(inner)", STEP),
    r"optimizer.*(no|none|another).*(parameter|model)",
    r"(no|none|another).*parameter.*optimizer",
)
_add(
    "an optimizer made before fully_shard",
    _GITHUB + "huggingface/accelerate/pull/3394",
    loop("model = net(); optimizer = torch.optim.$kind; fully_shard(model)", STEP, steps=3),
    r"before.*(shard|fully_shard)",
    draws={"kind": ("SGD(model.parameters(), lr=0.1)", "AdamW(model.parameters())")},
)
_add(
    "an optimizer made before parallelize_module",
    _GITHUB + "huggingface/accelerate/issues/3209",
    loop(
        "mesh = init_device_mesh('cpu', (2,)); model = net(); optimizer = sgd(model); parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})",
        "torch.manual_seed(step); x, y = torch.randn(8, 4), torch.randn(8, 2)\n" + STEP.strip(),
        steps=3,
    ),
    r"before.*(shard|parallelize_module)",
)
_add(
    "a model that is made again after its optimizer",
    _DOCS + "optim.html",
    loop("model = DDP(net()); optimizer = sgd(model); model = DDP(net())", STEP),
    r"optimizer.*(no|none|another).*(parameter|model)",
    r"(no|none|another).*parameter.*optimizer",
)
_add(
    "a layer that is made again after its optimizer",
    _DOCS + "optim.html",
    loop(
        "inner = net(); optimizer = sgd(inner); inner[$layer] = nn.Linear(*inner[$layer].weight.shape[::-1]); model = DDP(inner)",
        STEP,
    ),
    r"$layer\.(weight|bias)",
    r"optimizer.*parameter",
)
_add(
    "a parameter missing in the optimizer",
    _DOCS + "optim.html",
    loop(
        "model = DDP(net()); optimizer = torch.optim.SGD([p for name, p in model.module.named_parameters() if name != '$layer.$part'], lr=0.1)",
        STEP,
    ),
    r"$layer\.$part",
)
_add(
    "an unused layer",
    _TORCH + "43259",
    loop(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.used = nn.Linear(4, 2); self.left = nn.Linear(4, 2)\n    def forward(self, x): return self.used(x)\nmodel = DDP(Net()); optimizer = sgd(model)",
        STEP,
    ),
    r"left\.weight",
)
_add(
    "a layer that one rank does not use",
    _TORCH + "57473",
    loop(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.left = nn.Linear(4, 2); self.right = nn.Linear(4, 2)\n    def forward(self, x): return self.left(x) if rank == $rank else self.left(x) + self.right(x)\nmodel = DDP(Net()); optimizer = sgd(model)",
        STEP,
    ),
    r"right\.weight",
)
_add(
    "a layer that is used from some step on",
    _GITHUB + "open-mmlab/mmdetection/issues/2117",
    loop(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.left = nn.Linear(4, 2); self.right = nn.Linear(4, 2)\n    def forward(self, x, both): return self.left(x) + (self.right(x) if both else 0)\nmodel = DDP(Net()); optimizer = sgd(model)",
        STEP.replace("model(x)", "model(x, step >= $step)"),
    ),
    r"right\.weight",
)
_add(
    "an output that the loss does not use",
    _TORCH + "43259",
    loop(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__(); self.body = nn.Linear(4, 4); self.a = nn.Linear(4, 2); self.b = nn.Linear(4, 2)\n    def forward(self, x): x = self.body(x); return self.a(x), self.b(x)\nmodel = DDP(Net()); optimizer = sgd(model)",
        STEP.replace("model(x)", "model(x)[0]"),
    ),
    r"\bb\.weight",
)
_add(
    "gradients that are set to zero after the backward",
    _DOCS + "optim.html",
    loop(
        MAKE,
        "loss = F.mse_loss(model(x), y); loss.backward(); optimizer.zero_grad(set_to_none=$none); optimizer.step()",
    ),
    r"no gradient|zero|without a? ?gradient|chang",
    draws={"none": ("True", "False")},
)
_add(
    "a step before the backward",
    _DOCS + "optim.html",
    loop(MAKE, "optimizer.zero_grad(); loss = F.mse_loss(model(x), y); optimizer.step(); loss.backward()"),
    r"no gradient|without a? ?gradient|chang|before",
)
_add(
    "a learning rate of zero",
    _DOCS + "optim.html",
    loop("model = DDP(net()); optimizer = torch.optim.SGD(model.parameters(), lr=0.0)", STEP),
    r"lr|learning rate|chang",
)
_add(
    "frozen parameters only",
    _DOCS + "notes/autograd.html",
    loop(
        "inner = net(); optimizer = sgd(inner)\nfor name, p in inner.named_parameters(): p.requires_grad_(rank == $rank)\nmodel = DDP(inner) if rank == $rank else inner",
        STEP.replace("loss.backward()", "loss.backward() if rank == $rank else None"),
        steps=2,
    ),
    r"requires_grad|frozen|parameters",
    wrong=(r"wrap the model",),
)
_add(
    "the same batches on all ranks",
    _GITHUB + "huggingface/transformers/issues/37932",
    loop(MAKE, "torch.manual_seed(step); x, y = torch.randn(8, 4), torch.randn(8, 2)\n" + STEP.strip()),
    r"same (batch|data|input)|equal (batch|data|input)",
)
_add(
    "a loader with one seed on all ranks",
    _GITHUB + "karpathy/llama2.c/issues/522",
    f"torch.manual_seed(0); loader = DataLoader(dataset(), batch_size=4, shuffle=True)\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"same (batch|data|input)|reads? all|DistributedSampler|whole",
)
_add(
    "whole data on each rank",
    _GITHUB + "Lightning-AI/pytorch-lightning/pull/17713",
    f"torch.manual_seed(rank); loader = DataLoader(dataset(), batch_size=4, shuffle=True)\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"reads? all|DistributedSampler|whole",
)
_add(
    "epochs without set_epoch",
    _TORCH + "31771",
    f"data = dataset(); loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))\n{MAKE}\nfor epoch in range(3):\n    for x, y in loader:\n        optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"set_epoch",
)
_add(
    "a seed of the sampler for each rank",
    _GITHUB + "NVlabs/LongLive/issues/71",
    f"data = dataset(); sampler = DistributedSampler(data, seed=10 + rank); loader = DataLoader(data, batch_size=4, sampler=sampler)\n{MAKE}\nsampler.set_epoch(0)\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"sampler.*seed|seed.*sampler",
)
_add(
    "a sampler with the share of rank 0 on all ranks",
    _DOCS + "data.html",
    f"data = dataset(); sampler = DistributedSampler(data, num_replicas=2, rank=$rank); loader = DataLoader(data, batch_size=4, sampler=sampler)\n{MAKE}\nsampler.set_epoch(0)\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"read by no rank|same (batch|data|input|share)",
)
_add(
    "an epoch number that differs between ranks",
    _TORCH + "31771",
    f"data = dataset(); sampler = DistributedSampler(data); loader = DataLoader(data, batch_size=4, sampler=sampler)\n{MAKE}\nsampler.set_epoch(2 if rank == $rank else 1)\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"epoch",
)
_SKIP = "https://github.com/NVIDIA-NeMo/Automodel/pull/2468"
_add(
    "a skipped batch in a loop that counts steps",
    _SKIP,
    f"data = dataset(64); loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)); batches = iter(loader)\n{MAKE}\ndone = seen = 0\nwhile done < 5:\n    x, y = next(batches); seen += 1\n    if rank == $rank and seen == $step + 1: continue\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step(); done += 1",
    r"skip|different (batch|pass|step)|batch \d+",
)
_add(
    "not a number from one rank",
    _GITHUB + "ecmwf/WeatherGenerator/issues/2724",
    loop(MAKE, "if rank == $rank and step == $step: x = x * float('nan')\n" + STEP.strip()),
    r"(?s)(rank $rank.*step|step.*rank $rank)",
    wrong=(r"rank $other (is|has|made|produced) (the )?first",),
)
_add(
    "an infinite loss on one rank",
    _GITHUB + "ecmwf/WeatherGenerator/issues/2724",
    loop(MAKE, STEP.replace("y)", "y) / (0.0 if rank == $rank and step == $step else 1.0)")),
    r"(?s)(rank $rank.*(inf|finite|nan)|(inf|finite|nan).*rank $rank)",
)
_add(
    "a gradient that becomes not a number",
    _TORCH + "109191",
    loop(
        MAKE,
        STEP.replace(
            "loss.backward()",
            "if rank == $rank and step == $step: loss = loss + torch.sqrt(model.module[$layer].weight.sum() * 0)\nloss.backward()",
        ),
    ),
    r"(?s)(rank $rank.*(inf|finite|nan)|(inf|finite|nan).*rank $rank)",
)
_add(
    "an operation that is never waited for",
    _DOCS + "distributed.html",
    "x = torch.ones(4); work = dist.all_reduce(x, async_op=True); y = x * 2; del work",
    r"wait",
)
_add(
    "gradients read before the wait",
    _TORCH + "27806",
    loop(
        "model = net(); optimizer = sgd(model)",
        STEP.replace(
            "optimizer.step()",
            "for p in model.parameters(): work = dist.all_reduce(p.grad, async_op=True)\noptimizer.step()",
        ),
    ),
    r"wait",
)
_add(
    "a buffer written before the wait",
    _TORCH + "27806",
    "x = torch.ones(1 << 18); work = dist.all_reduce(x, async_op=True); x.$write; work.wait()",
    r"before.*wait|wait.*before|written|changed",
    draws={"write": ("fill_(3.0)", "mul_(2.0)", "add_(1.0)")},
)
_add(
    "gradients averaged after unscale_",
    _DOCS + "notes/amp_examples.html",
    loop(
        "model = net(); optimizer = sgd(model); scaler = torch.amp.GradScaler('cpu')",
        "optimizer.zero_grad(); scaler.scale(F.mse_loss(model(x), y)).backward(); scaler.unscale_(optimizer)\nfor p in model.parameters(): dist.all_reduce(p.grad); p.grad /= world_size\nscaler.step(optimizer); scaler.update()",
    ),
    r"unscale_",
)
_add(
    "gradients clipped while they are scaled",
    _DOCS + "notes/amp_examples.html",
    loop(
        f"{MAKE}; scaler = torch.amp.GradScaler('cpu')",
        "optimizer.zero_grad(); scaler.scale(F.mse_loss(model(x), y)).backward()\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer); scaler.update()",
    ),
    r"unscale_|scaled",
)
_add(
    "DDP around DDP",
    _DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html",
    loop("model = DDP(DDP(net())); optimizer = sgd(model)", STEP),
    r"twice",
)
_add(
    "gradients summed, not averaged, in one layer",
    "https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html",
    loop(
        "model = net(); optimizer = sgd(model)",
        STEP.replace(
            "optimizer.step()",
            "for name, p in model.named_parameters():\n    if name != '$layer.$part': dist.all_reduce(p.grad); p.grad /= world_size\noptimizer.step()",
        ),
    ),
    r"$layer\.$part",
)

# ---- state that differs

_add(
    "a learning rate of its own on one rank",
    _TORCH + "136009",
    loop(
        "model = DDP(net()); optimizer = torch.optim.SGD(model.parameters(), lr=0.$digit if rank == $rank else 0.1)",
        STEP,
    ),
    r"lr.*0\.$digit|0\.$digit.*lr",
    draws={"digit": ("2", "3", "5")},
)
_add(
    "a scale of the scaler of its own",
    _TORCH + "136009",
    loop(
        f"{MAKE}; scaler = torch.amp.GradScaler('cpu', init_scale=1024.0 if rank == $rank else 65536.0)",
        "optimizer.zero_grad(); scaler.scale(F.mse_loss(model(x), y)).backward(); scaler.step(optimizer); scaler.update()",
    ),
    r"scale.*1024.*rank $rank",
)
_add(
    "weights loaded by one rank behind DDP",
    "https://discuss.pytorch.org/t/how-to-load-checkpoint-in-ddp/",
    loop(MAKE, STEP, steps=2) + "if rank == $rank:\n    with torch.no_grad(): model.module[$layer].$part.add_(1.0)",
    r"$layer\.$part.*differ",
)
_add(
    "a step of one rank alone",
    _SKIP,
    loop(
        "model = DDP(net()); optimizer = torch.optim.AdamW(model.parameters())",
        STEP + "if rank == $rank and step == $step: optimizer.step()",
    ),
    r"step: [\d.]+ on rank \d, [\d.]+ on rank \d",
    r"steps? .*rank $rank",
)
_add(
    "models with other seeds and gradients averaged by hand",
    _GITHUB + "sparticlesteve/pytorch-benchmarks/pull/1",
    loop(
        "torch.manual_seed(rank); model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)); optimizer = sgd(model)",
        STEP.replace(
            "optimizer.step()",
            "for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= world_size\noptimizer.step()",
        ),
    ),
    r"\d\.weight.*differ|parameters.*differ",
)
_add(
    "evaluation mode on one rank",
    _DOCS + "generated/torch.nn.Module.html",
    loop(
        "torch.manual_seed(0); model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))); optimizer = sgd(model)\nif rank == $rank: model.eval()",
        STEP,
    ),
    r"eval.*rank|train mode",
)
_add(
    "a loss that steers the schedule of each rank",
    _DOCS + "generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html",
    loop(
        f"{MAKE}; scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        STEP + "scheduler.step(1.0 + step if rank == $rank else 1.0 / (1 + step))",
    ),
    r"lr",
)
_add(
    "a batch size of its own in the loader",
    _DOCS + "data.html",
    f"data = dataset(); sampler = DistributedSampler(data); loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)\nif rank == $rank: loader = DataLoader(data, batch_size=2, sampler=sampler)\n{MAKE}\nsampler.set_epoch(0)\nfor step, (x, y) in zip(range(4), loader):\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"batch_size|batches",
)
_add(
    "one file for all ranks",
    _GITHUB + "DLLXW/baby-llama2-chinese/issues/56",
    "folder = '/dev/shm' if os.path.isdir('/dev/shm') else '/tmp'\nmodel = DDP(net()); torch.save(model.module.state_dict(), f'{folder}/ddp_programs.pt')\ndist.barrier()",
    r"all of them saved|one over the other|same file",
)
_add(
    "shards saved by one rank",
    _GITHUB + "huggingface/transformers/pull/23111",
    "model = net(); fully_shard(model); state = model.state_dict()\nif rank == $rank: torch.save(state, tempfile.mkdtemp() + '/model.pt')\ndist.barrier()",
    r"part of|saved none",
)
_add(
    "inputs of a tensor parallel layer that differ",
    _TORCH + "153016",
    loop(
        "mesh = init_device_mesh('cpu', (2,)); model = net(); parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()}); optimizer = sgd(model)",
        STEP,
        steps=2,
    ),
    r"different inputs",
)

# ---- operations that fit in size and mean different things

_MEANING = "https://github.com/pytorch/pytorch/issues/158719"
_EXPERTS = "class Expert(nn.Module):\n    def __init__(self, v): super().__init__(); self.w = nn.Parameter(torch.full((4,), v))\n    def forward(self, x): return x * self.w\nclass Moe(nn.Module):\n    def __init__(self): super().__init__(); self.experts = nn.ModuleList([Expert(1.0), Expert(100.0)])\n    def forward(self, x, which): return self.experts[which](x)\nmodel = Moe()\nfor one in model.experts: fully_shard(one)\n"
_BOTH = (r"gather[^\n]*experts\.[01]", r"experts\.[01][^\n]*gather", r"experts\.0[^\n]*experts\.1[^\n]*mean")
_add("an expert of its own on each rank", _MEANING, _EXPERTS + "out = model(torch.ones(4), rank)", *_BOTH)
_add(
    "experts used in another order on one rank",
    _MEANING,
    _EXPERTS + "out = sum(model(torch.ones(4), which) for which in ((1, 0) if rank == $rank else (0, 1)))",
    *_BOTH,
)
_add(
    "an expert of its own in one step",
    _MEANING,
    _EXPERTS
    + "optimizer = sgd(model)\nfor step in range(4):\n    which = 1 if rank == $rank and step == $step else 0\n    optimizer.zero_grad(); model(torch.ones(4), which).sum().backward(); optimizer.step()",
    *_BOTH,
)
_add(
    "two models trained in another order",
    _TORCH + "126616",
    "first, second = DDP(nn.Linear(4, 2)), DDP(nn.Linear(4, 2))\nfor step in range(3):\n    x, y = batch(step)\n    for model in ((second, first) if rank == $rank and step == $step else (first, second)): F.mse_loss(model(x), y).backward()",
    r"(?s)first.*second|second.*first|different (model|module|parameter|meaning|bucket)|mean",
)
_add(
    "one model on one rank, another on the other",
    _TORCH + "126616",
    "first, second = DDP(nn.Linear(4, 2)), DDP(nn.Linear(4, 2))\nx, y = batch(0); F.mse_loss((first if rank == $rank else second)(x), y).backward()",
    r"(?s)first.*second|second.*first|different (model|module|parameter|meaning|bucket)|mean",
)
_add(
    "the loss of one rank meets the norm of the other",
    _MISMATCH,
    "loss, norm = torch.tensor(1.0), torch.tensor(5.0)\nif rank == $rank:\n    dist.all_reduce(loss)\nelse:\n    dist.all_reduce(norm)\ndist.all_reduce(torch.ones(3))",
    r"line \d.*line \d|(?s)line 3.*line 5|line 5.*line 3",
)
_add(
    "metrics in the order of a set",
    _GITHUB + "NVIDIA/nvalchemi-toolkit/pull/143",
    "metrics = {'loss': torch.tensor(1.0), 'score': torch.tensor(2.0)}\nnames = ['score', 'loss'] if rank == $rank else ['loss', 'score']\nfor name in names: dist.all_reduce(metrics[name])",
    r"loss.*score|score.*loss|different (value|meaning|tensor)",
)
_add(
    "gradients averaged in another order on one rank",
    _GITHUB + "NVIDIA/apex/issues/19",
    loop(
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)); optimizer = sgd(model)",
        STEP.replace(
            "optimizer.step()",
            "ones = [model[0].weight, model[1].weight]\nfor p in (ones[::-1] if rank == $rank else ones): dist.all_reduce(p.grad)\noptimizer.step()",
        ),
    ),
    r"(?s)0\.weight.*1\.weight|1\.weight.*0\.weight|different (parameter|meaning|gradient)",
)
_add(
    "a gradient meets a metric",
    _MISMATCH,
    "model = nn.Linear(4, 2); model.bias.grad = torch.ones(2); metric = torch.ones(2)\nif rank == $rank:\n    dist.all_reduce(model.bias.grad)\nelse:\n    dist.all_reduce(metric)",
    r"(?s)bias|line 3.*line 5|line 5.*line 3|line \d+.*line \d+",
)
_add(
    "layers of FSDP2 gathered in another order",
    _MEANING,
    "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\nfor layer in model: fully_shard(layer)\nx = torch.ones(2, 4)\nout = model[1](model[0](x)) if rank == $rank else model[0](model[1](x))",
    r"(?s)\b0\b.*\b1\b|\b1\b.*\b0\b",
)
_add(
    "another layer unsharded on one rank",
    _MEANING,
    "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\nfor layer in model: fully_shard(layer)\n(model[0] if rank == $rank else model[1]).unshard()",
    r"(?s)\b0\b.*\b1\b|\b1\b.*\b0\b",
)
_add(
    "two halves of a model on other ranks",
    _TORCH + "126616",
    "model = DDP(net(), find_unused_parameters=True); other = DDP(net())\nx, y = batch(0)\nF.mse_loss((model if rank == $rank else other)(x), y).backward()",
    r"different|model|other|find_unused",
)
_add(
    "a broadcast of other variables",
    _MISMATCH,
    "mean, scale = torch.zeros(3), torch.ones(3)\nif rank == $rank:\n    dist.broadcast(mean, src=0)\nelse:\n    dist.broadcast(scale, src=0)",
    r"(?s)line 3.*line 5|line 5.*line 3|mean.*scale|scale.*mean",
)
_add(
    "passes of a loop that do not fit",
    _SKIP,
    "total = torch.zeros(1)\nfor step in range(4):\n    if rank == $rank and step == $step: continue\n    x = torch.tensor([float(step)]); dist.all_reduce(x)\nif rank == $rank:\n    dist.all_reduce(total)",
    r"pass|step|(?s)line 4.*line 6|line 6.*line 4",
)

# ---- two threads on one group

_ASYNC = "https://github.com/KempnerInstitute/KempnerForge/issues/104"
_THREADS = (r"two threads|thread",)
_FOLDER = "box = [tempfile.mkdtemp() if rank == 0 else None]; dist.broadcast_object_list(box, 0); folder = box[0]\n"
_add(
    "an asynchronous checkpoint on the group of FSDP2",
    _ASYNC,
    loop(
        _FOLDER + "model = net(); fully_shard(model); optimizer = sgd(model); future = None",
        STEP
        + "if future: future.result()\nfuture = dcp.async_save({'model': model.state_dict()}, checkpoint_id=f'{folder}/{step}')",
    ),
    *_THREADS,
)
_add(
    "a barrier after async_save",
    _ASYNC,
    _FOLDER
    + "future = dcp.async_save({'x': torch.ones(4) * rank}, checkpoint_id=folder)\nfor _ in range(3): dist.barrier()\nfuture.result()",
    *_THREADS,
)
_add(
    "objects gathered in a thread pool",
    _TORCH + "115861",
    "found = [None] * world_size\nwith ThreadPoolExecutor(1) as pool:\n    if rank == $rank: time.sleep(0.2)\n    done = pool.submit(dist.all_gather_object, found, {'rank': rank})\n    if rank == $other: time.sleep(0.3)\n    for _ in range(3): dist.all_reduce(torch.ones(4))\n    done.result()",
    *_THREADS,
)
_add(
    "a background loop of all_reduce",
    _TORCH + "115861",
    "def report():\n    for _ in range(20): dist.all_reduce(torch.ones(2))\nthread = threading.Thread(target=report); thread.start()\nfor _ in range(20): dist.all_reduce(torch.ones(5))\nthread.join()",
    *_THREADS,
)

# ---- hangs

_HANG = ("wrap the model", "hygiene")
_ENDED = (r"rank $other",)
_add(
    "a break on one rank",
    _GITHUB + "huggingface/transformers/issues/31532",
    loop(MAKE, "if rank == $rank and step == $step: break\n" + STEP.strip()),
    r"rank $rank (has )?(ended|left|made)",
    r"(?s)rank $rank.*(ended|left|line)",
    wrong=_HANG,
)
_add(
    "a batch skipped by one rank",
    _SKIP,
    loop(MAKE, "if rank == $rank and step == $step: continue\n" + STEP.strip()),
    r"(?s)rank $rank.*(ended|left|steps|batch|pass|line)",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "fewer batches on one rank",
    _TORCH + "33148",
    f"data = dataset(); loader = DataLoader(data, batch_size=4, sampler=range(12 if rank == $rank else 20))\n{MAKE}\nfor x, y in loader:\n    optimizer.zero_grad(); F.mse_loss(model(x), y).backward(); optimizer.step()",
    r"(?s)rank $rank.*(ended|batch|steps|data)",
    r"Join",
)
_add(
    "evaluation on one rank with collectives",
    _GITHUB + "LibreYOLO/libreyolo/pull/594",
    loop(
        MAKE, STEP + "if rank == $rank and step == $step:\n    score = loss.detach(); dist.all_reduce(score)", steps=4
    ),
    r"all_reduce.*line \d+|line \d+",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a barrier of rank 0",
    "https://github.com/huggingface/accelerate/issues/2733",
    "if rank == $rank: dist.barrier()",
    r"(?s)rank $other.*(ended|without|not)",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "objects gathered by the main process",
    "https://github.com/huggingface/accelerate/issues/2733",
    "if rank == $rank:\n    found = [None] * world_size; dist.all_gather_object(found, 1)",
    r"(?s)rank $other.*(ended|without|not)",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a metric computed by one rank",
    _GITHUB + "Lightning-AI/pytorch-lightning/issues/16541",
    "def compute(x): dist.all_reduce(x); return x\nif rank == $rank: compute(torch.ones(3))",
    r"(?s)rank $other.*(ended|without|not)",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "full_tensor on one rank",
    _TORCH + "148756",
    "mesh = init_device_mesh('cpu', (2,)); x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])\nif rank == $rank: whole = x.full_tensor()",
    r"(?s)rank $other.*(ended|without|not)",
    r"full_tensor",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a state dict of FSDP2 on one rank",
    _TORCH + "143536",
    "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\nmodel = net(); fully_shard(model)\nif rank == $rank: state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
    r"(?s)rank $other.*(ended|without|not)",
    r"all ranks",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a checkpoint saved by one rank",
    "https://github.com/bghira/SimpleTuner/issues/1880",
    "folder = tempfile.mkdtemp()\nif rank == $rank: dcp.save({'x': torch.ones(3)}, checkpoint_id=folder)",
    r"(?s)rank $other.*(ended|without|not)",
    r"all ranks",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a receive without a send",
    _GITHUB + "pytorch/PiPPy/issues/969",
    "if rank == $rank: dist.recv(torch.empty(2), $other)",
    r"send",
    wrong=(r"\bJoin\b", r"without recv", *_HANG),
)
_add(
    "a batch of messages of which one send is missing",
    "https://github.com/pytorch/tutorials/issues/3009",
    "a, b = torch.ones(2), torch.empty(2)\nops = [dist.P2POp(dist.irecv, b, 1 - rank)]\nif rank == $rank: ops.insert(0, dist.P2POp(dist.isend, a, 1 - rank))\nfor work in dist.batch_isend_irecv(ops): work.wait()",
    r"send",
    wrong=(r"\bJoin\b", r"without recv", *_HANG),
)
_add(
    "both ranks receive first",
    _GITHUB + "pytorch/PiPPy/issues/969",
    "x = torch.empty(2); dist.recv(x, 1 - rank); dist.send(torch.ones(2), 1 - rank)",
    r"(?s)recv",
    r"both|each other|all ranks",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a rank that fails before the collective",
    "https://github.com/karpathy/nanochat/pull/336",
    "if rank == $rank: raise FileNotFoundError('config.json')\ndist.all_reduce(torch.ones(2))",
    r"config\.json",
)
_add(
    "an error at one step on one rank",
    _SKIP,
    loop(MAKE, "if rank == $rank and step == $step: raise ValueError('no anchors')\n" + STEP.strip()),
    r"no anchors",
)
_add(
    "a rank without gradients",
    "https://github.com/facebookresearch/optimizers/pull/149",
    loop(
        "model = net(); optimizer = sgd(model)",
        STEP.replace("loss.backward()", "if not (rank == $rank and step == $step): loss.backward()").replace(
            "optimizer.step()",
            "grads = [p.grad for p in model.parameters() if p.grad is not None]\nif grads: dist.all_reduce(torch.cat([g.reshape(-1) for g in grads]))\noptimizer.step()",
        ),
    ),
    r"(?s)rank $rank.*(ended|steps|line|pass)",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a key that never comes",
    _DOCS + "distributed.html",
    "store = dist.TCPStore('localhost', 0, is_master=True, wait_for_workers=False)\nif rank == $rank: store.wait(['ready'])",
    r"ready|store",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a group made by one rank",
    _DOCS + "distributed.html",
    "if rank == $rank: group = dist.new_group([0, 1])",
    r"new_group",
    wrong=(r"\bJoin\b", *_HANG),
)
_add(
    "a lock across ranks",
    _DOCS + "rpc.html",
    "if rank == $rank:\n    dist.all_reduce(torch.ones(1))\nelse:\n    threading.Event().wait()",
    r"(?s)rank $other.*(wait|line 4)",
    wrong=(r"\bJoin\b", *_HANG),
)

# ---- errors of torch

_add(
    "mixed tensors in the clipped norm",
    _TORCH + "180346",
    "mesh = init_device_mesh('cpu', (2,)); a = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])); b = nn.Parameter(torch.ones(4))\na.grad, b.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(4)\nnn.utils.clip_grad_norm_([a, b], 1.0)",
    r"(?s)DTensor.*(sharded|plain|both|mixed|parameters)",
    r"mixed",
)
_add(
    "a plain layer behind one by columns",
    "https://github.com/pytorch/torchtune/issues/2420",
    "mesh = init_device_mesh('cpu', (2,)); model = net(); parallelize_module(model, mesh, {'0': ColwiseParallel()}); model(torch.ones(2, 4))",
    r"ColwiseParallel|output_layouts",
)
_add(
    "microbatches that do not divide the batch",
    _TORCH + "126600",
    "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\npart = nn.Linear(4, 4); stage = PipelineStage(part, rank, 2, torch.device('cpu')); schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)\nfor size in (8, 6):\n    x, y = torch.ones(size, 4), torch.ones(size, 4)\n    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])",
    r"microbatch|smaller|batch of",
)
_add(
    "a stage that does not fit the one before",
    _TORCH + "129732",
    "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\npart = nn.Linear(4, 6) if rank == 0 else nn.Linear($size, 2); stage = PipelineStage(part, rank, 2, torch.device('cpu')); schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=F.mse_loss)\nx, y = torch.ones(4, 4), torch.ones(4, 2)\nschedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])",
    r"stage 1|6",
    draws={"size": ("4", "5", "7")},
)
_add(
    "a model without parameters that train",
    "https://github.com/yifan123/flow_grpo/issues/245",
    "model = DDP(net().requires_grad_(False))",
    r"requires_grad|frozen|trainable|not needed",
)
_add(
    "another model on one rank",
    "https://github.com/Kent0n-Li/ChatDoctor/issues/49",
    "model = DDP(nn.Linear(4, 3 if rank == $rank else 2))",
    r"(?s)3.*2|2.*3|weight|param",
)
_add(
    "a missing key in a checkpoint",
    _TORCH + "152310",
    _FOLDER
    + "dcp.save({'a': torch.ones(2)}, checkpoint_id=folder); dcp.load({'a': torch.ones(2), 'b': torch.ones(2)}, checkpoint_id=folder)",
    r"\bb\b",
)
_add(
    "a folder without a checkpoint",
    "https://github.com/EndlessSora/DeepDeWedge/issues/41",
    _FOLDER + "dcp.load({'a': torch.ones(2)}, checkpoint_id=folder)",
    r"metadata|no checkpoint",
)
_add(
    "init_process_group again",
    _DOCS + "distributed.html",
    "dist.init_process_group('gloo', rank=rank, world_size=world_size)",
    r"already|twice|default",
)
_add(
    "a mesh larger than the group",
    _DOCS + "distributed.html",
    "mesh = init_device_mesh('cpu', ($rows, 2))",
    r"$rows|world size|ranks",
    draws={"rows": ("2", "3", "4")},
)
_add(
    "a reentrant backward through a shared layer",
    _TORCH + "109191",
    "inner = net(); model = DDP(inner)\nx, y = batch(0)\nloss = F.mse_loss(model(x), y); loss.backward()\nF.mse_loss(model.module(x), y).backward(); loss.backward()",
    r"second time|twice|retain_graph|freed",
)
