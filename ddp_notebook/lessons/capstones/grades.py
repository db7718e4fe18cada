"""Grades of the capstones: your class runs on the ranks, or your plan is computed, and a target decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.lessons.capstones.plan import RESERVE_GB, Plan
from ddp_notebook.lessons.lesson_cells import running
from ddp_notebook.lessons.questions.questions import Verdict
from ddp_notebook.records import units

if TYPE_CHECKING:
    from ddp_notebook.session import Session

# Exposed time of a step, as a multiple of the time that its bytes occupy the link. Without overlap it cannot be below
# 1; with one call for each gradient it is about 0.85, since calls cost time too.
MOST_EXPOSED = 0.6
LEAST_TOKENS_S = 11_600  # lesson 28; the best plan has 12,800
MOST_PASSES = 3.0  # FSDP moves the weights twice and the gradients once
# Peak as a multiple of all weights on two ranks: half for the shards, half for their gradients, and two layers of eight
# with their inputs. The weights of all layers would add 1.
MOST_PEAK = 1.75
_RANKS = "ddp_notebook.lessons.capstones.ranks"


def grade_ddp(name: str) -> Verdict:
    """Train with your DDP and torch's DDP, compare the weights bit for bit, and measure the exposed time.

    Args:
        name: Name of your class on the ranks. It gets the network and a `Link`. Its method `finish` is called after each
            backward; after it, every gradient must be the mean over the ranks.

    Returns:
        The verdict. Its reason has the exposed time of a step, the calls and the bytes.
    """
    session = running()
    wrong, value = _run(session, f"import {_RANKS}\n_grade = {_RANKS}.grade_ddp({name})", "_grade")
    if wrong:
        return Verdict(False, wrong)
    worst = max(value.values(), key=lambda one: one["exposed"])
    reached = (
        f"{worst['exposed_ms']:.0f} ms of each step are exposed, {worst['exposed']:.2f} times the time of the transfer, "
        f"in {worst['calls']} calls of {units.size(worst['nbytes'])} together"
    )
    if not all(one["equal"] for one in value.values()):
        return Verdict(False, f"the weights differ from those of torch's DDP. {reached}")
    if worst["exposed"] > MOST_EXPOSED:
        return Verdict(False, f"the same bits as torch's DDP. {reached}; the target is {MOST_EXPOSED} times")
    return Verdict(True, f"the same bits as torch's DDP. {reached}")


def grade_plan(plan: Plan) -> Verdict:
    """Judge a plan for the model of lesson 28: it must fit, and train `LEAST_TOKENS_S` tokens per second.

    Args:
        plan: Plan for Llama 3 70B on two nodes, with the batch of the lesson.

    Raises:
        UsageError: The plan is for another model, cluster or batch.
    """
    given = Plan(replicate=plan.cluster.gpus)
    if (plan.model, plan.cluster, plan.sequences, plan.length) != (
        given.model, given.cluster, given.sequences, given.length
    ):
        raise UsageError("a plan of this exercise has the model, the cluster and the batch of the lesson")
    memory = f"{units.size(plan.nbytes)} of {plan.cluster.memory_gb:g} GB"
    if not plan.fits:
        return Verdict(False, f"it does not fit: {memory}, and {RESERVE_GB:g} GB must stay free")
    reached = f"{memory}, {plan.tokens_per_s:,.0f} tokens per second, MFU {plan.mfu:.0%}"
    if plan.tokens_per_s < LEAST_TOKENS_S:
        return Verdict(False, f"it fits: {reached}; the target is {LEAST_TOKENS_S:,} tokens per second")
    return Verdict(True, reached)


def grade_fsdp(name: str) -> Verdict:
    """Run a step of your FSDP. Compare its gradients with those of whole weights, and measure bytes and memory.

    Args:
        name: Name of your class on the ranks. It gets the weight of each layer. Its object has `shards`, one tensor per
            layer with the part of the rank, and `loss(x, y)`, which returns the loss. After its backward, each shard has
            its part of the mean gradient in `grad`.

    Returns:
        The verdict. Its reason has the bytes of a step and the peak of memory.
    """
    session = running()
    wrong, sharded = _run(session, f"import {_RANKS}\n_fsdp = {_RANKS}.GradedFSDP({name})\n_grade = _fsdp.is_sharded()", "_grade")
    if wrong:
        return Verdict(False, wrong)
    if not all(sharded.values()):
        return Verdict(False, "each shard must be a tensor of its own with 1/N of the elements of its layer: clone the part")
    wrong, right = _run(session, "_fsdp.step()\n_grade = _fsdp.is_right()", "_grade")
    if wrong:
        return Verdict(False, wrong)
    weights = int(session.peek(f"{_RANKS}.LAYERS * {_RANKS}.WIDTH ** 2 * 4", 0)[0])
    passes, calls = _bytes_of_step(session, weights)
    peak = max(one.peak for one in session.memory("_fsdp.step()").by_rank.values()) / weights
    reached = (
        f"{calls} calls move {passes:.1f} times the bytes of the model, and the peak of memory is {peak:.2f} times the model"
    )
    if not all(right.values()):
        return Verdict(False, f"the gradients of the shards are not the mean of the ranks. {reached}")
    if passes > MOST_PASSES + 0.01 or peak > MOST_PEAK:
        return Verdict(False, f"the gradients are right. {reached}; the targets are {MOST_PASSES:.0f} and {MOST_PEAK} times")
    return Verdict(True, f"the gradients are right. {reached}")


def _run(session: Session, code: str, name: str) -> tuple[str, Any]:
    """Run code, and return the error in words ("": none) and the value of a variable by rank."""
    try:
        session.run(code, timeout_s=20.0, quiet=True)
        return "", dict(session.pull(name))
    except DDPNotebookError as error:
        return str(error).partition("\n")[0], None


def _bytes_of_step(session: Session, weights: int) -> tuple[float, int]:
    """Run a step. Return the bytes of its calls on rank 0, divided by those of the weights, and the number of calls.

    An all-reduce counts twice: it moves as much as a reduce-scatter and an all-gather.
    """
    _, before, _ = session.recording.follow("call", 0)
    session.run("_fsdp.step()", quiet=True)
    calls = [one for one in session.recording.collectives(since=before) if one.rank == 0]
    nbytes = sum(one.nbytes * (2 if one.op == "all_reduce" else 1) for one in calls)
    return nbytes / weights, len(calls)
