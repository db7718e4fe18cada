"""Why ranks ran out of memory: the last error of each rank, and its memory up to then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import SessionBrokenError
from ddp_notebook.observe.report.memory_growth import Growth, growth_of
from ddp_notebook.observe.tables.matching import label_of, prompt_of
from ddp_notebook.records.names import readable
from ddp_notebook.records.schema import SPANS, Rows
from ddp_notebook.records.units import percent, size
from ddp_notebook.records.words import list_ranks

if TYPE_CHECKING:
    from ddp_notebook.observe.tables.matching import RowSource
    from ddp_notebook.observe.tables.recorded import RecordedTables

_HELD = ("parameters", "buffers", "gradients", "optimizer_state")
_NEAR = 0.8  # share of the limit
_MOST = 6  # modules and variables that are listed
_OPTIMIZER, _CELL = map(SPANS.index, ("optimizer", "cell"))
_NO_CELL = -1  # the cell of the error is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Facts about the out-of-memory errors of the ranks. As text they are the answer of `%ddp_memory --why`.

    `last` has the facts of each rank with an error, and `now` the present memory of all ranks, in bytes.
    """

    last: Mapping[int, Mapping[str, Any]]
    now: Mapping[int, Mapping[str, Any]]
    growth: Mapping[int, Growth]  # growth by rank; ranks whose memory did not grow are left out
    steps: Mapping[int, int]  # optimizer steps that the rank had taken when its memory began to grow
    others: int | None  # bytes of all other processes of the host; None: unknown, or several hosts
    is_live: bool = True  # False: from a saved recording
    earlier: Mapping[int, str] = field(default_factory=dict)  # ranks whose last error was in an earlier cell: its name
    ended: Mapping[int, str] = field(default_factory=dict)  # sentences about ranks that have died
    cell: str = ""  # name of the cell of the last errors: "In [6]"; "": no prompt is known
    not_asked: str = ""  # reason if `now` is not known

    def __str__(self) -> str:
        more = [*self._near(), *self._host()]
        if self.not_asked:
            more.append(f"Without the present memory of the ranks: {self.not_asked}.")
        if not self.last:
            none = "since its start" if self.is_live else "in this recording"
            had = "reported" if self.ended else "had"
            return "\n".join([*self.ended.values(), f"No rank has {had} an out-of-memory error {none}.", *more])
        lines = [*self.ended.values(), *(_sentence(rank, one, self.cell) for rank, one in sorted(self.last.items()))]
        lines += ["", *_table(self.last, self.growth), ""]
        for rank, one in sorted(self.last.items()):
            lines += _parts(rank, one)
            if (grown := self.growth.get(rank)) is not None:
                since = f", from step {self.steps[rank]} on" if rank in self.steps else ""
                lines.append(f"The resident memory of rank {rank} grew {grown}{since}.")
        lines += [f"Rank {rank} ran out of memory before that, in {cell}." for rank, cell in self.earlier.items()]
        return "\n".join([*lines, *more])

    def _near(self) -> list[str]:
        shares = {rank: share for rank, one in {**self.now, **self.last}.items() if (share := _share(one)) is not None}
        if not shares:
            return []
        near = [f"rank {rank} {percent(share)}" for rank, share in sorted(shares.items()) if share >= _NEAR]
        if not near:
            most = max(shares.values())
            return [f"No rank is near its limit: at most {percent(most)} of it are in use."]
        far = [rank for rank in self.now if shares.get(rank, 0.0) < _NEAR]
        return [f"Near the limit: {', '.join(near)}" + (f"; not: {list_ranks(far)}." if far else ".")]

    def _host(self) -> list[str]:
        return [] if self.others is None else [f"Other processes of the host use {size(self.others)}."]


def _share(one: Mapping[str, Any]) -> float | None:
    """Return the used share of the memory of a rank: of its GPU, if that had the error or the rank has no limit.

    Returns None if there is no limit, or if not the rank but one of its workers had the error.
    """
    if one.get("worker", -1) >= 0:
        return None
    gpu = one.get("gpu")
    if gpu and (one.get("is_of_gpu") or not one["limit"]):
        return float(1 - gpu["free"] / gpu["total"])
    return float(one["limit"][1] / one["limit"][2]) if one["limit"] else None


QUESTION = "out_of_memory.told()"
_FACT = "out-of-memory"  # see `rank.sharding.out_of_memory`


