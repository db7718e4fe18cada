"""Code blocks of the pages in docs/guide."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "guide"
README = Path(__file__).parents[2] / "README.md"
PAGES = sorted(FOLDER.glob("*.md"))
_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is fenced as ```python.

    Attributes:
        mark: the HTML comment on the line above: "raises", "not run: " and a reason, or "".
    """

    code: str
    mark: str

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run: ")

    @property
    def raises(self) -> bool:
        return self.mark == "raises"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order.

    Raises:
        ValueError: a mark is unknown.
    """
    found = [Block(one["code"], one["mark"] or "") for one in _BLOCK.finditer(page.read_text())]
    for block in found:
        if block.mark and block.runs and not block.raises:
            raise ValueError(f"{page.name}: unknown mark {block.mark!r}; known are 'raises' and 'not run: REASON'")
    return found
