"""The sentence of each finding. Each has a cause and a fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_notebook.records.words import list_ranks

Details = Mapping[int, Mapping[str, Any]]  # details by rank; if all are equal, the first ones are used


def _one(details: Details) -> Mapping[str, Any]:
    return next(iter(details.values()))


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def _at(step: int) -> str:
    """Return a step as users count it, from 0. The facts count from 1."""
    return f"step {step - 1}"


def _span(first: int, last: int, count: int) -> str:
    """Return the steps of an optimizer. Between them, the cell may have steps of another one.

    Example:
        >>> _span(3, 3, 1), _span(3, 5, 3), _span(3, 7, 3)
        ('step 2', 'steps 2-4', '3 steps from step 2 on')
    """
    if last - first + 1 != count:
        return f"{count} steps from {_at(first)} on"
    return _at(first) if first == last else f"steps {first - 1}-{last - 1}"


def _of_another_model(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    optimizer, models = one["optimizer"], _and(one["models"])
    if one["is_before_sharding"]:
        return _at(step), (
            f"{optimizer} was made before fully_shard replaced the parameters of {models}, so its step changed "
            f"nothing; make {optimizer} after fully_shard"
        )
    return _at(step), (
        f"{optimizer} holds no parameter of {models}, which ran backward, and its parameters have no gradients; make "
        f"{optimizer} from the parameters of the model that you train"
    )


_WITHOUT_PATH = {
    "no path": "backward() gave no parameter of {model} a gradient, although its forward ran; compute the loss from "
    "its output, without detach(), item() or no_grad() on the way",
    "no_grad": "the forward of {model} ran under no_grad(), so {optimizer} has no gradients; run the forward of a "
    "training step outside of no_grad()",
    "no forward": "{optimizer} has no gradients, because the forward of {model} did not run; call {model} in each "
    "step, or leave out the step of {optimizer}",
}


def _loss_without_path(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _at(step), _WITHOUT_PATH[one["cause"]].format(**one)


_NOT_AVERAGED = {
    "no forward": "its own forward did not run; call {model}(...), not a module inside it",
    "no_sync": "each forward ran under no_sync(); leave no_sync() for the last forward and backward of each step",
    "no_grad": "its own forward ran under no_grad(); call {model}(...) with gradients in each training step",
    "autograd": "its forward ran, but backward() averaged no bucket of it; compute the gradients with loss.backward(), "
    "not with torch.autograd.grad()",
}


def _bypassed(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    if one["cause"] == "late":
        return _at(step), (
            f"not all gradients of {one['model']} were averaged: the last forward and backward of the step ran under "
            "no_sync(); use no_sync() for the first ones only"
        )
    if one["cause"] == "again":
        return _at(step), (
            f"not all gradients of {one['model']} were averaged: a later backward() added to them without another "
            f"forward of {one['model']}; add the losses, and call backward() once for each forward"
        )
    why = _NOT_AVERAGED[one["cause"]].format(**one)
    return _at(step), f"gradients of {one['model']} were not averaged: {why}"


def _unreduced(step: int, details: Details) -> tuple[str, str]:
    model = _one(details)["model"]
    return _at(step), (
        f"the step lacks gradients of {model}, whose last backward() ran under set_requires_gradient_sync(False). "
        f"FSDP keeps them for a later backward. Call {model}.set_requires_gradient_sync(True) before the last forward "
        "and backward of each step"
    )


def _not_averaged(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    names, model = _and(one["names"]), one["model"]
    if one["is_inside"]:
        return _at(step), (
            f"gradients of {names} in {model} were not averaged, and the values differ between ranks: DDP averages the "
            "parameters that required gradients when it was made; make it after the last change of the model"
        )
    return _at(step), (
        f"{names} had the same values on all ranks before the step, and differ now. No DDP model has averaged the "
        "gradients. Put the parameters into the model before it is wrapped, or average their gradients with all_reduce"
    )


_NO_GRADIENT = {
    "zero_grad": "{optimizer} has no gradients, because zero_grad() ran between backward() and step(); call it before "
    "backward() or after step()",
    "no backward": "{optimizer} has no gradients: no backward() ran since its last step; call loss.backward() before "
    "{optimizer}.step()",
    "replaced": "{optimizer} was made before its parameters were replaced, as fully_shard, parallelize_module and new "
    "layers do; no module has them any more, so its step changed nothing; make {optimizer} after that",
    "": "no parameter of {optimizer} has a gradient after backward(), so its step changed nothing; make it from the "
    "parameters that the loss depends on",
}


def _no_gradient(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    if (cause := one["cause"]) in _NO_GRADIENT:
        return _at(step), _NO_GRADIENT[cause].format(**one)
    names = _by_rank({rank: own["names"] for rank, own in details.items()})
    if cause == "never":
        text = f"no gradient for {names}; use them in the loss, or freeze them with requires_grad_(False)"
    elif one["lacking"]:
        text = (
            f"the optimizer lacks {_and(one['lacking'])}, which got gradients; it holds {names} instead, which no "
            "module has any more; make the optimizer after the last change of the model"
        )
    else:
        text = (
            f"the optimizer holds {names}, which no module has any more and which had no gradient; make the optimizer "
            "after the last change of the model"
        )
    return _span(step, one["last"], one["count"]), text


def _not_in_optimizer(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _span(step, one["last"], one["last"] - step + 1), (
        f"no optimizer holds {_and(one['names'])} of {one['model']}, which got gradients and did not change; add them "
        "to an optimizer, or freeze them with requires_grad_(False)"
    )


def _by_rank(names: Mapping[int, Sequence[str]]) -> str:
    """Return names, with their ranks if these differ.

    Example:
        >>> _by_rank({0: ["a.weight"], 1: ["b.weight"]}), _by_rank({0: ["a"], 1: ["a"]})
        ('a.weight (rank 0) and b.weight (rank 1)', 'a')
    """
    ranks: dict[str, list[int]] = {}
    for rank, own in names.items():
        ranks.setdefault(_and(own), []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return _and([f"{own} ({list_ranks(some)})" for own, some in ranks.items()])


def _unused(step: int, details: Details) -> tuple[str, str]:
    names = _by_rank({rank: own["names"] for rank, own in details.items()})
    return _at(step), (
        f"backward() used no gradient of {names} in {_one(details)['model']}, so DDP did not average all gradients; "
        "use them in the loss, or pass find_unused_parameters=True to DDP"
    )


def _nothing_changed(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    if one.get("cause") == "rate":
        return _span(step, one["last"], one["count"]), (
            "the learning rate of the optimizer was 0 in each step of this cell; set lr, or call scheduler.step()"
        )
    return _span(step, one["last"], one["count"]), (
        f"all gradients of {one['optimizer']} are zero; check the loss and its factors"
    )


def _not_finite(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    if "bucket" in one:
        return _at(step), (
            f"the gradients in bucket {one['bucket']} of {one['model']} were NaN or infinite before they were "
            "averaged; skip a step on all ranks if a gradient is not finite on one"
        )
    if not one["was_finite"]:
        return _at(step), (
            "the loss was NaN or infinite, and so were parameters before this step; load or make the model again, and "
            "skip steps that are not finite"
        )
    if one.get("everywhere"):
        return _at(step), (
            "the losses of all ranks were NaN or infinite, and so were parameters after the step; look at the "
            "operations of the model, and skip such steps"
        )
    return _at(step), (
        "the loss was NaN or infinite, and so were parameters after the step; look at the batch, and skip a step on "
        "all ranks if one has such a loss"
    )


def _same_batches(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    is_always = one["same"] == one["compared"]
    steps = f"all {one['compared']}" if is_always else f"{one['same']} of {one['compared']}"
    return f"from {_at(step)} on" if is_always else _span(step, one["last"], one["last"] - step + 1), (
        f"{list_ranks(list(details))} gave {one['model']} the same inputs in {steps} compared steps, and the inputs "
        "changed from step to step. Give each rank its own part of the data with DistributedSampler, or its own seed"
    )


def _mixed_samplers(step: int, details: Details) -> tuple[str, str]:
    values = [f"{one['value']} on rank {rank}" for rank, one in details.items()]
    what = _one(details)["what"]
    fix = (
        "pass the same seed to it on all ranks" if what == "seed" else "call set_epoch with the same epoch on all ranks"
    )
    return _at(step), (
        f"the {what} of DistributedSampler is {_and(values)}. So each rank takes its part from another order of the "
        f"data, and the parts overlap; {fix}"
    )


def _skipped_batch(step: int, details: Details) -> tuple[str, str]:
    batches: dict[int, list[int]] = {}
    for rank, one in details.items():
        batches.setdefault(one["batch"], []).append(rank)
    each = [f"batch {batch} on {list_ranks(ranks)}" for batch, ranks in sorted(batches.items())]
    return _at(step), (
        f"gradients of {_and(each)} are averaged, because ranks have drawn different numbers of batches from their "
        "loader; skip a batch on all ranks or on none"
    )


def _mixed_values(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    values = [f"{own['value']} on rank {rank}" for rank, own in details.items()]
    return _and(list(dict.fromkeys(own["line"] for own in details.values()))), (
        f"{one['call']} #{one['number']} got different values: {_and(values)}; call it for the same values in the same "
        "order on all ranks"
    )


def _never_waited(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return f"{one['line']}", (
        f"{_started(one['call'])} was started, and its work was dropped without wait(); keep the work, and call wait() "
        "before the result is used"
    )


def _started(call: str) -> str:
    """Return the words for an operation that the user waits for.

    Example:
        >>> _started("recv"), _started("all_reduce")
        ('irecv', 'all_reduce with async_op=True')
    """
    return f"i{call}" if call in ("send", "recv") else f"{call} with async_op=True"


def _written_before_wait(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return f"{one['line']}", (
        f"a tensor of {_started(one['call'])} was changed between its start and wait(), so the result is undefined; "
        "change it after wait()"
    )


def _mixed_weights(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _at(step), (
        f"{_few(one['names'])} of {one['model']} differed between ranks when fully_shard split them, so the shards are "
        "parts of different weights. Load or broadcast the same weights on all ranks before fully_shard, or call "
        "set_model_state_dict with broadcast_from_rank0=True after it"
    )


def _few(names: Sequence[str]) -> str:
    """Return at most four names.

    Example:
        >>> _few(["a", "b"]), _few(["a", "b", "c", "d", "e", "f"])
        ('a and b', 'a, b, c and 3 more')
    """
    return _and(names if len(names) < 5 else [*names[:3], f"{len(names) - 3} more"])


def _averaged_loss(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    function, size = one["function"], one["size"]
    return _at(step), (
        f"{function} summed the loss over {size} ranks before backward(), and the sum was divided by {size}. Autograd "
        f"sees only the division. So the gradients of {one['model']} are 1/{size} of the averaged ones. Call "
        f"backward() first, or pass loss.detach().clone() to {function}"
    )


def _summed_again(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _at(step), (
        f"all_reduce summed gradients of {one['model']} that DDP had averaged, so they were {one['size']} times the "
        "average; leave out the all_reduce"
    )


_CLIPPED = {
    "early": "{function} ran before backward(), when there were no gradients, so the step used gradients that were not "
    "clipped; call it between backward() and step()",
    "late": "{function} ran after step(), and zero_grad() reset the clipped gradients, so no step used them; call it "
    "between backward() and step()",
}


def _clipped(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _at(step), _CLIPPED[one["cause"]].format(**one)


def _clipped_shards(step: int, details: Details) -> tuple[str, str]:
    model = _one(details)["model"]
    norms = [f"{own['value']:.3g} on rank {rank}" for rank, own in details.items()]
    return _at(step), (
        f"clip_grad_norm_ of torch.nn.utils clipped the shards of {model} by the norm of the shards on each rank "
        f"({_and(norms)}). Call {model}.clip_grad_norm_() of FSDP, which computes the norm of all shards"
    )


def _partial_output(step: int, details: Details) -> tuple[str, str]:
    return _at(step), (
        "the loss was computed from to_local() of a DTensor with Partial placement, which has only the summand of one "
        "rank; call full_tensor(), or redistribute(placements=[Replicate()]) before to_local(). In a parallel layer, "
        "set output_layouts=Replicate()"
    )


def _never_reset(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _span(step, one["last"], one["count"]), (
        f"the gradients of {one['optimizer']} were never reset, so each step used the sum of all gradients so far; "
        f"call {one['optimizer']}.zero_grad() before each backward()"
    )


def _nothing_loaded(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    inside = "model.module" if one["prefix"] == "module." else "model._orig_mod"
    fix = "remove it from the names" if one["where"] == "state dict" else f"load it into {inside}, or add it"
    return one["line"] or "load_state_dict", (
        f"load_state_dict(strict=False) loaded nothing, because only the names of the {one['where']} begin with "
        f"{one['prefix']!r}; {fix}"
    )


def _first_batch(step: int, details: Details) -> tuple[str, str]:
    one = _one(details)
    return _span(step, one["last"], one["last"] - step + 1), (
        "each step used the same batch, the first one of another pass over the data. The DistributedSampler had the "
        f"order of epoch {one['epoch']} in each of these passes. Take the batches of one pass with a for loop"
    )


def _trains_apart(step: int, details: Details) -> tuple[str, str]:
    return _at(step), (
        f"no collective, send or receive averaged a gradient in this cell, although {_one(details)['model']} is in "
        "DDP; call it, and then loss.backward(), in each step"
    )


def _same_epoch(step: int, details: Details) -> tuple[str, str]:
    return _at(step), (
        "another pass over the data has the order of the last one, because the epoch of its DistributedSampler is "
        f"still {_one(details)['epoch']}; call sampler.set_epoch(epoch) before each pass"
    )


# In the order of importance. A function gets the first step and the details by rank, and returns steps and sentence.
SENTENCES: dict[str, Callable[[int, Details], tuple[str, str]]] = {
    "ddp-bypassed": _bypassed,
    "unreduced": _unreduced,
    "not-averaged": _not_averaged,
    "mixed-weights": _mixed_weights,
    "partial-output": _partial_output,
    "nothing-loaded": _nothing_loaded,
    "optimizer-of-another-model": _of_another_model,
    "loss-without-path": _loss_without_path,
    "unused-parameters": _unused,
    "no-gradient": _no_gradient,
    "not-in-optimizer": _not_in_optimizer,
    "never-reset": _never_reset,
    "averaged-loss": _averaged_loss,
    "summed-again": _summed_again,
    "clipped-without-effect": _clipped,
    "clipped-shards": _clipped_shards,
    "not-finite": _not_finite,
    "mixed-samplers": _mixed_samplers,
    "skipped-batch": _skipped_batch,
    "mixed-values": _mixed_values,
    "same-batches": _same_batches,
    "trains-apart": _trains_apart,
    "written-before-wait": _written_before_wait,
    "never-waited": _never_waited,
    "nothing-changed": _nothing_changed,
    "first-batch": _first_batch,
    "same-epoch": _same_epoch,
}
