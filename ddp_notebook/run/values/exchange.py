"""Variables between the notebook and its ranks: pulled from them by name, pushed to them by value."""

from __future__ import annotations

import keyword
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.records.words import IMPORTED_MODULES, LOG_FUNCTION, RESERVED_NAMES, group_by_value, name_ranks
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import keyboard_interrupt, uninterrupted
from ddp_notebook.run.groups.living import Living
from ddp_notebook.run.questions import Questions
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.values.transfers import Transfers
from ddp_notebook.run.values.values import RankValues
from ddp_notebook.wire import bulk
from ddp_notebook.wire.events import Pull, Pulled, Push, Pushed


class Exchange:
    """Pulls and pushes variables, in turn with the cells.

    Args:
        cells: whose turn it may be.
        questions: to ask the ranks.
        transfers: for what is large.
        living: tells which ranks can answer.
    """

    def __init__(self, cells: Cells, questions: Questions, transfers: Transfers, living: Living) -> None:
        self._cells = cells
        self._questions = questions
        self._transfers = transfers
        self._living = living

    # ---- from the ranks

    def pull(self, name: str, ranks: RankSet, *, force: bool) -> RankValues:
        """See `Session.pull`."""
        chosen = self._living.parse(ranks)
        check_name(name)
        with self.turn(chosen):
            return self._pull(name, chosen, force)

    def _pull(self, name: str, ranks: list[int], force: bool) -> RankValues:
        asked: dict[int, Future[Pulled]] = {}  # what is still to be fetched, or to be dropped
        try:
            with uninterrupted():
                for rank in ranks:
                    asked[rank] = self._questions.ask(rank, lambda n: Pull(request=n, name=name, force=force))
            answers = {rank: self._questions.wait_for(rank, asked[rank]) for rank in ranks}
            _raise_errors(answers)
            values = {}
            for rank, answer in answers.items():
                data = self._transfers.fetch(rank, answer)
                del asked[rank]
                try:
                    values[rank] = _loads(data)
                except Exception as error:
                    what = f"{name!r}, {answer.about}, cannot be unpickled here: {type(error).__name__}: {error}"
                    if "process group" in str(error):
                        what += (
                            f"; it is bound to the ranks' group, and what is in it is not: %on_all_ranks inner = "
                            f"{name}.module, and %ddp_pull inner"
                        )
                    raise DDPNotebookError(f"rank {rank}: {what}") from error
            return RankValues(values, {rank: answer.about for rank, answer in answers.items()})
        finally:
            for rank, future in asked.items():  # now, or when the answer comes
                future.add_done_callback(partial(self._transfers.drop_answer, rank))

    # ---- to the ranks

    def push(self, variables: Mapping[str, Any], ranks: RankSet, *, force: bool) -> None:
        """See `Session.push`."""
        chosen = self._living.parse(ranks)
        differ = False  # whether ranks get different values
        for name, value in variables.items():
            if check_name(name) in RESERVED_NAMES:
                what = "a module that every rank has imported" if name in IMPORTED_MODULES else "each rank's own value"
                raise UsageError(f"`{name}` cannot be pushed: on the ranks it is {what}. Push it under another name")
            if isinstance(value, RankValues):
                differ = True
                _check_has(name, value, chosen)
        for rank in chosen if differ else chosen[:1]:
            _check_can_be_sent(_of_rank(variables, rank), f"rank {rank}: " if differ else "", force)
        with self.turn(chosen):
            answers = self._push(variables, chosen, differ)
        names = ", ".join(repr(name) for name in variables)
        _raise_errors(answers, f"{names} could not be set: ")
        if LOG_FUNCTION in variables:
            print(
                f"`log` on {name_ranks(chosen)} now hides the function log(loss=...), which records metrics. "
                "It is still there as ddp_notebook.log",
                file=sys.stderr,
            )

    def _push(self, variables: Mapping[str, Any], ranks: list[int], differ: bool) -> dict[int, Pushed]:
        transfers: dict[int, int] = {}
        try:
            data = b""
            messages: dict[int, Callable[[int], Push]] = {}
            for rank in ranks:
                if differ or not data:
                    data = bulk.dumps(_of_rank(variables, rank))
                if len(data) <= bulk.INLINE_BYTES:
                    messages[rank] = _with_number(Push(request=0, pickle=data))
                    continue
                transfers[rank] = self._transfers.put(rank, data)
                messages[rank] = _with_number(Push(request=0, transfer=transfers[rank]))
            with uninterrupted():
                asked = {rank: self._questions.ask(rank, message) for rank, message in messages.items()}
            return {rank: self._questions.wait_for(rank, future) for rank, future in asked.items()}
        except BaseException:
            for rank, transfer in transfers.items():
                self._transfers.drop(rank, transfer)
            raise

    # ---- both

    @contextmanager
    def turn(self, ranks: list[int]) -> Iterator[None]:
        """Wait until ranks are there and have nothing else to do, for a transfer that ends with the block."""
        try:
            with self._cells.turn:
                self._living.check(ranks)
                self._cells.check_idle(ranks)
                yield
        except KeyboardInterrupt as error:
            error.__traceback__ = None  # IPython keeps the last error: not the frames, and the data in them
            raise keyboard_interrupt("interrupted: the transfer was dropped, the ranks go on") from None


