"""Handle exceptions of user code without trusting them: `__str__` may raise or never return, and texts may be huge."""

from __future__ import annotations

from typing import Any

from ddp_notebook.rank.cell.truncation import bounded
from ddp_notebook.records.error_text import text_of
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

# Attribute access would call a user-defined `__getattribute__`.
_CAUSE: Any = BaseException.__cause__
_CONTEXT: Any = BaseException.__context__
_MEMBERS: Any = BaseExceptionGroup.exceptions


class FormattingStopped(BaseException):
    """Aborts the formatting of a traceback. IPython would catch a KeyboardInterrupt and continue."""


def words(error: BaseException) -> str:
    """Return the message of an exception. Runs its `__str__`."""
    try:
        return bounded(str(error))
    except FormattingStopped:
        raise
    except BaseException:  # including KeyboardInterrupt and SystemExit: neither may end the rank
        return f"<{type(error).__name__}.__str__ failed>"


def representation(error: BaseException) -> str:
    """Return the `repr` of an exception. Runs its `__repr__`."""
    try:
        return bounded(repr(error))
    except FormattingStopped:
        raise
    except BaseException:  # as in `words`
        return f"<{type(error).__name__}.__repr__ failed>"


def with_type(error: BaseException) -> str:
    """Return the type and the message of an exception. Runs its `__str__`.

    Example:
        >>> with_type(ValueError("no")), with_type(KeyError())
        ('ValueError: no', 'KeyError')
    """
    message = words(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def message_with_note(error: BaseException, message: str | None = None) -> str:
    """Return the message of an exception, with its first and its last note after the first line.

    A pipeline names the failed stage in a note. The last note explains an error of torch.

    Args:
        error: the exception.
        message: its message, if its `__str__` must not run.

    Example:
        >>> error = RuntimeError("no")
        >>> error.add_note("in stage 1")
        >>> message_with_note(error)
        'no (in stage 1)'
        >>> error.add_note("pass 2")
        >>> message_with_note(error)
        'no (in stage 1; pass 2)'
        >>> (error := MemoryError()).add_note("rank 0 has no memory left")
        >>> message_with_note(error)
        'rank 0 has no memory left'
    """
    message = words(error) if message is None else message
    notes = notes_of(error)
    if not notes or type(notes[0]) is not str:
        return message
    shown = "; ".join([notes[0], *(one for one in notes[1:][-1:] if type(one) is str)])
    first, end, rest = message.lstrip().partition("\n")
    return bounded(f"{first} ({shown}){end}{rest}" if first else shown)


def notes_of(error: BaseException) -> list[Any]:
    """Return the notes of `add_note` of an exception. Runs no user code."""
    try:
        notes = object.__getattribute__(error, "__dict__").get("__notes__", [])
    except Exception:  # a user-defined property has this name
        return []
    return notes if type(notes) is list else []


def known_words(error: BaseException | None) -> str:
    """Return the message of an exception if that runs no user code, else ""."""
    return "" if error is None else bounded(text_of(error))


def first_line(error: BaseException) -> str:
    """Return type and first message line of an exception, `"ValueError: no"`. Runs no user code."""
    line = known_words(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def chain(error: BaseException | None) -> list[BaseException]:
    """Return an exception, its causes and contexts, and the members of exception groups."""
    found: dict[int, BaseException] = {}
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        left += [_CAUSE.__get__(one), _CONTEXT.__get__(one)]
        if issubclass(type(one), BaseExceptionGroup):
            left += _MEMBERS.__get__(one)
    return list(found.values())
