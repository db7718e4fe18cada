"""Colours with a fixed meaning, for figures and for HTML. Imports no library.

One palette for figures and monitor, after Okabe and Ito, for any colour vision: tests/widgets/test_contract.py holds it
together with that of the monitor's light pages (widgets/js/drawing/colours.js).
"""

from __future__ import annotations

from typing import NamedTuple

INK = "#7A7A7A"  # text and axes: 4.3:1 on white, 4.4:1 on the #111 of a dark notebook; no colour has more on both


class Fill(NamedTuple):
    """How an area of one meaning is filled."""

    words: str
    face: str
    edge: str = "none"
    hatch: str = ""


_HOLLOW = "#80808026"  # the page shows through: a picture stands on a light one or on a dark one
# Waiting is an outline: nothing happens there.
FILLS = {
    "input": Fill("input", "#A862A0"),
    "compute": Fill("compute", "#0072B2"),
    "overlapped": Fill("compute while data moves", "#0072B2", "#8CC8EE", "////"),
    "hidden": Fill("transfer behind compute", "#56B4E9"),
    "exposed": Fill("exposed communication", "#D55E00"),
    "waiting": Fill("waiting for a slower rank", _HOLLOW, "#808080"),
    "optimizer": Fill("optimizer", "#009E73"),
    "rest": Fill("rest", "#9A9A9A"),
}
# What the stages of a pipeline do.
ACTIONS = {
    "forward": Fill("forward", "#0072B2"),
    "backward": Fill("backward", "#E69F00"),
    "input gradient": Fill("gradient of the input", "#E69F00"),
    "weight gradient": Fill("gradient of the weights", "#CC79A7"),
    "bubble": Fill("bubble", _HOLLOW, "#808080"),
}
# What a step's time went into, in the order in which it is stacked; the parts add up to the step's duration.
STEP_PARTS = ("input", "compute", "overlapped", "exposed", "waiting", "optimizer", "rest")
# Lines that are told apart by their labels: of ranks, and of operations. The second eight are dashed. Each has a
# contrast of 3 on white and on a dark notebook, since a figure stands on either.
LINES = ("#0072B2", "#D55E00", "#00855F", "#B5508A", "#9A6B00", "#3D9BD6", "#7458B0", "#6A6A6A")
