"""Find the module that a collective belongs to. FSDP provides it; DTensor and tensor parallel do not.

During a forward, `Module._call_impl` is on the stack. The innermost one belongs to the module, the outermost one to the
model. During a backward it is absent. So in the forward, the contexts of DTensor's autograd functions are marked with
the module if their backward may communicate. The backward finds the mark. In most steps of a long training loop torch's
functions are restored, since even a wrapper takes time. `rank.group.sequences` names the backwards of such steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, re, weakref

ROOT = "(root)"
CALL_IMPL = torch.nn.Module._call_impl.__code__  # code of the frame that runs a module's forward
_MARK = "_ddp_notebook_module"  # attribute of an autograd function's context
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


class Modules:
    """Names of modules, determined once for each module and line of a cell.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        >>> Modules().index(model)[id(model[0])][1]
        '0'
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}  # names by id, in the largest known model
        self.version = 0  # of these names
        self.found: dict[tuple[int, int, int], tuple[weakref.ref[torch.nn.Module], str]] = {}  # see `name`
        self._marked: set[int] = set()  # ids of code objects whose `ctx` may have a mark; torch keeps the code alive
        self._watched: list[tuple[Any, Any, Any]] = []  # autograd functions, their own forward, and the marking forward
        self.marks = True  # forwards are marked

    def watch(self, is_on: Callable[[], bool]) -> None:
        """Mark the contexts of DTensor's autograd functions in forwards.

        Args:
            is_on: returns whether names are needed now.

        Raises:
            ImportError, AttributeError: this torch has no such functions.
        """
        from torch.distributed.tensor._api import _FromTorchTensor
        from torch.distributed.tensor._redistribute import Redistribute

        self._mark(_FromTorchTensor, is_on, _is_replicated)
        self._mark(Redistribute, is_on, _changes)

    def mark(self, on: bool) -> None:
        """Set whether forwards are marked from now on. An autograd function looks up its forward at each call."""
        self.marks = on
        for function, torchs, ours in self._watched:
            if function.forward is (torchs if on else ours):  # otherwise other code has wrapped it too
                function.forward = staticmethod(ours if on else torchs)

    def noted(self, frame: FrameType) -> str | None:
        """Return the module that is marked in the context of this frame.

        Returns None if the frame's function has no marks, or if this step is not marked: even an access to the context
        takes time.
        """
        if not self.marks or id(frame.f_code) not in self._marked:
            return None
        return getattr(frame.f_locals["ctx"], _MARK, None)

    def of_context(self, ctx: Any, frame: FrameType) -> str:
        """Return the module for which DTensor's autograd function with this context runs.

        Args:
            frame: the first frame of the search if there is no mark.
        """
        mark = getattr(ctx, _MARK, None)
        return self.name(frame, None, 0) if mark is None else mark

    def _mark(self, function: Any, is_on: Callable[[], bool], may_communicate: Callable[[Any, Any], bool]) -> None:
        original = function.forward
        self._marked |= {id(original.__code__), id(function.backward.__code__)}

        @functools.wraps(original)
        def forward(ctx: Any, tensor: Any, mesh: Any, placements: Any, *rest: Any) -> Any:
            # torch.compile evaluates the first condition while it traces, so it traces only the original. Without a
            # gradient there is no backward, and collectives of a forward find their module anyway.
            if (
                not torch.compiler.is_compiling()
                and ctx.needs_input_grad[0]
                and self.marks
                and is_on()
                and may_communicate(tensor, placements)
            ):
                setattr(ctx, _MARK, self._caller())
            return original(ctx, tensor, mesh, placements, *rest)

        function.forward = staticmethod(forward)
        self._watched.append((function, original, forward))

    def name(self, frame: FrameType | None, code: CodeType | None, instruction: int) -> str:
        """Return the module whose forward is on the stack, or was when the forward of this backward ran; "" if there is
        none.

        Args:
            frame: the first frame of the search.
            code, instruction: the user's line. Two models may call the same module.
        """
        call_impl, marked = CALL_IMPL, self._marked
        while frame is not None:
            above = frame.f_code
            if above is call_impl:
                break
            if id(above) in marked and (mark := getattr(frame.f_locals["ctx"], _MARK, None)) is not None:
                return mark
            if above.co_name == "<module>":
                return ""
            frame = frame.f_back
        else:
            return ""
        return self._name(frame, code, instruction)

    def _caller(self) -> str:
        """Return the module in whose forward a DTensor function calls the caller's autograd function.

        Each inspected frame is first created, so the three known frames are skipped.
        """
        try:
            frame: FrameType | None = sys._getframe(4)
        except ValueError:  # in a thread that C++ has started
            return ""
        call_impl = CALL_IMPL
        while frame is not None and (above := frame.f_code) is not call_impl:
            frame = None if above.co_name == "<module>" else frame.f_back
        return "" if frame is None else self._name(frame, None, 0)

    def _name(self, frame: FrameType, code: CodeType | None, instruction: int) -> str:
        """Return the name of a module, given the frame that calls its forward."""
        module = frame.f_locals["self"]
        key = id(module), id(code), instruction
        known = self.found.get(key)
        if known is None or known[0]() is not module:
            known = self.found[key] = weakref.ref(module), self._look_up(module, frame)
        return known[1]

    def _look_up(self, module: torch.nn.Module, frame: FrameType) -> str:
        outermost, above = frame, frame.f_back
        while above is not None and above.f_code.co_name != "<module>":
            if above.f_code is CALL_IMPL:
                outermost = above
            above = above.f_back
        model: torch.nn.Module = outermost.f_locals["self"]
        around = self._names.get(id(model))
        if around is None or around[0]() is not model:
            self.index(model)
        elif (known := self._names.get(id(module))) is None or known[0]() is not module:  # added later
            self.index(model, around[1])
        known = self._names.get(id(module))
        return "" if known is None else known[1]  # not part of the model: other code calls it

    def outermost(self, frame: FrameType | None) -> torch.nn.Module | None:
        """Return the module whose forward is the outermost one on the stack; None if there is none."""
        found: torch.nn.Module | None = None
        while frame is not None and frame.f_code.co_name != "<module>":
            if frame.f_code is CALL_IMPL:
                found = frame.f_locals["self"]
            frame = frame.f_back
        return found

    def names_in(self, group: str) -> list[str]:
        """Return the sorted names of all known modules that have a DTensor as a parameter in this process group.

        Args:
            group: name of the group.
        """
        known = [(reference(), name) for reference, name in list(self._names.values())]
        return sorted({name for module, name in known if module is not None and group in _groups_of(module)})

    def known_name(self, module: torch.nn.Module) -> str:
        """Return the name of a module in the largest known model; "" if none is known."""
        known = self._names.get(id(module))
        return "" if known is None or known[0]() is not module else known[1]

    def index(self, model: torch.nn.Module, name: str = ROOT) -> dict[int, tuple[weakref.ref[torch.nn.Module], str]]:
        """Name the modules of a model. Return the names of all living modules, by id.

        Args:
            name: name of the model itself.
        """
        self._names = {key: known for key, known in self._names.items() if known[0]() is not None}
        self.version += 1
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            self._names[id(model)] = weakref.ref(model), name
            model = cast(torch.nn.Module, model.module)
        start = "" if name == ROOT else f"{name}."
        for key, module in torch.nn.Module.named_modules(model):
            full = _WRAPPERS.sub("", start + key).rstrip(".") or ROOT
            self._names[id(module)] = weakref.ref(module), full
        return self._names


def _groups_of(module: torch.nn.Module) -> set[str]:
    """Return the names of the process groups of a module's own parameters that are DTensors."""
    from torch.distributed.tensor import DTensor

    parameters: list[Any] = list(module._parameters.values())
    meshes = {one.device_mesh for one in parameters if isinstance(one, DTensor)}
    try:
        return {group.group_name for mesh in meshes for group in mesh.get_all_groups()}
    except RuntimeError:  # this process is not in the mesh, or the mesh has no groups
        return set()


def _is_replicated(_: Any, placements: Any) -> bool:
    """Return whether the gradient of a tensor that becomes a DTensor may be partial sums, which its backward
    reduces."""
    return any(placement.is_replicate() for placement in placements)


def _changes(tensor: Any, placements: Any) -> bool:
    """Return whether a redistribution changes the placements."""
    return tensor.placements != placements
