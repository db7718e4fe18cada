"""Findings of the cells of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.findings import first_bucket
from ddp_notebook.run.findings.decide import Finding, findings_of
from ddp_notebook.run.findings.silenced import silenced_by
from ddp_notebook.run.session_hooks import SessionFeature

_MOST_LINES = 3  # under a cell; the report has all
# Findings that explain why ranks train apart; "idle" is a cell without gradients, which trains nothing.
_WITHOUT_AVERAGE = {
    *("ddp-bypassed", "idle", "loss-without-path", "no-gradient", "optimizer-of-another-model", "trains-apart"),
}


class CellFindings(SessionFeature):
    """Shows findings under cells, and keeps them for the report."""

    def cell_ended(self, run: CellRun, code: str) -> Sequence[str]:
        results = run.result.by_rank
        facts: dict[int, list[Any]] = {rank: one.findings for rank, one in results.items() if one.findings}
        if not facts:
            return ()
        for rank, own in facts.items():
            if _WITHOUT_AVERAGE & {name for name, *_ in own}:  # the finding has the cause
                results[rank].trains_apart = ""
        silenced = silenced_by(code)
        if first_bucket.needs_gradients(facts, sorted(results)) and self._recordings is not None:
            facts = first_bucket.with_bucket(facts, self._recordings.now, run.number)
        found = [one for one in findings_of(facts, sorted(results)) if one.name not in silenced]
        self._keep(run.number, found)
        return [] if self.parts.options.quiet_findings else _lines(found)

    @property
    def _recordings(self) -> Any:
        return self.parts.hooks.features.get("recording")

    def _keep(self, cell: int, found: Sequence[Finding]) -> None:
        if (recordings := self._recordings) is not None:
            recordings.observer.recording.findings[cell] = tuple(str(one) for one in found)


def _lines(found: Sequence[Finding]) -> list[str]:
    lines = [str(one) for one in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        lines.append(f"{len(found) - _MOST_LINES} more in %ddp_report")
    return lines
