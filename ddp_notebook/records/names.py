"""Format names and texts of users for messages: with escaped control characters and limited length."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_CHARS = 80  # maximum length of one name
_MOST_NAMES = 8


def readable(name: str) -> str:
    """Format a name. Empty names and names with characters that a terminal would interpret get quotation marks.

    Example:
        >>> print(readable("loss"), readable(""), readable("\\x1b[31mred"), readable("a\\nb"))
        loss '' '\\x1b[31mred' 'a\\nb'
    """
    if len(name) > _MOST_CHARS:
        name = f"{name[: _MOST_CHARS // 2]}...{name[-_MOST_CHARS // 2 :]}"
    return name if name and name.isprintable() and name == name.strip() and ", " not in name else repr(name)


def listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """Join names with commas, and append the number of omitted names.

    Example:
        >>> listed(["loss", ""]), listed(f"x{i}" for i in range(1000))
        ("loss, ''", 'x0, x1, x2, x3, x4, x5, x6, x7 and 992 more')
    """
    every = list(names)
    shown = ", ".join(map(readable, every[:most]))
    return f"{shown} and {len(every) - most:,} more" if len(every) > most else shown


def printable(text: str) -> str:
    """Escape characters that a terminal would interpret or that UTF-8 cannot encode.

    Example:
        >>> printable("a\\x1b[2Jb\\ud800")
        'a\\\\x1b[2Jb\\\\ud800'
    """
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """Escape control characters other than newline and tab.

    Example:
        >>> printable_lines("a\\x1b[2J\\nb")
        'a\\\\x1b[2J\\nb'
    """
    return text if text.isprintable() else "".join(repr(one)[1:-1] if _is_control(one) else one for one in text)


def _is_control(one: str) -> bool:
    """Return whether a terminal would interpret the character, or UTF-8 cannot encode it."""
    return (one < " " and one not in "\n\t") or "\x7f" <= one < "\xa0" or "\ud800" <= one <= "\udfff"
