"""Sentences about where ranks diverged: of known programs, and true for random ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ddp_notebook.records.operation import Operation
from ddp_notebook.records.schema import CALL
from ddp_notebook.run.divergence import paths
from ddp_notebook.run.divergence.control_flow import ControlFlow, mark_elifs
from ddp_notebook.run.divergence.diverged_cells import _text_of
from ddp_notebook.run.divergence.paths import END, Event, LastAct, Paths, paths_of
from ddp_notebook.run.divergence.sentences import divergence
from tests.divergence.programs import PROGRAMS
from tests.divergence.random_programs import Generator, Log, run
from tests.divergence.simulated import events_of, flow_of

pytestmark = pytest.mark.unit

_NEEDS_RANKS = {name for name, one in PROGRAMS.items() if re.search(r"DistributedData|Thread|recv", one.code)}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - _NEEDS_RANKS))
def test_known_programs(name):
    program = PROGRAMS[name]
    paths = {rank: events_of(program, rank) for rank in range(program.world_size)}
    assert divergence(flow_of(program), Paths(paths)) == program.sentence


def test_no_sentence_about_equal_paths():
    program = PROGRAMS["uneven loop"]
    path = events_of(program, 0)
    assert divergence(flow_of(program), Paths({0: path, 1: path})) == ""


def test_without_the_first_collectives_of_a_cell():
    program = PROGRAMS["break"]
    paths = {rank: events_of(program, rank)[4:] for rank in range(2)}
    sentence = divergence(flow_of(program), Paths(paths, has_start=False))
    assert sentence == "line 2: rank 1 left the loop, rank 0 is still in it"  # 8 passes, of which 4 are known


def _event(code: Sequence[str], line: int) -> Event:
    name = code[line - 1].split("dist.")[1].split("(")[0]
    return Event("", line, "", name, name)


def _sentence(code: str, logs: Sequence[Log]) -> tuple[str, int]:
    """Return the sentence about a program, and the number of common collectives."""
    lines = code.split("\n")
    paths = {rank: [*(_event(lines, line) for line in log.events), END] for rank, log in enumerate(logs)}
    common = next(n for n in range(10_000) if len({path[n] for path in paths.values()}) > 1)
    return divergence(ControlFlow({"": mark_elifs(ast.parse(code), code)}), Paths(paths)), common


def _last(log: Log, common: int, kind: str, line: int):
    """Return the value of the last decision before the next collective of a rank; None if there was none."""
    values = [value for before, what, at, value in log.entries if before <= common and (what, at) == (kind, line)]
    return values[-1] if values else None


def _passes(log: Log, common: int, line: int) -> int:
    """Return the passes of a loop since its last entry, before the next collective."""
    kinds = [what for before, what, at, _ in log.entries if before <= common and at == line]
    return kinds[::-1].index("enter") if "enter" in kinds else 0


def _runs(log: Log, common: int, loop: int, line: int) -> int:
    """Return how often a collective ran since the last entry of a loop, among the common ones."""
    entered = [before for before, what, at, _ in log.entries if before <= common and (what, at) == ("enter", loop)]
    return log.events[entered[-1] : common].count(line)


def _is_true(sentence: str, logs: Sequence[Log], common: int) -> bool:
    """Return whether the logs of two ranks confirm a sentence."""

    def of(rank: str) -> Log:
        return logs[int(rank)]

    if found := re.fullmatch(r"line (\d+): rank (\d) took `if .*`, rank (\d) (did not|its `else`)", sentence):
        line, one, other, _ = found.groups()
        return _last(of(one), common, "if", int(line)) is True and _last(of(other), common, "if", int(line)) is False
    if found := re.fullmatch(
        r"line (\d+): rank (\d) left the loop after (\d+)( complete)? pass.*, rank (\d) .*", sentence
    ):
        line, gone, number, complete, still = found.groups()
        begun = _passes(of(gone), common, int(line)) - int(number)
        return begun in ((0, 1) if complete else (0,)) and _passes(of(still), common, int(line)) == int(number) + 1
    if found := re.fullmatch(r"line (\d+): rank (\d) left the loop after line (\d+) had run (\d+) .*", sentence):
        loop, gone, line, number = map(int, found.groups())
        return _runs(logs[gone], common, loop, line) == number == _runs(logs[1 - gone], common, loop, line)
    if found := re.fullmatch(r"line (\d+): rank (\d) left the loop, rank (\d) is still in it", sentence):
        return True  # checked by the tests of programs
    if found := re.fullmatch(r"line (\d+): rank (\d) made no pass of the loop, rank (\d) is in the 1st", sentence):
        line, none, first = found.groups()
        return (_passes(of(none), common, int(line)), _passes(of(first), common, int(line))) == (0, 1)
    if found := re.fullmatch(r"line (\d+): rank (\d) reached line (\d+) in the loop, rank (\d) did not", sentence):
        _, one, line, other = found.groups()
        return of(one).events[common] == int(line) and of(other).events[common : common + 1] != [int(line)]
    if found := re.fullmatch(r"line \d+: rank (\d) ran `except .*` \(line (\d+)\), rank (\d) did not", sentence):
        one, line, other = found.groups()
        ran = [
            any(before == common and (what, at) == ("except", int(line)) for before, what, at, _ in of(rank).entries)
            for rank in (one, other)
        ]
        return ran == [True, False]
    if found := re.fullmatch(r"line (\d+): rank (\d) returned early from `(\w)` \(line \d+\)", sentence):
        line, one, _ = found.groups()
        returned = [any(one == (common, "return", int(line), None) for one in log.entries) for log in logs]
        return returned[int(one)] and not returned[1 - int(one)]
    if found := re.fullmatch(r"rank (\d) reached line (\d+) through (.*), rank (\d) did not", sentence):
        one, line, conditions, other = found.groups()
        lines = map(int, re.findall(r"\(line (\d+)\)", conditions))
        is_there = of(one).events[common] == int(line) and of(other).events[common : common + 1] != [int(line)]
        return is_there and all(_last(of(one), common, "if", at) is True for at in lines)
    if found := re.fullmatch(
        r"rank (\d) called `(\w)` \(line (\d+)\), rank (\d) called `(\w)` \(line (\d+)\)", sentence
    ):
        one, _, line, other, _, its = found.groups()
        return (of(one).events[common], of(other).events[common]) == (int(line), int(its))
    raise AssertionError(f"unknown sentence: {sentence}")


def _check(seeds: range) -> dict[str, int]:
    """Check the sentences about random programs. Return how many programs had one."""
    counts = {"diverged": 0, "described": 0}
    for seed in seeds:
        code = Generator(seed).code()
        try:
            logs = [run(code, rank) for rank in range(2)]
        except (RuntimeError, ValueError):  # endless, or it fails on a rank
            continue
        names = [[code.split("\n")[line - 1].strip() for line in log.events] for log in logs]
        if logs[0].events == logs[1].events or names[0] == names[1]:
            continue
        counts["diverged"] += 1
        sentence, common = _sentence(code, logs)
        counts["described"] += bool(sentence)
        assert not sentence or _is_true(sentence, logs, common), f"seed {seed}: {sentence}\n{code}"
    return counts


def test_sentences_about_random_programs_are_true():
    counts = _check(range(150))
    assert counts["diverged"] > 40
    assert counts["described"] > 0.7 * counts["diverged"], counts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sentences_about_many_random_programs_are_true():
    counts = _check(range(10_000, 14_000))
    print(counts)
    assert counts["described"] > 0.7 * counts["diverged"], counts


_SYNC = """def sync():
    dist.all_reduce(t)
