"""A table that compares hosts."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_notebook.launch.preflight.compare import COLUMNS, HostFinding
from ddp_notebook.launch.preflight.query import Answer

_MARK = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """Facts about hosts, and findings about them. Its `repr` is the output of `%ddp_start --check`.

    Example:
        >>> lost = Answer(host="gpu1", machine="gpu1", trouble="ssh: connect to host gpu1: timed out")
        >>> table = HostTable(answers=(lost,))
        >>> table.fits, table.unreached
        (False, ['gpu1'])
        >>> table
        host  reached at  user  Python  torch ...
        gpu1  not reached*: ssh: connect to host gpu1: timed out
    """

    answers: tuple[Answer, ...] = ()
    findings: tuple[HostFinding, ...] = ()
    plan: str = ""  # ranks of a start, in words
    script: str = ""  # script or command of a start, if a launcher starts the hosts

    @property
    def fits(self) -> bool:
        """True if the ranks could be started."""
        return not self.unreached and not any(finding.is_fatal for finding in self.findings)

    @property
    def unreached(self) -> list[str]:
        """The hosts that cannot be reached."""
        return [answer.host for answer in self.answers if answer.trouble]

    def rows(self) -> list[str]:
        """Return the lines of the table, with marks at findings."""
        marks = {mark for finding in self.findings for mark in finding.marks}
        titles = ("host", *(column.title for column in COLUMNS))
        cells = [titles, *(_cells(answer, marks) for answer in self.answers if not answer.trouble)]
        widths = [max(len(row[number]) for row in cells) for number in range(len(titles))]
        widths[0] = max(len(answer.host) for answer in self.answers) if self.answers else 0
        widths[0] = max(widths[0], len(titles[0]))
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        by_host = dict(zip((row[0] for row in cells), lines, strict=True))
        for answer in self.answers:
            if answer.trouble:
                why = answer.trouble.removeprefix(f"no host server on {answer.host}: ").replace("\n", " ")
                by_host[answer.host] = f"{answer.host.ljust(widths[0])}  {_state(why)}"
        return [lines[0].rstrip(), *(by_host[answer.host].rstrip() for answer in self.answers)]

    def __repr__(self) -> str:
        lines = self.rows() if self.answers else []
        found = sorted(self.findings, key=lambda finding: not finding.is_fatal)
        lines += [f"{_MARK} {finding.sentence}" for finding in found]
        return "\n".join([*lines, *filter(None, [self.plan, self.script])])


def _state(why: str) -> str:
    """Describe a host without a host server. For a reached host, the reason says so itself."""
    if why.startswith("reached, "):
        return f"reached{_MARK}, {why.removeprefix('reached, ')}"
    if why.startswith("the host server on "):
        return f"reached{_MARK}, but {why}"
    return f"not reached{_MARK}: {why}"


def _cells(answer: Answer, marks: set[tuple[str, str]]) -> tuple[str, ...]:
    texts = [column.text(answer) + _MARK * ((answer.host, column.title) in marks) for column in COLUMNS]
    return (answer.host, *texts)
