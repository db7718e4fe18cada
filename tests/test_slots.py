"""Displays of several ranks in one place, as the front end shows them."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.run.output.rate_limiter import RateLimiter
from ddp_notebook.run.output.slots import Row


class Page:
    """A sink that keeps the displays as a front end does: in order, each with its last content."""

    can_update = is_live = True
    is_captured = False

    def __init__(self) -> None:
        self.displays: dict[str, dict[str, Any]] = {}
        self.rate_limiter = RateLimiter(self)
        self.row = Row(self.rate_limiter, is_grid=True)

    def put(self, rank: int, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        self.row.put([rank], data, metadata or {})

    def shown(self) -> str:
        """Return all displayed text after the changes so far."""
        self.row.show()
        self.rate_limiter.drain()
        return "\n".join(data.get("text/html") or data["text/plain"] for data in self.displays.values())

    def publish(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool) -> None:
        assert display_id is not None and update == (display_id in self.displays)
        self.displays[display_id] = data

    def write(self, stream: str, text: str) -> None:
        raise AssertionError(text)

    def flush(self, stream: str) -> None:
        pass

    def clear(self, wait: bool) -> None:
        raise AssertionError(wait)

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


def test_a_slot_that_is_left_alone_keeps_its_label():
    page = Page()
    page.put(0, {"text/html": "b0"})
    page.put(1, {"text/html": "b1"})
    assert "[0]" in page.shown()
    page.row.remove(1)
    shown = page.shown()
    assert "[0]" in shown and "b0" in shown and "b1" not in shown


@pytest.mark.parametrize("later", ["same", "<script>same</script>"])
def test_slots_that_become_equal_keep_their_label(later):
    page = Page()
    for rank in range(2):
        page.put(rank, {"text/html": f"b{rank}"})
    page.shown()
    for rank in range(2):
        page.put(rank, {"text/html": later})
    shown = page.shown()
    assert "[0-1]" in shown and shown.count("same") == 1 and "b0" not in shown


def test_slots_that_no_longer_fit_side_by_side_keep_their_labels():
    page = Page()
    for rank in range(2):
        page.put(rank, {"text/html": f"b{rank}"})
    page.shown()
    page.put(1, {"text/html": "<script></script>c1"})
    assert page.shown().split() == ["[0]", "b0", "[1]", "<script></script>c1"]


def _image(data: str, metadata: dict[str, Any]) -> str:
    page = Page()
    page.put(0, {"image/png": data, "text/plain": "a"}, metadata)
    page.put(1, {"image/png": "AAAA"})
    return page.shown()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 'alt="a" style'),
        ({"width": 40}, ' width="40" '),
        ({"width": "50%", "height": 30.5}, ' width="50%" height="30.5" style="max-width:100%" '),
        ({"width": float("nan"), "height": [1]}, 'alt="a" style'),
        ({"width": '1" onload="x'}, ' width="1&quot; onload=&quot;x" '),
    ],
)
def test_images_have_the_size_that_their_metadata_gives(size, expected):
    assert expected in _image("AAAA", {"image/png": size})


def test_the_data_of_an_image_stays_in_its_attribute():
    assert '"><img/src=x' not in _image('"><img/src=x/onerror=1>', {})


def test_a_comment_that_is_not_closed_hides_no_other_slot():
    page = Page()
    page.put(0, {"text/html": "a <!-- b"})
    page.put(1, {"text/html": "c"})
    assert "ddp-slots" not in page.shown()
    page = Page()
    page.put(0, {"text/html": "a <!-- b -->"})
    page.put(1, {"text/html": "c"})
    assert "ddp-slots" in page.shown()
