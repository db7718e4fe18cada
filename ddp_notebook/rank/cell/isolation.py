"""Isolate a rank from its cells: reject unsupported operations, and clean up after a cell."""

from __future__ import annotations

import atexit
import inspect
import pdb
import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import islice
from types import TracebackType
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.cell.exceptions import chain
from ddp_notebook.rank.imports import after_import
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, functools, os, resource, traceback, weakref

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_formatted: weakref.WeakSet[Any] = weakref.WeakSet()  # IPython's objects for frames of tracebacks
_of_cells: list[tuple[Callable[..., Any], Callable[[], Any]]] = []  # (function, call) of each handler
_unregister: Callable[[Any], None] = atexit.unregister


def protect_exits() -> None:
    """Hide the handlers registered so far from cells. They run at process exit, after the handlers of cells.

    Call it before the first cell.
    """
    atexit.register(_run_those_of_cells)
    atexit.register = _register
    atexit.unregister = _unregister_of_cells
    atexit._run_exitfuncs = _run_those_of_cells
    atexit._clear = _of_cells.clear
    atexit._ncallbacks = lambda: len(_of_cells)


@functools.wraps(cast(Any, atexit.register))
def _register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError("the first argument must be callable")
    _of_cells.append((func, functools.partial(func, *args, **kwargs)))
    return func


@functools.wraps(atexit.unregister)
def _unregister_of_cells(func: Any, /) -> None:
    _of_cells[:] = [one for one in _of_cells if one[0] != func]
    _unregister(func)  # a library imported before the first cell may have registered it


def _run_those_of_cells() -> None:
    """Run the handlers of cells, the last one first, and print their exceptions."""
    while _of_cells:
        _, call = _of_cells.pop()
        try:
            call()
        except BaseException:  # like `atexit`: continue with the next handler
            traceback.print_exc()


NOTEBOOK_MAGICS = {  # a test compares them with `magics.DDPMagics`, which ranks do not import
    "line": (
        *("ddp_start", "ddp_status", "ddp_restart", "ddp_stop", "ddp_interrupt", "ddp_heal", "ddp_check", "ddp_auto"),
        *("ddp_pull", "ddp_push", "ddp_record", "ddp_report", "ddp_monitor", "ddp_trace", "ddp_forecast", "ddp_nan"),
        *("ddp_verify", "ddp_debug", "on_all_ranks"),
        *("ddp_sync", "ddp_fetch", "ddp_attach", "ddp_jobs", "ddp_wait", "ddp_cancel", "ddp_resize", "ddp_fault"),
        *("ddp_memory", "ddp_peek", "ddp_whos", "ddp_diff", "ddp_torchrun", "ddp_help"),
    ),
    "cell": ("on_all_ranks", "on_ranks", "local", "ddp_twice"),
}
_TORCH = os.path.dirname(torch.__file__) + os.sep
TOLD = "_ddp_told"  # name that internal cells set, see `Session._ask`
_LEAST_FILES = 3
_MOST_LOOKED_AT = 100  # maximum number of checked elements of a container
_HOLDERS = torch.Tensor | torch.nn.Module | torch.optim.Optimizer
_COMMAND_LINES = ("argparse", "click", "optparse")  # these modules end the process if the command line is wrong
ARGUMENTS = (
    "a rank has no command line: set sys.argv = ['train.py', '--epochs', '3'] first, or pass the arguments as a "
    "list to parse_args()"
)
HYDRA = (
    "hydra ends the process when its program fails, and logs the reason above. A cell has no file, so config_path "
    "must be an absolute path"
)
_INSTEAD = (
    "Print the values, raise an error at this line, or inspect a variable after the cell: %on_all_ranks x, or "
    "%ddp_pull x in the notebook"
)
SCRIPT_ARGUMENTS = "the script rejected its arguments: pass them after its name, as in %run train.py --epochs 3"
SCRIPT_EXIT = "the script exited with this status; its rank continues"
INTERACTION = pdb.Pdb.interaction  # opens the prompt of a debugger
EXIT = "sys.exit() does not end a rank; %ddp_stop in the notebook ends them all"