"""
# Programs in which rank 0 waits in `all_reduce` and rank 1 in `barrier`. The branch in them is not the reason.
_WITHOUT_REASON = {
    "test raises": (
        "try:\n    if d[rank]:\n        dist.all_reduce(t)\n    else:\n        x = 1\nexcept KeyError:\n    x = 2"
    ),
    "suppressed": (
        "with suppress(KeyError):\n    x = d[rank]\n    if flag:\n        dist.all_reduce(t)\n    else:\n        x = 1"
    ),
    "variable": "with guard:\n    x = d[rank]\n    if flag:\n        dist.all_reduce(t)\n    else:\n        x = 1",
    "finally": "try:\n    x = d[rank]\n    if flag:\n        dist.all_reduce(t)\n    else:\n        x = 1\nfinally:",
    "decorator": f"@only_rank_0\n{_SYNC}if done:\n    sync()",
    "callback": f"{_SYNC}callbacks = [sync] if rank == 0 else []\nfor c in callbacks:\n    c()\nif flag:\n    sync()",
    "lambda": f"{_SYNC}f = lambda: sync()\nif rank == 0:\n    f()\nif flag:\n    sync()",
    "other value": f"{_SYNC}if rank == 1:\n    sync = print\nif flag:\n    sync()",
    "task": f"async {_SYNC}if first:\n    task = create_task(sync())\nif rank == 0:\n    await task",
    "forward": (
        "class Net(nn.Module):\n    def forward(self, x):\n        dist.all_reduce(x)\n"
        "if rank == 0:\n    net(x)\nif flag:\n    net.forward(x)"
    ),
}


@pytest.mark.parametrize("name", _WITHOUT_REASON)
def test_branches_that_are_not_the_reason(name):
    code = _WITHOUT_REASON[name]
    code += "\n    dist.barrier()" if code.endswith("finally:") else "\ndist.barrier()"
    lines = code.split("\n")
    reduces, ends = (next(n for n, line in enumerate(lines, 1) if api in line) for api in ("all_reduce", "barrier"))
    paths = Paths({0: [_event(lines, reduces)], 1: [_event(lines, ends)]})
    sentence = divergence(ControlFlow({"": mark_elifs(ast.parse(code), code)}), paths)
    assert sentence == "" or sentence.startswith(f"rank 0 reached line {reduces} through ")  # rank 1 may have failed


@pytest.mark.parametrize(
    "test", ["while sync():\n        x += 1", "if a:\n        x = 1\n    elif sync():\n        x = 2"]
)
def test_collectives_in_tests_are_not_counted_as_passes(test):
    code = f"{_SYNC}for epoch in range(1 + rank):\n    sync()\n    {test}\ndist.barrier()"
    lines = code.split("\n")
    one, end = _event(lines, 2), _event(lines, len(lines))
    paths = Paths({0: [one, one, end], 1: [one, one, one]})
    assert divergence(ControlFlow({"": mark_elifs(ast.parse(code), code)}), paths) == ""


def test_a_file_that_was_changed_after_its_import():
    file = ast.parse("def load():\n    if first:\n        dist.all_reduce(t)\n    dist.barrier()")
    flow = ControlFlow({"util.py": file, "": ast.parse("load()\nsave()")})

    def sentence(function):
        events = [Event("util.py", line, function, api, api) for line, api in ((3, "all_reduce"), (4, "barrier"))]
        return divergence(flow, Paths({rank: [event] for rank, event in enumerate(events)}))

    assert sentence("load") == "util.py:2: rank 0 took `if first:`, rank 1 did not"
    assert sentence("save") == ""  # `save` was at these lines


def test_a_file_that_was_changed_after_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "changed_later.py"
    file.write_text("x = 1\n")
    assert _text_of(file.name, file.stat().st_mtime) == "x = 1\n"
    assert _text_of(file.name, file.stat().st_mtime - 1) == ""


class _Recording:
    """Recording of a loop that has called `all_reduce` many times, which counts the texts that are looked up."""

    looked_up = 0

    def rows(self, table):
        rows = np.zeros(10_000, CALL)
        rows["rank"], rows["number"] = np.arange(10_000) % 2, np.arange(10_000) // 2
        rows["call"], rows["cell"], rows["bucket"], rows["end_ns"] = rows["number"], 1, -1, 1
        return rows

    def text(self, number):
        self.looked_up += 1
        return "all_reduce"

    def group_of(self, number):
        return {"name": "0"}


def test_lines_of_a_long_loop_are_looked_up_once(monkeypatch):
    recording: Any = _Recording()
    monkeypatch.setattr(recording, "text", lambda number, text=recording.text: text(number) and "cell line 2")
    monkeypatch.setattr(paths, "calls_of", lambda rows, cell: rows.rows("call"))
    waits = Operation(name="barrier", number=5000, group="", ranks=(0, 1), key="0")
    found = paths_of(recording, 1, {rank: LastAct(waits, "cell line 3 (barrier)") for rank in range(2)})
    assert found is not None and [len(path) for path in found.events.values()] == [5001, 5001]
    assert recording.looked_up < 10
