"""Figures with bars: breakdown of step times, and the buckets of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import MaxNLocator

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.figures.drawing import Picture, fill_style, key, picture, text_on
from ddp_notebook.observe.figures.palette import INK, STEP_PARTS
from ddp_notebook.observe.steps.steps import measure
from ddp_notebook.observe.steps.steps import steps as steps_of
from ddp_notebook.observe.steps.waits import straggler_of
from ddp_notebook.observe.tables.matching import RowSource, calls_of, in_cell, label_of, match_collectives
from ddp_notebook.observe.views import Bucket, Step, Straggler
from ddp_notebook.records.schema import SPANS
from ddp_notebook.records.units import ms, percent, size
from ddp_notebook.records.words import rank_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORDS = {"compute": "compute", "exposed": "exposed communication"} | {one: one for one in ("input", "optimizer")}
_LEAST_TOLD = 0.05  # share of a step that the title mentions
_MOST_COLUMNS = 160  # steps side by side; with more steps, several share a bar
_MOST_BARS = 32  # with more bars, an area is drawn
_MOST_CUT = 20  # bars beyond the axis; some of them have room for a label
_MOST_NAMED = 32  # bars that have their own label
_ROW = 0.27  # inches
_NAME_LENGTH = 34

Times = npt.NDArray[np.float64]


# ---- steps


def steps(recording: RowSource, cell: int | None) -> Picture:
    """Draw `figures.steps`."""
    measured = measure(recording, cell)
    measured = measured.of_cell(int(measured.cell.max(initial=0)))
    found = measured.steps()
    if not found:
        raise UsageError(
            f"nothing to draw: no step was recorded{in_cell(recording, cell)}; run a cell that calls "
            "optimizer.step(), with %ddp_record meta or values"
        )
    ranks = sorted({step.rank for step in found})
    kept = measured.typical.steps()
    of_rank = np.array([_mean(_of(rank, kept) or _of(rank, found)) for rank in ranks])  # (R, parts)
    hosts = recording.hosts
    where = "" if cell is None else f" ({label_of(recording, cell)})"
    title = _told(of_rank, straggler_of(measured, hosts), hosts, where)
    height = min(max(len(ranks), 3) * _ROW, 6.0)
    figure, (above, below) = picture(title, height + 4.2, (height, 2.2))
    _draw_by_rank(above, ranks, of_rank)
    if hosts:
        _draw_hosts(above, [hosts[rank] for rank in ranks])
    draw_by_step(below, found)
    shown = [part for at, part in enumerate(STEP_PARTS) if of_rank[:, at].any()]
    key(figure, shown)
    return figure


def _parts(step: Step) -> tuple[int, ...]:
    """Return the parts of a step, in the order of `STEP_PARTS`. They add up to its duration."""
    hidden = min(step.overlapped_ns, step.compute_ns)
    return (
        step.input_ns,
        step.compute_ns - hidden,
        hidden,
        step.exposed_ns,
        step.waiting_ns,
        step.optimizer_ns,
        step.rest_ns,
    )


def _of(rank: int, found: Sequence[Step]) -> list[Step]:
    return [step for step in found if step.rank == rank]


def _mean(found: Sequence[Step]) -> Times:
    return np.mean([_parts(step) for step in found], axis=0)


def _told(of_rank: Times, slow: Straggler | None, hosts: Sequence[str], where: str) -> str:
    part = dict(zip(STEP_PARTS, of_rank.mean(axis=0).tolist(), strict=True))
    whole = sum(part.values()) or 1.0
    part["compute"] += part.pop("overlapped")
    words = _WORDS | {"waiting": "waiting for others" if slow is None else f"waiting for {rank_on(slow.rank, hosts)}"}
    words["rest"] = "between"
    told = sorted((name for name in part if part[name] >= _LEAST_TOLD * whole), key=lambda name: -part[name])
    shares = ", ".join(f"{percent(part[name] / whole)} {words[name]}" for name in told)
    return f"A step takes {ms(whole)}: {shares}{where}"


def _draw_by_rank(axes: Axes, ranks: Sequence[int], of_rank: Times) -> None:
    left = np.zeros(len(ranks))
    widest = float(of_rank.sum(axis=1).max()) / 1e6
    for part, ns in zip(STEP_PARTS, of_rank.T, strict=True):
        widths = ns / 1e6
        axes.barh(range(len(ranks)), widths, left=left, height=0.78, **fill_style(part))
        for row, width in enumerate(widths):
            if width > 0.06 * widest and part != "overlapped" and len(ranks) <= _MOST_NAMED:
                whole = width + (of_rank[row, STEP_PARTS.index("overlapped")] / 1e6 if part == "compute" else 0)
                _write(axes, left[row] + width / 2, row, f"{whole:.3g}", text_on(part), "center")
        left += widths
    if len(ranks) <= _MOST_NAMED:
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        for row, whole in enumerate(left):
            _write(axes, whole + 0.01 * widest, row, f"{whole:.3g} ms", INK, "left")
    else:
        axes.set_ylabel("rank")
    axes.set_xlim(0, 1.1 * widest)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time per step (ms), mean of the steps")


def _draw_hosts(axes: Axes, hosts: Sequence[str]) -> None:
    """Draw a line between the ranks of different hosts, and the name of each host next to its first rank.

    Args:
        hosts: host of each row, in order.
    """
    firsts = [row for row, host in enumerate(hosts) if not row or hosts[row - 1] != host]
    for row in firsts[1:]:
        axes.axhline(row - 0.5, color=INK, linewidth=0.6)
    if len(firsts) <= _MOST_NAMED:
        beside = axes.secondary_yaxis("right")
        beside.set_yticks(firsts, [hosts[row] for row in firsts])
        beside.tick_params(length=0)
        beside.spines[:].set_visible(False)


def draw_by_step(
    axes: Axes, found: Sequence[Step], numbers: Sequence[int] | None = None, most: int = _MOST_COLUMNS
) -> list[str]:
    """Draw the breakdown of the time of each step, mean of the ranks. Return the visible parts, for `key`.

    Args:
        found: steps of all ranks.
        numbers: number of each step; None: the number in its cell.
        most: limit of columns; with more steps, several share one.
    """
    all_numbers = np.array([step.step for step in found] if numbers is None else numbers)
    unique, of_number, counts = np.unique(all_numbers, return_inverse=True, return_counts=True)
    sums = np.zeros((len(unique), len(STEP_PARTS)))
    np.add.at(sums, of_number, np.array([_parts(step) for step in found], np.float64))
    parts = sums / counts[:, None] / 1e6  # (steps, parts)
    together = -(-len(unique) // most)
    edges = range(0, len(unique), together)
    heights = np.array([np.median(parts[at : at + together], axis=0) for at in edges])
    # Midpoints between the first and last step of each column.
    x = np.array([(unique[at] + unique[min(at + together, len(unique)) - 1]) / 2 for at in edges])
    base = np.zeros(len(x))
    for part, column in zip(STEP_PARTS, heights.T, strict=True):
        style = fill_style(part)
        if len(x) <= _MOST_BARS:
            axes.bar(x, column, bottom=base, width=0.86 * together, **style)
        elif column.any():  # one area, because many bars take ten times as long
            outline = np.append(x - together / 2, x[-1] + together / 2)
            low, high = (np.append(one, one[-1]) for one in (base, base + column))
            axes.fill_between(outline, low, high, step="post", **style)
        base += column
    axes.set_ylim(bottom=0)
    top = 1.15 * float(np.percentile(base, 90))
    if base.max() > 1.5 * top:  # the first step is often much longer than the others, which would become invisible
        axes.set_ylim(0, top)
        written: list[int] = []
        for at in np.argsort(-base)[:_MOST_CUT].tolist():  # the largest first
            if base[at] > top and all(abs(at - other) > 0.4 * len(x) for other in written):  # labels need this room
                written.append(at)
                place, align = (-0.43, "left") if at < len(x) / 2 else (0.43, "right")
                told = ms(float(base[at]) * 1e6)
                words = f"↑ {told}" if align == "left" else f"{told} ↑"
                # Above the axes, because a bar behind a label makes it unreadable.
                axes.text(x[at] + place * together, 1.02 * top, words, color=INK, ha=align, va="bottom", fontsize=8.5)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step" if together == 1 else f"step ({together} together)")
    axes.set_ylabel("time (ms), mean of ranks")
    return [part for at, part in enumerate(STEP_PARTS) if heights[:, at].any()]


def _write(axes: Axes, x: float, y: float, text: str, color: str, align: str) -> None:
    axes.text(x, y, text, color=color, ha=align, va="center", fontsize=8.5, clip_on=True)


# ---- buckets


def buckets(recording: RowSource, rank: int, step: int | None, cell: int | None) -> Picture:
    """Draw `figures.buckets`."""
    chosen = _choose_step(recording, rank, step, cell)
    waited = _waited_by_issue(recording, chosen)
    begin, end = _backward_of(recording, chosen)
    last_issue = max(bucket.issue_ns for bucket in chosen.buckets)
    rows = [_Row(bucket, waited.get(bucket.issue_ns, 0), last_issue, end) for bucket in chosen.buckets]
    where = f" (rank {chosen.rank}, {label_of(recording, chosen.cell)}, step {chosen.step})"
    height = 1.7 + _ROW * min(len(rows) + 1, 40)
    latest = max([end, *(row.end for row in rows)])
    all_arrived = min(max([last_issue, *(row.arrived for row in rows)]), latest)
    title = _told_of(rows, all_arrived - last_issue, latest - all_arrived) + where
    figure, (axes,) = picture(title, height)

    _draw(axes, 0, "compute", begin, last_issue, begin)
    _draw(axes, 0, "waiting", last_issue, all_arrived, begin)
    _draw(axes, 0, "exposed", all_arrived, latest, begin)
    for at, row in enumerate(rows, 1):
        _draw(axes, at, "waiting", row.begin, row.arrived, begin)
        _draw(axes, at, "hidden", row.arrived, row.hidden_until, begin)
        _draw(axes, at, "exposed", row.hidden_until, row.end, begin)
    axes.axvline((last_issue - begin) / 1e6, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(
        (last_issue - begin) / 1e6,
        -0.75,
        "all gradients are ready ",
        color=INK,
        fontsize=8.5,
        ha="right",
        va="center",
    )
    labels = ["backward", *(_label(row.bucket) for row in rows)]
    every = -(-len(labels) // 40)
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.set_ylim(len(labels) - 0.4, -1.2)
    axes.set_xlim(0, 1.02 * (latest - begin) / 1e6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time since the backward began (ms)")
    key(figure, ("compute", "waiting", "hidden", "exposed"))
    return figure


class _Row:
    """Times of one bucket: `begin`: issue; `arrived`: arrival of all ranks; `hidden_until`: end of this rank's other
    work.
    """

    def __init__(self, bucket: Bucket, waited_ns: int, last_issue: int, backward_end: int) -> None:
        self.bucket = bucket
        self.begin = bucket.issue_ns
        self.end = max(backward_end if bucket.end_ns is None else bucket.end_ns, self.begin)
        self.arrived = min(self.begin + waited_ns, self.end)
        self.hidden_until = min(max(self.arrived, last_issue), self.end)


def _told_of(rows: Sequence[_Row], waiting_ns: int, exposed_ns: int) -> str:
    transfer = _union([(row.arrived, row.end) for row in rows])
    hidden = _union([(row.arrived, row.hidden_until) for row in rows])
    count = f"{len(rows)} buckets" if len(rows) > 1 else "1 bucket"
    words = f"{percent(hidden / transfer) if transfer else 'nothing'} of the transfer of {count} "
    words += f"({size(sum(row.bucket.nbytes for row in rows))}) is hidden; exposed: {ms(exposed_ns)}"
    return words + (f", and {ms(waiting_ns)} of waiting" if waiting_ns > _LEAST_TOLD * exposed_ns else "")


def _union(intervals: Sequence[tuple[int, int]]) -> int:
    """Return the total time covered by the intervals."""
    total, until = 0, -1
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _draw(axes: Axes, row: int, meaning: str, begin: int, end: int, zero: int) -> None:
    if end > begin:
        axes.barh(row, (end - begin) / 1e6, left=(begin - zero) / 1e6, height=0.72, **fill_style(meaning))


def _label(bucket: Bucket) -> str:
    names = bucket.parameters
    shown = f"{names[0]}, {len(names) - 1} more" if len(names) > 1 else "".join(names)
    if len(shown) > _NAME_LENGTH:
        shown = "…" + shown[1 - _NAME_LENGTH :]
    return "  ".join(filter(None, [shown, f"{size(bucket.nbytes)}", f"#{bucket.bucket}"]))


def _choose_step(recording: RowSource, rank: int, step: int | None, cell: int | None) -> Step:
    if not 0 <= rank < recording.world_size:
        raise UsageError(f"rank {rank} does not exist; the ranks are 0 to {recording.world_size - 1}")
    found = steps_of(recording, cell, rank)
    having = [one for one in found if one.buckets]
    if not having:
        raise UsageError(
            f"nothing to draw: rank {rank} synchronised no gradient bucket{in_cell(recording, cell)}; train a model in "
            "DistributedDataParallel with %ddp_record meta or values"
        )
    if step is None:
        return having[-1]
    last_cell = having[-1].cell
    of_number = {one.step: one for one in having if one.cell == last_cell}
    if step not in of_number:
        has = f"{min(of_number)} to {max(of_number)}" if len(of_number) > 1 else str(min(of_number))
        raise UsageError(
            f"step {step} of rank {rank} has no buckets; steps with buckets in {label_of(recording, last_cell)}: {has}"
        )
    return of_number[step]


def _waited_by_issue(recording: RowSource, step: Step) -> dict[int, int]:
    """Return the time that each bucket waited for other ranks, by its issue time on this rank."""
    calls = calls_of(recording, step.cell)
    calls = calls[calls["bucket"] >= 0]
    matched = match_collectives(recording, calls)
    rows = calls[matched.index]
    mine = rows["rank"] == step.rank
    came = matched.arrived_ns[mine] + matched.waited_ns[mine] - rows["issue_ns"][mine]
    return dict(zip(rows["issue_ns"][mine].tolist(), came.tolist(), strict=True))


def _backward_of(recording: RowSource, step: Step) -> tuple[int, int]:
    """Return the begin of the backward pass of the first bucket, and the end of that of the last bucket."""
    spans = recording.rows("span")
    issued = [bucket.issue_ns for bucket in step.buckets]
    mine = spans[
        (spans["rank"] == step.rank)
        & (spans["kind"] == SPANS.index("backward"))
        & (spans["end_ns"] >= min(issued))
        & (spans["start_ns"] <= max(issued))
    ]
    ends = [bucket.end_ns or bucket.issue_ns for bucket in step.buckets]
    if not len(mine):
        return min(issued), max(ends)
    return int(mine["start_ns"].min()), int(mine["end_ns"].max())
