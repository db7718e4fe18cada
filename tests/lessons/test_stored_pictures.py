"""The pictures that notebooks keep: each is different, readable, and as a fresh execution draws it.

`test_notebooks` compares them with a fresh execution (`stored_pictures.compare`).
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from matplotlib.patches import FancyArrowPatch

from ddp_notebook.display import picture
from ddp_notebook.lessons.messages.transfer_picture import call_spans
from ddp_notebook.observe.figures.palette import ACTIONS, FILLS
from tests.lessons.stored_pictures import LEAST_PX, check_readable, compare, pngs
from tools.picture_texts import Texts, read, record

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
# A literal colour: "#d55e00", "C0", "tab:red", a grey as "0.8", or color="white".
_LITERAL = re.compile(r"""#[0-9a-fA-F]{6}\b|["']C\d["']|["']tab:\w+["']|colou?rs?=["'](?!none)[\w.#]+["']""")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_two_pictures_of_a_notebook_are_equal(path):
    found = pngs(nbformat.read(path, as_version=4).cells)
    equal = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert not equal


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_picture_is_readable(path):
    """Letters have 9 pixels on a page of 800, no text covers another one, and a picture fits on a screen."""
    stored = pngs(nbformat.read(path, as_version=4).cells)
    assert [cell_id for cell_id, png in stored.items() if read(png) is None] == [], (
        "store with python -m tools.pictures"
    )
    check_readable(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_colours_of_its_own(path):
    cells = nbformat.read(path, as_version=4).cells
    found = [_LITERAL.findall(cell.source) for cell in cells if cell.cell_type == "code"]
    assert not any(found), found


def test_lessons_take_their_colours_from_one_place():
    """From `observe/figures/palette.py` in Python, and from the monitor's `colours.js` in the browser."""
    folder = ROOT / "ddp_notebook/lessons"
    files = [*folder.rglob("*.py"), *(folder / "js").glob("*")]
    found = {path.name: _LITERAL.findall(path.read_text()) for path in files if "questions" not in path.parts}
    assert not {name: literals for name, literals in found.items() if literals}


def test_the_meanings_of_time_have_different_colours():
    names = ("forward", "backward", "hidden", "exposed", "waiting", "optimizer")
    faces = [(FILLS | ACTIONS)[name].face for name in names]
    assert len(set(faces)) == len(names)
    assert FILLS["compute"].face == ACTIONS["forward"].face


# ---- the tests can fail


def drawn(title: str, label: str = "", size: float = 9, places: tuple[float, ...] = ()) -> bytes:
    """Return the PNG of a figure with labels at these places of its width."""
    record()
    figure, (axes,) = picture(title, 2.0)
    axes.set_ylabel(label)
    for x in places:
        axes.text(x, 0.5, "a label", fontsize=size)
    return figure._repr_png_()[0]


def texts(**how: Any) -> Texts:
    found = read(drawn("a title", **how))
    assert found is not None
    return found


def test_small_and_covered_and_cut_texts_are_found():
    assert texts(places=(0.1, 0.5)).overlaps == [] == texts(places=(0.1, 0.5)).cut
    assert texts(places=(0.1, 0.12)).overlaps == [["a label", "a label"]]
    assert texts(size=5, places=(0.1,)).smallest_px < LEAST_PX < texts(size=7, places=(0.1,)).smallest_px
    figure, (axes,) = picture("a title", 2.0, layout=None)
    axes.text(1.3, 0.5, "a label")
    found = read(figure._repr_png_()[0])
    assert found is not None and found.cut == ["a label"]


def test_lines_through_texts_are_found():
    def crossed(draw: Callable[[Any, Any], None]) -> list[str]:
        figure, (axes,) = picture("a title", 2.0, layout=None)
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        draw(figure, axes)
        found = read(figure._repr_png_()[0])
        assert found is not None
        return found.crossed

    record()

    def arrow(y: float) -> list[str]:
        def draw(_: Any, axes: Any) -> None:
            axes.text(0.4, 0.5, "a label", va="center")
            axes.add_patch(FancyArrowPatch((0.1, y), (0.9, y)))

        return crossed(draw)

    def note(y: float) -> list[str]:
        def draw(_: Any, axes: Any) -> None:
            axes.text(0.4, 0.5, "a label", va="center")
            axes.annotate("", (0.9, y), (0.1, y), arrowprops={"arrowstyle": "->"})

        return crossed(draw)

    def legend(y: float) -> list[str]:
        def draw(_: Any, axes: Any) -> None:
            axes.plot([0, 1], [y, y], label="a curve")
            axes.legend(loc="center")

        return crossed(draw)

    assert arrow(0.5) == note(0.5) == ["a label"] and arrow(0.8) == note(0.8) == []
    assert legend(0.5) == ["a curve"] and legend(0.9) == []


def test_another_panel_and_another_title_are_found(tmp_path):
    def cells(title: str, label: str) -> list[nbformat.NotebookNode]:
        png = base64.b64encode(drawn(title, label)).decode()
        output = nbformat.v4.new_output("display_data", data={"image/png": png})
        return [nbformat.v4.new_code_cell("draw()", id="c", outputs=[output])]

    stored = tmp_path / "stored.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells("a step takes 20 ms with 4 ranks", "time (ms)")), stored)
    compare(stored, cells("a step takes 31 ms with 2 ranks", "time (ms)"))
    with pytest.raises(AssertionError, match="store its pictures again"):
        compare(stored, cells("a step takes 31 ms with 2 ranks", "cores in use"))
    with pytest.raises(AssertionError, match="4 messages"):
        compare(stored, cells("4 messages, 12 B", "time (ms)"))


def test_a_call_is_divided_at_the_right_times():
    assert call_spans(0, 500, 500, 490) == [(0, 490, "waiting"), (490, 500, "exposed")]
    assert call_spans(0, 500, 200, 100) == [(0, 300, "hidden"), (300, 500, "exposed")]
    assert call_spans(10, 20, 10, None) == [(10, 20, "waiting")]
