"""Readability of a widget on the page: size of letters, texts over each other, lines through texts, and its height."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator

WIDTH_PX = 800  # the column in which a reader sees a lesson
LEAST_PX = 9.0
TALLEST_PX = 900  # about one screen

_MEASURE = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readability:
    """Measures of a widget on the page.

    Args:
        width: Pixels.
        height: Pixels.
        wider: Pixels by which the content is wider than its place.
        texts: Number of shown texts.
        small: Texts with letters that are too small, with their pixels.
        field_px: Height of the smallest letters in a field.
        overlaps: Pairs of texts that cover each other.
        crossed: Texts with a line through them, and the line.
    """

    width: float
    height: float
    wider: float
    texts: int
    small: list[str]
    field_px: float
    overlaps: list[list[str]]
    crossed: list[str]


def readability(root: Locator) -> Readability:
    """Measure a widget as it is on the page now."""
    found: dict[str, Any] = root.evaluate(_MEASURE, LEAST_PX)
    return Readability(**found)


def findings(root: Locator, *, tallest_px: float = TALLEST_PX) -> list[str]:
    """Return a sentence for each text that is small, covered or crossed, and one if the widget is too high."""
    found = readability(root)
    assert found.texts > 0 and found.width <= WIDTH_PX + 1, found
    sentences = [f"small: {one}" for one in found.small]
    sentences += [f"over each other: {one!r} and {other!r}" for one, other in found.overlaps]
    sentences += [f"a line through: {one}" for one in found.crossed]
    if found.field_px < LEAST_PX:
        sentences.append(f"a field with letters of {found.field_px:g} pixels")
    if found.wider > 1:
        sentences.append(f"{found.wider:g} pixels wider than the page")
    if found.height > tallest_px:
        sentences.append(f"{found.height:.0f} pixels high")
    return sentences
