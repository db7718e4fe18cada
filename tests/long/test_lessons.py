"""Every notebook on 2, 3 and 4 ranks: at its full length with its claims, and as a reader who presses Run All.

A run as a reader has a kernel of its own, in a copy of the folder. It fails on each error, warning and hang card that
the notebook does not show on purpose, and on files and processes that are left.

    python -m pytest -m long tests/long/test_lessons.py -k "run_all and 07_" --junitxml seconds.xml
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.kernels import NotebookKernel, Reply
from tests.lessons import solutions
from tests.lessons.claims import claims_of, is_idle
from tests.lessons.test_notebooks import FOLDER, NOTEBOOKS, check_claims, check_shown, execute
from tests.lessons.test_puzzles import compare as compare_solutions

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TIMES = ("unanswered", "shown", "unanswered again")
CELL_S = 600.0
ERRORS = {"RankError", "RankDiedError", "CellTimeoutError"}
CARD = re.compile(r"(no progress|waiting) for \d+ s")
# Cells that run a wrong program on purpose, besides those that end with an error.
WRONG = re.compile(r"lessons\.bug\(\d+\)\.run\(\)")
# Findings about mistakes that a lesson makes on purpose, by its number.
FINDINGS = {
    "05": {"written-before-wait"},
    "13": {"optimizer-of-another-model"},
    "16": {"not-finite", "trains-apart"},  # the exercise averages nothing before the reader has solved it
}
# Other lines of deliberate faults, by the number of the lesson.
LINES = {
    "18": re.compile(r"rank \d died \(killed by SIGKILL\) and was replaced in .*"),
    "19": re.compile(
        r"rank \d died \(killed by SIGKILL\) and was replaced in .*"
        r"|\[\d\] %ddp_fault kill .*: the cell ended first, and the fault did not happen"  # without the reader's code
    ),
}
OF_TORCHRUN = re.compile(r"[WE]\d{4} .*")  # its log in a cell with %ddp_torchrun
# Lines about a machine that is too busy, which are true then.
BUSY = re.compile(r"no rank has started within \d+ s")
OF_TWO = "25/overlap"  # compares sums bit for bit, which only two ranks make in each order


@dataclass
class WatchedReply(Reply):
    """Output of a cell, with the hang cards that were shown for a time."""

    cards: list[str] = field(default_factory=list)

    def read(self, message: dict[str, Any]) -> None:
        super().read(message)
        text = message["content"].get("data", {}).get("text/plain", "")
        if message["msg_type"] in ("display_data", "update_display_data") and CARD.match(text):
            self.cards.append(text)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lesson_runs_on_other_numbers_of_ranks(path, world_size):
    """At its full length, with its claims. `tests/lessons` does this with four ranks."""
    check_shown(execute(path, world_size))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("time", TIMES)
def test_run_all(path, world_size, time, tmp_path):
    """Three times, since a run depends on the order in which processes get the cores."""
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.executed.*", "my_answers.json", "ko", "zh-TW"))
    before = files_in(folder)
    is_shown = time == "shown"
    env = {
        "DDP_NOTEBOOK_RANKS": str(world_size),
        "DDP_NOTEBOOK_SHORT": "1",
        "DDP_NOTEBOOK_ANSWERS": "shown" if is_shown else "",
    }
    with closing(NotebookKernel(env=env, cwd=str(folder))) as kernel:
        wrong = list(run_all(kernel, folder / path.name, with_claims=is_shown))
    assert not wrong, "\n\n".join(wrong)
    answers = folder / "my_answers.json"
    assert not answers.exists(), f"a reader who presses Run All has answered nothing: {answers.read_text()}"
    assert files_in(folder) - before == set()


def run_all(kernel: NotebookKernel, path: Path, *, with_claims: bool) -> Iterator[str]:
    """Run the cells of a notebook, and yield what a reader would be surprised by."""
    cells = nbformat.read(path, as_version=4).cells
    claims, with_times = claims_of(path) if with_claims else [], is_idle()
    for cell in cells:
        if cell.cell_type != "code":
            continue
        message_id = kernel.start(cell.source)
        reply = WatchedReply()
        kernel._replies[message_id] = reply
        kernel.finish(message_id, CELL_S)
        fails = "raises-exception" in cell.metadata.get("tags", [])
        where = f"--- cell {cell.id}:\n{cell.source[:300]}\n--- "
        if not fails and not WRONG.search(cell.source):
            if any(not is_expected(line, path.name[:2], cell.source) for line in reply.stderr.splitlines()):
                yield f"{where}stderr: {reply.stderr[-2000:]}"
            if "Warning:" in reply.stdout or "Traceback" in reply.stdout:
                yield f"{where}stdout: {reply.stdout[-2000:]}"
            if reply.cards and not is_overloaded():
                yield f"{where}hang card: {reply.cards[-1]}"
        if fails and reply.ename not in ERRORS:
            yield f"{where}no error of the ranks, but {reply.ename or reply.status}"
        if reply.status != "ok" and not fails:
            yield f"{where}error: {reply.ename}: {reply.evalue}\n{reply.traceback[-2000:]}"
            return  # Run All ends
        check_claims(kernel, claims, cell.id, with_times=with_times)


def is_expected(line: str, lesson: str, source: str) -> bool:
    """Return whether a cell of a lesson writes this line to stderr on purpose."""
    if finding_of(line) in FINDINGS.get(lesson, ()) or (lesson in LINES and LINES[lesson].fullmatch(line)):
        return True
    if source.startswith("%ddp_torchrun") and OF_TORCHRUN.fullmatch(line):
        return True
    return is_overloaded() and BUSY.fullmatch(line) is not None


def is_overloaded() -> bool:
    """Return whether more than four processes wanted each core in the last minute: more than those of two notebooks."""
    return os.getloadavg()[0] > 4 * (os.cpu_count() or 1)


def finding_of(line: str) -> str:
    """Return the name of the finding that a line of stderr reports; "" if it reports none."""
    if " train apart: " in line:
        return "trains-apart"
    found = re.search(r"\(# ddp: ok ([\w-]+)\)$", line)
    return found[1] if found else ""


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", [name for name in solutions.PAIRS if name != OF_TWO])
def test_a_puzzle_is_the_same_on_other_numbers_of_ranks(name, world_size, waiting_host_server):
    """The naive solution misses the target, and the good one reaches it."""
    from ddp_notebook import api

    waiting_host_server()
    with api.start(world_size):
        compare_solutions(name, *solutions.PAIRS[name])
