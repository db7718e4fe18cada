"""Phases in which the main thread runs code of this package and no code of the user, see `records.phases`.

Each phase is a function, so that its name is in the stack of a rank that cannot answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ddp_notebook.records.phases import PHASES
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

T = TypeVar("T")
_now = [""]  # phase of the main thread; "": none


def current() -> str:
    """Return the phase of the main thread; "" if it is in none. Callable from any thread."""
    return _now[0]


def start_cell(call: Callable[[], T]) -> T:
    """Call a function that prepares a cell."""
    before, _now[0] = _now[0], PHASES["start_cell"]
    try:
        return call()
    finally:
        _now[0] = before


def clean_up(call: Callable[[], T]) -> T:
    """Call a function that cleans up after a cell."""
    before, _now[0] = _now[0], PHASES["clean_up"]
    try:
        return call()
    finally:
        _now[0] = before


def send_output(call: Callable[[], T]) -> T:
    """Call a function that sends the last output of a cell. It waits while the notebook reads no output."""
    before, _now[0] = _now[0], PHASES["send_output"]
    try:
        return call()
    finally:
        _now[0] = before


async def answer_request(answer: Callable[..., Any], *message: Any) -> None:
    """Answer a request of the notebook between two cells."""
    before, _now[0] = _now[0], PHASES["answer_request"]
    try:
        await answer(*message)
    finally:
        _now[0] = before
