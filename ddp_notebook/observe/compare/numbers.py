"""The first number that differs between two training runs: a metric, or the input or result of a collective.

Values of the same rank, step and collective are compared bit by bit. Of a large tensor only a sample was recorded, and
of fast training only some steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.observe.compare.names import group_title, renumbered
from ddp_notebook.observe.compare.sides import Side
from ddp_notebook.observe.steps.steps import Layouts
from ddp_notebook.observe.tables.distinct import distinct
from ddp_notebook.observe.tables.meanings import preview_of
from ddp_notebook.observe.tables.store import keys_of
from ddp_notebook.observe.views import Preview
from ddp_notebook.records.meaning import meaning
from ddp_notebook.records.names import listed, readable
from ddp_notebook.records.schema import ORIGINS, SIDES, VALUE, Rows
from ddp_notebook.records.units import percent
from ddp_notebook.records.words import list_ranks

_INPUT = SIDES.index("input")
_LOCAL = SIDES.index("local gradient")
_DDP = ORIGINS.index("ddp")
_CONTENTS = VALUE.fields["numel"][1] if VALUE.fields is not None else 0  # the columns from here on are the values
_LOSSES = ("loss", "acc", "grad", "norm", "perplexity")  # metrics of the training are called like this
_AT_ONCE = 8192  # rows
_MOST_NAMES = 4
_MOST_CODES = 1 << 13  # keys have 13 bits for the code, 14 for the rank and 26 for the step
_SHOWN = 8  # significant digits of a value
Floats = npt.NDArray[np.float64]
Codes = dict[tuple[object, ...], int]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberChange:
    """The first difference of one metric or of the tensors of one collective."""

    kind: str  # "metric", or one of `records.SIDES`: "input", "output", "local gradient", "synchronised gradient"
    name: str  # metric, parameter, or operation with its bucket
    detail: str  # parameters of the bucket, or the line of the call; "": unknown
    step: int
    ranks: tuple[int, ...]  # ranks whose values differ in this step
    compared: tuple[int, ...]  # ranks whose values of this step were compared
    before: float  # a value of the first of these ranks: the first differing element, or the mean
    after: float
    what: str  # "element 0", "mean" or "value"
    share: float  # relative difference in this step, maximum of the ranks
    last_step: int  # last compared step
    last_share: float  # relative difference in that step
    clean_step: int | None  # last earlier step in which the values were equal; None: no earlier step was compared
    time_ns: int  # time in the first run
    only_result: bool = False  # the inputs of this collective are equal on all compared ranks

    @property
    def subject(self) -> str:
        """Return the differing object as words."""
        if self.kind == "metric":
            return f"the metric {readable(self.name)}"
        if self.kind in SIDES[_LOCAL:]:
            return f"the {self.kind} of {readable(self.name)}"
        side = "input" if self.kind == "input" else "result"
        return f"the {side} of {self.name}" + (f" ({self.detail})" if self.detail else "")

    def __str__(self) -> str:
        if self.clean_step is None or self.clean_step == self.step - 1:
            when = f"from step {self.step} on,"
        else:
            when = f"first between steps {self.clean_step} and {self.step},"
        value = "" if self.what == "value" else f" ({self.what})"
        text = (
            f"{self.subject} differs {when} on {_whose(self.ranks, self.compared)}: {_number(self.before)} in A and "
            f"{_number(self.after)} in B{value} on rank {self.ranks[0]}"
        )
        if self.what == "number of elements":
            return text
        if self.kind == "metric":
            text += f", {'up to ' * (len(self.ranks) > 1)}{percent(self.share)} apart"
        else:
            text += f"; recorded differences are up to {percent(self.share)} of the tensor's largest value"
        if self.only_result:
            text += "; its inputs are equal on all compared ranks, so only the reduction differs"
        if self.last_step > self.step:
            text += f"; in step {self.last_step} {percent(self.last_share)}"
        return text


def _whose(ranks: tuple[int, ...], compared: tuple[int, ...]) -> str:
    if len(ranks) == len(compared) > 1:
        return "all ranks"
    return list_ranks(ranks) + (f" of {len(compared)}" if len(compared) > 1 else "")


def _number(value: float) -> str:
    return f"{value:.{_SHOWN}g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Comparison of the recorded numbers of two runs."""

    first: NumberChange | None
    others: tuple[NumberChange, ...]  # first differences of other metrics and of tensors, in the order of time
    apart: tuple[NumberChange, ...]  # metrics that differ although all compared tensors or losses are equal
    tensors: int  # number of compared sides of collectives and gradients
    of_training: int  # the compared tensors without those that DDP sends to set up a model and to copy its buffers
    metrics: int  # number of compared values of metrics
    losses: int  # number of compared values of losses
    lacking: str  # why no tensor of training was compared, as a clause; "": some were compared
    left_out: bool  # the values of some steps were not recorded

    @property
    def is_found(self) -> bool:
        return self.first is not None

    @property
    def sentence(self) -> str:
        """Return the comparison as one sentence, without its full stop."""
        if self.first is not None:
            text = str(self.first)
            more = ". Values of more steps: %ddp_record all" if self._has_gap(self.first) else ""
            if self.tensors and not self.of_training:
                more += f". No gradient was compared: {self.lacking}"
            return f"{text[0].upper()}{text[1:]}{more}"
        counts = [
            f"{count:,} {word}{'s' * (count != 1)}"
            for count, word in ((self.tensors, "tensor"), (self.metrics, "metric value"))
            if count
        ]
        if not counts:
            return (
                "No number was compared: no metric and no value of a tensor was recorded in both runs. log(loss=...) "
                "records a metric, %ddp_record values the tensors of collectives"
            )
        some = ", of some steps only (%ddp_record all: of each step)" if self.left_out and self.tensors else ""
        if not self.tensors or self.of_training:
            return f"All compared numbers are equal: {' and '.join(counts)}{some}"
        which = "No gradient was compared" if self.losses else "No gradient and no loss was compared"
        sent = "tensors that DDP sends to set up a model or to copy its buffers"
        return f"{which}: {self.lacking}. Only {sent} were compared, and they are equal: {' and '.join(counts)}{some}"

    @staticmethod
    def _has_gap(one: NumberChange) -> bool:
        return one.kind != "metric" and one.clean_step is not None and one.clean_step < one.step - 1


