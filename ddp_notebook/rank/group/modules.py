"""Which module a collective is made for: FSDP tells it by itself, DTensor and tensor parallel do not.

A forward has `Module._call_impl` on the stack, whose innermost one is the module and outermost one the model. A
backward has neither. So the contexts of DTensor's own autograd functions are marked with the module in a forward where
their backward may communicate, and both find the mark. In most steps of a long training loop torch's functions are put
back, since already to pass through ours takes time; `rank.group.sequences` names the backwards of such steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, cast

import torch

from ddp_notebook.stdlib import functools, re, weakref

ROOT = "(root)"
CALL_IMPL = torch.nn.Module._call_impl.__code__  # of a module whose forward is on the stack
_MARK = "_ddp_notebook_module"  # of an autograd function's context
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


class Modules:
    """Names of modules, worked out once for each module and line of a cell.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        >>> Modules().index(model)[id(model[0])][1]
        '0'
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}  # by id, in the largest model seen
        self.found: dict[tuple[int, int, int], tuple[weakref.ref[torch.nn.Module], str]] = {}  # see `name`
        self._marked: set[int] = set()  # ids of codes whose `ctx` may have a mark; they live as long as torch
        self._watched: list[tuple[Any, Any, Any]] = []  # autograd functions, their own forward and the one that marks
        self.marks = True  # forwards are marked

    def watch(self, is_on: Callable[[], bool]) -> None:
        """Mark what DTensor's autograd functions do in a forward.

        Args:
            is_on: whether somebody asks for names now.

        Raises:
            ImportError, AttributeError: this torch has no such functions.
        """
        from torch.distributed.tensor._api import _FromTorchTensor
        from torch.distributed.tensor._redistribute import Redistribute

        self._mark(_FromTorchTensor, is_on, _is_replicated)
        self._mark(Redistribute, is_on, _changes)

    def mark(self, on: bool) -> None:
        """Whether forwards are marked from now on. An autograd function looks for its forward at each call."""
        self.marks = on
        for function, torchs, ours in self._watched:
            if function.forward is (torchs if on else ours):  # else somebody has wrapped it too
                function.forward = staticmethod(ours if on else torchs)

    def noted(self, frame: FrameType) -> str | None:
        """The module that was marked in this frame's context; None if it is no frame of a function with marks, or this
        is no step with marks: already to look at the context takes time."""
        if not self.marks or id(frame.f_code) not in self._marked:
            return None
        return getattr(frame.f_locals["ctx"], _MARK, None)

    def of_context(self, ctx: Any, frame: FrameType) -> str:
        """The module for which DTensor's autograd function of this context runs.

        Args:
            frame: the innermost one to look at, if there is no mark.
        """
        mark = getattr(ctx, _MARK, None)
        return self.name(frame, None, 0) if mark is None else mark

    def _mark(self, function: Any, is_on: Callable[[], bool], may_communicate: Callable[[Any, Any], bool]) -> None:
        original = function.forward
        self._marked |= {id(original.__code__), id(function.backward.__code__)}

        @functools.wraps(original)
        def forward(ctx: Any, tensor: Any, mesh: Any, placements: Any, *rest: Any) -> Any:
            # torch.compile knows the first of these while it traces, and so traces nothing but the original.
            # Without a gradient there will be no backward, and a forward's own collectives find their module anyway.
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
        """The module whose forward is on the stack, or was when this backward's forward ran; "" if there is none.

        Args:
            frame: the innermost one to look at.
            code, instruction: the user's line. The same module may be called by two models.
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
        """The module in whose forward DTensor's function runs that has an autograd function call our caller. Each frame
        that is looked at is made for it first, so the three that are known are passed over."""
        try:
            frame: FrameType | None = sys._getframe(4)
        except ValueError:  # in a thread that C++ has started
            return ""
        call_impl = CALL_IMPL
        while frame is not None and (above := frame.f_code) is not call_impl:
            frame = None if above.co_name == "<module>" else frame.f_back
        return "" if frame is None else self._name(frame, None, 0)

    def _name(self, frame: FrameType, code: CodeType | None, instruction: int) -> str:
        """The name of a module, by the frame that calls its forward."""
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
        elif (known := self._names.get(id(module))) is None or known[0]() is not module:  # added since
            self.index(model, around[1])
        known = self._names.get(id(module))
        return "" if known is None else known[1]  # not of the model: somebody calls it besides

    def index(self, model: torch.nn.Module, name: str = ROOT) -> dict[int, tuple[weakref.ref[torch.nn.Module], str]]:
        """Give a model's modules their names. Returns the names of all that live, by id.

        Args:
            name: the model's own.
        """
        self._names = {key: known for key, known in self._names.items() if known[0]() is not None}
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            self._names[id(model)] = weakref.ref(model), name
            model = cast(torch.nn.Module, model.module)
        start = "" if name == ROOT else f"{name}."
        for key, module in torch.nn.Module.named_modules(model):
            full = _WRAPPERS.sub("", start + key).rstrip(".") or ROOT
            self._names[id(module)] = weakref.ref(module), full
        return self._names


def _is_replicated(_: Any, placements: Any) -> bool:
    """Whether the gradient of a tensor that becomes a DTensor may be partial sums, which its backward adds up."""
    return any(placement.is_replicate() for placement in placements)


def _changes(tensor: Any, placements: Any) -> bool:
    """Whether a redistribution has something to do."""
    return tensor.placements != placements
