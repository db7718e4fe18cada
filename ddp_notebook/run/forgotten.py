"""A plain cell that has failed because it was meant for the ranks: a line under its traceback says so.

The notebook has neither a rank's variables nor a process group, and torch's errors do not know of ranks; nor does
IPython say which magic was meant by one that is not there.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from ddp_notebook.records.words import IMPORTED_MODULES, LOG_FUNCTION, RANK_VARIABLES

_ATTRIBUTE = "_ddp_notebook_forgotten"
_SEND = ("on_all_ranks", "on_ranks")
_RUN = ("time", "capture")  # magics that run their code where the cell runs
_OURS = ("ddp_", "on_")
_NO_MAGIC = re.compile(r"magic.* `(%%?)(\S+)` not found\.$")  # IPython's words
_NO_GROUP = "Default process group has not been initialized"  # torch's words


def watch(shell: Any, ranks_are_there: Callable[[], bool]) -> None:
    """Look at the cells that fail in the notebook from now on.

    Args:
        shell: IPython's.
        ranks_are_there: whether there is a session.
    """
    unwatch(shell)

    def look(result: Any) -> None:
        # What runs without history is no cell of the user's, or the inner one of %%local and --here.
        error = result.error_in_exec if result is not None and result.info.store_history else None
        if error is None:
            return
        hint = meant_by(error, shell.magics_manager.magics)
        if not hint and ranks_are_there():
            hint = hint_for(error, shell.history_manager.input_hist_parsed, shell.user_ns)
        if hint:
            print(hint, file=sys.stderr)

    shell.events.register("post_run_cell", look)
    setattr(shell, _ATTRIBUTE, look)


def unwatch(shell: Any) -> None:
    """Look no more."""
    if (look := getattr(shell, _ATTRIBUTE, None)) is not None:
        shell.events.unregister("post_run_cell", look)
        delattr(shell, _ATTRIBUTE)


def meant_by(error: BaseException, magics: Mapping[str, Iterable[str]]) -> str:
    """Which of our magics was meant by one that is not there.

    Args:
        error: IPython's.
        magics: the names of those that are there, of lines ("line") and of cells ("cell").

    Example:
        >>> meant_by(UsageError("Cell magic `%%on_all_rank` not found."), {"cell": ["on_all_ranks"], "line": []})
        'did you mean %%on_all_ranks?'
    """
    found = _NO_MAGIC.search(str(error)) if isinstance(error, UsageError) else None
    if found is None:
        return ""
    sign, name = found.groups()
    if sign == "%%" and name in magics["cell"]:
        return f"%%{name} has to be the first line of its cell"
    ours = [one for one in magics["line" if sign == "%" else "cell"] if one.startswith(_OURS)]
    close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
    return f"did you mean {sign}{close[0]}?" if close else ""


def hint_for(error: BaseException, cells: list[str], variables: dict[str, Any]) -> str:
    """What to do about a failed cell, if it was meant for the ranks.

    Args:
        error: that it has failed with.
        cells: the notebook's, as IPython has transformed them.
        variables: the user's.

    Example:
        >>> try:
        ...     rank
        ... except NameError as error:
        ...     print(hint_for(error, [], globals()))
        `rank` is there on the ranks only: put %%on_all_ranks above the cell
    """
    if type(error) in (ValueError, RuntimeError) and _NO_GROUP in str(error):
        return "the notebook is in no process group, and its ranks are: put %%on_all_ranks above the cell"
    if type(error) is not NameError or not error.name or not _is_in(variables, error):
        return ""
    name, put = error.name, "put %%on_all_ranks above the cell"
    if name in RANK_VARIABLES or name == LOG_FUNCTION:
        return f"`{name}` is there on the ranks only: {put}"
    is_import = _import_on_ranks(name, cells)
    if is_import or name in IMPORTED_MODULES:
        return f"`{name}` is imported on the ranks: {put}, or import it here too"
    if is_import is not None:
        return f"`{name}` is set by a cell on the ranks: {put}, or bring its values here with %ddp_pull {name}"
    return ""


def _is_in(variables: dict[str, Any], error: BaseException) -> bool:
    """Whether it was raised in the user's own cells: in a module the name may be forgotten on the ranks too."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals is variables


def _import_on_ranks(name: str, cells: list[str]) -> bool | None:
    """Whether a name was imported by the last cell that has set it on ranks. None: none has."""
    for cell in reversed(cells):
        for symbol in _symbols(cell, False):
            if symbol.get_name() == name:
                return symbol.is_imported()
    return None


def _symbols(plain: str, is_sent: bool) -> Iterator[symtable.Symbol]:
    """What a cell sets on ranks, functions and imports among it.

    Args:
        plain: the cell, as IPython has transformed it.
        is_sent: it runs on ranks.
    """
    with contextlib.suppress(SyntaxError):  # then it has set nothing
        if is_sent:
            symbols = symtable.symtable(plain, "cell", "exec").get_symbols()
            yield from (symbol for symbol in symbols if symbol.is_assigned() or symbol.is_imported())
        if not any(f"_magic({magic!r}" in plain for magic in (*_SEND, *_RUN)):
            return
        for node in ast.walk(ast.parse(plain)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("run_cell_magic", "run_line_magic"):
                words = [getattr(argument, "value", None) for argument in node.args]
                if len(words) > 1 and words[0] in (*_SEND, *_RUN) and isinstance(code := words[-1], str):
                    inner = TransformerManager().transform_cell(code)
                    yield from _symbols(inner, is_sent or words[0] in _SEND)
