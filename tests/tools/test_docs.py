"""The links between the texts of the repository, as Sphinx gets them. tests/browser/test_docs.py builds the pages."""

from __future__ import annotations

import posixpath
import re

import pytest

from ddp_notebook.launch.options import TABLE
from ddp_notebook.magics import _MAGICS
from tools.docs import options, sources
from tools.docs.fresh import ROOT
from tools.docs.notebooks import NOTEBOOKS

_LINK = re.compile(r"(?<!!)\]\(([^)\s#]+)")
_OF_ROOT = [name for name in sources.TEXTS if name.endswith(".md") and "/" not in name]


@pytest.mark.parametrize("name", _OF_ROOT)
def test_links_between_texts_lead_to_a_page(name):
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {*sources.TEXTS, *(f"notebooks/{path.name}" for path in NOTEBOOKS)}
    links = [link for link in _LINK.findall(sources.placed(name)) if not re.match(r"\w+:", link)]
    found = {posixpath.normpath(link.removeprefix("/")) for link in links}
    assert {one for one in found if one.endswith((".md", ".ipynb"))} <= pages


def test_no_type_of_a_field_in_the_reference_ends_with_an_underscore():
    """Sphinx takes the underscore of `np.bool_` for that of a link to another place."""
    found = re.findall(
        r"^    \w+: .*\b\w+_\]", (ROOT / "ddp_notebook" / "observe" / "views.py").read_text(), re.MULTILINE
    )
    assert found == []


@pytest.mark.parametrize("name", _OF_ROOT)
def test_every_column_of_a_table_has_a_heading(name):
    """Screen readers read headings aloud with the cells of a column."""
    heads = re.findall(r"^(\|.*\|)\n\|[-:| ]+\|$", (ROOT / name).read_text(), re.MULTILINE)
    assert [head for head in heads if re.search(r"\|\s*\|", head)] == []


def test_the_page_of_options_has_every_option_of_a_start_and_every_magic():
    page = options.page()
    rows = re.findall(r"^\| `(N|--[\w-]+)", page, re.MULTILINE)
    assert rows == [option.flag for option in TABLE]
    assert re.findall(r"^## (%+\w+)$", page, re.MULTILINE) == [magic.parser().prog for magic in _MAGICS.values()]
