"""Add a hint below the traceback of a plain cell that failed because it was meant for the ranks.

The notebook has neither a rank's variables nor a process group, and errors of torch do not mention ranks. IPython does
not suggest a similar magic for an unknown one. A script that `%run` runs in the notebook fails in the same way, because
its environment has no RANK.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
import shlex
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.records.words import IMPORTED_MODULES, LOG_FUNCTION, OF_EACH_RANK, RANK_VARIABLES
from ddp_notebook.run.cells.cell_options import parse_line

_ATTRIBUTE = "_ddp_notebook_forgotten"
_SEND = ("on_all_ranks", "on_ranks")
_RUN_SCRIPT = re.compile(r"^\s*%?run\s+(.+)$", re.MULTILINE)  # IPython adds the % if automagic is on
_RUN = ("time", "capture")  # magics that run their code in the process of the cell
_OURS = ("ddp_", "on_")
_NO_MAGIC = re.compile(r"magic.* `(%%?)(\S+)` not found\.$")  # message of IPython
_NO_GROUP = "Default process group has not been initialized"  # message of torch
_NOT_SET = re.compile(rf"environment variable ({'|'.join(OF_EACH_RANK)}) expected, but not set")  # message of torch


def watch(shell: Any, ranks_are_there: Callable[[], bool]) -> None:
    """Add hints to cells that fail in the notebook from now on.

    Args:
        shell: the IPython shell.
        ranks_are_there: returns whether there is a session.
    """
    unwatch(shell)
    earlier: list[BaseException | None] = []  # last error before each running cell; a cell may run another one

    def begin(_: Any) -> None:
        earlier.append(getattr(sys, "last_value", None))

    def look(result: Any) -> None:
        before = earlier.pop() if earlier else None
        # Code without history is not a user's cell, or is the inner cell of %%local and --here.
        if result is None or not result.info.store_history:
            return
        if (error := result.error_in_exec) is not None:
            hint = meant_by(error, shell.magics_manager.magics)
            if not hint and ranks_are_there():
                hint = hint_for(error, shell.history_manager.input_hist_parsed, shell.user_ns)
        else:  # %run shows the error of its script, and does not fail
            error = getattr(sys, "last_value", None)
            hint = "" if error is None or error is before else hint_for_script(error, result.info.raw_cell)
        if hint:
            print(hint, file=sys.stderr)

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", look)
    setattr(shell, _ATTRIBUTE, {"pre_run_cell": begin, "post_run_cell": look})


def unwatch(shell: Any) -> None:
    """Stop adding hints."""
    for event, callback in getattr(shell, _ATTRIBUTE, {}).items():
        shell.events.unregister(event, callback)
    if hasattr(shell, _ATTRIBUTE):
        delattr(shell, _ATTRIBUTE)


def meant_by(error: BaseException, magics: Mapping[str, Iterable[str]]) -> str:
    """Return a suggestion of a similar magic of this package for an unknown magic.

    Args:
        error: the error of IPython.
        magics: names of all magics, for lines ("line") and cells ("cell").

    Example:
        >>> meant_by(UsageError("Cell magic `%%on_all_rank` not found."), {"cell": ["on_all_ranks"], "line": []})
        'did you mean %%on_all_ranks?'
    """
    found = _NO_MAGIC.search(str(error)) if isinstance(error, UsageError) else None
    if found is None:
        return ""
    sign, name = found.groups()
    if sign == "%%" and name in magics["cell"]:
        return f"%%{name} must be the first line of its cell"
    ours = [one for one in magics["line" if sign == "%" else "cell"] if one.startswith(_OURS)]
    close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
    return f"did you mean {sign}{close[0]}?" if close else ""


def hint_for(error: BaseException, cells: list[str], variables: dict[str, Any]) -> str:
    """Return a hint about a failed cell that was meant for the ranks.

    Args:
        error: the error of the cell.
        cells: cells of the notebook, as transformed by IPython.
        variables: variables of the user.

    Example:
        >>> try:
        ...     rank
        ... except NameError as error:
        ...     print(hint_for(error, [], globals()))
        `rank` exists on the ranks only: put %%on_all_ranks above the cell
    """
    if type(error) in (ValueError, RuntimeError) and _NO_GROUP in str(error):
        return "the notebook is not in the process group of its ranks: put %%on_all_ranks above the cell"
    if name := _missing_variable(error):
        return f"{name} is set on ranks only: put %%on_all_ranks above the cell"
    if type(error) is not NameError or not error.name or not _is_in(variables, error):
        return ""
    name, put = error.name, "put %%on_all_ranks above the cell"
    if name in RANK_VARIABLES or name == LOG_FUNCTION:
        return f"`{name}` exists on the ranks only: {put}"
    is_import = _import_on_ranks(name, cells)
    if is_import or name in IMPORTED_MODULES:
        return f"`{name}` is imported on the ranks: {put}, or import it here too"
    if is_import is not None:
        return f"`{name}` is set by a cell on the ranks: {put}, or bring its values here with %ddp_pull {name}"
    return ""


def hint_for_script(error: BaseException, cell: str) -> str:
    """Return a hint for a script that failed in the notebook because it needs a rank.

    Args:
        error: the error of the script.
        cell: the text of the cell.

    Example:
        >>> hint_for_script(KeyError("RANK"), "%run train.py --epochs 2")[:76]
        'RANK is set on ranks only, and %run has run train.py in the notebook: %on_al'
    """
    name = _missing_variable(error)
    has_no_group = type(error) in (ValueError, RuntimeError) and _NO_GROUP in str(error)
    command = _RUN_SCRIPT.search(cell)
    if command is None or not (name or has_no_group):
        return ""
    lacks = f"{name} is set on ranks only" if name else "the notebook is not in the process group"
    line = command[1].strip()
    try:
        script = next((os.path.basename(word) for word in shlex.split(line) if word.endswith(".py")), "the script")
    except ValueError:  # unbalanced quotes
        script = "the script"
    return (
        f"{lacks}, and %run has run {script} in the notebook: %on_all_ranks %run {line} runs it on "
        f"the ranks, and %ddp_torchrun {line} by torchrun"
    )


def _missing_variable(error: BaseException) -> str:
    """Return the torchrun variable that is missing in the environment; "" for other errors."""
    if type(error) is KeyError and error.args and error.args[0] in OF_EACH_RANK:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_in_environment = not frames or frames[-1].f_globals.get("__name__") == "os"
        return str(error.args[0]) if is_in_environment else ""
    found = _NOT_SET.search(str(error)) if isinstance(error, ValueError) else None
    return "" if found is None else found[1]


def _is_in(variables: dict[str, Any], error: BaseException) -> bool:
    """Return whether a cell of the user raised the error. In a module, the name may be undefined on the ranks too."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals is variables