def keep(recording: RecordedTables, cell: int, facts: Mapping[int, Sequence[Sequence[Any]]]) -> None:
    """Keep the facts of the ranks that ran out of memory in a cell, and a sentence for its report.

    Args:
        recording: the recording of the session.
        cell: number of the cell.
        facts: by rank: name, step and details of each fact about the cell.
    """
    for rank, own in sorted(facts.items()):
        for name, _, details in own:
            if name == _FACT:
                recording._out_of_memory[rank] = {**details, "cell": cell}
                found = recording.findings.get(cell, ())
                recording.findings[cell] = (*found, _sentence(rank, details).rstrip("."))


def why_of_file(path: str) -> OutOfMemory:
    """Explain the out-of-memory errors of a saved recording.

    Raises:
        RecordingError: the file is not a recording.
    """
    from ddp_notebook.observe.files import load

    recording = load(path)
    return explained(recording, recording._out_of_memory, {}, recording.rows("resource"), is_live=False)


def asked(session: Any) -> OutOfMemory:
    """Ask the ranks of a session, and explain the last out-of-memory errors.

    If a rank has died or still runs a cell, the facts are those that the notebook got with the end of each cell.
    """
    recording, cluster = session.recording, session._parts.liveness.cluster
    dead = {rank: cluster.process(rank).tell_end() for rank in cluster.gone}
    reason = ""
    if not dead:
        try:
            return why(session._ask(QUESTION, "out_of_memory"), recording)
        except SessionBrokenError as error:
            reason = str(error).partition(":")[0]
    rows = recording.rows("resource")
    found = explained(recording, recording._out_of_memory, {}, rows)
    return replace(found, ended={rank: _ended(rank, end, rows) for rank, end in dead.items()}, not_asked=reason)


def _ended(rank: int, end: str, rows: Rows) -> str:
    """Return sentences about a rank that has died, with its last sample of memory.

    Example:
        >>> import numpy as np
        >>> from ddp_notebook.records.schema import RESOURCE
        >>> print(_ended(1, "killed by SIGTERM", np.zeros(0, RESOURCE)))
        Rank 1 died: killed by SIGTERM.
    """
    text = f"Rank {rank} died: {end}."
    own = rows[rows["rank"] == rank]
    if len(own):
        last = own[own["time_ns"].argmax()]
        text += (
            f" Its last sample had {size(int(last['rss_bytes']))} of resident memory, and "
            f"{size(int(last['host_used_bytes']))} of {size(int(last['host_total_bytes']))} of its host were in use."
        )
    if end.endswith("SIGKILL"):  # otherwise the reason is known
        text += " It is not known who sent SIGKILL. If it was Linux, because memory was used up, dmesg shows it."
    return text


def why(told: Mapping[int, Mapping[str, Any]], recording: RecordedTables) -> OutOfMemory:
    """Explain the last out-of-memory errors.

    Args:
        told: values of `QUESTION` by rank.
        recording: the recording of the session.
    """
    cells = {rank: one.get("cell", _NO_CELL) for rank, one in recording._out_of_memory.items()}
    last = {rank: {**one["last"], "cell": cells.get(rank, _NO_CELL)} for rank, one in told.items() if one["last"]}
    return explained(recording, last, {rank: one["now"] for rank, one in told.items()}, recording.rows("resource"))


def explained(
    recording: RowSource,
    last: Mapping[int, Any],
    now: Mapping[int, Any],
    resources: Rows,
    *,
    is_live: bool = True,
) -> OutOfMemory:
    """Combine the facts of the ranks with recorded rows.

    Args:
        recording: the recorded tables.
        last: facts of ranks with an error, see `rank.sharding.out_of_memory`.
        now: memory of each rank.
        resources: rows of `records.RESOURCE`.
        is_live: the ranks were asked, so ranks without facts had no error.
    """
    newest = max((facts.get("cell", _NO_CELL) for facts in last.values()), default=_NO_CELL)
    earlier = {
        rank: label_of(recording, facts["cell"]) if "cell" in facts and facts["cell"] != _NO_CELL else "an earlier cell"
        for rank, facts in sorted(last.items())
        if facts.get("cell", _NO_CELL) != newest
    }
    last = {rank: facts for rank, facts in last.items() if rank not in earlier}
    spans = recording.rows("span")
    growth, steps = {}, {}
    for rank, facts in last.items():
        own = spans[(spans["rank"] == rank) & (spans["cell"] == facts.get("cell", _NO_CELL))]
        if (one := _growth_in(own, resources, rank)) is None:
            continue
        growth[rank] = one
        taken = own[own["kind"] == _OPTIMIZER]
        if len(taken) and taken["start_ns"].min() <= one.end_ns:
            steps[rank] = int((taken["end_ns"] <= one.begin_ns).sum())
    others = _others(recording, resources)
    return OutOfMemory(
        last=last,
        now=now,
        growth=growth,
        steps=steps,
        others=others,
        is_live=is_live,
        earlier=earlier,
        cell=label_of(recording, newest) if prompt_of(recording, newest) else "",
    )


