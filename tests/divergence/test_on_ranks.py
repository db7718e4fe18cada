"""Sentences about where ranks diverged, under the hang card and in errors, on real ranks."""

from __future__ import annotations

import sys

import pytest

from ddp_notebook import start
from ddp_notebook.errors import DDPNotebookError
from tests.divergence.programs import PROGRAMS, Program
from tests.divergence.simulated import text

pytestmark = pytest.mark.processes

_ON_TWO = {name: one for name, one in PROGRAMS.items() if one.world_size == 2}
_TIMEOUT_S = 2.5


def _error(session, program: Program) -> str:
    if program.earlier:
        session.run(text(program.earlier), execution_count=1)
    with pytest.raises(DDPNotebookError) as caught:
        session.run(text(program.code), quiet=True, timeout_s=_TIMEOUT_S, execution_count=2)
    return str(caught.value)


def _is_right(session, program: Program, sentences: set[str]) -> bool:
    error = _error(session, program)
    if program.sentence:
        return program.sentence in error
    return not any(sentence in error for sentence in sentences)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with the module of the programs."""
    for program in PROGRAMS.values():
        if program.file:
            (tmp_path / "paths_helper.py").write_text(text(program.file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


_SENTENCES = {one.sentence for one in PROGRAMS.values() if one.sentence}
# One program of each kind ends by an error of the guard. The others take as long as the grace or the time limit.
_QUICK = ("if and else", "uneven loop", "break", "early return", "comprehension", "match", "function of a file")


def test_errors_of_mismatches(folder):
    with start(2, grace_s=0.5, hang_after_s=0.5) as session:
        wrong = [name for name in _QUICK if not _is_right(session, PROGRAMS[name], _SENTENCES)]
        wrong += [one for one in ("uneven batches of DDP",) if not _is_right(session, PROGRAMS[one], _SENTENCES)]
        assert not wrong
        # an error of the user's own has no such sentence
        with pytest.raises(DDPNotebookError) as caught:
            session.run("dist.barrier()\nif rank == 0:\n    raise ValueError('mine')\ndist.barrier()", quiet=True)
        assert "took `if" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("guard", [True, False])
def test_all_programs(folder, guard):
    # An error of the guard in a thread ends only the thread.
    programs = {name: one for name, one in _ON_TWO.items() if not (guard and "Thread" in one.code)}
    with start(2, guard=guard, grace_s=0.5, hang_after_s=0.5) as session:
        wrong = [name for name, program in programs.items() if not _is_right(session, program, _SENTENCES)]
    print(f"{len(programs) - len(wrong)} of {len(programs)}, guard {guard}")
    assert not wrong


@pytest.mark.long
def test_programs_of_three_ranks(folder):
    with start(3, grace_s=0.5, hang_after_s=0.5) as session:
        of_three = {name: one for name, one in PROGRAMS.items() if one.world_size == 3}
        wrong = [name for name, program in of_three.items() if not _is_right(session, program, _SENTENCES)]
    assert of_three
    assert not wrong