def install(shell: Any) -> None:
    """Make `exit()`, `quit()`, `breakpoint()` and debuggers raise an error with a remedy."""
    after_import("stack_data", _note_formatted_frames)  # IPython 7 does not use it
    shell.ask_exit = _refuse_exit
    sys.breakpointhook = pdb.set_trace = _refuse_breakpoint
    limits = sys.modules["resource"]
    for name, has_pid in (("setrlimit", False), ("prlimit", True)):
        if hasattr(limits, name):  # `prlimit` exists on Linux only
            setattr(limits, name, _with_enough_files(getattr(limits, name), has_pid=has_pid))
    dist.breakpoint = _refuse_distributed_breakpoint  # the version of torch increases the timeouts of all groups
    pdb.Pdb.interaction = _refuse_debugger  # type: ignore[method-assign]
    for name, kind in (("debug", "line_cell"), ("pdb", "line")):
        shell.register_magic_function(_refuse_debugger, kind, name)
    for name in NOTEBOOK_MAGICS["line"]:
        shell.register_magic_function(_refuse_line_magic(name), "line", name)
    for name in NOTEBOOK_MAGICS["cell"]:
        shell.register_magic_function(_refuse_cell_magic(name), "cell", name)
    # Warning of torch for a group without a bound device, see `rank.group.join`. The current device is correct.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    # Advice of IPython after sys.exit(), which does not apply to a rank.
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")


def _with_enough_files(set_limit: Callable[..., Any], *, has_pid: bool) -> Callable[..., Any]:
    """Return `resource.setrlimit` or `prlimit` that refuses a limit at which ZeroMQ ends the process."""

    @functools.wraps(set_limit)
    def checked(*args: Any) -> Any:
        of_this = args[has_pid:] if not has_pid or args[:1] in ((0,), (os.getpid(),)) else ()
        if of_this[:1] == (resource.RLIMIT_NOFILE,) and len(of_this) == 2 and 0 <= of_this[1][0] < _LEAST_FILES:
            raise ValueError(
                f"RLIMIT_NOFILE must be at least {_LEAST_FILES} on a rank, got {of_this[1][0]}: below that, ZeroMQ "
                "cannot poll its sockets and ends the process"
            )
        return set_limit(*args)

    return checked


def advice_after_exit(error: SystemExit, *, is_of_script: bool) -> str:
    """Return a remedy for `sys.exit()`, or for the missing command line of a cell.

    Args:
        error: exception raised by code of the cell.
        is_of_script: whether a script under `%run` raised it.
    """
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    raised_in = "" if at is None else str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    if is_of_script:
        return SCRIPT_ARGUMENTS if raised_in in _COMMAND_LINES else SCRIPT_EXIT
    if raised_in == "hydra":
        return HYDRA
    return ARGUMENTS if raised_in in _COMMAND_LINES else EXIT


def _refuse_exit() -> NoReturn:
    raise RuntimeError("exit() and quit() do not end a rank; %ddp_stop in the notebook ends them all")


def _refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"breakpoint() would stop this rank while the others wait for it. {_INSTEAD}")


def _refuse_distributed_breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> NoReturn:
    raise RuntimeError(f"dist.breakpoint() would stop rank {rank} while the others wait for it. {_INSTEAD}")


def _refuse_debugger(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a debugger cannot run on a rank: the other ranks would wait, and a failed cell keeps no frames. "
        f"{_INSTEAD}. (%%local runs a cell in the notebook.)"
    )


def _refuse_line_magic(name: str) -> Callable[[str], NoReturn]:
    def refuse(_: str) -> NoReturn:
        raise RuntimeError(
            f"%{name} runs in the notebook, but this cell runs on a rank: move it to a separate cell, or use %%local"
        )

    return refuse


def _refuse_cell_magic(name: str) -> Callable[[str, str], NoReturn]:
    def refuse(_: str, __: str) -> NoReturn:
        raise RuntimeError(
            f"%%{name} runs in the notebook, but this cell runs on a rank: make it the first line of a cell"
        )

    return refuse


def put_names_back(namespace: dict[str, Any], names: dict[str, Any]) -> None:
    """Restore deleted variables of the rank, and changed integers such as `rank`.

    Tutorials contain `for rank in range(size)`, after which every rank would take itself for the last one.
    """
    if all(namespace.get(name) is value for name, value in names.items()):
        return
    deleted = [name for name in names if name not in namespace]
    changed = [
        name
        for name, value in names.items()
        if type(value) is int and name in namespace and (type(now := namespace[name]) is not int or now != value)
    ]
    for did, which in (("set", changed), ("deleted", deleted)):
        if which:
            namespace.update({name: names[name] for name in which})
            advice = "; use another name to keep one" if did == "set" else ""
            print(
                f"ddp_notebook: this cell has {did} {' and '.join(which)}, but each cell starts with the rank's own "
                f"value{advice}",
                file=sys.stderr,
            )