def _growth_in(spans: Rows, resources: Rows, rank: int) -> Growth | None:
    """Return the growth of a rank's memory in the cell with these spans; None if the cell is unknown or too short."""
    cells = spans[spans["kind"] == _CELL]
    if not len(cells):
        return None
    begin_ns, end_ns = int(cells["start_ns"].min()), int(cells["end_ns"].max())
    inside = resources["time_ns"] >= begin_ns
    if end_ns >= 0:
        inside &= resources["time_ns"] <= end_ns
    return growth_of(resources[inside], rank)


def _others(recording: RowSource, resources: Rows) -> int | None:
    if len(set(recording.hosts)) > 1 or not len(resources):
        return None
    last = {int(row["rank"]): row for row in resources}
    newest = max(last.values(), key=lambda row: int(row["time_ns"]))
    return max(0, int(newest["host_used_bytes"]) - sum(int(row["rss_bytes"]) for row in last.values()))


def _sentence(rank: int, one: Mapping[str, Any], cell: str = "") -> str:
    places = [part for part in (cell, one["site"]) if part]
    where = f" in {', '.join(places)}" if places else ""
    where += f", in {readable(one['module'])}" if one["module"] else ""
    requested = f"it requested {size(one['requested'])}" if one["requested"] >= 0 else "an allocation failed"
    if (worker := one.get("worker", -1)) >= 0:
        text = f"Worker {worker} of a data loader of rank {rank} ran out of memory: {requested}. The rank got the error"
        inherits = f". Workers inherit the limit of their rank: {size(one['limit'][2])} ({one['limit'][3]})"
        return f"{text}{where}{inherits if one['limit'] else ''}."
    text = f"Rank {rank} ran out of memory{where}: {requested}"
    if one["limit"] and not one.get("is_of_gpu"):  # the limits of the host say nothing about a GPU
        left, used, limit, what = one["limit"]
        if left >= one["requested"] >= 0:  # memory was freed while the error was raised
            return f"{text}. After the error, {size(used)} of {size(limit)} were in use ({what})."
        text += f" when {size(used)} of {size(limit)} were in use ({what})"
        share = percent(left / one["requested"]) if 0 < left < one["requested"] else ""
        if share and share != "100 %":  # a difference that the numbers do not show would contradict the error
            text += f". At most {size(left)} would have fitted, {share} of the request"
    if one["gpu"]:
        gpu = one["gpu"]
        text += (
            f". The GPU has {size(gpu['total'])}: {size(gpu['reserved'])} are reserved by the rank, "
            f"{size(gpu['others'])} are used by other processes, and {size(gpu['free'])} are free"
        )
    return f"{text}."


def _table(last: Mapping[int, Mapping[str, Any]], growth: Mapping[int, Growth]) -> list[str]:
    shown = [name for name in _HELD if name != "buffers" or any(one[name] for one in last.values())]
    rows = [["", *(name.replace("_", " ") for name in shown), "activations", "variables", "resident", "peak"]]
    for rank, one in sorted(last.items()):
        cells = [size(one[name]) for name in shown]
        cells += [size(sum(one[name].values())) for name in ("activations", "variables")]
        # Linux updates its maximum late, so a sample may exceed it.
        peak = max(0, one["peak_rss"], growth[rank].most if rank in growth else 0)
        rows.append([f"rank {rank}", *cells, size(max(0, one["rss"])), size(peak)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def _parts(rank: int, one: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, words in (("activations", "Activations"), ("variables", "Other tensors and arrays in variables")):
        parts = sorted(one[name].items(), key=lambda both: -both[1])
        if parts:
            listed = ", ".join(
                f"{readable(part) if part else 'no module'} {size(nbytes)}" for part, nbytes in parts[:_MOST]
            )
            more = f", and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
            lines.append(f"{words} of rank {rank}: {listed}{more}.")
    return [*lines, *_by_line(rank, one.get("history") or {})]


def _by_line(rank: int, history: Mapping[str, Any]) -> list[str]:
    """Return a line about the lines that have allocated memory of a GPU; [] without a history of the allocator."""
    if not history or not history["lines"]:
        return []
    parts = [f"{line or 'no line of yours'} {size(nbytes)}" for line, nbytes in history["lines"].items()]
    most, line = history["largest"]
    text = f"GPU memory of rank {rank} by the line that allocated it: {', '.join(parts)}"
    return [f"{text}. The largest tensor has {size(most)}, from {line or 'no line of yours'}."]
