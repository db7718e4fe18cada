"""Lines as a terminal would show them: redrawn ones, and long ones in pieces."""

from __future__ import annotations

_LONGEST_CHARS = 100_000  # shown in one piece


def visible(line: str) -> str:
    """What a terminal shows after a line was redrawn with carriage returns.

    Example:
        >>> visible("10 %\\r20 %\\r")
        '20 %'
    """
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


def redrawn(text: str) -> str:
    """The last state of an unfinished line, kept for its next redraw.

    Example:
        >>> redrawn("10 %\\r20 %\\r")
        '20 %\\r'
    """
    return visible(text) + ("\r" if text.endswith("\r") else "")


def pieces(line: str) -> list[str]:
    """A long line as several, cut at the same places on every rank.

    Example:
        >>> [len(piece) for piece in pieces("x" * 250_000)]
        [100000, 100000, 50000]
    """
    if len(line) <= _LONGEST_CHARS or "\r" in line:
        return [line]
    return [line[at : at + _LONGEST_CHARS] for at in range(0, len(line), _LONGEST_CHARS)]