def check_name(name: object) -> str:
    """The name, if a variable can have it.

    Raises:
        UsageError: none can.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is no name of a variable; give one such as 'x'")
    return name


def _of_rank(variables: Mapping[str, Any], rank: int) -> dict[str, Any]:
    return {name: value[rank] if isinstance(value, RankValues) else value for name, value in variables.items()}


def _check_has(name: str, values: RankValues, ranks: list[int]) -> None:
    if missing := [rank for rank in ranks if rank not in values]:
        there = name_ranks(list(values)) if values else "no rank"
        raise UsageError(
            f"{name!r} has a value for {there} and none for {name_ranks(missing)}; give those one too, or name the "
            "ranks that are to get theirs (--ranks, ranks=)"
        )


def _check_can_be_sent(variables: Mapping[str, Any], where: str, force: bool) -> None:
    nbytes = 0
    for name, value in variables.items():
        try:
            nbytes += bulk.weigh(value)
        except Exception as error:
            kind = type(value).__name__
            raise DDPNotebookError(f"{where}{name!r} ({kind}) cannot be pickled: {error}") from error
    if nbytes > bulk.MOST_BYTES and not force:
        names = ", ".join(repr(name) for name in variables)
        raise UsageError(
            f"{where}{names}: {nbytes / 1e9:.2f} GB; more than {bulk.MOST_BYTES / 1e9:g} GB is sent with --force "
            "(force=True) only"
        )


def _with_number(message: Push) -> Callable[[int], Push]:
    return lambda number: replace(message, request=number)


def _raise_errors(answers: Mapping[int, Pulled | Pushed], what: str = "") -> None:
    errors = group_by_value({rank: what + answer.error for rank, answer in answers.items() if answer.error})
    if errors:
        raise DDPNotebookError("; ".join(f"{name_ranks(ranks)}: {error}" for error, ranks in errors.items()))


class _Unpickler(pickle.Unpickler):
    """Imports what it needs without interruption: a half-imported torch cannot be imported again."""

    def find_class(self, module: str, name: str) -> Any:
        if module in sys.modules:
            return super().find_class(module, name)
        with uninterrupted():
            return super().find_class(module, name)


class _Reader:
    """Bytes as a file to unpickle from. `io.BytesIO` would copy a bytearray first."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._rest = memoryview(data)

    def read(self, size: int) -> bytes:
        return bytes(self._take(size))

    def readinto(self, target: memoryview) -> int:
        piece = self._take(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("not a pickle of protocol 5")  # older ones have lines

    def _take(self, size: int) -> memoryview:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


def _loads(data: bytes | bytearray) -> Any:
    return _Unpickler(_Reader(data)).load()
