"""Findings about programs of the tables: the sentence for each wrong one, and silence about right ones like it."""

from __future__ import annotations

import random
import re

import pytest

from ddp_notebook.run.findings.sentences import SENTENCES
from tests.training_programs.program import PRELUDE, read

SEED = random.SystemRandom().randrange(1000)
WRONG, RIGHT = ({one.name: one for one in read(table)} for table in ("wrong", "right"))

_LOSS = (
    "step 0: {0} summed the loss over 2 ranks before backward(), and the sum was divided by 2. Autograd sees only the "
    "division. So the gradients of model are 1/2 of the averaged ones. Call backward() first, or pass "
    "loss.detach().clone() to {0} (# ddp: ok averaged-loss)"
)
_WEIGHTS = (
    "step 0: 0.weight, 0.bias, 2.weight and 2.bias of model differed between ranks when fully_shard split them, so the "
    "shards are parts of different weights. Load or broadcast the same weights on all ranks before fully_shard, or "
    "call set_model_state_dict with broadcast_from_rank0=True after it (# ddp: ok mixed-weights)"
)
_PARTIAL = (
    "step 0: the loss was computed from to_local() of a DTensor with Partial placement, which has only the summand of "
    "one rank; call full_tensor(), or redistribute(placements=[Replicate()]) before to_local(). In a parallel layer, "
    "set output_layouts=Replicate() (# ddp: ok partial-output)"
)
SAID = {
    "the loss is averaged before the backward": _LOSS.format("all_reduce"),
    "the loss is reduced to rank 0, divided and sent back before the backward": _LOSS.format("reduce"),
    "a checkpoint that rank 0 loads before fully_shard": _WEIGHTS,
    "other seeds before fully_shard": _WEIGHTS,
    "a partial sum that becomes a local tensor": _PARTIAL,
    "an output of a layer by rows that is not reduced": _PARTIAL,
    "gradients are clipped before the backward": "step 0: clip_grad_norm_ ran before backward(), when there were no "
    "gradients, so the step used gradients that were not clipped; call it between backward() and step() "
    "(# ddp: ok clipped-without-effect)",
    "gradients are clipped after the step": "step 1: clip_grad_norm_ ran after step(), and zero_grad() reset the "
    "clipped gradients, so no step used them; call it between backward() and step() "
    "(# ddp: ok clipped-without-effect)",
    "gradients that are never reset": "steps 0-5: the gradients of optimizer were never reset, so each step used the "
    "sum of all gradients so far; call optimizer.zero_grad() before each backward() (# ddp: ok never-reset)",
    "the names of a checkpoint of DDP fit no parameter": "cell line 6: load_state_dict(strict=False) loaded nothing, "
    "because only the names of the state dict begin with 'module.'; remove it from the names "
    "(# ddp: ok nothing-loaded)",
    "each step takes the first batch of the loader": "steps 0-2: each step used the same batch, the first one of "
    "another pass over the data. The DistributedSampler had the order of epoch 0 in each of these passes. Take the "
    "batches of one pass with a for loop (# ddp: ok first-batch)",
    "shards of FSDP1 are clipped by torch.nn.utils": "step 0: clip_grad_norm_ of torch.nn.utils clipped the shards of "
    "model by the norm of the shards on each rank (NORM on rank 0 and NORM on rank 1). Call model.clip_grad_norm_() of "
    "FSDP, which computes the norm of all shards (# ddp: ok clipped-shards)",
    "gradients summed again after DDP has averaged them": "step 0: all_reduce summed gradients of model that DDP had "
    "averaged, so they were 2 times the average; leave out the all_reduce (# ddp: ok summed-again)",
}
NEAR = {
    "averaged-loss": (
        "a copy of the loss is averaged before the backward",
        "the loss is averaged in place after the backward",
        "a loss per token of all ranks, with the number of ranks as a factor",
        "a loss of gathered features, multiplied by the number of ranks",
        "the loss is summed in place, and its gradients by hand",
        "a loss with the number of ranks as a factor is averaged before the backward",
    ),
    "mixed-weights": (
        "FSDP2 after the weights of rank 0 were broadcast",
        "FSDP2 that gets the state dict of rank 0 after sharding",
        "FSDP2 whose DTensors are initialized after sharding",
        "FSDP2 from the meta device",
        "a distributed checkpoint of FSDP2",
    ),
    "partial-output": (
        "a partial sum that the user reduces",
        "a partial sum that is redistributed",
        "the sum of the parts of a partial sum",
        "losses of all ranks as a partial tensor for the log",
        "tensor parallel layers whose sum is scattered",
        "columns whose shards have a loss of their own",
    ),
    "never-reset": (
        "gradients that are set to None by hand",
        "gradients that fade instead of being reset",
        "gradients are set to zero in place by hand",
        "per-sample gradients with torch.func",
        "mixed precision with main weights in float32",
    ),
    "clipped-without-effect": (
        "the norm of the gradients is logged after the step",
        "each micro batch is clipped",
        "gradients of two models are clipped in their own phase",
        "adversarial examples by a gradient of the inputs",
        "sharpness-aware steps with two backwards",
        "a compiled function that clips",
        "gradients are clipped between the steps of two optimizers",
        "a clipping function that is pickled",
    ),
    "clipped-shards": (
        "FSDP1 with its own clipping",
        "FSDP2 with a clipped norm",
        "whole parameters of FSDP1 are clipped by torch.nn.utils",
        "shards of FSDP1 are clipped element by element",
        "the norm of a shard of FSDP1 is measured",
        "shards of FSDP1 whose norms are below the limit",
    ),
    "summed-again": (
        "gradients that DDP has averaged are averaged again",
        "gradients that DDP has averaged are summed for a statistic",
        "the largest gradients of all ranks are kept after DDP",
        "gradients of no_sync are summed by hand with equal data on all ranks",
        "a sum of averaged gradients that Adam divides by hand",
        "gradients that a hook of DDP has divided by another number are summed",
    ),
    "nothing-loaded": (
        "a backbone whose names lack those of the head",
        "names without their prefix are loaded",
        "adapters are loaded into a model that has more",
        "an optional part of a checkpoint is empty",
        "a state dict of DDP is loaded into DDP",
        "several prefixes of names are tried",
    ),
    "first-batch": (
        "a new iterator whenever the last one is exhausted",
        "the first batch of another order in each step",
        "one batch is looked at before each epoch",
        "the first batch of the validation data in each step",
        "data that fit into one batch",
        "a data set whose samples are random",
    ),
}


