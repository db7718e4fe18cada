"""The library that made a call (user, DDP, FSDP, DTensor), and the line of the user's code that led to it.

Frames are classified by their file, with a cache of files: 0.1 us a frame. (A lookup of the code object in a dict takes
longer, since its hash is computed each time.)
"""

from __future__ import annotations

import bisect
import dis
from sys import _current_frames, _getframe
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.group.modules import CALL_IMPL, ROOT, Modules
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import functools, os

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NN_FUNCTIONAL = os.path.join(_TORCH, "distributed", "nn", "functional.py")
USER = "user"
_NOBODY = "nobody"  # frames of neither the user nor torch: this package and wrappers
_FUNCTIONAL = "functional"
REDUCER = "reducer"  # C++ code in a backward pass, perhaps in an autograd thread
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
MARKED = ("dtensor", _FUNCTIONAL)  # in a backward pass, only marks tell their modules
_TRANSPARENT = ("typing_extensions.py", "contextlib.py")
_KNOW_MODULES = frozenset(("fsdp", "dtensor"))  # some of their frames contain the module
IDENTITY = "_ddp_notebook_identity"  # attribute of FSDP's groups of parameters
_PARAM_GROUP = "_fsdp_param_group.py"  # file of FSDP whose frames contain the module
# Functions that users do not call directly.
_WRAPPERS = frozenset(
    (
        *("wrapper", "_wrapped_call_impl", "_call_impl", "inner", "decorate_context", "nonrecursive_disable_wrapper"),
        *("wait", "<lambda>"),  # the hooks of tensor parallel are lambdas
    )
)
_makers: dict[str, str] = {}  # maker of each file; "" for other files of torch


class CallSite(NamedTuple):
    """Source of an operation. The fields are references, which are described in text later."""

    origin: str
    api: CodeType | None  # torch function that the user's code called
    code: CodeType | None  # code of the user's frame
    instruction: int  # offset in that code
    cell: tuple[CodeType, int] | None  # code and offset of the cell's frame, if it is another frame
    module: str  # module for which FSDP, DTensor or tensor parallel made the call
    identity: int = 0  # object of FSDP that made the call, see `identities`; 0 if unknown


# As in `CallSite`.
SiteFields = tuple[str, CodeType | None, CodeType | None, int, tuple[CodeType, int] | None, str, int]

Line = tuple[int, int, tuple[int, int] | None]  # ids of code objects, since hashing one takes 2 us


def line_of(site: SiteFields) -> Line:
    """Return a key that distinguishes the line of this site from others."""
    cell = site[4]
    return id(site[2]), site[3], None if cell is None else (id(cell[0]), cell[1])


def calls_of(site: SiteFields) -> list[tuple[str, int, str]]:
    """Return file, line and function of the user's call, and of the cell's call that led to it."""
    code, instruction, cell = site[2:5]
    found = [(code, instruction), *([cell] if cell is not None else [])]
    return [(one.co_filename, _line_at(one, offset), one.co_name) for one, offset in found if one is not None]


@functools.lru_cache(1000)
def _line_starts(code: CodeType) -> tuple[list[int], list[int]]:
    found = [(at, line) for at, line in dis.findlinestarts(code) if line is not None]
    return [at for at, _ in found], [line for _, line in found]


def _line_at(code: CodeType, instruction: int) -> int:
    starts, lines = _line_starts(code)
    return lines[max(0, bisect.bisect_right(starts, instruction) - 1)] if lines else code.co_firstlineno


def origin(depth: int = 1) -> str:
    """Return `"user"`, or the name of the torch library that made the call.

    Args:
        depth: number of frames to skip, starting with the caller.
    """
    frame: FrameType | None = _getframe(depth)
    while frame is not None:
        maker = _maker_of(frame)
        if maker and maker is not _NOBODY:
            return maker
        frame = frame.f_back
    return REDUCER


