"""Exceptions of the user's code, handled without trust: their `__str__` may raise or never return, and their text may
be endless."""

from __future__ import annotations

from types import WrapperDescriptorType

from ddp_notebook.rank.cell.bounds import bounded

_PLAIN = (str, bytes, int, float, bool, type(None))


class FormattingStopped(BaseException):
    """Ends the formatting of a traceback. IPython would catch a KeyboardInterrupt there and go on."""


def words(error: BaseException) -> str:
    """What an exception says. Runs its `__str__`."""
    try:
        return bounded(str(error))
    except FormattingStopped:
        raise
    except BaseException:  # also a KeyboardInterrupt or a SystemExit: neither may end the rank
        return f"<{type(error).__name__}.__str__ failed>"


def known_words(error: BaseException | None) -> str:
    """What an exception says if no code of the user's has to run for that, else nothing."""
    if error is None or not isinstance(type(error).__str__, WrapperDescriptorType):
        return ""
    return words(error) if all(type(arg) in _PLAIN for arg in error.args) else ""


def first_line(error: BaseException) -> str:
    """Such as `"ValueError: no"`. Runs no code of the user's."""
    line = known_words(error).partition("\n")[0][:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception, those behind it, and those in it."""
    found: dict[int, BaseException] = {}
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        left += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return list(found.values())
