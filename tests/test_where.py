"""The current position of a rank, in the user's words."""

from __future__ import annotations

import signal

import pytest

from ddp_notebook.messages import encoding
from ddp_notebook.rank.cell.current_line import OURS, CurrentLine

_CELL = ("cell.py", 9, "<module>")


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ([_CELL], "cell line 9"),
        ([(signal.__file__, 1, "getsignal"), _CELL], "cell line 9, in getsignal"),
        ([(signal.__file__, 1, "getsignal"), (OURS + "cell/handlers.py", 1, "_on_interrupt"), _CELL], "cell line 9"),
        ([(OURS + "group/waiting.py", 1, "connect_store"), _CELL], "cell line 9, in TCPStore"),
        (
            [(encoding.__file__, 70, "encode"), ("display.py", 3, "show"), _CELL],
            "display.py:3 in show, from cell line 9",
        ),
    ],
)
def test_the_called_function_is_named_without_package_frames(calls, place):
    where = CurrentLine()
    where.enter("cell.py", 1)
    assert where.of_calls(calls) == place
