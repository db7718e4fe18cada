"""Whose call an operation is (the user's, DDP's, FSDP's, DTensor's), and which line of the user's code has led to it.

Frames are told apart by their files, whose makers are remembered: 0.1 us a frame. (Looking up a code object in a dict
takes longer: its hash is computed each time.)
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from ddp_notebook.rank.cell.where import OURS
from ddp_notebook.rank.group.modules import CALL_IMPL, ROOT, Modules
from ddp_notebook.stdlib import os

_TORCH = os.path.dirname(torch.__file__) + os.sep
USER = "user"
_NOBODY = "nobody"  # frames of neither the user nor torch: ours, and wrappers
_FUNCTIONAL = "functional"
REDUCER = "reducer"  # C++ code below a backward, perhaps in a thread of autograd
_MAKERS = {
    "nn/parallel/": "ddp",
    "distributed/fsdp/": "fsdp",
    "distributed/_composable/": "fsdp",
    "distributed/tensor/": "dtensor",
    "distributed/_functional_collectives.py": _FUNCTIONAL,
    "distributed/pipelining/": "pipeline",
    "distributed/optim/": "optimizer",
    "distributed/checkpoint/": "checkpoint",
    "distributed/algorithms/ddp_comm_hooks/": "ddp hook",
    "distributed/algorithms/": "ddp",
    "autograd/graph.py": REDUCER,  # without another frame it calls C++
    "autograd/": "torch",
}
_FOR_MODULES = frozenset(("fsdp", "dtensor", _FUNCTIONAL))
MARKED = ("dtensor", _FUNCTIONAL)  # whose modules are known in a backward by marks only
_TRANSPARENT = ("typing_extensions.py", "contextlib.py")
_PARAM_GROUP = "_fsdp_param_group.py"  # FSDP's: it knows its module
# Functions that users do not call themselves.
_WRAPPERS = frozenset(
    (
        *("wrapper", "_wrapped_call_impl", "_call_impl", "inner", "decorate_context", "nonrecursive_disable_wrapper"),
        *("wait", "<lambda>"),  # the hooks of tensor parallel are such
    )
)
_known: dict[str, str] = {}  # by file; "": a file of torch that has no maker in `_MAKERS`


class Site(NamedTuple):
    """Where an operation comes from: references, from which words are made later."""

    origin: str
    api: CodeType | None  # torch's function that the user's code has called
    code: CodeType | None  # of the user's frame
    instruction: int  # in that code
    cell: tuple[CodeType, int] | None  # code and instruction of the cell's frame, if that is another one
    module: str  # that FSDP, DTensor or tensor parallel has called for


SiteFields = tuple[str, CodeType | None, CodeType | None, int, tuple[CodeType, int] | None, str]  # of a `Site`

Line = tuple[int, int, tuple[int, int] | None]  # by ids of code objects, since hashing one takes 2 us


def line_of(site: SiteFields) -> Line:
    """What tells one line of the user's from another."""
    cell = site[4]
    return id(site[2]), site[3], None if cell is None else (id(cell[0]), cell[1])


