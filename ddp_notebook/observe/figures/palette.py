"""Colours with a fixed meaning, for figures and for HTML. Imports no library.

Figures and the monitor share one palette, after Okabe and Ito, for any colour vision. tests/widgets/test_contract.py
compares it with the colours of the monitor's light pages (widgets/js/drawing/colours.js).
"""

from __future__ import annotations

from typing import NamedTuple

# text and axes: contrast 4.3:1 on white, 4.4:1 on the #111 of a dark notebook; no colour has more on both
INK = "#7A7A7A"


class Fill(NamedTuple):
    """Fill style of an area with one meaning."""

    words: str
    face: str
    edge: str = "none"
    hatch: str = ""


_HOLLOW = "#80808026"  # transparent, for light and dark pages
# Waiting is an outline, because nothing happens then.
FILLS = {
    "input": Fill("input", "#A862A0"),
    "compute": Fill("compute", "#0072B2"),
    "overlapped": Fill("compute while data moves", "#0072B2", "#8CC8EE", "////"),
    "hidden": Fill("hidden communication", "#56B4E9"),
    "exposed": Fill("exposed communication", "#D55E00"),
    "waiting": Fill("waiting for a slower rank", _HOLLOW, "#808080"),
    "optimizer": Fill("optimizer", "#009E73"),
    "rest": Fill("rest", "#9A9A9A"),
}
# Actions of pipeline stages.
ACTIONS = {
    "forward": Fill("forward", "#0072B2"),
    "backward": Fill("backward", "#E69F00"),
    "input gradient": Fill("gradient of the input", "#E69F00"),
    "weight gradient": Fill("gradient of the weights", "#CC79A7"),
    "bubble": Fill("bubble", _HOLLOW, "#808080"),
}
# Parts of a step's time, in stacking order. They add up to the step's duration.
STEP_PARTS = ("input", "compute", "overlapped", "exposed", "waiting", "optimizer", "rest")
# Colours of lines with labels, for ranks and operations. The second eight lines are dashed. Each colour has a
# contrast of 3:1 both on white and on a dark notebook.
ON_LINES = "#FFFFFF"  # text on an area in one of `LINES`
ON_PALE = "#202020"  # text on a pale area, which is pale on dark pages too
LINES = ("#0072B2", "#D55E00", "#00855F", "#B5508A", "#9A6B00", "#3D9BD6", "#7458B0", "#6A6A6A")
