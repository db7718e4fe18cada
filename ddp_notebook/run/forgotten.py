"""A plain cell that has failed because it was meant for the ranks: a line under its traceback says so.

The notebook has neither a rank's variables nor a process group, and torch's errors do not know of ranks.
"""

from __future__ import annotations

import ast
import contextlib
import symtable
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

_ATTRIBUTE = "_ddp_notebook_forgotten"
_EVERY_RANK_HAS = frozenset({"rank", "local_rank", "world_size", "device", "torch", "dist", "log"})
_SEND = ("on_all_ranks", "on_ranks")
_RUN = ("time", "capture")  # magics that run their code where the cell runs
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
        error = result.error_in_exec if result.info.store_history else None
        cells = shell.history_manager.input_hist_parsed
        if error is not None and ranks_are_there() and (hint := hint_for(error, cells)):
            print(hint, file=sys.stderr)

    shell.events.register("post_run_cell", look)
    setattr(shell, _ATTRIBUTE, look)


def unwatch(shell: Any) -> None:
    """Look no more."""
    if (look := getattr(shell, _ATTRIBUTE, None)) is not None:
        shell.events.unregister("post_run_cell", look)
        delattr(shell, _ATTRIBUTE)


def hint_for(error: BaseException, cells: list[str]) -> str:
    """What to do about a failed cell, if it was meant for the ranks.

    Args:
        error: that it has failed with.
        cells: the notebook's, as IPython has transformed them.

    Example:
        >>> hint_for(NameError("name 'rank' is not defined", name="rank"), [])
        '`rank` is there on the ranks only: put %%on_all_ranks above the cell'
    """
    if isinstance(error, NameError) and (name := error.name):
        if name in _EVERY_RANK_HAS:
            return f"`{name}` is there on the ranks only: put %%on_all_ranks above the cell"
        if any(name in _set_by(code) for code in _sent(cells)):
            return (
                f"`{name}` is a variable of the ranks: put %%on_all_ranks above the cell to use it there, or bring its "
                f"values here with %ddp_pull {name}"
            )
    elif _NO_GROUP in str(error):
        return "the notebook is in no process group, and its ranks are: put %%on_all_ranks above the cell"
    return ""


def _sent(cells: list[str]) -> Iterator[str]:
    """The code of the cells that went to ranks, the last one first."""
    for cell in reversed(cells):
        yield from _under_magics(cell, _SEND)


def _set_by(code: str) -> set[str]:
    """The names that a cell sets, functions and imports among them."""
    try:
        plain = TransformerManager().transform_cell(code)
        symbols = symtable.symtable(plain, "cell", "exec").get_symbols()
    except SyntaxError:  # it has failed on the ranks too
        return set()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return names.union(*map(_set_by, _under_magics(plain, _RUN)))


def _under_magics(plain: str, magics: Collection[str]) -> Iterator[str]:
    """The code that some magics are given.

    Args:
        plain: a cell as IPython has transformed it.
    """
    if not any(f"_magic({magic!r}" in plain for magic in magics):
        return
    with contextlib.suppress(SyntaxError):  # of another line of it
        for node in ast.walk(ast.parse(plain)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("run_cell_magic", "run_line_magic"):
                magic, *_, code = (getattr(argument, "value", "") for argument in node.args)
                if magic in magics:
                    yield code