def numbers(a: Side, b: Side) -> Numbers:
    """Compare metrics, collectives and gradients of two runs, and return the first differences."""
    metrics, values = _compare_metrics(a, b)
    tensors, count, of_training = _compare_tensors(a, b)
    differing = sorted(tensors, key=lambda one: (one.time_ns, one.kind != "input"))
    main, apart = _split(metrics, differing, of_training, values)
    order = sorted([*differing, *main], key=lambda one: (one.time_ns, one.kind != "input"))
    return Numbers(
        first=order[0] if order else None,
        others=tuple(order[1:]),
        apart=tuple(apart),
        tensors=count,
        of_training=of_training,
        metrics=sum(values.values()),
        losses=sum(number for name, number in values.items() if _is_loss(name)),
        lacking="" if of_training else _lacking(a, b),
        left_out=bool(a.rows.rows("call")["left_out"].any() or b.rows.rows("call")["left_out"].any()),
    )


def _split(
    metrics: list[NumberChange], differing: list[NumberChange], tensors: int, values: dict[str, int]
) -> tuple[list[NumberChange], list[NumberChange]]:
    """Split differing metrics into those of the training and others, such as logged times and rates.

    A value that differs in a step in which all compared tensors, or else the losses, are still equal is no number of
    the training.

    Args:
        differing: differing tensors.
        tensors: number of compared tensors of training.
        values: number of compared values, by metric.
    """
    losses = [one for one in metrics if _is_loss(one.name)]
    if tensors:
        first = differing[0] if differing else None
    elif any(map(_is_loss, values)):
        first = min(losses, key=lambda one: one.step, default=None)
    else:
        return metrics, []
    equal_until = math.inf if first is None else -1 if first.clean_step is None else first.clean_step
    apart = [one for one in metrics if not _is_loss(one.name) and one.step <= equal_until]
    return [one for one in metrics if one not in apart], apart


def _is_loss(name: str) -> bool:
    return any(word in name.lower() for word in _LOSSES)


# ---- metrics


