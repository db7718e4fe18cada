"""Readability of a widget on the page: size of letters, texts over each other, lines through texts, and its height."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator

WIDTH_PX = 800  # of the column in which a reader sees a lesson
LEAST_PX = 9.0
TALLEST_PX = 900  # about one screen

_MEASURE = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readability:
    """What a reader sees of a widget.

    Args:
        width: Pixels.
        height: Pixels.
        texts: Number of shown texts.
        small: Texts with letters that are too small, with their pixels.
        field_px: Height of the smallest letters in a field.
        overlaps: Pairs of texts that cover each other.
        crossed: Texts with a line through them, and the line.
    """

    width: float
    height: float
    texts: int
    small: list[str]
    field_px: float
    overlaps: list[list[str]]
    crossed: list[str]


def readability(root: Locator) -> Readability:
    """Measure a widget as it is on the page now."""
    found: dict[str, Any] = root.evaluate(_MEASURE, LEAST_PX)
    return Readability(**found)


def check_readable(root: Locator, *, tallest_px: float = TALLEST_PX) -> None:
    """Check the size of letters, texts over each other, lines through texts, and the height."""
    found = readability(root)
    assert found.texts > 0 and found.width <= WIDTH_PX + 1, found
    assert found.small == [] and found.field_px >= LEAST_PX, found
    assert found.overlaps == [] and found.crossed == [], found
    assert found.height <= tallest_px, found
