"""Code of puzzles on each rank: runs a solution, compares its result, and measures the memory of its tensors.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import ast
import dis
import textwrap
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from inspect import getsource, isclass, isfunction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_MOST_TEXT = 200
_OF_DOTS = ("RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "POP_TOP")  # bytecode of `...`


class PuzzleRun:
    """One run of a solution, in a copy of the names of the rank's cells.

    Args:
        names: Variables of the cells.
        source: Definition of the solution; "" if the cells have defined it.
        solution: Name of the solution.
        setup: Code that creates the arguments.
    """

    def __init__(self, names: Mapping[str, Any], source: str, solution: str, setup: str) -> None:
        self.names = dict(names)
        exec(compile(source, "<solution>", "exec"), self.names)
        if solution not in self.names:
            raise NameError(f"name {solution!r} is not defined")
        self.is_empty = _is_empty(self.names[solution])
        self.names["solution"] = self.names[solution]
        exec(compile(setup, "<puzzle>", "exec"), self.names)
        self.peak_bytes = 0

    def run(self, call: str, *, with_memory: bool = False) -> None:
        """Evaluate the expression with the call, and keep its result."""
        memory = TensorMemory()
        with memory if with_memory else nullcontext():
            self.names["result"] = eval(compile(call, "<puzzle>", "eval"), self.names)
        self.peak_bytes = memory.peak_bytes

    def difference(self, got: str, wanted: str, tolerance: float) -> str:
        """Return how the result differs from the right one; "" if they are equal.

        Args:
            got, wanted: Expressions.
            tolerance: Largest relative and absolute difference of numbers.
        """
        has, right = eval(got, self.names), eval(wanted, self.names)
        try:
            torch.testing.assert_close(has, right, rtol=tolerance, atol=tolerance, check_device=False)
        except AssertionError as error:
            if _is_short(has) and _is_short(right):
                return f"{_text(has)} instead of {_text(right)}"
            return str(error).strip().splitlines()[0][:_MOST_TEXT]
        return ""


def has_dots(names: Mapping[str, Any], source: str, name: str) -> bool:
    """Return whether a function or class has a line with the dots of the notebook.

    Args:
        names: Variables of the cells.
        source: Its definition; "" if the cells have defined it.
        name: Its name.
    """
    defined: Any = names.get(name)
    functions: list[Any] = [one for one in vars(defined).values() if isfunction(one)] if isclass(defined) else [defined]
    try:
        texts = [source] if source else [textwrap.dedent(getsource(one)) for one in functions]
        nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    except (OSError, TypeError, SyntaxError):  # Python does not know the source
        return False
    return any(isinstance(node, ast.Expr) and getattr(node.value, "value", None) is ... for node in nodes)


class TensorMemory(TorchDispatchMode):
    """The largest number of bytes of tensors that were created in this context and alive at the same time.

    Counts the storages of the results of all operations, on any device. Tensors from before do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass(one) for one in _tensors((args, kwargs))):
            return NotImplemented  # a DTensor: count the operations on its part, and not the whole tensor
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for one in _tensors(result):
            storage = one.untyped_storage()
            is_new = storage._cdata not in given  # not a view, and not an operation in place
            if is_new and storage.device.type != "meta":  # DTensor computes shapes on tensors without memory
                self._alive.add(storage)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self._alive))
        return result


def _is_empty(function: Any) -> bool:
    """Return whether a function has only the dots of the notebook."""
    code = getattr(function, "__code__", None)
    if code is None or any(one.opname not in _OF_DOTS for one in dis.get_instructions(code)):
        return False
    return set(code.co_consts) <= {None, ..., function.__doc__}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def _is_short(value: Any) -> bool:
    return sum(one.numel() for one in _tensors(value)) <= 8


def _text(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)[:_MOST_TEXT]