def origin(depth: int = 1) -> str:
    """`"user"`, or who in torch has called.

    Args:
        depth: frames to skip, from the caller's on.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        maker = _maker_of(frame)
        if maker and maker is not _NOBODY:
            return maker
        frame = frame.f_back
    return REDUCER


class _Library:
    """The part of a call's stack that belongs to torch's parallel libraries (DDP, FSDP, DTensor, autograd).

    Args:
        modules: knows their names.
    """

    __slots__ = ("_modules", "is_in_backward", "module", "origin")

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self.origin = ""
        self.module = ""  # that the call is for
        self.is_in_backward = False  # of that module: one further out is not the one that the call is for

    def add(self, maker: str, frame: FrameType, caller: FrameType | None) -> None:
        """Take the next frame, from the innermost one outwards.

        Args:
            maker: the library.
            caller: the frame further inside that has called a module's forward.
        """
        if not self.origin or (self.origin is _FUNCTIONAL and maker is not REDUCER):  # DTensor calls those
            self.origin = maker
        if maker is REDUCER:
            self.is_in_backward = self.is_in_backward or caller is None
        elif self.module:
            return
        elif maker == "fsdp" and frame.f_code.co_filename.endswith(_PARAM_GROUP):
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            self.module = ROOT if name == "" else name or ""
        elif maker == "dtensor" and caller is None:
            self.module = self._modules.noted(frame) or ""


class Sites:
    """Where calls come from.

    Args:
        cells: the files of cells.
        modules: knows their names.
    """

    def __init__(self, cells: dict[str, int], modules: Modules) -> None:
        self._modules = modules
        self._cells = cells
        # See `site`. By the id of the code, since hashing it takes 2 us; the code is kept so that its id stays its own.
        self._near: dict[int, tuple[int, CodeType]] = {}

    def site(self, depth: int) -> SiteFields:
        """The fields of a `Site`: where the call of the frame `depth` levels above comes from.

        Each frame costs 0.4 us. So once a cell has called a function of torch, past the wrappers that torch defines it
        with, the frame at that distance is tried first: it is probably a cell's again.
        """
        try:
            frame: FrameType | None = sys._getframe(depth)
        except ValueError:  # in a thread that C++ has started
            return REDUCER, None, None, 0, None, ""
        assert frame is not None
        first, levels = frame.f_code, 0
        near = self._near.get(id(first))
        if near is not None:
            try:
                user = sys._getframe(depth + near[0])
            except ValueError:  # in a thread that begins here
                user = frame
            if user.f_code.co_filename in self._cells:
                return USER, first, user.f_code, user.f_lasti, None, ""
        known, wrappers = _known, _WRAPPERS
        api: CodeType | None = None
        is_always_so = True  # the frames between the first one and the user's
        caller: FrameType | None = None  # that has called the innermost module's forward
        inside: _Library | None = None  # torch's parallel libraries that the call went through
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            maker = known.get(file)
            if maker is None:
                maker = known[file] = _maker(file)
            if maker is USER:
                if is_always_so and api is first and inside is None and file in self._cells:
                    self._near[id(first)] = levels, first
                return self._of_user(frame, api, caller, inside)
            if maker and maker is not _NOBODY:
                if inside is None:
                    inside = _Library(self._modules)
                inside.add(maker, frame, caller)
            elif code is CALL_IMPL and caller is None:
                caller = frame
            if code.co_name not in wrappers and maker is not _NOBODY:
                api = code
            if levels and not (code.co_name == "wrapper" and file.startswith(_TORCH)):
                is_always_so = False
            frame, levels = frame.f_back, levels + 1
        if inside is None:
            return REDUCER, api, None, 0, None, ""
        if not inside.module and inside.origin in _FOR_MODULES:
            inside.module = self._modules.name(caller, None, 0)
        return inside.origin, api, None, 0, None, inside.module

    def _of_user(
        self, frame: FrameType, api: CodeType | None, caller: FrameType | None, inside: _Library | None
    ) -> SiteFields:
        """The fields of a `Site` whose line is that of the user's frame. The rest as in `site`."""
        code, instruction = frame.f_code, frame.f_lasti
        cell = None if code.co_filename in self._cells else self._cell_above(frame)
        if inside is None:
            return USER, api, code, instruction, cell, ""
        if not inside.module and inside.origin in _FOR_MODULES and not inside.is_in_backward:
            inside.module = self._modules.name(caller or frame, code, instruction)
        return inside.origin, api, code, instruction, cell, inside.module

    def of_thread(self, thread: int) -> SiteFields:
        """Where a thread is that waits for what others call, such as autograd's backward."""
        frame, api = sys._current_frames().get(thread), None
        while frame is not None:
            code, maker = frame.f_code, _maker_of(frame)
            if maker is USER:
                cell = None if code.co_filename in self._cells else self._cell_above(frame)
                return USER, api, code, frame.f_lasti, cell, ""
            if code.co_name not in _WRAPPERS and maker is not _NOBODY:
                api = code
            frame = frame.f_back
        return REDUCER, None, None, 0, None, ""

    def line(self, frame: FrameType | None) -> Line:
        """The line of the site of this frame, for less than the site."""
        known = _known
        while frame is not None:
            code = frame.f_code
            maker = known.get(code.co_filename)
            if maker is None:
                maker = _maker_of(frame)
            if maker is USER:
                cell = None if code.co_filename in self._cells else self._cell_above(frame)
                return id(code), frame.f_lasti, None if cell is None else (id(cell[0]), cell[1])
            frame = frame.f_back
        return id(None), 0, None

    def is_of_cell(self, site: SiteFields) -> bool:
        """Whether a cell has led to it, in its own thread."""
        code, cell = site[2], site[4]
        return cell is not None or (code is not None and code.co_filename in self._cells)

    def _cell_above(self, frame: FrameType) -> tuple[CodeType, int] | None:
        """The cell that has called a module's function, if one has."""
        back = frame.f_back
        while back is not None:
            if back.f_code.co_filename in self._cells:
                return back.f_code, back.f_lasti
            back = back.f_back
        return None


def _maker_of(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    maker = _known.get(file)
    if maker is None:
        maker = _known[file] = _maker(file)
    return maker


def _maker(file: str) -> str:
    if file.startswith(OURS):
        return _NOBODY
    if not file.startswith(_TORCH):
        return _NOBODY if file.endswith(_TRANSPARENT) else USER
    inside = file[len(_TORCH) :]
    return next((maker for start, maker in _MAKERS.items() if inside.startswith(start)), "")
