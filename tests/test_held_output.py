"""Output that waits for a view to appear above it leaves the rate limiter in order."""

from __future__ import annotations

import time
from typing import Any

from ddp_notebook.run.output.rate_limiter import FLUSH_S, RateLimiter


class Page:
    """A sink that stores its input."""

    can_update = is_live = True
    is_captured = False

    def __init__(self) -> None:
        self.got: list[Any] = []

    def write(self, stream: str, text: str) -> None:
        self.got.append(text)

    def flush(self, stream: str) -> None:
        pass

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        self.got.append(data)

    def clear(self, wait: bool) -> None:
        self.got.append("clear")

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


class Held:
    """A rate limiter that is held until `is_held` is false."""

    def __init__(self) -> None:
        self.page, self.is_held, self.asked = Page(), True, (0.0, 0.0)
        self.rate_limiter = RateLimiter(self.page, self._holds)

    def _holds(self, waits_s: float, quiet_s: float) -> bool:
        self.asked = waits_s, quiet_s
        return self.is_held

    def flush(self, after_s: float = 1.0) -> float | None:
        return self.rate_limiter.flush(time.monotonic() + after_s)


def test_what_is_held_leaves_in_order_when_it_is_no_longer_held():
    held = Held()
    held.rate_limiter.write("stdout", "a")
    held.rate_limiter.show({"text/plain": "b"})
    assert held.flush() == FLUSH_S and held.page.got == []
    assert 0.9 < held.asked[0] < 1.1 < held.asked[1], "it has waited for a second; nothing was sent before"
    held.is_held = False
    assert held.flush() is None and held.page.got == ["a", {"text/plain": "b"}]

    held.is_held = True
    held.rate_limiter.write("stdout", "c")
    held.rate_limiter.drain()
    assert held.page.got[-1] == "c", "the cell is over, or the package adds a line"


def test_a_clear_never_removes_what_was_shown_while_it_was_held():
    held = Held()
    held.rate_limiter.write("stdout", "a")
    held.rate_limiter.clear(True)
    held.rate_limiter.write("stdout", "b")
    held.flush()
    held.is_held = False
    held.flush()
    assert held.page.got == ["b"], "nothing was there to clear"

    held.is_held = True
    held.rate_limiter.clear(True)
    held.rate_limiter.write("stdout", "c")
    held.flush(2.0)
    assert held.page.got == ["b", "clear", "c"], "it is not held"


def test_more_displays_than_may_wait_are_not_held():
    held = Held()
    for number in range(202):
        held.rate_limiter.show({"text/plain": str(number)})
    held.flush()
    assert len(held.page.got) == 202
