"""Lay out the source folder of Sphinx: the texts of the repository, the pages of docs/, and the executed notebooks.

Pages of docs/ move up by one folder, so links between texts are rewritten. Links to other files lead to the repository.
"""

from __future__ import annotations

import filecmp
import json
import posixpath
import re
import shutil
import tomllib
from collections.abc import Collection
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.course import declaration, languages
from tools.docs import fresh, replays
from tools.docs.notebooks import NOTEBOOKS

TEXTS = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "notebooks/README.md",
    "notebooks/glossary.md",
    "notebooks/map.svg",
    "notebooks/teaching.md",
    "tests/benchmarks/RESULTS.md",
)
_DOCS = fresh.ROOT / "docs"
_PAGES = (".py", ".md", ".css", ".js", ".svg", ".png", ".gif")
_BADGE = re.compile(r"\[!\[([^\]]*)\]\(https?://[^)]*\)\](\([^)]*\))")  # an external image
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
# Sphinx derives the id of each heading from its text, and does not allow skipped levels.
_GLOSSARY_HEADING = re.compile(r'^<a id="[^"]+"></a>\n\n### ', re.MULTILINE)


def lay_out(made: Path, folder: Path) -> None:
    """Copy all sources into a folder. Unchanged files keep their time, so that Sphinx does not read them again.

    Args:
        made: Folder of executed notebooks and recordings.
        folder: Input folder of Sphinx.
    """
    pages = {name: fresh.ROOT / name for name in site_paths()}
    wanted: dict[Path, str | Path] = {}
    for name, path in pages.items():
        text = relinked(name, path.read_text(), pages) if path.suffix == ".md" else path
        wanted[Path(placed(name))] = text
    for path in NOTEBOOKS:
        wanted[Path("notebooks", path.name)] = _page(f"notebooks/{path.name}", _read(made / path.name), pages)
    for language, number, file in languages.lesson_files():
        name = declaration.read().lessons[number].file.name
        notebook = languages.translate(_read(made / name), file)  # executed once: its code cells are the same
        wanted[Path("notebooks", language, name)] = _page(f"notebooks/{language}/{name}", notebook, pages)
    glossary, contents = Path("notebooks/glossary.md"), Path("notebooks/README.md")
    wanted[glossary] = _GLOSSARY_HEADING.sub("## ", str(wanted[glossary]))
    wanted[contents] = str(wanted[contents]) + _toctree()
    for name in ("training.html", "training.npz", "simulated.html"):
        wanted[Path("extra/recordings", name)] = made / name
    wanted[Path("static/recorded.js")] = replays.script(made)
    wanted[Path("play.md")] = _with_facts(_DOCS / "play.md", made / "training.json")

    for path, content in wanted.items():
        _bring(content, folder / path)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder) not in wanted:
            path.unlink()


def site_paths() -> list[str]:
    """Return the paths of the site's texts, pictures and scripts in the repository."""
    files = [path for path in sorted(_DOCS.rglob("*")) if path.suffix in _PAGES and path.name not in replays.SCRIPTS]
    return [*TEXTS, *(path.relative_to(fresh.ROOT).as_posix() for path in files)]


def placed(name: str) -> str:
    """Return the path of a file on the site.

    Example:
        >>> placed("docs/guide/values.md"), placed("ARCHITECTURE.md")
        ('guide/values.md', 'ARCHITECTURE.md')
    """
    return name.removeprefix("docs/")


def relinked(name: str, text: str, pages: Collection[str]) -> str:
    """Return a text of the repository with its relative links as the site needs them.

    Args:
        name: path of the text in the repository.
        text: its content.
        pages: paths in the repository of all files of the site, without notebooks.

    Example:
        >>> relinked("docs/guide/a.md", "[x](../../ARCHITECTURE.md#map)", ["ARCHITECTURE.md"])
        '[x](../ARCHITECTURE.md#map)'
        >>> relinked("ARCHITECTURE.md", "[x](docs/guide/a.md)", ["docs/guide/a.md"])
        '[x](guide/a.md)'
    """
    if name == "docs/play.md":  # a page of the site only, with links of the site
        return text
    folder = posixpath.dirname(placed(name))

    def on_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[1]))
        if target in pages or (target.startswith("notebooks/") and target.endswith(".ipynb")):
            return posixpath.relpath(placed(target), folder or ".")
        if (fresh.ROOT / target).exists():
            return f"{_repository()}/{target}"
        return found[1]  # a file that the build makes

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(on_site, part) for part in parts)


def _repository() -> str:
    with (fresh.ROOT / "pyproject.toml").open("rb") as file:
        address = tomllib.load(file)["tool"]["ddp_notebook"]
    return f"https://github.com/{address['repository']}/blob/{address['branch']}"


def _read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def _page(name: str, notebook: NotebookNode, pages: Collection[str]) -> str:
    """Return a notebook as the site needs it: with links of the site, and badges as text.

    Args:
        name: its path in the repository.
        notebook: the notebook; it is changed.
        pages: see `relinked`.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _BADGE.sub(r"[\1]\2", relinked(name, cell.source, pages))
    return nbformat.writes(notebook)


def _toctree() -> str:
    """Return the sidebar entries below the notebooks' table of contents, in the order of reading."""
    lessons = [f"{one.number} {one.title} <{one.file.stem}>" for one in declaration.read().lessons.values()]
    lines = ["", "```{toctree}", ":hidden:", "", *lessons, "glossary", "teaching", "```", ""]
    for language, name in languages.LANGUAGES.items():
        entries = [
            f"{number} {languages.title(file)} <{language}/{declaration.read().lessons[number].file.stem}>"
            for of, number, file in languages.lesson_files()
            if of == language
        ]
        lines += ["```{toctree}", ":hidden:", f":caption: {name}", "", *entries, "```", ""]
    return "\n".join(lines)


def _with_facts(page: Path, facts: Path) -> str:
    """Insert the figures of the recorded training run into a page: `@slow@` is the slow rank."""
    found = page.read_text()
    for name, value in json.loads(facts.read_text()).items():
        found = found.replace(f"@{name}@", str(value))
    return found


def _bring(content: str | Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        if not to.is_file() or not filecmp.cmp(content, to, shallow=False):
            shutil.copyfile(content, to)
    elif not to.is_file() or to.read_text() != content:
        to.write_text(content)
