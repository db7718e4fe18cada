"""Send a training step to the ranks, and explain the result."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.errors import RankDiedError, RankError, UsageError
from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.verify.causes import explain
from ddp_notebook.run.verify.last_step import averages_itself, find_step
from ddp_notebook.run.verify.verification import Verification

Ask = Callable[[str], dict[int, Any]]  # evaluates an expression on all ranks
_MOST_MICRO = 1000


def verify(ask: Ask, codes: Sequence[str], loss: str, batch: Sequence[str], model: str, micro: int) -> Verification:
    """Compare a step with one process, see `Session.verify`.

    Args:
        ask: evaluates an expression on all ranks.
        codes: texts of the last cells, the newest first.

    Raises:
        UsageError: an argument is invalid, or the step cannot be compared.
    """
    _check(loss, batch, model, micro)
    if loss.strip():
        step = {"loss": loss.strip(), "batch": list(batch), "micro": micro}
        return _compare(ask, step, model, averages_itself(codes))
    found = find_step(codes, ask("feature.data_names(globals())")[0], batch)
    if micro > 1 and found.after:
        raise UsageError("--micro does not work for a step that averages gradients itself; omit it")
    step = {"before": found.before, "loss": found.loss, "after": found.after, "batch": list(found.batch)}
    step |= {"selects": not found.is_sure, "micro": micro}
    verification = _compare(ask, step, model, False)
    before = re.sub(r":\n\s+", ": ", found.before).replace("\n", "; ")
    text = "; ".join(filter(None, [before, f"{found.loss}.backward()", found.after.replace("\n", " ")]))
    return replace(verification, notes=(f"the step, from the last training cell: {text}", *verification.notes))


def _check(loss: str, batch: Sequence[str], model: str, micro: int) -> None:
    if loss.strip():
        try:
            ast.parse(loss.strip(), mode="eval")
        except SyntaxError as error:
            raise UsageError(
                f"the loss must be an expression, such as F.cross_entropy(model(x), y): {error.msg}"
            ) from None
        if not batch:
            raise UsageError("name the variables with each rank's part of the batch: --batch x,y")
    for name in (*batch, *([model] if model else [])):
        if not name.isidentifier():
            raise UsageError(f"--batch and --model need names of variables, got {name!r}")
    if not 1 <= micro <= _MOST_MICRO:
        raise UsageError(f"--micro must be 1 to {_MOST_MICRO} micro-steps, got {micro}")


def _compare(ask: Ask, step: dict[str, Any], model: str, may_average: bool) -> Verification:
    """Compare a step with one process.

    Args:
        step: arguments of `rank.verify.step.Step`.
        model: name of the main model; "": the first one in the step.
        may_average: a cell combines gradients itself, outside of this step.
    """
    try:
        facts = ask(f"feature.compare(globals(), {step!r}, {model!r})")[0]
    except RankError as error:
        failed = {} if error.result is None else error.result.by_rank
        reasons = {rank: one.error for rank, one in failed.items() if one.failed_by_itself and one.error}
        if isinstance(error, RankDiedError) or not reasons:
            raise
        rank, reason = min(reasons.items())
        raise UsageError(
            f"the ranks cannot compute the step together: {reason} (rank {rank}). Models, gradients and variables are "
            "restored"
        ) from None
    if "refusal" in facts:
        raise UsageError(f"{facts['refusal']}. Nothing was changed")
    if may_average and facts["wrapper"] == "none":
        raise UsageError(
            "no DDP or FSDP model takes part in the loss, and a cell combines gradients itself: use %ddp_verify "
            "without LOSS, which also runs the statements after backward. Nothing was changed"
        )
    return explain({**facts, "after": step.get("after", "")})


def read_line(parser: LineParser, line: str) -> tuple[str, list[str], str, int]:
    """Return the loss, the batch, the model and the micro-steps of a line. The loss may contain spaces and quotes.

    Raises:
        UsageError: an option is unknown or has no value.

    Example:
        >>> from ddp_notebook.run.verify.feature import verify_line
        >>> read_line(verify_line(), "F.mse_loss(model(x), y) --batch x,y --micro 2")
        ('F.mse_loss(model(x), y)', ['x', 'y'], '', 2)
    """
    found = re.search(r"(?:^|\s)--(?:batch|model|micro)(?=[\s=]|$)", line)
    loss, options = (line, "") if found is None else (line[: found.start()], line[found.start() :])
    if loss.strip().startswith("--"):
        loss, options = "", line
    given = parser.parse_line(options)
    micro = parser.number(int, "--micro", given.micro, "number of micro-steps")
    batch = [name.strip() for name in (given.batch or "").split(",") if name.strip()]
    return loss.strip(), batch, given.model or "", micro
