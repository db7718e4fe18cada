"""Programs that reset state of the interpreter, stopped while their cells wait in other ways."""

from __future__ import annotations

import pytest

from tests.resets import PROGRAMS, WAITS, reset_stop_and_go_on

pytestmark = pytest.mark.long
# Only the main thread can undo these, and it is in a sleep that no signal ends.
_KEEP_A_SLEEP = {"signals: all blocked by C"}


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait != "a loop"])
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program not in _KEEP_A_SLEEP])
def test_the_stop_button_works_whatever_the_cell_waits_in(session, program, wait, tmp_path):
    reset_stop_and_go_on(session, program, wait, tmp_path)
