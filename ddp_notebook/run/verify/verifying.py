"""Send a training step to the ranks, and explain the result."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddp_notebook.errors import RankDiedError, RankError, UsageError
from ddp_notebook.line_parser import LineParser
from ddp_notebook.run.verify.accumulation import divides, factors
from ddp_notebook.run.verify.causes import explain
from ddp_notebook.run.verify.last_step import averages_itself, find_step
from ddp_notebook.run.verify.verification import Verification

Ask = Callable[[str], dict[int, Any]]  # evaluates an expression on all ranks
OfCell = Callable[[int], tuple[str, Sequence[str]]]
_MOST_MICRO = 1000
# Findings of cells that say the same, by the cause of the comparison.
_SAME = {
    "bypassed": ("ddp-bypassed", "trains-apart"),
    "no_wrapper": ("unreduced", "trains-apart"),
    "same_batch": ("same-batches",),
    "outside": ("not-averaged",),
    "ignored": ("not-averaged",),
    "late": ("not-averaged",),
    "unused": ("unused-parameters",),
    "sum_of_ranks": ("summed-again",),
}


def verify(
    ask: Ask, codes: Sequence[str], of_cell: OfCell, loss: str, batch: Sequence[str], model: str, micro: int
) -> Verification:
    """Compare a step with one process, see `Session.verify`.

    Args:
        ask: evaluates an expression on all ranks.
        codes: texts of the last cells, the newest first.
        of_cell: returns the name and the findings of the cell with this index in `codes`.

    Raises:
        UsageError: an argument is invalid, or the step cannot be compared.
    """
    _check(loss, batch, model, micro)
    if loss.strip():
        step = {"loss": loss.strip(), "batch": list(batch), "micro": micro}
        verification = _compare(ask, step, model, averages_itself(codes))
        notes = [_accumulation(micro, _divides(ask, loss, micro) or None, "LOSS")] if micro > 1 else []
        return replace(verification, notes=(*notes, *verification.notes))
    found = find_step(codes, ask("feature.data_names(globals())")[0], batch)
    if micro > 1 and found.after:
        raise UsageError("--micro does not work for a step that averages gradients itself; omit it")
    if micro == 1 and found.has_no_sync:
        raise UsageError(
            "the loop accumulates gradients with no_sync(): give the number of micro-steps for each optimizer step, "
            "such as %ddp_verify --micro 4"
        )
    step = {"before": found.before, "loss": found.loss, "after": found.after, "batch": list(found.batch)}
    text = f"{found.before}\n{found.loss}"
    is_divided = _divides(ask, text, micro) if micro > 1 else None
    step |= {"selects": not found.is_sure, "micro": micro, "divides": is_divided is not False}
    verification = _compare(ask, step, model, False)
    parts = [found.before, f"{found.loss}.backward()", found.after]
    text = "; ".join(_in_one_line(one) for one in parts if one)
    notes = [f"the step, from the last training cell: {text}"]
    if micro > 1:
        notes.append(_accumulation(micro, is_divided, "the loop"))
    elif found.may_accumulate:
        notes.append(
            "one backward was compared. If the loop adds the gradients of several before an optimizer step, give their "
            "number with --micro"
        )
    if found.has_no_sync:
        notes.append("no_sync() of the loop was left out: its condition was not evaluated")
    cell, findings = of_cell(found.at)
    return replace(
        verification, notes=(*notes, *verification.notes), cell=cell, found_in_cell=_others(findings, verification)
    )


def _in_one_line(code: str) -> str:
    """Return statements in one line.

    Example:
        >>> _in_one_line("for p in model.parameters():\\n    p.grad /= 2\\n    p.grad += 1")
        'for p in model.parameters(): p.grad /= 2; p.grad += 1'
    """
    return re.sub(r"\n\s*", "; ", re.sub(r":\n\s+", ": ", code))


def _divides(ask: Ask, text: str, micro: int) -> bool | None:
    """Return whether the text of a step divides the loss by the number of micro-steps, see `accumulation.divides`."""
    found, called = factors(text)
    facts = ask(f"feature.factor_facts(globals(), {found!r}, {called!r})")[0]
    return divides(facts["values"], micro, is_known=facts["is_known"])


def _accumulation(micro: int, is_divided: bool | None, place: str) -> str:
    """Return the note about the micro-steps."""
    split = f"each rank's last batch was split into {micro} micro-steps"
    if is_divided:
        return f"{split}; {place} divides the loss by {micro}"
    if is_divided is False:
        return f"{split}, and their gradients were added: {place} does not divide the loss by {micro}"
    return (
        f"{split}, and the comparison is for the mean of the {micro} micro-steps, because {place} does not show a "
        f"division. Your loop must divide each loss by {micro}"
    )


def _others(findings: Sequence[str], verification: Verification) -> tuple[str, ...]:
    """Return the findings of a cell that the comparison does not report too."""
    same = {name for one in verification.findings for name in _SAME.get(one.cause, ())}
    return tuple(one for one in findings if not any(one.endswith(f"(# ddp: ok {name})") for name in same))


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
    return explain({**facts, "after": step.get("after", ""), "text": f"{step.get('before', '')}\n{step['loss']}"})


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
