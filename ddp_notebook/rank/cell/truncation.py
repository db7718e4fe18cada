"""Output that is too long to be read is cut before it is sent; its beginning and its end are kept."""

from __future__ import annotations

from typing import Any

from ddp_notebook.records.units import bundle_chars, size

MOST_CHARS = 200_000  # of a traceback, of an exception's message, and of the text that replaces a display
MOST_DISPLAY_CHARS = 10_000_000  # of one display, all its MIME types together; plotly's first figure has 5 million


def bounded(text: str) -> str:
    """The text, or its beginning and its end if it is too long."""
    if len(text) <= MOST_CHARS:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"


def bounded_display(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a display message, or instead a text that says what was too large. A table of 200,000 rows is 17
    MB of HTML, which a browser shows after minutes if at all."""
    data = content.get("data") or {}
    if bundle_chars(data) <= MOST_DISPLAY_CHARS:
        return content
    sizes = {kind: len(value) for kind, value in data.items() if isinstance(value, str)}
    told = ", ".join(f"{kind} {size(chars)}" for kind, chars in sizes.items())
    text = bounded(str(data.get("text/plain", "")))
    return {**content, "data": {"text/plain": f"{text}\n[... not sent, since it is too large: {told} ...]"}}
