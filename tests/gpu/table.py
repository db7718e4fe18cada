"""A Markdown table with the results of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def table(machine: str, reports: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        machine: Description of the machine.
        reports: pytest reports of these tests. The last column contains their `record_property` values.
    """
    yield f"{machine}:"
    yield ""
    yield "| test | result | s | seen |"
    yield "|---|---|---|---|"
    for report in reports:
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        noted = [f"{name} {value}" for name, value in report.user_properties]
        yield f"| {name} | {report.outcome} | {report.duration:.1f} | {'; '.join([*noted, *_reason(report)])} |"


def _reason(report: pytest.TestReport) -> list[str]:
    """Return the reason why a test was skipped or has failed."""
    match report.outcome, report.longrepr:
        case "skipped", (_, _, reason):
            return [str(reason).removeprefix("Skipped: ")]
        case "failed", repr:
            return [str(getattr(getattr(repr, "reprcrash", None), "message", repr)).splitlines()[0].replace("|", "/")]
    return []
