"""Truncate output that is too long to read, but keep its start and end."""

from __future__ import annotations

from typing import Any

from ddp_notebook.records.units import bundle_chars, size
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

MOST_CHARS = 200_000  # limit for a traceback, an exception message, and the text that replaces a display
MOST_DISPLAY_CHARS = 10_000_000  # limit for one display, all MIME types together; plotly's first one has 5 million


def bounded(text: str) -> str:
    """Truncate a text in the middle if it is too long."""
    if len(text) <= MOST_CHARS:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"


def bounded_display(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a display message, or a text that names the oversized parts.

    For example, a table of 200,000 rows is 17 MB of HTML, which takes a browser minutes to show.
    """
    data = content.get("data") or {}
    if bundle_chars(data) <= MOST_DISPLAY_CHARS:
        return content
    sizes = {kind: len(value) for kind, value in data.items() if isinstance(value, str)}
    told = ", ".join(f"{kind} {size(chars)}" for kind, chars in sizes.items())
    text = bounded(str(data.get("text/plain", "")))
    return {**content, "data": {"text/plain": f"{text}\n[... not sent, since it is too large: {told} ...]"}}