@pytest.fixture
def lines(session, capsys):
    """Run a program and return the findings under its cell."""

    def lines(code: str) -> list[str]:
        session.run(PRELUDE + "\ntorch.manual_seed(0)", quiet=True)
        capsys.readouterr()
        result = session.run(f"{code}\nNone")
        err = capsys.readouterr().err
        print(f"seed {SEED}", err, {rank: one.findings for rank, one in result.by_rank.items()})
        return [line for line in err.splitlines() if "# ddp: ok" in line or "train apart" in line]

    return lines


@pytest.mark.parametrize("name", SAID)
def test_the_sentence_about_a_wrong_program(lines, name):
    code = WRONG[name].drawn(SEED).code
    assert [re.sub(r"[\d.]+ on rank", "NORM on rank", line) for line in lines(code)] == [SAID[name]]
    finding = SAID[name].rpartition(" ")[2].removesuffix(")")
    assert lines(f"{code}\n# ddp: ok {finding}") == []


@pytest.mark.parametrize("finding", NEAR)
def test_nothing_is_said_about_right_programs_near_a_wrong_one(lines, finding):
    assert finding in SENTENCES and len(NEAR[finding]) >= 5
    for name in NEAR[finding]:
        assert lines(RIGHT[name].drawn(SEED).code) == [], name
