"""The course as a whole: its declaration, the map, the paths and the written pages."""

from __future__ import annotations

import itertools
import re
import tomllib
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest

from tools.course import contents, map_picture, teaching
from tools.course.__main__ import wanted
from tools.course.declaration import FOLDER, notebooks, read
from tools.course.map_picture import Layout

COURSE = read()
SVG = "{http://www.w3.org/2000/svg}"
ROOT = FOLDER.parent
COUNT = re.compile(
    r"\b(\d\d|[5-9]|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|twenty(-\w+)?)\]?"
    r" (of the |other |more )?(notebooks|lessons)\b",
    re.IGNORECASE,
)


def test_each_notebook_is_declared_after_those_it_needs():
    numbers = list(COURSE.lessons)
    assert sorted(numbers) == [path.name[:2] for path in notebooks()]
    for number, lesson in COURSE.lessons.items():
        for need in lesson.needs:
            assert numbers.index(need) < numbers.index(number), (need, number)


def test_no_prerequisite_is_declared_twice():
    """An edge of the map that follows from two others only hides them."""
    for lesson in COURSE.lessons.values():
        for need in lesson.needs:
            others = set().union(*(COURSE.needed_for(other) for other in lesson.needs if other != need))
            assert need not in others, (need, lesson.number)


@pytest.mark.parametrize("path", COURSE.paths, ids=lambda path: path.mark)
def test_a_path_can_be_followed_from_its_start(path):
    done: set[str] = set()
    for number in [*path.lessons, *path.further]:
        if number in path.lessons:
            assert set(COURSE.lessons[number].needs) <= done, number
        assert number not in done and not COURSE.lessons[number].optional
        done.add(number)


def test_the_first_path_takes_four_hours():
    assert 0 < COURSE.minutes(COURSE.paths[0].lessons) <= 240


def test_each_lesson_is_on_a_path_or_optional():
    on_paths = {number for path in COURSE.paths for number in [*path.lessons, *path.further]}
    assert {number for number, lesson in COURSE.lessons.items() if not lesson.optional} - {"03"} == on_paths


@pytest.mark.parametrize("lesson", COURSE.lessons.values(), ids=list(COURSE.lessons))
def test_the_box_of_a_lesson_agrees_with_the_declaration(lesson):
    first = nbformat.read(lesson.file, as_version=4).cells[0].source
    box = "\n".join(line for line in first.splitlines() if line.startswith(">"))
    needed, _, rest = box.partition("**You will be able to**")
    assert set(re.findall(r"\((\d\d)_\w+\.ipynb\)", needed)) <= COURSE.needed_for(lesson.number)
    assert re.findall(r"\*\*Minutes\*\* (\d+)", rest) == [str(lesson.minutes)]


def test_written_files_are_up_to_date():
    for path, text in wanted().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m tools.course"


# ---- the map


def test_every_node_is_a_lesson_and_every_edge_a_prerequisite():
    root = ElementTree.fromstring(map_picture.svg(COURSE))
    assert [node.get("href") for node in root.iter(f"{SVG}a")] == [one.file.name for one in COURSE.lessons.values()]

    layout = Layout(COURSE)
    middles = {}
    for number, lesson in COURSE.lessons.items():
        x, y = layout.corner(lesson)
        middles[number] = x, y
    drawn = set()
    for points in layout.edges():
        source = next(n for n, (x, y) in middles.items() if _is_inside(points[0], x, y, layout.node_width))
        target = next(n for n, (x, y) in middles.items() if _is_inside(points[-1], x, y, layout.node_width))
        drawn.add((source, target))
    assert drawn == {(need, number) for number, lesson in COURSE.lessons.items() for need in lesson.needs}
    lines = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(lines) == len(drawn)


def _is_inside(point: tuple[float, float], x: float, y: float, width: float) -> bool:
    return x <= point[0] <= x + width and y <= point[1] <= y + map_picture.NODE_HEIGHT


def test_no_edge_crosses_a_lesson():
    layout = Layout(COURSE)
    boxes = [layout.corner(lesson) for lesson in COURSE.lessons.values()]
    for points in layout.edges():
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            for x, y in boxes:
                beside = max(x0, x1) <= x or min(x0, x1) >= x + layout.node_width
                above = max(y0, y1) <= y or min(y0, y1) >= y + map_picture.NODE_HEIGHT
                assert beside or above, (points, x, y)


def test_the_map_is_readable_at_800_pixels():
    root = ElementTree.fromstring(map_picture.svg(COURSE))
    assert root.get("width") == "800" and float(root.get("height", 0)) < 950
    assert min(float(text.get("font-size", 0)) for text in root.iter(f"{SVG}text")) >= 9
    width = Layout(COURSE).node_width
    for node in root.iter(f"{SVG}a"):
        box = node.find(f"{SVG}rect")
        assert box is not None
        titles = [text for text in node.iter(f"{SVG}text") if text.get("font-weight") == "normal"]
        for text in titles:
            assert text.text and len(text.text) * 0.6 * float(text.get("font-size", 0)) < width
            assert float(text.get("y", 0)) < float(box.get("y", 0)) + map_picture.NODE_HEIGHT


# ---- the pages


def test_a_part_of_a_page_must_exist():
    with pytest.raises(ValueError, match="no part 'paths'"):
        contents.with_parts("# A page", {"paths": "text"})


def test_no_text_counts_the_lessons():
    """A count in words is out of date with the next lesson."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *FOLDER.rglob("*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md"}
    for path in notebooks():
        cells = nbformat.read(path, as_version=4).cells
        texts[path] = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert {path.name: found[0] for path, text in texts.items() if (found := COUNT.search(text))} == {}


def test_each_term_has_a_lesson_and_each_row_a_notebook():
    page = (FOLDER / "glossary.md").read_text(encoding="utf-8")
    assert len(re.findall("^Lessons: ", page, re.MULTILINE)) == len(re.findall("^### ", page, re.MULTILINE)) > 100
    declared = tomllib.loads((FOLDER / "course.toml").read_text(encoding="utf-8"))["lesson"]
    assert [row["number"] for row in declared] == list(COURSE.lessons)


# ---- the teacher's guide


def test_each_lesson_has_a_plan_of_50_minutes():
    with teaching.FILE.open("rb") as file:
        rows = tomllib.load(file)["lesson"]
    assert {row["number"] for row in rows} == set(COURSE.lessons)
    assert {row["number"]: teaching.minutes(row) for row in rows if teaching.minutes(row) != 50} == {}
    assert all(row["before"] and row["board"] for row in rows)


def test_the_guide_has_the_wrong_answers_of_questions():
    page = teaching.guide(COURSE)
    assert "- `04/world-size`: **24** is right.\n" in page
    assert "  - *8*: 8 is the number of processes of one node.\n" in page
    assert "- `06/all-reduce`: **the sums, [10, 100]** is right.\n  - *its own numbers, [2, 20]*: " in page
    assert "- `23/caught`: **step 3** is right.\n" in page, "the text of the choice, not its value"


def test_each_step_of_a_plan_names_parts_of_its_lesson():
    """Otherwise a teacher does not find the cells of a step."""
    with teaching.FILE.open("rb") as file:
        rows = tomllib.load(file)["lesson"]
    for row in rows:
        known = teaching.headings(COURSE.lessons[row["number"]], "#{2,3}")
        named = [part for _, parts, _ in teaching.steps(row) for part in parts]
        assert named and set(named) <= set(known), (row["number"], set(named) - set(known))
