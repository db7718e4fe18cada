"""Whose call an operation is (the user's, DDP's, FSDP's, DTensor's), and which line of the user's code has led to it.

Frames are told apart by their files, whose makers are remembered: 0.1 us a frame. (Looking up a code object in a dict
takes longer: its hash is computed each time.)
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from ddp_notebook.rank.cell.current_line import OURS
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
_KNOW_MODULES = frozenset(("fsdp", "dtensor"))  # some of their frames know their module
_PARAM_GROUP = "_fsdp_param_group.py"  # FSDP's: it knows its module
# Functions that users do not call themselves.
_WRAPPERS = frozenset(
    (
        *("wrapper", "_wrapped_call_impl", "_call_impl", "inner", "decorate_context", "nonrecursive_disable_wrapper"),
        *("wait", "<lambda>"),  # the hooks of tensor parallel are such
    )
)
_makers: dict[str, str] = {}  # by file; "": a file of torch that has no maker in `_MAKERS`


class CallSite(NamedTuple):
    """Where an operation comes from: references, from which words are made later."""

    origin: str
    api: CodeType | None  # torch's function that the user's code has called
    code: CodeType | None  # of the user's frame
    instruction: int  # in that code
    cell: tuple[CodeType, int] | None  # code and instruction of the cell's frame, if that is another one
    module: str  # that FSDP, DTensor or tensor parallel has called for


SiteFields = tuple[str, CodeType | None, CodeType | None, int, tuple[CodeType, int] | None, str]  # of a `CallSite`

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


class CallSites:
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
        """The fields of a `CallSite`: where the call of the frame `depth` levels above comes from.

        Each frame costs 0.4 us. So once a cell has called a function of torch, past the wrappers that torch defines it
        with, the frame at that distance is tried first: it is probably a cell's again.
        """
        try:
            frame: FrameType | None = sys._getframe(depth)
        except ValueError:  # in a thread that C++ has started
            return REDUCER, None, None, 0, None, ""
        assert frame is not None
        first = frame.f_code
        near = self._near.get(id(first))
        if near is not None:
            try:
                user = sys._getframe(depth + near[0])
            except ValueError:  # in a thread that begins here
                user = frame
            if user.f_code.co_filename in self._cells:
                return USER, first, user.f_code, user.f_lasti, None, ""
        makers, wrappers, innermost = _makers, _WRAPPERS, frame
        api: CodeType | None = None
        caller: FrameType | None = None  # that has called the innermost module's forward
        while frame is not None:
            code = frame.f_code
            try:
                maker = makers[code.co_filename]
            except KeyError:
                maker = _maker_of(frame)
            if maker is USER:
                if code.co_filename in self._cells:
                    if api is first:
                        self._note_distance(innermost, frame)
                    return USER, api, code, frame.f_lasti, None, ""
                return USER, api, code, frame.f_lasti, self._cell_above(frame), ""
            if maker is not _NOBODY:
                if maker:
                    return self._through_libraries(frame, maker, api, caller)
                if code is CALL_IMPL and caller is None:
                    caller = frame
                if code.co_name not in wrappers:
                    api = code
            frame = frame.f_back
        return REDUCER, api, None, 0, None, ""

    def _note_distance(self, first: FrameType, user: FrameType) -> None:
        """Note the distance between the first frame and that of a cell, if there are only wrappers of torch's between
        them: then it is always the same."""
        levels, frame = 1, first.f_back
        while frame is not None and frame is not user:
            if frame.f_code.co_name != "wrapper" or not frame.f_code.co_filename.startswith(_TORCH):
                return
            frame, levels = frame.f_back, levels + 1
        self._near[id(first.f_code)] = levels, first.f_code

    def _through_libraries(
        self, frame: FrameType | None, origin: str, api: CodeType | None, caller: FrameType | None
    ) -> SiteFields:
        """The fields of a `CallSite` for a call that comes from torch's parallel libraries or from autograd.

        Args:
            frame: the innermost one of such a library.
            origin: that library.
            api, caller: of the frames further inside, as in `site`.
        """
        makers, wrappers = _makers, _WRAPPERS
        module = ""
        is_in_backward = False  # of a module: one further out is not the one that the call is for
        while frame is not None:
            code = frame.f_code
            try:
                maker = makers[code.co_filename]
            except KeyError:
                maker = _maker_of(frame)
            if maker is USER:
                break
            if maker is not _NOBODY:
                if not maker:
                    if code is CALL_IMPL and caller is None:
                        caller = frame
                elif maker is REDUCER:
                    is_in_backward |= caller is None
                else:
                    if origin is _FUNCTIONAL:  # DTensor calls those
                        origin = maker
                    if not module and maker in _KNOW_MODULES:
                        module = self._module_at(frame, maker, caller)
                if code.co_name not in wrappers:
                    api = code
            frame = frame.f_back
        if frame is None:
            user, instruction, cell, is_in_backward = None, 0, None, False
        else:
            user, instruction = frame.f_code, frame.f_lasti
            cell = None if user.co_filename in self._cells else self._cell_above(frame)
        if not module and origin in _FOR_MODULES and not is_in_backward:
            module = self._modules.name(caller or frame, user, instruction)
        return origin, api, user, instruction, cell, module

    def _module_at(self, frame: FrameType, maker: str, caller: FrameType | None) -> str:
        """The module that a frame of FSDP or DTensor knows; "": none."""
        if maker == "fsdp":
            if not frame.f_code.co_filename.endswith(_PARAM_GROUP):
                return ""
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            return ROOT if name == "" else name or ""
        return (caller is None and self._modules.noted(frame)) or ""

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
        makers = _makers
        while frame is not None:
            code = frame.f_code
            try:
                maker = makers[code.co_filename]
            except KeyError:
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
    maker = _makers.get(file)
    if maker is None:
        maker = _makers[file] = _maker(file)
    return maker


def _maker(file: str) -> str:
    if file.startswith(OURS):
        return _NOBODY
    if not file.startswith(_TORCH):
        return _NOBODY if file.endswith(_TRANSPARENT) else USER
    inside = file[len(_TORCH) :]
    return next((maker for start, maker in _MAKERS.items() if inside.startswith(start)), "")
