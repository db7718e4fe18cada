"""Record the texts of each drawn figure in its PNG, and read them back.

    import tools.picture_texts as texts

    texts.record()                     # from now on, in this process
    texts.read(png)                    # Texts(title="...", labels=[...], smallest_px=9.3, overlaps=[], cut=[], ...)

A stored picture of a notebook keeps them, so that a test can compare it with a fresh execution of the notebook without
comparing pixels, which contain measured times.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Code for the kernel of a notebook: from then on its figures record their texts.
RECORD = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport tools.picture_texts\ntools.picture_texts.record()"
KEYWORD = "ddp_notebook texts"  # name of the PNG text chunk
SHOWN_PX = 800  # width of a notebook page at which texts must be readable
_SHARE = 0.12  # texts may overlap by this share of the smaller one, because boxes include empty space
_PX_PER_IN = 100  # resolution at which notebooks show figures that fit on the page


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of a figure.

    Args:
        title: Title of the figure.
        labels: Titles and axis labels of its axes, without empty ones.
        smallest_px: Height of the smallest letters in pixels on a page of `SHOWN_PX`.
        overlaps: Pairs of texts that cover each other.
        cut: Texts that extend beyond the figure.
        crossed: Texts with an arrow through them, and texts of legends with a curve through them.
    """

    title: str
    labels: list[str]
    smallest_px: float
    overlaps: list[list[str]]
    cut: list[str]
    crossed: list[str] = field(default_factory=list)


def record() -> None:
    """Make matplotlib write the texts of a figure into each PNG. Repeated calls do nothing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    original = FigureCanvasAgg.print_png
    if hasattr(original, "records_texts"):
        return

    @functools.wraps(original)  # matplotlib reads the signature
    def print_png(canvas: Any, target: Any, *, metadata: Any = None, **options: Any) -> None:
        canvas.draw()
        said = {KEYWORD: json.dumps(asdict(texts_of(canvas.figure)))}
        original(canvas, target, metadata={**(metadata or {}), **said}, **options)

    print_png.records_texts = True  # type: ignore[attr-defined]
    FigureCanvasAgg.print_png = print_png  # type: ignore[assignment, method-assign]


def texts_of(figure: Any) -> Texts:
    """Measure the texts of a drawn figure."""
    px_per_in = min(_PX_PER_IN, SHOWN_PX / figure.get_size_inches()[0])
    suptitle = getattr(figure, "_suptitle", None)
    labels = [text for axes in figure.axes for text in _names(axes) if text]
    shown = list(_shown(figure))
    return Texts(
        title=suptitle.get_text() if suptitle is not None else "",
        labels=labels,
        smallest_px=round(min((text.get_fontsize() for text in shown), default=99.0) / 72 * px_per_in, 2),
        overlaps=_overlaps(shown, figure.canvas.get_renderer()),
        cut=[text.get_text() for text in shown if _is_cut(text, figure)],
        crossed=_crossed(shown, figure),
    )


def read(png: bytes) -> Texts | None:
    """Return the texts in a PNG; None if it was not drawn after `record`."""
    from PIL import Image

    found = Image.open(io.BytesIO(png)).info.get(KEYWORD)
    return None if found is None else Texts(**json.loads(found))


def without_numbers(words: str) -> str:
    """Replace numbers and their units' prefixes, which differ between executions, by #.

    Example:
        >>> without_numbers("4 ranks: 1.5 MB in 20 ms")
        '# ranks: # B in # s'
    """
    return re.sub(r"\d[\d.,]*(?: ?([kMGmu])(?=[Bs]\b))?", lambda found: "# " if found[1] else "#", words)


def _names(axes: Any) -> list[str]:
    titles = [axes.get_title(loc=side) for side in ("left", "center", "right")]
    return [*titles, axes.get_xlabel(), axes.get_ylabel()]


def _shown(figure: Any) -> Iterator[Any]:
    """Yield the visible texts with letters, once each."""
    from matplotlib.text import Text

    hidden = {id(text) for axes in figure.axes if not axes.axison for axis in (axes.xaxis, axes.yaxis)
              for text in axis.findobj(Text)}  # fmt: skip
    ticks = {id(text) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in _ticks_outside(axis)}
    seen = set()
    for text in figure.findobj(Text):
        if id(text) in seen or id(text) in hidden or id(text) in ticks:
            continue
        seen.add(id(text))
        if text.get_visible() and text.get_text().strip():
            yield text


def _ticks_outside(axis: Any) -> Iterator[Any]:
    """Yield the labels of ticks beyond the limits, which matplotlib keeps and does not draw."""
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    for ticks in (axis.majorTicks, axis.minorTicks):
        for tick in ticks:
            if not low - margin <= tick.get_loc() <= high + margin or not tick.get_visible():
                yield from (tick.label1, tick.label2)


def _is_cut(text: Any, figure: Any) -> bool:
    box, whole = text.get_window_extent(figure.canvas.get_renderer()), figure.bbox
    return bool(box.x0 < whole.x0 - 2 or box.x1 > whole.x1 + 2 or box.y0 < whole.y0 - 2 or box.y1 > whole.y1 + 2)


def _overlaps(shown: list[Any], renderer: Any) -> list[list[str]]:
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    found = []
    for at, (words, box) in enumerate(boxes):
        for other_words, other in boxes[at + 1 :]:
            width = min(box.x1, other.x1) - max(box.x0, other.x0)
            height = min(box.y1, other.y1) - max(box.y0, other.y0)
            smaller = min(box.width * box.height, other.width * other.height)
            if width > 0 and height > 0 and width * height > _SHARE * smaller:
                found.append([words, other_words])
    return found


def _crossed(shown: list[Any], figure: Any) -> list[str]:
    """Return the texts that an arrow crosses, and those of legends that a curve crosses."""
    from matplotlib.legend import Legend
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.text import Annotation, Text

    arrows = figure.findobj(FancyArrowPatch)
    arrows += [one.arrow_patch for one in figure.findobj(Annotation) if one.arrow_patch is not None]
    curves = [line for axes in figure.axes for line in axes.lines]
    of_legends = {id(text) for legend in figure.findobj(Legend) for text in legend.findobj(Text)}
    over_text, over_legends = _paths(arrows), _paths(curves)
    found = []
    for text in shown:
        box = _letters(text, figure)
        lines = [*over_text, *(over_legends if id(text) in of_legends else [])]
        if any(path.intersects_bbox(box, filled=False) for path in lines):
            found.append(text.get_text())
    return found


def _paths(lines: list[Any]) -> list[Any]:
    """Return the paths of visible lines, in pixels, without the points that only close the head of an arrow."""
    from matplotlib.path import Path as Curve

    paths = [one.get_transform().transform_path(one.get_path()) for one in lines if one.get_visible()]
    return [Curve(points) for path in paths for points in path.to_polygons(closed_only=False) if len(points) > 1]


def _letters(text: Any, figure: Any) -> Any:
    """Return the box of a text without the empty space at its edges."""
    from matplotlib.transforms import Bbox

    box = text.get_window_extent(figure.canvas.get_renderer())
    return Bbox.from_extents(box.x0 + 2, box.y0 + 0.2 * box.height, box.x1 - 2, box.y1 - 0.2 * box.height)
