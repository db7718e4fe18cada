"""What the documentation site is made of, as far as it needs neither Sphinx nor ranks; tests/browser/test_docs.py
looks at the site itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import ddp_notebook
from ddp_notebook import lessons, widgets
from docs import docstrings
from tools.docs import fresh
from tools.docs.notebooks import NOTEBOOKS, TRAINING
from tools.docs.sources import TEXTS, _for_all_pages

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Example:
        >>> Measured(rank=0, ns=5).ns
        5
    """

    rank: int
    ns: int  # from the *issue* on
    _hidden: int = 0


def rewritten(text: str, one: object = None) -> list[str]:
    lines = text.splitlines()
    docstrings.rewrite(None, "class", "", one, None, lines)
    return lines


def test_indented_code_gets_its_mark_and_sections_stay():
    words = "Purpose.\n\n    %load_ext ddp_notebook\n    %ddp_start 4\n\nThen more.\n\n"
    assert rewritten(words + "Args:\n    *unnamed: none, see `log`.") == [
        "Purpose.",
        "",
        "::",
        "",
        "    %load_ext ddp_notebook",
        "    %ddp_start 4",
        "",
        "Then more.",
        "",
        "Args:",
        r"    \*unnamed: none, see `log`.",
    ]


def test_only_backticks_have_a_meaning_in_prose():
    assert rewritten("Of `a*b` and a*b, name_ and _name.") == [r"Of `a*b` and a\*b, name\_ and _name."]
    example = ["Example:", "    >>> f(*x_)", "    'a\\n'"]
    assert rewritten("\n".join(example)) == example


def test_the_comments_beside_fields_are_read():
    lines = rewritten(Measured.__doc__ or "", Measured)
    assert lines[-4:] == ["Attributes:", "    rank (int):", r"    ns (int): from the \*issue\* on", ""]


def test_a_docstring_makes_no_notebook_run_again(tmp_path, monkeypatch):
    (tmp_path / "ddp_notebook").mkdir()
    module = tmp_path / "ddp_notebook" / "one.py"
    monkeypatch.setattr(fresh, "ROOT", tmp_path)

    def key(source: str) -> str:
        module.write_text(source)
        fresh._code.cache_clear()
        return fresh.key_of("a notebook")

    try:
        first = key('def f():\n    """Old."""\n    return 1\n')
        assert key('def f():\n    """New."""\n    return 1  # really\n') == first
        assert key("def f():\n    return 2\n") != first
    finally:
        fresh._code.cache_clear()


def test_what_is_made_is_known_by_what_it_was_made_of(tmp_path):
    made = tmp_path / "page.html", tmp_path / "facts.json"
    for one in made:
        one.write_text("")
    assert not fresh.is_made(made, "key")
    fresh.set_made(made[0], "key")
    assert fresh.is_made(made, "key") and not fresh.is_made(made, "another key")
    made[1].unlink()
    assert not fresh.is_made(made, "key")


def test_the_reference_has_every_public_name():
    """Before a site is built: tests/browser/test_docs.py looks for them in it."""
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = {line.split(".")[-1] for line in re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)", text, re.MULTILINE)}
    wanted = {*ddp_notebook.__all__, *lessons.__all__, *widgets.__all__} - set(ddp_notebook.errors.__all__)
    assert wanted - named == set()
    assert ".. automodule:: ddp_notebook.errors" in text


def test_the_site_is_made_of_what_there_is():
    assert all((ROOT / name).is_file() for name in TEXTS)
    assert len(NOTEBOOKS) >= 16 and TRAINING in [path.stem for path in NOTEBOOKS]
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(
        heading in (ROOT / "README.md").read_text() for heading in re.findall(r'-(?:before|after): "(.+)"', index)
    )


def test_links_of_the_readme_lead_there_from_every_page_that_includes_it():
    laid_out = _for_all_pages((ROOT / "README.md").read_text())
    assert "](/clusters.md" in laid_out and "](/index.md#slurm)" in laid_out
    assert "](#" not in laid_out and "](docs/clusters" not in laid_out