def _compare_metrics(a: Side, b: Side) -> tuple[list[NumberChange], dict[str, int]]:
    codes: Codes = {}
    first, second = (_keyed_metrics(side, codes) for side in (a, b))
    keys, at, to = np.intersect1d(first[0], second[0], return_indices=True)
    if not len(keys):
        return [], {}
    rows, others = first[1][at], second[1][to]
    before, after = rows["value"], others["value"]
    differs = (before != after) & ~(np.isnan(before) & np.isnan(after))
    code = _code_of(side=a, rows=rows, codes=codes)
    names = {number: str(key[0]) for key, number in codes.items()}
    compared = {names[number]: int((code == number).sum()) for number in np.unique(code).tolist()}
    found = []
    for number in np.unique(code[differs]).tolist():
        own = code == number
        found.append(_first_metric(names[number], rows[own], before[own], after[own], differs[own]))
    return found, compared


def _code_of(side: Side, rows: Rows, codes: Codes) -> Ints:
    first, back = distinct(rows["name"])
    found = [codes.setdefault((side.rows.text(int(name)),), len(codes)) for name in rows["name"][first]]
    return np.array(found, np.int64)[back] if len(found) else np.zeros(0, np.int64)


def _keyed_metrics(side: Side, codes: Codes) -> tuple[Ints, Rows]:
    """Return a key of each row, equal in both runs: metric, rank, step, and count in that step."""
    rows = side.rows.rows("metric")
    if not len(rows):
        return np.zeros(0, np.int64), rows
    code = _code_of(side, rows, codes)
    if (known := code < _MOST_CODES).sum() < len(rows):  # a program may use a new name in each step
        code, rows = code[known], rows[known]
    step = rows["step"] - min(0, int(rows["step"].min()))
    key = (code << 14 | rows["rank"]) << 36 | np.minimum(step, (1 << 26) - 1) << 10
    return _counted(key, rows["time_ns"]), rows


