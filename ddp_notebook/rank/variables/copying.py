"""Serialize variables for another rank in a single pickle, so that an optimizer still holds its model's parameters."""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import IPython
import torch

from ddp_notebook.rank.cell.exceptions import words
from ddp_notebook.rank.variables.values import CannotSendError
from ddp_notebook.records import logs
from ddp_notebook.stdlib import io, os
from ddp_notebook.wire import bulk

_EVERY_RANK_HAS = frozenset({"rank", "local_rank", "world_size", "device", "torch", "dist", "In", "Out"})


def read(
    namespace: Mapping[str, Any],
    names: Sequence[str],
    hidden: Collection[str] = (),
    dumps: Callable[[Any], Any] | None = None,
) -> tuple[Any, list[str], dict[str, str]]:
    """Serialize variables into one pickle.

    Args:
        namespace: all variables.
        names: variables to include; empty for all that can be pickled.
        hidden: names that do not belong to the user.
        dumps: creates the pickle; None for a pickle that contains all data.

    Returns:
        The pickle of a dict, the names in it, and the reasons for the names that are not in it.

    Raises:
        CannotSendError: a requested variable does not exist or cannot be pickled.
    """
    if unknown := [name for name in names if name not in namespace]:
        raise CannotSendError(f"undefined variable {', '.join(map(repr, unknown))}")
    values = {name: namespace[name] for name in names or names_of_user(namespace, hidden)}
    values = {name: value for name, value in values.items() if not logs.is_log(value)}
    # modules, functions and classes last, because messages list the first names
    kinds = (types.ModuleType, types.FunctionType, type)
    values = dict(sorted(values.items(), key=lambda item: isinstance(item[1], kinds)))
    left: dict[str, str] = {}
    dumps = dumps or _dumps
    try:
        return dumps(values), list(values), left
    except (Exception, SystemExit):  # find the variables that cannot be pickled
        for name, value in list(values.items()):
            try:
                _dumps(value)
            except (Exception, SystemExit) as error:
                if names:
                    raise CannotSendError(
                        f"{name!r} ({type(value).__name__}) cannot be pickled: {words(error)}"
                    ) from error
                del values[name]
                why = (words(error) or type(error).__name__).splitlines()[0]
                left[name] = f"a {type(value).__name__} cannot be pickled ({why})"
    return dumps(values), list(values), left


def names_of_user(namespace: Mapping[str, Any], hidden: Collection[str] = ()) -> list[str]:
    """Return the names of the user's variables."""
    own = [name for name in namespace if not (name.startswith("_") or name in hidden or name in _EVERY_RANK_HAS)]
    return [name for name in own if not logs.is_log(namespace[name])]


class DevicePickler(bulk.ValuePickler):
    """Pickler that sends tensors of a GPU to the GPU of the unpickling process."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.is_cuda and not vars(obj):
            return _to_gpu, (obj.detach().cpu(), obj.requires_grad)
        if isinstance(obj, types.ModuleType):
            return NotImplemented if obj.__name__ == "__main__" else (_import, (obj.__name__,))
        made = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and isinstance(made, tuple) and obj.__globals__ is _variables():
            make, (code, _, *rest), (attributes, slots), *how = made
            made = (
                make,
                (code, _Variables(obj.__code__.co_filename), *rest),
                (attributes, {**slots, "__globals__": {}}),
                *how,
            )
        return made


class _Variables:
    """Placeholder for the user's variables in a pickle.

    A function of a cell uses the variables of the rank that unpickles it, as if its cell had run there. cloudpickle
    alone would send the values of this rank, including `rank`. The text of the cell is sent too, for tracebacks,
    `inspect.getsource` and `torch.jit.script`.

    Args:
        file: file name of the cell.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        entry: Any = linecache.cache.get(self._file, ())
        # entry of a cell as IPython creates it; IPython 7 adds a time
        is_of_no_file = len(entry) == 4 and (entry[1] is None or not os.path.exists(self._file))
        return _variables, ("".join(entry[2]), self._file, _number_of(self._file)) if is_of_no_file else ()


class CellText(str):
    """Text of a cell that has run on another rank.

    Args:
        text: the text.
        file: file name of the cell.
    """

    def __new__(cls, text: str, file: str) -> CellText:
        new = super().__new__(cls, text)
        new.file = file
        return new

    file: str


def _number_of(file: str) -> int:
    """Return the number of a cell in `In [n]` by its file; 0 if unknown."""
    compiler: Any = getattr(IPython.get_ipython(), "compile", None)
    return int(getattr(compiler, "cells", {}).get(file, 0))  # set by the runner of this rank


def _variables(text: str = "", file: str = "", number: int = 0) -> dict[str, Any]:
    """Return the user's variables of this process. Register the text of a cell that has not run here.

    Args:
        text: text of the cell that defined a function.
        file: file name of that cell.
        number: number of that cell; 0 if unknown.
    """
    shell = IPython.get_ipython()
    if shell is None:
        return {}
    if file and file not in linecache.cache and number:
        shell.compile.cache(text, number, CellText(text, file))
    elif file:
        linecache.cache.setdefault(file, (len(text), None, text.splitlines(keepends=True), file))
    return shell.user_ns


def _to_gpu(values: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return values.cuda().requires_grad_(requires_grad)


def _import(name: str) -> types.ModuleType:
    import importlib

    return importlib.import_module(name)


def pickled(value: Any) -> list[list[Any]]:
    """Pickle a value with `DevicePickler` as parts, see `bulk.pickled`."""
    return bulk.pickled(value, DevicePickler)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    DevicePickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
