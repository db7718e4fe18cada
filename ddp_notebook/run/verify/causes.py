"""Derive findings about a training step from the facts of the ranks, see `rank.verify.comparison`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_notebook.records.words import list_ranks, name_ranks
from ddp_notebook.run.verify.gradients import MARGIN, Combination, Gradients, Tolerances, mean, minus
from ddp_notebook.run.verify.verification import Finding, ParameterCheck, Verification

Facts = Mapping[str, Any]
_SHOWN = 3
_CLOSE = 1e-3  # relative difference of two counts that are the same number
_MOST_ROUNDING = 1000.0  # rounding errors; a larger effect of the order of samples is real
_FEW = 4  # fewer elements than this for each rank cannot tell the weights of the ranks apart


def explain(facts: Facts) -> Verification:
    """Return the findings, notes and differences of a comparison.

    Args:
        facts: the result of the rank 0.
    """
    losses = dict(enumerate(facts["losses"]))
    if facts["hangs"]:
        return _result(facts, list(_without_gradient(facts)), (), losses)
    gradients = Gradients(facts["matrices"], facts["runs"])
    # A mean over no entries is NaN, and its gradient is 0.
    bad = [
        rank
        for rank, loss in losses.items()
        if not math.isfinite(loss) and gradients.norm("", {("local", rank): 1.0}) != 0
    ]
    if bad:
        summary = f"not compared: the loss is {losses[bad[0]]:g} on {list_ranks(bad)}"
    elif not gradients.are_finite:
        summary = "not compared: a gradient is NaN or infinite; with a scaler, repeat it after the first step"
    else:
        summary = _is_not_repeatable(facts, gradients)
    if summary:
        return Verification(summary=summary, is_compared=False, losses=losses, samples=facts["samples"])
    return _Explanation(facts, gradients).result(losses)


def _is_not_repeatable(facts: Facts, gradients: Gradients) -> str:
    """Return a sentence if the same step gives other gradients each time, else ""."""
    if facts["repeat"] is None:
        return ""
    tolerances = Tolerances(gradients, facts["unit"], facts["parts"])
    for rank, off in enumerate(facts["repeat"]):
        for name, errors in off.items():
            size = gradients.norm(name, {("local", rank): 1.0})
            explained = 0.0 if facts["is_eager"] or not size else tolerances.measured(name) / size / facts["unit"]
            if errors > MARGIN * max(1.0, explained):
                left = f" ({', '.join(f'{place} is {what}' for place, what in facts['left'])})" if facts["left"] else ""
                return (
                    f"not compared: rank {rank} has repeated its step, and the gradient of {name} is off by "
                    f"{errors * facts['unit']:.2g}. The step reads or changes something that %ddp_verify does not "
                    f"restore, such as an iterator, a file or time{left}"
                )
    return ""


def _result(
    facts: Facts,
    findings: Sequence[Finding],
    checks: Sequence[ParameterCheck],
    losses: Mapping[int, float],
    notes: Sequence[str] = (),
    is_whole: bool = True,
) -> Verification:
    if findings:
        summary = findings[0].sentence
    elif facts.get("no_whole") or not is_whole:
        summary = f"the {len(losses)} ranks together compute the average of their parts"
    else:
        apart = f"apart from {' and '.join(facts['norms'])}, " if facts["norms"] else ""
        summary = (
            f"{apart}the {len(losses)} ranks together compute the gradients that one process computes for the whole "
            f"batch of {facts['samples']} samples"
        )
    return Verification(
        summary=summary,
        findings=tuple(findings),
        notes=tuple(notes),
        parameters=tuple(checks),
        losses=losses,
        whole_loss=facts.get("whole_loss"),
        samples=facts["samples"],
        is_without_dropout=_is_without_dropout(facts),
    )


def _is_without_dropout(facts: Facts) -> bool:
    return bool(facts["drops"]) and not facts.get("no_whole")


def _some(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _without_gradient(facts: Facts) -> Iterator[Finding]:
    if never := facts["never"]:
        yield Finding(
            cause="unused",
            sentence=f"the loss does not depend on {_some(never)}: DDP raises an error in the next forward pass; "
            "freeze such parameters, or pass find_unused_parameters=True to DDP",
            parameters=tuple(never),
        )
    covered = [name for name in facts["missing"] if name not in facts["causes"]]
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in covered:
        by_ranks.setdefault(tuple(facts["missing"][name]), []).append(name)
    for ranks, names in by_ranks.items():
        yield Finding(
            cause="no_gradient",
            sentence=f"{_some(names)} {'has' if len(names) == 1 else 'have'} no gradient on {list_ranks(ranks)}: DDP "
            "would wait for it there; pass find_unused_parameters=True to DDP, or use the same parameters on all ranks",
            parameters=tuple(names),
            ranks=ranks,
        )


class _Explanation:
    """Findings of one comparison.

    Args:
        facts: facts of the ranks.
        gradients: gradients of all runs.
    """

    def __init__(self, facts: Facts, gradients: Gradients) -> None:
        self._facts = facts
        self._gradients = gradients
        self._parts = facts["parts"]
        self._count = len(self._parts)
        self._tolerances = Tolerances(gradients, facts["unit"], self._parts)
        self._average = mean("local", self._parts)
        # Without hooks and later statements of the user, the average itself is intended.
        self._intended: Combination = {("intended", 0): 1.0} if "intended" in gradients.runs else self._average
        self._order = self._order_effect()
        self._quiet = self._quiet_run()
        self._off = self._off_together()
        self._factor = self._sum_factor()

    def result(self, losses: Mapping[int, float]) -> Verification:
        findings = [*self._data(), *self._together()]
        notes: list[str] = []
        apart = self._off_whole()
        if apart:
            found, note = self._whole()
            # A part that another fault has changed says nothing about the loss.
            findings += found
            notes += note
        notes += self._notes()
        off = set(self._off) | set(apart)
        checks = [self._check(name, name in off) for name in self._gradients.names]
        is_whole = not apart and not self._order and self._quiet == "quiet"
        return _result(self._facts, findings, checks, losses, notes, is_whole=is_whole)

    # ---- the batch

    def _data(self) -> Iterator[Finding]:
        facts = self._facts
        if facts["same_batch"]:
            yield Finding(
                cause="same_batch",
                sentence=f"All ranks have the same batch, so {self._count} ranks compute the same gradient as 1. Give "
                "each rank its own samples, such as with a DistributedSampler.",
            )
        elif facts["overlap"] >= max(self._count, min(facts["rows"][rank] for rank in self._parts) / 2):
            yield Finding(
                cause="overlap",
                sentence=f"{facts['overlap']} of {facts['samples']} samples are on more than one rank: give each rank "
                "its own samples, such as with a DistributedSampler",
            )
        if ranks := facts["other_batch"]:
            yield Finding(
                cause="other_batch",
                sentence=f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} another batch than the other "
                "ranks that compute the same part of the batch: give all ranks of a tensor parallel group the same "
                "samples",
                ranks=tuple(ranks),
            )

    # ---- the step of all ranks

    def _is_same(self, name: str, one: Combination, other: Combination) -> bool:
        limit = self._tolerances.together(name, self._facts["is_eager"])
        return self._gradients.norm(name, minus(one, other)) <= limit

    def _off_together(self) -> list[str]:
        """Return the parameters whose gradient is not as intended on some rank."""
        ranks = range(self._facts["world"])
        return [
            name
            for name in self._gradients.names
            if not all(self._is_same(name, {("together", rank): 1.0}, self._intended) for rank in ranks)
        ]

    def _sum_factor(self) -> float:
        """Return the factor between the gradients of all ranks and the average of the parts, if it is right.

        A program may sum gradients over the ranks and divide the loss by the number of all samples. Then the sum is the
        gradient of the whole batch. Returns 1.0 for all other programs.
        """
        ratio = self._gradients.ratio("", {("together", 0): 1.0}, self._average)
        is_factor = math.isfinite(ratio) and ratio > _CLOSE and abs(ratio - 1) >= _CLOSE
        if self._facts["no_whole"] or self._order or not is_factor:
            return 1.0
        is_scaled = self._is_scaled(ratio, self._gradients.names, self._average)
        fits = self._fits({key: ratio * one for key, one in mean(self._quiet, self._parts).items()})
        return ratio if is_scaled and fits else 1.0

    def _is_scaled(self, ratio: float, names: Sequence[str], target: Combination) -> bool:
        """Return whether all ranks have `ratio` times these gradients."""
        scaled = {key: ratio * one for key, one in target.items()}
        ranks = range(self._facts["world"])
        return all(self._is_same(name, {("together", rank): 1.0}, scaled) for name in names for rank in ranks)

    def _is_own(self, name: str) -> bool:
        """Return whether each rank has kept the gradient of its part."""
        run = "changed" if "changed" in self._gradients.runs else "local"
        return all(self._is_same(name, {("together", rank): 1.0}, {(run, rank): 1.0}) for rank in self._parts)

    def _together(self) -> Iterator[Finding]:
        if mixed := self._facts["mixed_shards"]:
            yield Finding(
                cause="mixed_shards",
                sentence=f"the statements after backward combine the shards of {_some(mixed)}: each rank holds other "
                "elements of a sharded gradient, which FSDP has already averaged; leave such parameters out",
                parameters=tuple(mixed),
            )
        if self._factor != 1.0:
            return
        off = self._off
        own = [name for name in off if self._is_own(name)]
        rest = [name for name in off if name not in own]
        explained: set[str] = set()
        if off and self._facts["no_sync"]:
            yield self._not_averaged(
                "no_sync",
                off,
                "{names}: no_sync() or set_requires_gradient_sync(False) is still in effect; "
                "end it before the last backward of each step",
            )
            explained |= set(off)
        elif own:
            found = list(self._unaveraged(own))
            yield from found
            explained |= {name for one in found for name in one.parameters}
        yield from self._other_weights(explained)
        rest = [name for name in rest if name not in explained]
        if rest and not self._facts["other_batch"] and not self._differs_by_weights(rest):
            yield self._reduced(rest)
        summed = [name for name in self._gradients.names if name not in off and self._is_summed(name)]
        if summed:
            which = "" if len(summed) == len(self._gradients.names) else f" of {_some(summed)}"
            yield Finding(
                cause="sum_of_ranks",
                sentence=f"the gradients{which} are {self._count} times the average of the parts: the step sums them "
                "over the ranks and does not divide them by the number of ranks",
                parameters=tuple(summed),
            )

    def _is_summed(self, name: str) -> bool:
        """Return whether the statements after `backward` sum a gradient over the ranks, and the loss is a mean."""
        is_sum = self._facts["after"] and self._is_scaled(self._count, [name], self._average)
        if not is_sum or self._gradients.norm(name, self._average) <= self._tolerances.together(name, True):
            return False
        parts = {key: self._count * one for key, one in mean(self._quiet, self._parts).items()}
        return bool(self._facts["no_whole"] or self._order or not self._is_whole(name, parts, 1.0))

    def _differs_by_weights(self, names: Sequence[str]) -> bool:
        """Return whether parameters outside of wrappers differ between ranks, which changes all gradients in a model
        that ranks compute together."""
        return bool(self._facts["weights"]) and self._facts["wrapper"] in ("tensor", "fsdp2")

    def _not_averaged(self, cause: str, names: Sequence[str], sentence: str) -> Finding:
        weights = [name for name in names if name in self._facts["weights"]]
        total = len(self._gradients.names)
        if sentence.startswith("{names}"):
            text = sentence.replace("{names}", _not_averaged_words(names, total))
        else:
            text = sentence.format(names=_names(names, total))
        if weights:
            text += f"; the ranks already hold other values of {_some(weights)}"
        return Finding(cause=cause, sentence=text, parameters=tuple(names))

    def _bypass(self) -> str:
        """Return the sentences about a loss that does not call the DDP model."""
        if found := re.search(r"\b(\w+)\.module\(", self._facts["text"]):
            return f"The loss calls {found[0]}x), which bypasses DDP. Call {found[1]}(x)."
        return "The loss calls the module inside DDP, which bypasses DDP. Call the DDP model."

    def _unaveraged(self, own: Sequence[str]) -> Iterator[Finding]:
        facts = self._facts
        if facts["wrapper"] == "none" and facts["after"]:
            yield self._not_averaged(
                "no_wrapper",
                own,
                "each rank keeps its own gradient of {names}: the statements after backward leave it out",
            )
            return
        if facts["wrapper"] == "none":
            has = (
                "DataParallel splits a batch over the GPUs of one rank and averages nothing between ranks; use DDP"
                if facts["data_parallel"]
                else "no DDP or FSDP model takes part in the loss, and the step has no statement that averages "
                "gradients"
            )
            yield self._not_averaged("no_wrapper", own, f"each rank keeps its own gradient of {{names}}: {has}")
            return
        by_cause: dict[str, list[str]] = {}
        for name in own:
            by_cause.setdefault(facts["causes"].get(name, "covered"), []).append(name)
        covered = by_cause.pop("covered", [])
        if covered and facts["forward_bypassed"]:
            yield self._not_averaged(
                "bypassed",
                covered,
                f"{{names}}. {self._bypass()}",
            )
        elif covered:
            yield self._not_averaged("unknown", covered, "{names}; the cause is not known")
        sentences = {
            "ignored": "{names}: DDP was made to ignore it",
            "converted": "{names}: it was converted to another type after DDP had wrapped the model; convert the model "
            "first, and wrap it then",
            "unmanaged": "{names}: FSDP does not shard it, because it was in ignored_params "
            "or joined the model after fully_shard",
            "late": "{names}: it was added to the model, or unfrozen, after the model was "
            "wrapped; wrap the model again",
            "outside": "{names}: it is outside of the wrapped model; wrap one module that contains all parameters",
        }
        for cause, names in by_cause.items():
            sentence = sentences[cause]
            if len(names) > 1:
                sentence = (
                    sentence.replace("it was", "they were")
                    .replace("it is", "they are")
                    .replace("ignore it", "ignore them")
                )
            yield self._not_averaged(cause, names, sentence)

    def _other_weights(self, explained: set[str]) -> Iterator[Finding]:
        """Yield the parameters that must be equal and are not."""
        facts = self._facts
        prefixes = {
            prefix for prefix in facts["prefixes"] if any(_has_prefix(name, prefix, facts) for name in facts["sizes"])
        }
        names = [
            name
            for name in facts["weights"]
            if name not in explained
            and any(_has_prefix(name, prefix, facts) for prefix in prefixes)
            and facts["wrapper"] != "none"
            and all(math.isfinite(off) for off in facts["weights"][name].values())
        ]
        if not names:
            return
        by_rank = {rank: off for name in names for rank, off in facts["weights"][name].items()}
        ranks = sorted(by_rank)
        which = f"{list_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'}"
        largest = max(names, key=lambda name: float(facts["largest"][name]))
        off = f"they differ by at most {facts['largest'][largest]:.2g} ({largest})"
        than = (
            f"rank 0: {off}, and the averaged gradient belongs to none of them. {self._weights_cause()}. The whole "
            "batch was computed with the values of rank 0"
        )
        if set(names) <= set(facts["copies"]):
            than = (
                f"another rank with the same shard: {off}, and torch takes them for equal copies. "
                f"{self._weights_cause()}"
            )
        yield Finding(
            cause="weights",
            sentence=f"{which} other values of {_some(names)} than {than}",
            parameters=tuple(names),
            ranks=tuple(ranks),
        )

    def _weights_cause(self) -> str:
        """Return the sentence about the cause of different weights, and the remedy."""
        if options := self._facts["options"]:
            name, option, values = options[0]
            of_ranks = [f"{value:g} on rank {rank}" for rank, value in enumerate(values[:_SHOWN])]
            more = f" and others on {len(values) - _SHOWN} more ranks" if len(values) > _SHOWN else ""
            return (
                f"{option} of {name} is {_and(of_ranks)}{more}, so each step moves them apart: give all ranks the same "
                "value, and then make the weights equal"
            )
        return (
            "Make them equal, such as by wrapping the model again; the statement that changes them on one rank is not "
            "known, and may run again"
        )

    def _reduced(self, names: Sequence[str]) -> Finding:
        """Return the finding for gradients that ranks have combined in another way than by an average."""
        facts, gradients = self._facts, self._gradients
        ratio = gradients.ratio("", {("together", 0): 1.0}, self._intended)
        is_scaled = len(names) == len(gradients.names) and self._is_scaled(ratio, names, self._intended)
        times = f"{ratio:.4g} times their average" if is_scaled else "something other than their average"
        hooked = [name for name in names if name in facts["gradient_hooks"]]
        which = _names(names, len(gradients.names))
        if hooked == list(names) and all(
            self._is_same(name, {("together", 0): 1.0}, mean("changed", self._parts)) for name in names
        ):
            smaller = all(
                gradients.norm(name, {("changed", rank): 1.0}) <= gradients.norm(name, {("local", rank): 1.0}) * 1.0001
                for name in names
                for rank in self._parts
            )
            what = "clips" if smaller else "changes"
            return Finding(
                cause="clipped",
                sentence=f"a hook {what} the gradient of {which} on each rank before the average, and not the average: "
                "clip after backward, such as with clip_grad_norm_",
                parameters=tuple(names),
            )
        if facts["hook"]:
            return Finding(
                cause="comm_hook",
                sentence=f"the comm hook {facts['hook']} reduces the gradients of {which} to {times}",
                parameters=tuple(names),
            )
        if facts["divide_factor"] and is_scaled:
            return Finding(
                cause="divide_factor",
                sentence=f"the gradients of {which} are {times}: set_gradient_divide_factor was called with "
                f"{facts['divide_factor']:g}, and {self._count} ranks are averaged",
                parameters=tuple(names),
            )
        if facts["after"]:
            cause, why = self._later_statements()
            return Finding(
                cause=cause, sentence=f"the gradients of {which} are {times}: {why}", parameters=tuple(names)
            )
        return Finding(
            cause="unknown",
            sentence=f"the ranks reduce the gradients of {which} to {times}; the cause is not known",
            parameters=tuple(names),
        )

    def _later_statements(self) -> tuple[str, str]:
        after = self._facts["after"]
        if 0 <= after.find("clip") < after.find("all_reduce"):
            return "clipped", "the step clips them on each rank before it averages them; clip them after all_reduce"
        return "unknown", "the cause is in the statements after backward"

    # ---- the whole batch

    def _order_effect(self) -> float:
        """Return the relative effect of the order of the parts on the gradient of the whole batch; 0.0: rounding."""
        if self._facts["no_whole"]:
            return 0.0
        first, second = self._parts[:2]
        whole = self._gradients.norm("", {("whole", first): 1.0})
        off = self._gradients.norm("", {("whole", first): 1.0, ("whole", second): -1.0})
        rounding = max(self._facts["unit"] * whole, self._tolerances.measured(""))
        return off / whole if off > _MOST_ROUNDING * rounding else 0.0

    def _quiet_run(self) -> str:
        """Return the run to compare with the whole batch."""
        if "quiet_rows" not in self._gradients.runs:
            return "quiet"
        return "quiet_rows" if self._fits(mean("quiet_rows", self._parts), self._added) else "quiet"

    @property
    def _added(self) -> int:
        """Number of micro-steps whose gradients are added, and not averaged."""
        return 1 if self._facts["divides"] else int(self._facts["micro"])

    def _off_whole(self) -> list[str]:
        """Return the parameters for which the average of the parts is not the gradient of the whole batch."""
        if self._facts["no_whole"] or self._order:
            return []
        parts = {key: one * self._factor for key, one in mean(self._quiet, self._parts).items()}
        return [name for name in self._gradients.names if not self._is_whole(name, parts, 1.0)]

    def _is_whole(self, name: str, parts: Combination, factor: float) -> bool:
        off = self._gradients.norm(name, minus(parts, {("whole", self._parts[0]): 1.0}, factor))
        return off <= self._tolerances.whole(name) * max(1.0, abs(factor))

    def _fits(self, parts: Combination, factor: float = 1.0) -> bool:
        return all(self._is_whole(name, parts, factor) for name in self._gradients.names)

    def _whole(self) -> tuple[list[Finding], list[str]]:
        """Return the finding or the note about a loss that depends on the split of the batch."""
        facts, parts = self._facts, self._parts
        average = mean(self._quiet, parts)
        ratio = self._gradients.ratio("", average, {("whole", parts[0]): 1.0})
        rows = [facts["rows"][rank] for rank in parts]
        is_unequal = len(set(rows)) > 1 and self._fits(self._weighted(rows), self._added)
        is_scaled = math.isfinite(ratio) and abs(ratio - 1) > _CLOSE and self._fits(average, ratio)
        # A mean over no entries is NaN. The gradient of such a rank is 0, which explains the factor.
        is_mean = not math.isfinite(sum(facts["quiet_losses"][rank] for rank in parts))
        if is_scaled and not is_mean:
            return self._scaled(ratio)
        if is_unequal:
            unequal = Finding(cause="unequal", sentence=self._unequal(rows))
            return [unequal, *([self._accumulated()] if self._added > 1 else [])], []
        if found := self._by_counts():
            return [found], []
        return self._scaled(ratio) if is_scaled else self._by_weights()

    def _unequal(self, rows: Sequence[int]) -> str:
        """Return the sentences about ranks with other numbers of samples."""
        parts, total = self._parts, sum(rows)
        have = [f"rank {rank} has {row}" for rank, row in zip(parts[1:], rows[1:], strict=True)]
        factors = [f"{row * self._count / total:.4g} on rank {rank}" for rank, row in zip(parts, rows, strict=True)]
        length = f"len({self._facts['sized']})" if self._facts["sized"] else "its number of samples"
        world = "world_size" if self._count == self._facts["world"] else str(self._count)
        return (
            f"Rank {parts[0]} has {_and([f'{rows[0]} samples', *have])}, but {'both' if len(parts) == 2 else 'all'} "
            f"count equally in the average. Multiply each loss by {length} * {world} / {total}: {', '.join(factors)}."
        )

    def _accumulated(self) -> Finding:
        """Return the finding for a loop that does not divide its loss by the number of micro-steps."""
        micro = self._facts["micro"]
        sentence = (
            f"the gradients are {micro} times those of one process: the gradients of {micro} micro-steps (--micro "
            f"{micro}) were added, and the loss is not divided by {micro}. If your loop has {micro} micro-steps for "
            f"each optimizer step, divide the loss by {micro} before backward(); otherwise give its number with --micro"
        )
        return Finding(cause="accumulated", sentence=sentence)

    def _by_counts(self) -> Finding | None:
        """Return the finding for means over different numbers of entries, such as labels that are not ignored."""
        facts, parts = self._facts, self._parts
        for name in facts["counts"][parts[0]]:
            counts = [facts["counts"][rank].get(name, 0) for rank in parts]
            if sum(counts) and len(set(counts)) > 1 and self._fits(self._weighted(counts)):
                factors = ", ".join(f"{one * self._count / sum(counts):.4g}" for one in counts)
                sentence = (
                    f"the ranks average over different numbers of entries ({name}: {_numbers(counts)}) and count "
                    f"the same: multiply the losses of ranks {', '.join(map(str, parts))} by {factors}, or divide "
                    "sums by the number of all ranks"
                )
                return Finding(cause="tokens", sentence=sentence)
        return None

    def _weighted(self, sizes: Sequence[float]) -> dict[tuple[str, int], float]:
        return {(self._quiet, rank): size / sum(sizes) for rank, size in zip(self._parts, sizes, strict=True)}

    def _scaled(self, ratio: float) -> tuple[list[Finding], list[str]]:
        count = self._count
        on_one = self._facts["on_one"]  # factor by which the loss changes if the step sees one rank only
        if on_one is not None and abs(on_one * ratio - 1) < _CLOSE * 10 and abs(on_one - 1) > _CLOSE * 10:
            times = f"{ratio:.4g} times" if ratio > 1 else f"1/{1 / ratio:.4g} of"
            how = "multiplied by" if ratio > 1 else "divided by"
            sentence = (
                f"the gradients are {times} those of one process: the loss is {how} the number of ranks, and the "
                "average of the ranks already is the mean; remove the factor"
            )
            return [Finding(cause="world_size", sentence=sentence)], []
        if self._added > 1 and abs(ratio / self._added - 1) < _CLOSE * 10:
            return [self._accumulated()], []
        micro = self._facts["micro"] if self._facts["divides"] else 1  # divisor of the loss
        if abs(ratio * count * micro - 1) < _CLOSE * 10 and self._is_sum_of_losses():
            whom = "ranks" if micro == 1 else "ranks and micro-steps"
            sentence = (
                f"the gradients are 1/{count * micro} of those of one process: the loss is a sum over the batch, and "
                f"{whom} are averaged. Use a mean, or multiply the loss by the number of {whom} ({count * micro})"
            )
            return [Finding(cause="sum", sentence=sentence)], []
        sentence = (
            f"the gradients are {ratio:.4g} times those of one process with the whole batch; the cause is not known"
        )
        return [Finding(cause="unknown", sentence=sentence)], []

    def _is_sum_of_losses(self) -> bool:
        total = sum(self._facts["quiet_losses"][rank] for rank in self._parts) * self._facts["micro"]
        return abs(total - self._facts["whole_loss"]) <= max(_CLOSE, 4 * self._facts["unit"]) * abs(total)

    def _by_weights(self) -> tuple[list[Finding], list[str]]:
        facts, parts = self._facts, self._parts
        whole = {("whole", parts[0]): 1.0}
        weights = self._gradients.weights([{(self._quiet, rank): 1.0} for rank in parts], whole)
        fitted = {(self._quiet, rank): weight for rank, weight in zip(parts, weights, strict=True)}
        is_enough = sum(facts["sizes"].values()) >= _FEW * self._count
        if is_enough and all(weight > 0 for weight in weights) and self._fits(fitted):
            shares = " and ".join(f"{weight:.4g}" for weight in weights)
            return [], [
                f"in the gradient of the whole batch the parts of ranks {', '.join(map(str, parts))} count {shares}, "
                f"and not 1/{self._count} each: the loss is a weighted mean whose weights differ between ranks"
            ]
        off = self._gradients.norm("", minus(mean(self._quiet, parts), whole)) / self._gradients.norm("", whole)
        return [], [
            f"the gradient of the whole batch differs by {off:.2g} from the average of the parts, and no "
            "weights of the ranks explain it. The loss compares samples within a batch, such as in-batch negatives, or "
            "is not a mean over samples"
        ]

    # ---- notes and numbers

    def _notes(self) -> Iterator[str]:
        facts = self._facts
        if facts["norms"]:
            own = [name for name in facts["norms"] if name != "SyncBatchNorm"]
            apart = (
                f"{_and(own)} normalizes each rank's part alone, so one process with the whole batch computes other "
                "gradients in training"
                if own
                else "SyncBatchNorm normalizes all parts together"
            )
            yield f"{apart}; the comparison with the whole batch uses running statistics"
        if own := facts["own_buffers"]:
            yield (
                f"{_some(own)} {'differs' if len(own) == 1 else 'differ'} between ranks, and no wrapper makes such "
                "buffers equal; the comparison with the whole batch uses the values of rank 0"
            )
        if self._order:
            yield (
                f"the gradient of the whole batch depends on the order of the parts (by {self._order:.2g}), and was "
                "not compared. The first dimension may not hold the samples, or the step reads values that differ "
                "between ranks"
            )
        elif facts["no_whole"] and facts["no_whole"] != "one part":
            yield f"the whole batch was not compared: {facts['no_whole']}"
        elif facts["no_whole"]:
            yield "all ranks compute one part of the batch, so that the whole batch is this part"
        elif facts["loss_is"]:
            yield (
                f"{facts['shortage']}. The whole batch was computed in parts{', without dropout' * facts['drops']}: "
                f"the loss of each rank's part is the {facts['loss_is']} of the losses of its samples"
            )
        elif facts["drops"]:
            yield "the comparison with the whole batch was made without dropout"
        if self._quiet == "quiet_rows":
            yield (
                f"the {facts['micro']} micro-steps have different numbers of samples and count the same: samples of a "
                "smaller one count more"
            )
        if self._factor != 1.0:
            yield (
                f"the gradients are {self._factor:.4g} times the average of the parts, and this is the gradient of the "
                "whole batch"
            )
        elif facts["hook"] and not self._off:
            yield f"the comm hook {facts['hook']} computes the average, within the rounding of its type"
        if facts["overlap"] > 0 and not facts["same_batch"]:
            yield f"{facts['overlap']} of {facts['samples']} samples are on more than one rank"
        yield f"types: {', '.join(facts['dtypes'])}; relative rounding error {facts['unit']:.2g}"

    def _check(self, name: str, is_off: bool) -> ParameterCheck:
        gradients, intended = self._gradients, self._intended
        size = gradients.norm(name, intended)
        ranks = range(self._facts["world"])
        together = max(gradients.norm(name, minus({("together", rank): 1.0}, intended)) for rank in ranks)
        whole = math.nan
        if not self._facts["no_whole"] and not self._order:
            target = {("whole", self._parts[0]): 1.0}
            whole = _share(
                gradients.norm(name, minus(mean(self._quiet, self._parts), target)), gradients.norm(name, target)
            )
        return ParameterCheck(
            name=name,
            elements=self._facts["sizes"][name],
            off_together=_share(together, size),
            off_whole=whole,
            is_off=is_off,
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def _names(names: Sequence[str], total: int) -> str:
    return f"all {total} parameters" if len(names) == total > 1 else _some(names)


def _not_averaged_words(names: Sequence[str], total: int) -> str:
    """Return that no rank averages parameters, without an "all" that may be read as "not all"."""
    if len(names) == total > 1:
        return f"None of the {total} parameters is averaged"
    return f"the ranks do not average {_some(names)}"


def _and(words: Sequence[str]) -> str:
    """Join words with commas and "and".

    Example:
        >>> _and(["a"]), _and(["a", "b"]), _and(["a", "b", "c"])
        ('a', 'a and b', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _numbers(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _has_prefix(name: str, prefix: str, facts: Facts) -> bool:
    """Return whether a parameter belongs to the model with this prefix; "": the main model."""
    if prefix:
        return name.startswith(prefix)
    return not any(other and name.startswith(other) for other in facts["prefixes"]) and name not in facts["plain"]
