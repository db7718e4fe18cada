"""The names of models and optimizers."""

from __future__ import annotations

from collections.abc import Container

from ddp_notebook.stdlib import itertools


def new_name(one: object, taken: Container[str]) -> str:
    """ "Net", then "Net 2": no two live objects have the same name."""
    kind = type(one).__name__
    names = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def nothing() -> None:
    """A weak reference to nothing yet."""
