"""Programs that reset state of the interpreter, stopped while their cells wait in different ways."""

from __future__ import annotations

import pytest

from tests.resets import PROGRAMS, WAITS, reset_stop_and_go_on

pytestmark = pytest.mark.long
# Only the main thread can undo these resets, and no signal ends its sleep. A plain kernel also ignores the stop button
# then, or ends.
_KEEP_A_SLEEP = {
    "signals: all blocked by C",
    "signals: all blocked by another _signal module",
    "signals: another _signal module",
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_stop_button_works_whatever_the_cell_waits_in(make_session, program, wait, tmp_path):
    if program in _KEEP_A_SLEEP and wait in ("a sleep", "an operation"):
        pytest.skip("only the main thread can undo it, and sleeps")
    reset_stop_and_go_on(make_session(2), program, wait, tmp_path, forms_anew=True)
