"""Text of an error of user code, read without running that code."""

from __future__ import annotations

from types import WrapperDescriptorType
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_ARGS: Any = BaseException.args  # attribute access would call a user-defined `__getattribute__`
_PLAIN = (str, bytes, int, float, bool, type(None))  # types of arguments
_LIBRARIES = ("numpy", "torch")  # their errors may have a `__str__` in Python


def text_of(error: BaseException) -> str:
    """Return the text of an error, or "" if code of the user makes it: that code may hang, or raise anything.

    Example:
        >>> text_of(MemoryError("no memory"))
        'no memory'
    """
    kind = type(error)
    if kind.__module__.partition(".")[0] in _LIBRARIES:
        return str(error)
    is_plain = isinstance(kind.__str__, WrapperDescriptorType)
    return str(error) if is_plain and all(type(one) in _PLAIN for one in _ARGS.__get__(error)) else ""
