"""`Session` as it is used to move values: the public methods for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.run.assembly import Assembled
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.values.values import RankValues


class ValueFace(Assembled):
    """The part of `Session` that moves values."""

    def pull(
        self,
        name: str,
        ranks: RankSet = None,
        force: bool = False,
        safe: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> RankValues:
        """Return the value of a variable on ranks, by rank. Tensors of a GPU arrive on the CPU. `session["x"]` is the
        same.

        The notebook unpickles the value. A pickle can run any program, so a rank on a host that was broken into can run
        one in the notebook. With `safe=True` nothing is unpickled.

        While a job runs in the background, numbers, text, tensors, arrays and containers of them are copied between two
        of its optimizer steps. Other values are read when the job has ended, and a line says so. If further jobs wait,
        values are read behind them.

        Args:
            name: the variable.
            ranks: which of them, as for `run`; None: all.
            force: pull it even if it has more than 1 GB on a rank.
            safe: receive only numbers, text, bytes, None, tensors, NumPy arrays of numbers, and lists, tuples, sets and
                dicts of them. Everything else is refused.
            report: told the size and the progress of large values, see `run.progress.ProgressLine`.

        Raises:
            UsageError: no such rank, or no name of a variable.
            DDPNotebookError: a rank has no such variable, it is too large, or it cannot be sent; names the rank and
                the type. With `safe`, also if a rank sends anything else than such a value.
            KeyboardInterrupt: it was interrupted; nothing of it is kept.

        Example:
            >>> session.pull("rank")
            [0] 0
            [1] 1
            >>> session.pull("world_size", ranks=0, safe=True)
            [0] 2
        """
        return self._parts.exchange.pull(name, ranks, force=force, safe=safe, report=report)

    def peek(self, expression: str, ranks: RankSet = None) -> RankValues:
        """Evaluate an expression on ranks, and return its value as text, by rank. While a job runs in the background,
        that is done between two of its optimizer steps, where variables of the function that trains are found too.

        Args:
            expression: of Python. It must not call a collective: ranks are not at the same step.
            ranks: which of them, as for `run`; None: all.

        Raises:
            UsageError: no such rank, or no expression.
            DDPNotebookError: the expression raised something; names the rank and the error.
            KeyboardInterrupt: the wait for a step was interrupted.

        Example:
            >>> session.peek("rank + 10")
            [0] 10
            [1] 11
        """
        return self._parts.exchange.peek(expression, ranks)

    def push(
        self,
        variables: Mapping[str, Any] | None = None,
        /,
        *,
        ranks: RankSet = None,
        force: bool = False,
        **values: Any,
    ) -> None:
        """Set variables on ranks. Functions and classes of the notebook's cells travel by value, and tensors of a GPU
        arrive on the CPU. `session["x"] = 1` is the same for all ranks.

        Args:
            variables: names and values. A `RankValues` gives each rank its own.
            ranks: which of them, as for `run`; None: all.
            force: push them even if a rank gets more than 1 GB.
            values: more names and values.

        Raises:
            UsageError: no such rank, no name of a variable, more than 1 GB, or a `RankValues` that lacks a rank.
            DDPNotebookError: a value cannot be pickled, or a rank cannot unpickle it.
            KeyboardInterrupt: it was interrupted; a rank may have them or not.

        Example:
            >>> session.push(lr=0.1, words=["a", "b"])
            >>> session.push({"ranks": 4}, ranks="0")
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise UsageError(f"push takes names and values, not {variables!r:.60}: push(x=1) or push({{'x': 1}})")
        self._parts.exchange.push({**(variables or {}), **values}, ranks, force=force)

    def __getitem__(self, name: str) -> RankValues:
        """`session["x"]`: see `pull`."""
        return self.pull(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """`session["x"] = value`: see `push`."""
        self.push({name: value})
