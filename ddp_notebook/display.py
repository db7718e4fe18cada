"""Drawing helpers for custom lessons, panels and figures.

    from ddp_notebook.display import INK, LINES, has_front_end, picture

    figure, (axes,) = picture("the mean of four ranks", height=2.0)
    axes.plot([0.5, 0.25], color=LINES[0])

`has_front_end` returns whether a user may be at the front end. `read_bundle` reads JavaScript that `hatch_build.py` has
built. `calls_drawn` converts calls between ranks to plain data. The other names draw figures for light and dark pages.
Colours have a fixed meaning (`FILLS`) or a label (`LINES`). These names import matplotlib, so they are loaded at their
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.observe.figures.moments import calls_drawn
from ddp_notebook.run.notebook_kernel import has_front_end
from ddp_notebook.widgets.bundles import read as read_bundle

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import FAINT, Picture, fill_style, key, paler, picture, text_on
    from ddp_notebook.observe.figures.palette import FILLS, INK, LINES, ON_LINES, ON_PALE

__all__ = [
    "FAINT",
    "FILLS",
    "INK",
    "LINES",
    "ON_LINES",
    "ON_PALE",
    "Picture",
    "calls_drawn",
    "fill_style",
    "has_front_end",
    "key",
    "paler",
    "picture",
    "read_bundle",
    "text_on",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddp_notebook.observe.figures import drawing

    return getattr(drawing, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