def _counted(key: Ints, order: npt.NDArray[np.integer]) -> Ints:
    """Add to each key its count among equal keys, in this order. The keys have 10 free bits for it."""
    by_key = np.argsort(key, kind="stable")
    ordered = key[by_key]
    if (ordered[1:] != ordered[:-1]).all():
        return key
    by_key = np.lexsort((order, key))
    is_new = np.ones(len(key), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    begins = np.maximum.accumulate(np.where(is_new, np.arange(len(key)), 0))
    counts = np.empty(len(key), np.int64)
    counts[by_key] = np.minimum(np.arange(len(key)) - begins, 1023)
    return key + counts


def _first_metric(
    name: str,
    rows: Rows,
    before: Floats,
    after: Floats,
    differs: npt.NDArray[np.bool_],
) -> NumberChange:
    steps, ranks = rows["step"], rows["rank"]
    step, last = int(steps[differs].min()), int(steps.max())
    here = steps == step
    own = np.flatnonzero(here & differs)
    chosen = own[np.argmin(ranks[own])]
    clean = steps[~np.isin(steps, steps[differs])]
    clean = clean[clean < step]
    share = _apart(before, after, np.maximum(np.abs(before), np.abs(after)))
    return NumberChange(
        kind="metric",
        name=name,
        detail="",
        step=step,
        ranks=_unique(ranks[own]),
        compared=_unique(ranks[here]),
        before=float(before[chosen]),
        after=float(after[chosen]),
        what="value",
        share=float(share[own].max()),
        last_step=last,
        last_share=float(share[steps == last].max()),
        clean_step=int(clean.max()) if len(clean) else None,
        time_ns=int(rows["time_ns"][own].min()),
    )


def _unique(ranks: npt.NDArray[np.integer]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in np.unique(ranks))


def _apart(before: Floats, after: Floats, scale: Floats) -> Floats:
    """Return the relative difference: 0 for equal values, infinite if only one is not finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.abs(after - before) / scale
    found = np.where(np.isnan(found), np.where(np.isfinite(before) != np.isfinite(after), np.inf, 0.0), found)
    return found


# ---- tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """Recorded values of one run: n sides of collectives and gradients."""

    key: Ints  # equal in both runs: code, rank, step, count in the step, side
    code: Ints
    rank: Ints
    step: Ints
    side: Ints
    time_ns: Ints
    value: Ints  # index in the table of values
    call: Ints  # row in the table of calls; -1 for a gradient


def _lacking(a: Side, b: Side) -> str:
    """Return why no gradient was compared, as a clause."""
    without = [name for name, one in (("A", a), ("B", b)) if not _are_of_training(one.rows.rows("call")).any()]
    if without:
        verb = "has" if len(without) == 1 else "have"
        return f"{' and '.join(without)} {verb} no collective that could send gradients, such as all_reduce"
    return "no collective that could send gradients has recorded values of the same size in the same step of A and B"


def _are_of_training(calls: Rows) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the calls without those that DDP makes to set up a model and to copy its buffers.

    Source: torch/csrc/distributed/c10d/reducer.cpp, and `_sync_module_states` in torch/nn/parallel/distributed.py.
    """
    found: npt.NDArray[np.bool_] = (calls["origin"] != _DDP) | (calls["bucket"] >= 0)
    return found


def _compare_tensors(a: Side, b: Side) -> tuple[list[NumberChange], int, int]:
    """Return the first differing tensors, the number of compared tensors, and the number of those of training."""
    codes: Codes = {}
    # With another number of ranks, results of collectives always differ.
    compared: Sequence[int] = range(_LOCAL) if a.run.ranks == b.run.ranks else [_INPUT]
    first, second = _tensors(a, codes, compared), _tensors(b, codes, compared)
    _, at, to = np.intersect1d(first.key, second.key, return_indices=True)
    if not len(at):
        return [], 0, 0
    differs, is_compared = _differ(a, b, first.value[at], second.value[to], _are_buckets(codes)[first.code[at]])
    at, to, differs = at[is_compared], to[is_compared], differs[is_compared]
    call = first.call[at]
    of_training = int((_are_of_training(a.rows.rows("call"))[call] | (call < 0)).sum())  # -1: a gradient by its name
    if not differs.any():
        return [], len(at), of_training
    steps, times, codes_of, sides = first.step[at], first.time_ns[at], first.code[at], first.side[at]
    begins = np.flatnonzero(differs & (steps == steps[differs].min()))
    code = int(codes_of[begins[np.argmin(times[begins])]])
    # A rank with equal inputs may issue the collective first, and its result differs: the input of the other is first.
    number = int(sides[begins[codes_of[begins] == code]].min())
    own = np.flatnonzero((codes_of == code) & (sides == number))
    values, others = _values(a, first.value[at[own]]), _values(b, second.value[to[own]])
    found = _first_tensor(a, b, first, at[own], values, others, differs[own])
    inputs = (codes_of == code) & (sides == _INPUT) & (steps == found.step)
    only_result = found.kind == "output" and set(found.compared) <= set(first.rank[at[inputs]].tolist())
    return [replace(found, only_result=only_result and not differs[inputs].any())], len(at), of_training


def _are_buckets(codes: Codes) -> npt.NDArray[np.bool_]:
    return np.array([isinstance(key[-1], int) and key[-1] >= 0 for key in codes], bool)


def _values(side: Side, indexes: Ints) -> Rows:
    return side.recording.store.rings["value"].take(indexes)[0]


def _differ(
    a: Side, b: Side, at: Ints, to: Ints, is_bucket: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return masks (n,) of the values that differ in any bit, and of those that can be compared.

    Buckets of other sizes contain other parameters. They are a setting, and no other number.

    Args:
        at, to: (n,) indexes in the tables of values of both runs.
        is_bucket: (n,) the values belong to a bucket of gradients.
    """
    differs, is_compared = np.zeros(len(at), bool), np.ones(len(at), bool)
    rings = [side.recording.store.rings["value"] for side in (a, b)]
    for begin in range(0, len(at), _AT_ONCE):  # copies of all rows would take more time for memory than for comparison
        part = slice(begin, begin + _AT_ONCE)
        (values, is_kept), (others, other_is_kept) = rings[0].take(at[part]), rings[1].take(to[part])
        rows, columns = (some.view(np.uint8).reshape(-1, VALUE.itemsize)[:, _CONTENTS:] for some in (values, others))
        differs[part] = (rows != columns).any(1)
        is_same_size = (values["numel"] == others["numel"]) | ~is_bucket[part]
        is_compared[part] = is_kept & other_is_kept & is_same_size
    return differs & is_compared, is_compared


def _tensors(side: Side, codes: Codes, sides: Sequence[int] = range(_LOCAL)) -> _Tensors:
    """Return the recorded values of collectives, on these sides of them, and of gradients."""
    calls = side.rows.rows("call")
    keys, end, _ = side.recording.store.value_keys.since(0)
    order = np.argsort(keys, kind="stable")
    first, keys = end - len(keys), keys[order]
    code, key = _keyed_calls(side, calls, codes)
    is_compared = ~_are_bucket_orders(side, calls)
    rank, step, issue_ns = (calls[name].astype(np.int64) for name in ("rank", "step", "issue_ns"))
    of_call = keys_of(rank, calls["call"], np.uint64(0))
    found = []
    for number in sides:
        wanted = of_call | np.uint64(number)
        at = np.searchsorted(keys, wanted, side="right") - 1
        has = np.flatnonzero(is_compared & (at >= 0) & (keys[np.maximum(at, 0)] == wanted)) if len(keys) else order[:0]
        found.append(
            _Tensors(
                key=key[has] << 2 | number,
                code=code[has],
                rank=rank[has],
                step=step[has],
                side=np.full(len(has), number, np.int64),
                time_ns=issue_ns[has],
                value=first + order[at[has]],
                call=has,
            )
        )
    found.append(_gradients(side, keys, first + order, codes))
    return _Tensors(
        **{one.name: np.concatenate([getattr(part, one.name) for part in found]) for one in fields(_Tensors)}
    )


def _are_bucket_orders(side: Side, calls: Rows) -> npt.NDArray[np.bool_]:
    """Return a mask (n,) of the broadcasts in which DDP sends the order of its buckets.

    Source: torch/csrc/distributed/c10d/reducer.cpp, `sync_bucket_indices` (it sends int32).
    """
    first, of = distinct(calls["op"], calls["dtype"])
    texts = [(side.rows.text(int(calls["op"][at])), side.rows.text(int(calls["dtype"][at]))) for at in first.tolist()]
    is_order = np.array([both == ("broadcast", "int32") for both in texts], bool)
    found: npt.NDArray[np.bool_] = (calls["origin"] == _DDP) & is_order[of]
    return found


def _keyed_calls(side: Side, calls: Rows, codes: Codes) -> tuple[Ints, Ints]:
    """Return the code and the key of each call. The code is that of operation, group, library, module and bucket."""
    first, back = distinct(*(calls[name] for name in ("op", "group", "origin", "module", "bucket")))
    modules = renumbered(side.rows.text(number) for number in set(calls["module"][first].tolist()))
    found = []
    for number in first.tolist():
        row = calls[number]
        module = modules[side.rows.text(int(row["module"]))]
        own = (side.rows.text(int(row["op"])), group_title(side.rows, int(row["group"])), int(row["origin"]), module)
        found.append(codes.setdefault((*own, int(row["bucket"])), len(codes)))
    code = np.array(found, np.int64)[back] if len(found) else np.zeros(0, np.int64)
    key = (code << 14 | calls["rank"]) << 34 | calls["step"].astype(np.int64) << 10
    return code, _counted(key, calls["call"])


def _gradients(side: Side, keys: npt.NDArray[Any], indexes: Ints, codes: Codes) -> _Tensors:
    """Return the gradients of the parameters that `--gradient` names.

    Args:
        keys, indexes: (n,) key and index of each row in the table of values.
    """
    at = indexes[(keys & np.uint64(3)) >= _LOCAL]
    rows = _values(side, at)
    spans = side.rows.rows("span")[["rank", "span", "step", "start_ns"]].tolist() if len(at) else []
    places = {(rank, span): (step, begin_ns) for rank, span, step, begin_ns in spans}
    places_of = [places.get(of, (-1, 0)) for of in zip(rows["rank"].tolist(), rows["call"].tolist(), strict=True)]
    step, time_ns = np.array(places_of, np.int64).reshape(-1, 2).T
    own = step >= 0  # the backward belongs to this cell
    at, rows, step, time_ns = at[own], rows[own], step[own], time_ns[own]
    names = [side.rows.text(number) for number in rows["name"].tolist()]
    code = np.array([codes.setdefault(("gradient", name), len(codes)) for name in names], np.int64)
    base = (code << 14 | rows["rank"]) << 34 | step << 10
    own_side = rows["side"].astype(np.int64)
    key = np.zeros(len(rows), np.int64)
    for number in np.unique(own_side).tolist():
        chosen = own_side == number
        key[chosen] = _counted(base[chosen], rows["call"][chosen]) << 2 | number
    return _Tensors(
        key=key,
        code=code,
        rank=rows["rank"].astype(np.int64),
        step=step,
        side=own_side,
        time_ns=time_ns,
        value=at,
        call=np.full(len(rows), -1, np.int64),
    )


def _first_tensor(
    a: Side, b: Side, first: _Tensors, at: Ints, values: Rows, others: Rows, differs: npt.NDArray[np.bool_]
) -> NumberChange:
    """Return the first difference of the tensors of one collective and side.

    Args:
        at: (n,) places in `first` of these tensors.
        values, others: (n,) their values in both runs.
    """
    steps, ranks = first.step[at], first.rank[at]
    step, last = int(steps[differs].min()), int(steps.max())
    here = steps == step
    own = np.flatnonzero(here & differs)
    chosen = own[np.lexsort((first.time_ns[at[own]], ranks[own]))[0]]
    clean = steps[~np.isin(steps, steps[differs])]
    clean = clean[clean < step]
    share = _shares(values, others)
    before, after = preview_of(values[chosen], a.rows.text), preview_of(others[chosen], b.rows.text)
    what, one, other = _values_of(before, after)
    here_share = max(float(share[own].max()), _apart_of_first(before, after))
    kind = SIDES[int(first.side[at[chosen]])]
    name, detail = _name(a, int(first.call[at[chosen]]), values[chosen], kind)
    return NumberChange(
        kind=kind,
        name=name,
        detail=detail,
        step=step,
        ranks=_unique(ranks[own]),
        compared=_unique(ranks[here]),
        before=one,
        after=other,
        what=what,
        share=here_share,
        last_step=last,
        last_share=max(float(share[steps == last].max()), here_share if last == step else 0.0),
        clean_step=int(clean.max()) if len(clean) else None,
        time_ns=int(first.time_ns[at[own]].min()),
    )


def _shares(values: Rows, others: Rows) -> Floats:
    """Return the relative difference of the minimum, maximum and mean of each pair of tensors, to its largest value."""
    bounds = [np.abs(some[column]) for some in (values, others) for column in ("low", "high")]
    scale = np.fmax.reduce(bounds)
    return np.maximum.reduce([_apart(values[name], others[name], scale) for name in ("low", "high", "mean")])


def _values_of(before: Preview, after: Preview) -> tuple[str, float, float]:
    """Return the first differing element of two tensors, or their means."""
    if before.numel != after.numel:
        return "number of elements", float(before.numel), float(after.numel)
    ones, others = before.first, after.first
    if ones.shape == others.shape and ones.dtype == others.dtype and ones.dtype.kind in "fiub":
        differs = (ones != others) & ~((ones != ones) & (others != others))
        if differs.any():
            at = int(np.argmax(differs))
            return f"element {at}", float(ones[at]), float(others[at])
    return "mean", before.mean, after.mean


def _apart_of_first(before: Preview, after: Preview) -> float:
    ones, others = before.first, after.first
    if ones.shape != others.shape or ones.dtype.kind != "f" or not len(ones):
        return 0.0
    bounds = [abs(one) for one in (before.low, before.high, after.low, after.high) if math.isfinite(one)]
    scale = np.full(len(ones), max(bounds, default=1.0) or 1.0)
    return float(_apart(ones.astype(np.float64), others.astype(np.float64), scale).max())


def _name(side: Side, row: int, value: np.void, kind: str) -> tuple[str, str]:
    """Return the name of a tensor and its details."""
    if kind in SIDES[_LOCAL:]:
        return side.rows.text(int(value["name"])), ""
    call = side.rows.rows("call")[row]
    op, origin = side.rows.text(int(call["op"])), ORIGINS[int(call["origin"])]
    if call["bucket"] >= 0:
        layouts = Layouts(side.rows)
        parameters = layouts.parameters(
            int(call["rank"]), int(call["module"]), int(call["bucket"]), int(call["issue_ns"])
        )
        return f"gradient bucket {int(call['bucket'])}", listed(parameters, _MOST_NAMES) if parameters else ""
    words, module = meaning(origin, op), side.rows.text(int(call["module"]))
    details = ", ".join(filter(None, [words, readable(module) if module else "", side.rows.text(int(call["site"]))]))
    return op, details