def end_traceback_at_user(error: BaseException | None) -> None:
    """Remove internal frames from a traceback.

    If our code raised the error, the frames of torch and of this package below the user's call are removed. Frames of
    this package that only observe user code are always removed.
    """
    if error is None:
        return
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at)
        while (after := at.tb_next) is not None and after.tb_next is not None and _is_ours(after):
            at.tb_next = after.tb_next  # it observes a forward, backward or loader of the user
        at = at.tb_next
    if not frames or not frames[-1].tb_frame.f_code.co_filename.startswith(OURS):
        return
    while len(frames) > 1 and frames[-1].tb_frame.f_code.co_filename.startswith((OURS, _TORCH)):
        frames.pop()
    if not frames[-1].tb_frame.f_code.co_filename.startswith(OURS):
        frames[-1].tb_next = None


def _is_ours(at: TracebackType) -> bool:
    code = at.tb_frame.f_code
    return code.co_filename.startswith(OURS) or TOLD in code.co_names  # an internal cell that calls user code


def has_lost_device(words: str) -> bool:
    """Return whether a GPU error has corrupted this process's CUDA context. Then every later call fails.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#error-checking

    Args:
        words: message of the error. The device is checked only for CUDA errors, because the check waits for the device.
    """
    if "CUDA error" not in words or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def forget_failure(shell: Any, failure: BaseException, *, clears: bool = True) -> None:
    """Release the frames of a failed cell, because their variables may hold all GPU memory.

    The exceptions, `sys.last_*` and IPython's formatters refer to the frames, and so do formatter objects in reference
    cycles. These objects are cleared first. Otherwise the garbage collector may free a DataLoader after its queues are
    closed, and the DataLoader would wait 5 s for each worker. The caller collects garbage later.

    Args:
        clears: drop the variables of the frames. Otherwise a feature keeps them, and calls `clear_frames` later.
    """
    for formatted in list(_formatted):
        vars(formatted).clear()
    for error in chain(failure):
        if clears:
            clear_frames(error.__traceback__)
        BaseException.with_traceback(error, None)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    for formatter in (shell.InteractiveTB, shell.SyntaxTB):
        if hasattr(formatter, "tb"):
            formatter.tb = None


def clear_frames(at: TracebackType | None) -> None:
    """Drop the variables of the functions in a traceback. A generator may go on, so its frame is not changed."""
    while at is not None:
        if not at.tb_frame.f_code.co_flags & _SUSPENDABLE:
            with contextlib.suppress(RuntimeError):  # the frame is executing: it belongs to this package
                at.tb_frame.clear()
        at = at.tb_next


def _note_formatted_frames() -> None:
    """Keep track of IPython's objects for formatted frames. A search through all objects would take seconds."""
    stack_data = sys.modules["stack_data"]
    original = stack_data.FrameInfo.__init__

    @functools.wraps(original)
    def __init__(formatted: Any, *args: Any, **named: Any) -> None:
        _formatted.add(formatted)
        original(formatted, *args, **named)

    stack_data.FrameInfo.__init__ = __init__


def forget_tensors(shell: Any, execution_count: int) -> None:
    """Drop tensors from `Out`, `_3`, `__` and `___`. `_` keeps the last value."""
    out, hook = shell.user_ns.get("_oh"), shell.displayhook
    if type(out) is dict and execution_count in out and _holds_tensor(out[execution_count]):
        del out[execution_count]
        for names in (shell.user_ns, shell.user_ns_hidden):
            names.pop(f"_{execution_count}", None)
    for name in ("__", "___"):
        if _holds_tensor(getattr(hook, name, None)):
            if shell.user_ns.get(name) is getattr(hook, name):  # otherwise it is a variable of the user
                shell.push({name: ""}, interactive=False)
            setattr(hook, name, "")


def _holds_tensor(value: Any, depth: int = 3) -> bool:
    """Return whether a value is or contains a tensor. Calls no method of a user-defined class, because it may fail."""
    kind = type(value)
    if kind is str:  # the usual case
        return False
    if issubclass(kind, _HOLDERS):
        return True
    if depth == 0:
        return False
    parts: Iterable[Any] = ()
    if issubclass(kind, dict):
        parts = list(islice(dict.values(value), _MOST_LOOKED_AT))
    elif (container := next((one for one in (list, tuple, set) if issubclass(kind, one)), None)) is not None:
        parts = list(islice(container.__iter__(value), _MOST_LOOKED_AT))
    return any(_holds_tensor(part, depth - 1) for part in parts)