def is_of_nn_functional() -> bool:
    """Return whether `torch.distributed.nn.functional` makes the current call, which users call directly."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and _maker_of(frame) != "torch":
        if frame.f_code.co_filename == _NN_FUNCTIONAL:
            return True
        frame = frame.f_back
    return False


class CallSites:
    """Finder of the call sites of operations.

    Args:
        cells: files of cells.
        modules: names of modules.
    """

    def __init__(self, cells: dict[str, int], modules: Modules) -> None:
        self._modules = modules
        self._cells = cells
        # See `site`. The key is the id of the code, since hashing it takes 2 us. The code is kept so that its id is not
        # reused.
        self._near: dict[int, tuple[int, CodeType]] = {}

    def site(self, depth: int) -> SiteFields:
        """Return the fields of a `CallSite` for the call of the frame `depth` levels above.

        Each frame costs 0.4 us. So the distance is noted when a cell has called a torch function through torch's own
        wrappers only. The next call of that function tries the frame at this distance first, since it probably belongs
        to a cell again.
        """
        try:
            frame: FrameType | None = _getframe(depth)
        except ValueError:  # in a thread that C++ has started
            return REDUCER, None, None, 0, None, "", 0
        assert frame is not None
        first = frame.f_code
        near = self._near.get(id(first))
        if near is not None:
            try:
                user = _getframe(depth + near[0])
            except ValueError:  # in a thread that starts here
                user = frame
            if user.f_code.co_filename in self._cells:
                return USER, first, user.f_code, user.f_lasti, None, "", 0
        makers, wrappers, innermost = _makers, _WRAPPERS, frame
        api: CodeType | None = None
        caller: FrameType | None = None  # the caller of the innermost module's forward
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
                    return USER, api, code, frame.f_lasti, None, "", 0
                return USER, api, code, frame.f_lasti, self._cell_above(frame), "", 0
            if maker is not _NOBODY:
                if maker:
                    return self._through_libraries(frame, maker, api, caller)
                if code is CALL_IMPL and caller is None:
                    caller = frame
                if code.co_name not in wrappers:
                    api = code
            frame = frame.f_back
        return REDUCER, api, None, 0, None, "", 0

    def _note_distance(self, first: FrameType, user: FrameType) -> None:
        """Note the distance from the first frame to that of a cell. It is constant if only torch's wrappers are between
        them."""
        levels, frame = 1, first.f_back
        while frame is not None and frame is not user:
            if frame.f_code.co_name != "wrapper" or not frame.f_code.co_filename.startswith(_TORCH):
                return
            frame, levels = frame.f_back, levels + 1
        self._near[id(first.f_code)] = levels, first.f_code

    def _through_libraries(
        self, frame: FrameType | None, origin: str, api: CodeType | None, caller: FrameType | None
    ) -> SiteFields:
        """Return the fields of a `CallSite` for a call of the parallel libraries of torch or of autograd.

        Args:
            frame: the innermost frame of such a library.
            origin: that library.
            api, caller: from the frames further inside, as in `site`.
        """
        makers, wrappers = _makers, _WRAPPERS
        module, identity = "", 0
        is_in_backward = False  # inside the backward of a module: modules further out are not the right ones
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
                    if origin is _FUNCTIONAL:  # DTensor calls functional collectives
                        origin = maker
                    if not (module or identity) and maker in _KNOW_MODULES:
                        module, identity = self._module_at(frame, maker, caller)
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
        return origin, api, user, instruction, cell, module, identity

    def _module_at(self, frame: FrameType, maker: str, caller: FrameType | None) -> tuple[str, int]:
        """Return the module that a frame of FSDP or DTensor contains, and its identity; "" and 0 if there is none."""
        if maker == "fsdp":
            if not frame.f_code.co_filename.endswith(_PARAM_GROUP):
                return "", 0
            group = frame.f_locals.get("self")
            name = getattr(group, "_module_fqn", None)
            return ROOT if name == "" else name or "", getattr(group, IDENTITY, 0)
        return (caller is None and self._modules.noted(frame)) or "", 0

    def of_thread(self, thread: int) -> SiteFields:
        """Return the call site of a thread that waits for other threads' calls, such as a backward pass of autograd."""
        frame, api = _current_frames().get(thread), None
        while frame is not None:
            code, maker = frame.f_code, _maker_of(frame)
            if maker is USER:
                cell = None if code.co_filename in self._cells else self._cell_above(frame)
                return USER, api, code, frame.f_lasti, cell, "", 0
            if code.co_name not in _WRAPPERS and maker is not _NOBODY:
                api = code
            frame = frame.f_back
        return REDUCER, None, None, 0, None, "", 0

    def line(self, frame: FrameType | None) -> Line:
        """Return the line of the call site of this frame. It is faster than the whole site."""
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
        """Return whether a cell led to the call, in the cell's thread."""
        code, cell = site[2], site[4]
        return cell is not None or (code is not None and code.co_filename in self._cells)

    def _cell_above(self, frame: FrameType) -> tuple[CodeType, int] | None:
        """Return the cell that called this function of a module; None if no cell did."""
        back = frame.f_back
        while back is not None:
            if back.f_code.co_filename in self._cells:
                return back.f_code, back.f_lasti
            back = back.f_back
        return None


def is_of_user(frame: FrameType) -> bool:
    """Return whether a frame runs code of the user, or of a library other than torch."""
    return _maker_of(frame) is USER


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
