"""`survive`: training loops that continue when a rank dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from ddp_notebook.rank.survive.loop import SurvivingStep

_EXAMPLE = "for step in ddp_notebook.survive(model, optimizer, loader, steps=500):"


def survive(*members: Any, steps: int, on_loss: str = "replace", resume: str = "") -> Iterable[SurvivingStep]:
    """Iterate over training steps, in a cell on all ranks, and survive the death of a rank.

    The dead rank gets a new process while the cell runs, and all ranks repeat the interrupted step. No step is lost or
    done twice.

    A step must do all its work inside `with step:`, and `members` must contain everything that it changes. Each step
    starts without gradients, and with the batch `step.batch`.

    A new process starts at the cell's statement with the loop, with the variables that its rank had at that point. The
    statement may call a function that contains the loop. Collectives that the function calls before the loop are not
    sent to other ranks.

    Args:
        members: the model, the optimizer, the loader or sampler of the batches, and other objects that the steps
            change. These may be schedulers and other objects with a `state_dict`, lists, dicts, sets, tensors, arrays,
            generators.
        steps: number of steps.
        on_loss: "replace" gives the rank a new process. "shrink" continues with the other ranks, which are renumbered
            without a gap and share the rest of each epoch's data.
        resume: the folder of `%ddp_start --on-preempt`: start with the last step that was saved there, or with 0.

    Raises:
        UsageError: this process is not a rank, an optimizer or its model is missing, or "shrink" is used with sharded
            state. The shards of a dead rank are lost, for example in FSDP.

    Example:
        >>> for step in ddp_notebook.survive(model, optimizer, loader, losses, steps=500):  # doctest: +SKIP
        ...     with step:
        ...         inputs, targets = step.batch
        ...         loss = loss_of(model(inputs), targets)
        ...         loss.backward()
        ...         optimizer.step()
        ...         losses.append(float(loss))
    """
    module = sys.modules.get("ddp_notebook.rank.survive.survival")
    here = None if module is None else module.current()
    if here is None:
        raise UsageError(f"survive() must run on ranks: put the loop into a cell with %%on_all_ranks\n{_EXAMPLE}")
    import torch

    from ddp_notebook.rank.survive.loop import Loop
    from ddp_notebook.rank.survive.tracked import TrackedObjects

    if not isinstance(steps, int) or steps < 0:
        raise UsageError(f"steps must be an integer of at least 0, got {steps!r}; {_EXAMPLE}")
    if on_loss not in ("replace", "shrink"):
        raise UsageError(f'on_loss must be "replace" or "shrink", got {on_loss!r}')
    optimizers = [one for one in members if isinstance(one, torch.optim.Optimizer)]
    if not optimizers:
        raise UsageError(f"survive() needs the optimizer, to repeat a step after a loss: {_EXAMPLE}")
    held = {id(p) for one in members if isinstance(one, torch.nn.Module) for p in one.parameters()}
    for optimizer in optimizers:
        if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
            kind = type(optimizer).__name__
            raise UsageError(f"survive() needs the model whose parameters {kind} updates: {_EXAMPLE}")
    if on_loss == "shrink" and (obstacles := here.obstacles()):
        raise UsageError(
            f'survive(on_loss="shrink") cannot go on with fewer ranks: {"; ".join(obstacles)}; use the default, '
            'on_loss="replace", which keeps their number'
        )
    folder = os.path.abspath(resume) if resume else ""
    try:
        return Loop(here, TrackedObjects(members), steps, shrinks=on_loss == "shrink", resume=folder)
    except TypeError as error:
        raise UsageError(str(error)) from None
