"""`Session` as it is used to move values: the public methods for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.errors import UsageError
from ddp_notebook.run.assembly import Assembled
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.values.values import RankValues


class ValueFace(Assembled):
    """The part of `Session` that moves values."""

    def pull(self, name: str, ranks: RankSet = None, force: bool = False, safe: bool = False) -> RankValues:
        """Return the value of a variable on ranks, by rank. Tensors of a GPU arrive on the CPU. `session["x"]` is the
        same.

        The notebook unpickles the value. A pickle can run any program, so a rank on a host that was broken into can run
        one in the notebook. With `safe=True` nothing is unpickled.

        Args:
            name: the variable.
            ranks: which of them, as for `run`; None: all.
            force: pull it even if it has more than 1 GB on a rank.
            safe: receive only numbers, text, bytes, None, tensors, NumPy arrays of numbers, and lists, tuples, sets and
                dicts of them. Everything else is refused.

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
        return self._parts.exchange.pull(name, ranks, force=force, safe=safe)

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
