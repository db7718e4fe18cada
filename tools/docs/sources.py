"""What Sphinx reads: a folder in which each text of the repository has its own place, so that links between them lead
where they lead in the repository. Nothing is written twice: docs/index.md includes README.md."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
from pathlib import Path

from tools.docs import fresh, replays
from tools.docs.notebooks import NOTEBOOKS

TEXTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/monitor.png",
    "notebooks/README.md",
    "notebooks/glossary.md",
    "tests/benchmarks/RESULTS.md",
)
_DOCS = fresh.ROOT / "docs"
_PAGES = (".py", ".md", ".css", ".js", ".svg")
# Sphinx gives each heading its name as an id, and wants no level left out.
_BADGE = re.compile(r"\[!\[([^\]]*)\]\(https?://[^)]*\)\](\([^)]*\))")  # a picture that lies elsewhere
_PAGE_LINK = re.compile(r"\]\(docs/(?=[\w-]+\.md)")
_GLOSSARY_HEADING = re.compile(r'^<a id="[^"]+"></a>\n\n### ', re.MULTILINE)


def lay_out(made: Path, folder: Path) -> None:
    """Bring everything into a folder. Files that have not changed keep their time, by which Sphinx knows them.

    Args:
        made: what was executed and recorded.
        folder: for Sphinx.
    """
    wanted: dict[Path, str | Path] = {Path(name): fresh.ROOT / name for name in TEXTS}
    wanted |= {Path(name): placed(name) for name in TEXTS if "/" not in name}
    for path in sorted(_DOCS.rglob("*")):
        if path.suffix in _PAGES and path.name not in replays.SCRIPTS:
            wanted[path.relative_to(_DOCS)] = path
    for path in NOTEBOOKS:
        wanted[Path("notebooks", path.name)] = _BADGE.sub(r"[\1]\2", (made / path.name).read_text())
    glossary, contents = Path("notebooks/glossary.md"), Path("notebooks/README.md")
    wanted[glossary] = _GLOSSARY_HEADING.sub("## ", (fresh.ROOT / glossary).read_text())
    wanted[contents] = (fresh.ROOT / contents).read_text() + _toctree()
    for name in ("training.html", "training.npz", "simulated.html"):
        wanted[Path("extra/recordings", name)] = made / name
    wanted[Path("static/recorded.js")] = replays.script(made)
    wanted[Path("play.md")] = _with_facts(_DOCS / "play.md", made / "training.json")

    for path, content in wanted.items():
        _bring(content, folder / path)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder) not in wanted:
            path.unlink()


def placed(name: str) -> str:
    """Return a text of the repository's root with links to where the pages of docs lie for Sphinx. Those of README.md
    also lead there from a page that includes a part of it.

    Example:
        >>> "](/security.md)" in placed("ARCHITECTURE.md")
        True
    """
    text = _PAGE_LINK.sub("](/", (fresh.ROOT / name).read_text())
    return text.replace("](#", "](/index.md#") if name == "README.md" else text


def _toctree() -> str:
    """What stands in the sidebar below the notebooks' table of contents."""
    return "\n".join(["", "```{toctree}", ":hidden:", "", *(path.stem for path in NOTEBOOKS), "glossary", "```", ""])


def _with_facts(page: Path, facts: Path) -> str:
    """A page with the figures of the recorded training in it: `@slow@` is the slow rank."""
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
