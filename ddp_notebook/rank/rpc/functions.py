"""Functions and classes of cells in calls from other ranks.

torch sends the name of a function, and the callee looks it up. In a notebook, the callee's run of the cell may not have
reached the `def` yet. Or the callee may have the function of an earlier cell, and would silently run an old version. So
the call also contains a digest of the code, and the callee waits until its own cell defines this version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch._C._distributed_rpc import PyRRef

from ddp_notebook.stdlib import hashlib, os, pickle, time, weakref

_MAIN = "__main__"
_KINDS = FunctionType, type  # a tuple, because a union would be created at each call
_LOOK_S = 0.005
_TO_BEGIN_S = 2.0  # time for a rank to start the cell that the caller runs
_LOCAL = "<"  # part of the qualified name of a local function, which cannot be looked up

Running = Callable[[], tuple[int, float] | None]
_digests: weakref.WeakKeyDictionary[Any, tuple[object, str]] = (
    weakref.WeakKeyDictionary()
)  # with the code that was digested


class CellPickler(pickle.Pickler):
    """Pickler for calls. Functions and classes of cells are sent as their name and a digest of their code."""

    running: Running = staticmethod(lambda: None)  # returns the running cell
    check: Callable[[Any], None] = staticmethod(lambda reference: None)  # raises if the value of a reference is lost
    is_leaving: Callable[[], bool] = staticmethod(lambda: False)  # True in `shutdown`: no definitions follow

    def dump(self, obj: Any) -> None:
        """Pickle an object, like `Pickler.dump`.

        Raises:
            pickle.PicklingError: the message names the function and the arguments that cannot be sent.
        """
        try:
            super().dump(obj)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise pickle.PicklingError(_unsendable(obj, error)) from error

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, PyRRef):
            self.check(obj)  # otherwise the receiver would wait forever for the owner
            return NotImplemented
        if not isinstance(obj, _KINDS) or obj.__module__ != _MAIN:
            return NotImplemented
        name = obj.__qualname__
        if _LOCAL in name:
            raise pickle.PicklingError(
                f"the other rank cannot find {name} by its name: define it with def (or class) at the top level of a "
                "cell"
            )
        return find, (name, digest(obj), (self.running() or (0, 0.0))[0])


def _unsendable(obj: Any, error: Exception) -> str:
    if not hasattr(obj, "func"):
        kind = type(obj).__name__
        return f"the result of the call, a {kind}, cannot be sent: {error}; call rpc.remote to keep it on its rank"
    name = getattr(obj.func, "__qualname__", type(obj.func).__name__)
    if name in str(error):
        return str(error)
    what = [f"argument {n}, {type(one).__name__}" for n, one in enumerate(obj.args or ()) if _fails(one)]
    what += [f"argument {key}, {type(one).__name__}" for key, one in (obj.kwargs or {}).items() if _fails(one)]
    return (
        f"{name} cannot be called on another rank: {', '.join(what) or name} cannot be sent ({error}); create it "
        "in the function itself"
    )


def _fails(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return True
    return False


def find(name: str, expected: str, cell: int) -> Any:
    """Return the object that a call refers to by name. On the callee, wait until its cell has defined the object.

    Args:
        name: qualified name.
        expected: digest of the caller's object.
        cell: cell that the caller runs.

    Raises:
        NameError: the rank has no object or another version, and its cell will not define it.
    """
    until = time.monotonic() + _TO_BEGIN_S
    while True:
        running = (CellPickler.running() or (0, 0.0))[0]
        found = _look_up(name)
        if found is not None and digest(found) == expected:
            return found
        if CellPickler.is_leaving() or (running != cell and (running > cell or time.monotonic() > until)):
            break
        time.sleep(_LOOK_S)
    rank = os.environ.get("RANK", "?")
    what = f"has no {name}" if found is None else f"has another version of {name} than the caller"
    raise NameError(f"rank {rank} {what}: run the cell that defines it on all ranks (%%on_all_ranks)")


def _look_up(name: str) -> Any:
    found: Any = sys.modules[_MAIN]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def digest(obj: Any) -> str:
    """Return a short digest of code. Equal code has the same digest on every rank.

    Example:
        >>> digest(lambda a: a + 1) == digest(lambda a: a + 1), digest(lambda a: a + 1) == digest(lambda a: a + 2)
        (True, False)
    """
    made_of = getattr(obj, "__code__", None)
    known = _digests.get(obj) if isinstance(obj, FunctionType | type) else None
    if known is not None and known[0] is made_of:
        return known[1]
    summed = hashlib.blake2b(digest_size=12)
    for part in _parts(obj):
        summed.update(part.encode())
    told = summed.hexdigest()
    if isinstance(obj, FunctionType | type):
        _digests[obj] = made_of, told
    return told


def _parts(obj: Any) -> Iterator[str]:
    """Yield the parts of a function's code, or of the methods of a class."""
    if isinstance(obj, type):
        yield from (base.__qualname__ for base in obj.__bases__)
        for name, value in sorted(vars(obj).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield name
                yield from _parts(function)
        return
    if (code := getattr(obj, "__code__", None)) is not None:
        yield from _parts_of_code(code)
    if (wrapped := getattr(obj, "__wrapped__", None)) is not None:
        yield from _parts(wrapped)


def _parts_of_code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _parts_of_code(value)
        else:
            yield repr(sorted(value, key=repr)) if isinstance(value, frozenset) else repr(value)
