"""Run a table of programs in a session, collect everything that the session reports, and count the results.

`python -m tests.training_programs.runner` runs the three tables and writes docs/measurements/training_tables.md.
Options: `--seed N` for other places of the faults, `--only TEXT` for programs whose names contain the text, `--table
NAME`, and `--show` to print the report of each program.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.training_programs.program import FALSE_ADVICE, PRELUDE, Program, of_libraries, read

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "training_tables.md"
TABLES = {table: read(table) for table in ("wrong", "right", "deliberate")}
TABLES["right"] += of_libraries()
NAMED, NOTICED, MISSED, MISLED, SILENT = "named", "noticed only", "missed", "wrong cause", "silent"
_FORGET = """
for _name in [name for name in globals() if name not in _kept_names]: del globals()[_name]
gc.collect()
dist.all_reduce(torch.ones(1)); torch.manual_seed(0); torch.set_grad_enabled(True)
"""
_HEAD = """# Programs about training

Small programs run as cells, and everything that the session reports is collected: text under the cell, errors, hang
cards, findings of `%ddp_report` and of `%ddp_check`. `python -m tests.training_programs.runner` writes this page (seed
{seed}). The programs are in `tests/training_programs`.

| table | programs | named | noticed only | missed | wrong cause | silent |
|---|---|---|---|---|---|---|"""
_LEGEND = """
- *Wrong* programs have a fault at a random rank, step, parameter or operation. *Named*: the right cause was reported.
  *Noticed only*: something else was reported, such as the error of torch.
- *Right* programs must be *silent*.
- *Deliberate* programs do something unusual on purpose. They may be noticed. *Wrong cause*: they were called wrong."""
# Notes of the report about times, about the choice of the cell, or about the contents of a cell
_OF_TIMES = re.compile(
    r"Bubble of|cell \d+ ran later|\d+ ranks on \d+ cores|(Inference|Input|Passes|Communication|Pipeline): "
)
_OF_GROUP = "no default process group after this cell"  # a script that ends its group
_OUTPUT = re.compile(r"^\[[\d, -]+\] ")  # a line that a rank has printed
_CLEAN = re.compile(r"(succeeded|stopped): ranks?[^\n]*|^--- ranks? [\d,-]+ ---$", re.MULTILINE)
# Sentences that call a program wrong.
_BLAMES = re.compile(r"wrong|mistake|error|must|no effect|change nothing|trains? nothing", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """Everything that a session has reported about a program."""

    program: Program
    cell: str  # text under the cell, with a hang card
    error: str  # "": the cell has succeeded
    report: str  # findings of the report
    check: str  # findings of the check

    @property
    def text(self) -> str:
        return "\n".join(filter(None, [self.cell, self.error, self.report, self.check]))

    @property
    def verdict(self) -> str:
        """Return the verdict on a wrong program."""
        text, program = self.text, self.program
        advice = [one for one in FALSE_ADVICE if not any(one in cause for cause in program.cause)]
        if any(_found(one, text) for one in (*program.wrong, *advice)):
            return MISLED
        if any(_found(cause, text) for cause in program.cause):
            return NAMED
        return NOTICED if text.strip() else MISSED


def _found(pattern: str, text: str) -> bool:
    """Return whether a text has a pattern. With `(?s)` in the pattern, a dot matches line ends too."""
    flags = re.IGNORECASE | (re.DOTALL if "(?s)" in pattern else 0)
    return re.search(pattern.replace("(?s)", ""), text, flags) is not None


class Runner:
    """Runs programs in one session per number of ranks. Starts another one if a program has broken it."""

    def __init__(self) -> None:
        self._session: Any = None
        self._known: tuple[str, ...] = ()  # mistakes of earlier programs, which a check repeats
        self._reported = 0  # cell of the last report

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.stop()
            self._session = None

    def run(self, program: Program) -> Result:
        """Run a program with a random place for its fault."""
        session = self.ready(program.world_size)
        shown, error = io.StringIO(), ""
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                session.run(f"{program.code}\nNone", timeout_s=program.timeout_s)
            except Exception as raised:
                error = str(raised)
            report, check = self._asked(session)
        return Result(program, _plain(shown.getvalue()), error, report, check)

    def _asked(self, session: Any) -> tuple[str, str]:
        """Return the findings of the report and of the check."""
        report = check = ""
        try:
            found = session.report()
            if found.cell != self._reported:
                report = "\n".join(note for note in found.notes if not _OF_TIMES.match(note))
            self._reported = found.cell
        except Exception as error:
            report = "" if "cell" in str(error) else str(error)  # no cell has trained
        try:
            agreement = session.check()
            hints = [note for note in agreement.notes if "each rank reads all" in note or "NaN" in note]
            mistakes = [one for one in agreement.mistakes if one not in self._known]
            check = "\n".join([*map(str, agreement.differences), *mistakes, *hints])
        except Exception:
            self.stop()
        return report, check

    def ready(self, world_size: int) -> Any:
        """Return a session without variables of an earlier program, and start one if needed."""
        from ddp_notebook import api

        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if self._session is not None and self._session.world_size == world_size:
                try:
                    self._session.run(_FORGET, quiet=True, timeout_s=20)
                    self._known = self._session.check().mistakes
                    return self._session
                except Exception:
                    pass
            self.stop()
            self._known, self._reported = (), 0
            hang_after_s = 3.0 if world_size == 2 else 20.0  # ranks with large libraries import for seconds
            self._session = api.start(world_size, grace_s=3.0, hang_after_s=hang_after_s)
            self._session.run(PRELUDE + "\ntorch.manual_seed(0)\n_kept_names = {*globals(), '_kept_names'}", quiet=True)
        return self._session


def _plain(text: str) -> str:
    """Return the text of the session under a cell, without the output of the program and of torch."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    lines = [line for line in _CLEAN.sub("", text).split("\n") if line.strip()]
    kept, is_output = [], False
    for line in lines:
        if not line.startswith(" "):  # otherwise the line continues the one before
            is_output = _OF_GROUP in line or (_OUTPUT.match(line) is not None and "ddp_notebook: " not in line)
        if not is_output:
            kept.append(line)
    return "\n".join(kept)


