"""Names of models and optimizers."""

from __future__ import annotations

from collections.abc import Container

from ddp_notebook.stdlib import itertools


def new_name(one: object, taken: Container[str]) -> str:
    """Return a new name for an object from its class: "Net", then "Net 2". Live objects have different names."""
    kind = type(one).__name__
    names = itertools.chain([kind], (f"{kind} {number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def nothing() -> None:
    """Return None, like a weak reference to a dead object."""
