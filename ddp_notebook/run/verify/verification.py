"""Result of a comparison of a training step with one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_notebook.records.names import printable_lines

_MOST_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake in a training step.

    Attributes:
        cause: short name of the cause, such as "weights", "ignored", "sum"; "unknown": the step is wrong, and no
            recorded fact shows the reason.
        sentence: the mistake, its place and its remedy.
        parameters: names of the affected parameters.
        ranks: the affected ranks; (): all.
    """

    cause: str
    sentence: str
    parameters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCheck:
    """Differences of one parameter's gradient, relative to its norm."""

    name: str
    elements: int
    off_together: float  # step of all ranks, compared with the average of their parts
    off_whole: float  # average of the parts, compared with the whole batch; NaN: not computed
    is_off: bool  # a difference is larger than rounding explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison of one training step with one process. Its `repr` is the text that `%ddp_verify` shows.

    Attributes:
        summary: one sentence about the result.
        is_compared: False if a loss or a gradient is NaN or infinite.
        findings: the mistakes, the most certain first; (): the step is right.
        notes: facts that explain differences and are no mistakes.
        parameters: differences by parameter.
        losses: loss of each rank's part, by rank.
        whole_loss: loss of the whole batch on one process; None: not computed.
        samples: number of samples in the whole batch.
        is_without_dropout: the whole batch was computed without dropout, which the step has.
        cell: name of the cell with the step, such as "In [7]"; "": the step was given.
        found_in_cell: other findings of that cell, as under the cell.

    Example:
        >>> Verification(summary="the step is right").is_right
        True
    """

    summary: str
    is_compared: bool = True
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    parameters: tuple[ParameterCheck, ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)
    whole_loss: float | None = None
    samples: int = 0
    is_without_dropout: bool = False
    cell: str = ""
    found_in_cell: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Return whether the comparison found no mistake."""
        return self.is_compared and not self.findings

    def __repr__(self) -> str:
        lines = [self.summary, *(f"- {one.sentence}" for one in self.findings[1:])]
        if self.losses:
            losses = ", ".join(f"rank {rank} {loss:.6g}" for rank, loss in self.losses.items())
            without = ", without dropout," if self.is_without_dropout else ""
            whole = "" if self.whole_loss is None else f"; whole batch{without} {self.whole_loss:.6g}"
            lines.append(f"  loss: {losses}{whole}")
        lines += self._table() if self.findings else []
        lines += [f"  note: {one}" for one in self.notes]
        if self.found_in_cell:
            lines += [f"other findings in {self.cell}:", *(f"- {one}" for one in self.found_in_cell)]
        return printable_lines("\n".join(lines))

    def _table(self) -> list[str]:
        """Return a line for each group of parameters, such as a layer."""
        groups: dict[str, list[ParameterCheck]] = {}
        for one in self.parameters:
            groups.setdefault(one.name.rpartition(".")[0] or one.name, []).append(one)
        wrong = {name: checks for name, checks in groups.items() if any(one.is_off for one in checks)}
        lines = []
        for name, checks in list(wrong.items())[:_MOST_GROUPS]:
            together = max(one.off_together for one in checks)
            whole = max((one.off_whole for one in checks if one.off_whole == one.off_whole), default=None)
            apart = "" if whole is None else f", parts differ from the whole batch by {whole:.2g}"
            lines.append(f"  {name}: ranks differ from the average of their parts by {together:.2g}{apart}")
        if len(wrong) > _MOST_GROUPS:
            lines.append(f"  and {len(wrong) - _MOST_GROUPS} more groups of parameters")
        return lines
