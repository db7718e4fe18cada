"""The links between the texts of the repository, as Sphinx gets them. tests/browser/test_docs.py builds the pages."""

from __future__ import annotations

import posixpath
import re

import nbformat
import pytest

from ddp_notebook.launch.options import TABLE
from ddp_notebook.magics import _MAGICS
from tools.course import declaration
from tools.docs import notebooks, reference, sources
from tools.docs.fresh import ROOT
from tools.docs.notebooks import NOTEBOOKS

_LINK = re.compile(r"(?<!!)\]\(([^)\s#]+)")
_TEXTS = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md"))]
_OF_ROOT = [name for name in sources.TEXTS if name.endswith(".md") and "/" not in name]


def test_links_between_texts_lead_to_a_page_of_the_site():
    pages = sources.site_paths()
    on_site = {sources.placed(name) for name in pages} | {f"notebooks/{path.name}" for path in NOTEBOOKS}
    for name in [name for name in pages if name.endswith(".md") and name != "docs/play.md"]:
        folder = posixpath.dirname(sources.placed(name))
        for link in _LINK.findall(sources.relinked(name, _without_code((ROOT / name).read_text()), pages)):
            if not re.match(r"\w+:|#", link) and link.endswith((".md", ".ipynb")):
                assert posixpath.normpath(posixpath.join(folder, link)) in on_site, (name, link)


@pytest.mark.long
@pytest.mark.processes
def test_a_notebook_that_fails_keeps_its_last_good_execution(tmp_path, monkeypatch):
    notebook = tmp_path / "source" / "99_fails.ipynb"
    notebook.parent.mkdir()
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    monkeypatch.setattr(notebooks, "NOTEBOOKS", [notebook])
    made = tmp_path / "made"
    assert "ZeroDivisionError" in notebooks.execute_all(made)[0], "the first time there is none"
    assert nbformat.read(made / notebook.name, as_version=4).cells[0].outputs == []
    (made / notebook.name).write_text("the last good one")
    [failed] = notebooks.execute_all(made)
    assert (
        failed
        == "99_fails.ipynb failed, and the site shows its last good execution: ZeroDivisionError: division by zero"
    )
    assert (made / notebook.name).read_text() == "the last good one"


def test_no_field_type_in_the_reference_ends_with_an_underscore():
    """Sphinx reads the underscore of `np.bool_` as a link."""
    found = re.findall(
        r"^    \w+: .*\b\w+_\]", (ROOT / "ddp_notebook" / "observe" / "views.py").read_text(), re.MULTILINE
    )
    assert found == []


@pytest.mark.parametrize("name", _OF_ROOT)
def test_every_column_of_a_table_has_a_heading(name):
    """Screen readers read the heading of a column aloud with its cells."""
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", (ROOT / name).read_text(), re.MULTILINE)
    assert [head for head in heads if re.search(r"\|\s*\|", head)] == []


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.stem)
def test_a_generated_page_is_up_to_date(path):
    assert path.read_text() == reference.pages()[path], "run: python -m tools.docs.reference"


def test_the_options_page_has_every_start_option_and_every_magic():
    page = reference.options_page()
    rows = re.findall(r"^\| `(N|--[\w-]+)", page, re.MULTILINE)
    assert rows == [option.flag for option in TABLE]
    assert re.findall(r"^## (%+\w+)$", page, re.MULTILINE) == [magic.parser().prog for magic in _MAGICS.values()]
    for name, magic in _MAGICS.items():
        for action in magic.parser()._actions:
            if action.option_strings and action.dest != "help":
                assert re.search(rf"{action.option_strings[-1]}\b", page), (name, action.option_strings)


def test_the_side_list_has_numbered_lessons_in_reading_order():
    lines = sources._toctree().split("```", 2)[1].splitlines()
    shown = [line for line in lines if line.endswith(">")]
    assert shown == [f"{one.number} {one.title} <{one.file.stem}>" for one in declaration.read().lessons.values()]
    assert sorted(line[:2] for line in shown) == [path.name[:2] for path in NOTEBOOKS]


def test_links_of_a_notebook_lead_to_pages_of_the_site():
    cells = [
        nbformat.v4.new_markdown_cell("[a](../docs/guide/memory.md) [b](glossary.md#rank)"),
        nbformat.v4.new_code_cell("x[0](y)"),
    ]
    page = sources._page("notebooks/a.ipynb", nbformat.v4.new_notebook(cells=cells), sources.site_paths())
    first, second = nbformat.reads(page, as_version=4).cells
    assert first.source == "[a](../guide/memory.md) [b](glossary.md#rank)" and second.source == "x[0](y)"


def _without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def slugs(page: str) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub and Sphinx make them, and the explicit ones."""
    headings = re.findall(r"^#+ (.*)$", _without_code(page), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)"', page))


@pytest.mark.parametrize("path", _TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_anchors_of_a_text_exist(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(path.read_text())):
        if re.match(r"\w+:", link) or link.startswith("recordings/"):  # created with the site
            continue
        name, _, anchor = link.partition("#")
        folder = ROOT if path.name == "play.md" else path.parent  # this page exists only in the site
        target = (folder / name).resolve() if name else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in slugs(target.read_text()), link


@pytest.mark.parametrize("page", ["verify", "nan", "diff", "twice", "forecast", "memory"])
def test_the_page_of_a_command_has_a_picture(page):
    path = ROOT / "docs" / "guide" / f"{page}.md"
    [(text, name)] = re.findall(r"^!\[(.*)\]\((\S+\.png)\)$", path.read_text(), re.MULTILINE)
    picture = (path.parent / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) <= 120_000
    assert len(text) > 40