def results(programs: Iterable[Program], seed: int) -> Iterator[Result]:
    """Run programs one after the other, and yield their results."""
    with Runner() as runner:
        for program in programs:
            yield runner.run(program.drawn(seed))


def verdict(table: str, result: Result) -> str:
    """Return the verdict on a program of this table."""
    if table == "wrong":
        return result.verdict
    if not result.text.strip():
        return SILENT
    if table == "right":
        return MISLED
    is_misled = result.error or any(re.search(one, result.text) for one in result.program.wrong)
    return MISLED if is_misled or _BLAMES.search(result.text) else NOTICED


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--table", choices=TABLES)
    parser.add_argument("--only", default="")
    parser.add_argument("--after", type=int, default=0, help="leave out this number of programs")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--no-page", action="store_true")
    given = parser.parse_args(arguments or None)
    print(f"seed {given.seed}", flush=True)
    verdicts: dict[str, dict[str, str]] = {}
    for table, programs in TABLES.items():
        if given.table in (None, table):
            chosen = [program for program in programs if given.only in program.name][given.after :]
            start = time.monotonic()
            of_table = verdicts[table] = {}
            for result in results(chosen, given.seed):
                found = of_table[result.program.name] = verdict(table, result)
                took, start = time.monotonic() - start, time.monotonic()
                print(f"{table}: {result.program.name}: {found} ({took:.1f} s)", flush=True)
                if given.show:
                    print("\n".join(f"    | {line}" for line in result.text.split("\n")), flush=True)
    if not given.only and not given.no_page and given.table is None:
        PAGE.write_text(page(verdicts, given.seed))


def page(verdicts: dict[str, dict[str, str]], seed: int) -> str:
    """Return the page with the counts, and the list of programs with another result than wanted."""
    lines = [_HEAD.format(seed=seed)]
    for table, of_table in verdicts.items():
        found = list(of_table.values())
        counts = [found.count(one) for one in (NAMED, NOTICED, MISSED, MISLED, SILENT)]
        lines.append(f"| {table} | {len(found)} | " + " | ".join(map(str, counts)) + " |")
    lines.append(_LEGEND)
    wanted = {"wrong": {NAMED}, "right": {SILENT}, "deliberate": {SILENT, NOTICED}}
    for table, of_table in verdicts.items():
        others = {name: found for name, found in of_table.items() if found not in wanted[table]}
        if others:
            lines += [
                "",
                f"## {table.capitalize()} programs with another result",
                "",
                "| program | result |",
                "|---|---|",
            ]
            lines += [f"| {name} | {found} |" for name, found in others.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
