"""Exceptions of the user's code, handled without trusting them: their `__str__` may raise or never return, and their
text may be endless."""

from __future__ import annotations

from types import WrapperDescriptorType
from typing import Any

from ddp_notebook.rank.cell.truncation import bounded
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

# Attribute access would call a `__getattribute__` of the user's.
_CAUSE: Any = BaseException.__cause__
_CONTEXT: Any = BaseException.__context__
_MEMBERS: Any = BaseExceptionGroup.exceptions
_ARGS: Any = BaseException.args
_PLAIN = (str, bytes, int, float, bool, type(None))


class FormattingStopped(BaseException):
    """Ends the formatting of a traceback. IPython would catch a KeyboardInterrupt there and go on."""


def words(error: BaseException) -> str:
    """The message of an exception. Runs its `__str__`."""
    try:
        return bounded(str(error))
    except FormattingStopped:
        raise
    except BaseException:  # also a KeyboardInterrupt or a SystemExit: neither may end the rank
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


def message_with_note(error: BaseException) -> str:
    """The message of an exception, with its first note behind the first line: there a pipeline says which stage it was.

    Example:
        >>> error = RuntimeError("no")
        >>> error.add_note("in stage 1")
        >>> message_with_note(error)
        'no (in stage 1)'
        >>> (error := MemoryError()).add_note("rank 0 has no memory left")
        >>> message_with_note(error)
        'rank 0 has no memory left'
    """
    message = words(error)
    notes = notes_of(error)
    if not notes or type(notes[0]) is not str:
        return message
    first, end, rest = message.lstrip().partition("\n")
    return bounded(f"{first} ({notes[0]}){end}{rest}" if first else notes[0])


def notes_of(error: BaseException) -> list[Any]:
    """Return what `add_note` has added to an exception. Runs no code of the user's."""
    try:
        notes = object.__getattribute__(error, "__dict__").get("__notes__", [])
    except Exception:  # a property of the user's has its name
        return []
    return notes if type(notes) is list else []


def known_words(error: BaseException | None) -> str:
    """The message of an exception if that runs no code of the user's, else an empty one."""
    if error is None or not isinstance(type(error).__str__, WrapperDescriptorType):
        return ""
    return words(error) if all(type(arg) in _PLAIN for arg in _ARGS.__get__(error)) else ""


def first_line(error: BaseException) -> str:
    """The first line of an error, `"ValueError: no"`. Runs no code of the user's."""
    line = known_words(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception, its causes and contexts, and the exceptions in a group."""
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
