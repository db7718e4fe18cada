"""Names of models and optimizers."""

from __future__ import annotations

from collections.abc import Container, Mapping

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import itertools


def new_name(one: object, taken: Container[str]) -> str:
    """Return a new name for an object from its class: "Net", then "Net 2". Live objects have different names."""
    kind = type(one).__name__
    names = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def variable_of(one: object, namespace: Mapping[str, object]) -> str:
    """Return the last variable with an object; "" if there is none.

    Example:
        >>> value = [1]
        >>> variable_of(value, {"a": [1], "b": value, "_1": value})
        'b'
    """
    names = [name for name, value in list(namespace.items()) if value is one and not name.startswith("_")]
    return names[-1] if names else ""


def nothing() -> None:
    """Return None, like a weak reference to a dead object."""
