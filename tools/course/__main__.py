"""Write everything that follows from the declaration of the course.

    python -m tools.course           the map, the tables of notebooks/README.md, and the teacher's guide
    python -m tools.course --check   change nothing; the exit status is 1 if a file is out of date

The glossary gets the lessons of each term, and the package the hashes of the exercises' starters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddp_notebook.lessons.questions import starters as kept_starters
from tools.course import contents, glossary, map_picture, starters, teaching
from tools.course.declaration import FOLDER, read


def wanted() -> dict[Path, str]:
    """Return the content of each written file."""
    course, page, terms = read(), FOLDER / "README.md", FOLDER / "glossary.md"
    return {
        FOLDER / "map.svg": map_picture.svg(course),
        page: contents.with_parts(page.read_text(encoding="utf-8"), contents.parts(course)),
        terms: glossary.with_lessons(terms.read_text(encoding="utf-8"), course),
        FOLDER / "teaching.md": teaching.guide(course),
        kept_starters.FILE: starters.content(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the map and the tables of the course.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is out of date")
    options = parser.parse_args()
    old = [path for path, text in wanted().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if not options.check:
            path.write_text(wanted()[path], encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parent)}: {'out of date' if options.check else 'written'}")
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