def _import_on_ranks(name: str, cells: list[str]) -> bool | None:
    """Return whether the last cell that set a name on ranks imported it. None: no cell set it."""
    for cell in reversed(cells):
        for symbol in _symbols(cell, False):
            if symbol.get_name() == name:
                return symbol.is_imported()
    return None


def _symbols(plain: str, is_sent: bool) -> Iterator[symtable.Symbol]:
    """Yield the symbols that a cell sets on ranks, including functions and imports.

    Args:
        plain: the cell, as transformed by IPython.
        is_sent: the cell runs on ranks.
    """
    with contextlib.suppress(SyntaxError):  # a cell with a syntax error sets nothing
        if is_sent:
            symbols = symtable.symtable(plain, "cell", "exec").get_symbols()
            yield from (symbol for symbol in symbols if symbol.is_assigned() or symbol.is_imported())
        if not any(f"_magic({magic!r}" in plain for magic in (*_SEND, *_RUN)):
            return
        for node in ast.walk(ast.parse(plain)):
            called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in ("run_cell_magic", "run_line_magic"):
                words = [getattr(argument, "value", None) for argument in node.args]
                if len(words) > 1 and words[0] in (*_SEND, *_RUN) and isinstance(code := words[-1], str):
                    if called == "run_line_magic" and words[0] in _SEND:
                        with contextlib.suppress(DDPNotebookError):  # the cell has not run because of a wrong option
                            code = parse_line(code)[1]
                    inner = TransformerManager().transform_cell(code)
                    yield from _symbols(inner, is_sent or words[0] in _SEND)
