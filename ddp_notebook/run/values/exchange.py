"""Pull variables from ranks by name, and push values to ranks."""

from __future__ import annotations

import keyword
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.messages.ranks import Peek, Pull, Pulled, Pushed
from ddp_notebook.records.units import size
from ddp_notebook.records.words import (
    IMPORTED_MODULES,
    IPYTHON_NAMES,
    LOG_FUNCTION,
    RESERVED_NAMES,
    group_by_value,
    list_ranks,
    name_ranks,
)
from ddp_notebook.run.cells.cell import CellRun
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.cells.interrupt import keyboard_interrupt, uninterrupted
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.values.transfers import PushedData, Transfers
from ddp_notebook.run.values.values_by_rank import RankValues
from ddp_notebook.wire import bulk, safe
from ddp_notebook.wire.buffers import join, split

_MARGIN = 1.1  # a value on the wire may exceed the rank's estimate by this factor
_MOST_SHOWN = 1000  # characters of a rank's text that are shown in one line
_DDP = "DistributedDataParallel"
_SAY_S = 0.5  # shorter waits are not reported
_TOLD_BYTES = 10_000_000  # values of at least this size are reported
_PULL_INTERRUPTED = "interrupted: the transfer was dropped, and the ranks continue"
_NOT_PUSHED = "interrupted: nothing was sent, and the ranks continue"
# A rank that has received the message sets the variables, even after the interrupt.
_PUSH_INTERRUPTED = "interrupted: some or all ranks may have the variables; push again to set them on all ranks"
_T = TypeVar("_T")
Report = Callable[[str], None]  # receives progress texts; a text that starts with \r replaces the previous one


class Exchange:
    """Pulls and pushes variables, in the run queue of the cells.

    Args:
        cells: cells of the session, with the run queue.
        questions: sends requests to the ranks.
        transfers: transfers large data.
        liveness: liveness checks of the ranks.
    """

    def __init__(self, cells: Cells, questions: Questions, transfers: Transfers, liveness: Liveness) -> None:
        self._cells = cells
        self._questions = questions
        self._transfers = transfers
        self._liveness = liveness

    # ---- from the ranks

    def pull(
        self, name: str, ranks: RankSet, *, force: bool, safe: bool, report: Report = lambda _: None
    ) -> RankValues:
        """Pull a variable, see `Session.pull`."""
        chosen = self._liveness.parse(ranks)
        check_name(name)
        # If jobs wait, pull after them in the queue, so that the value includes their changes.
        if (job := self._job_on(chosen)) is not None and not self._cells.run_queue.waiting_jobs:
            found = self._between_steps(job, chosen, lambda: self._pull(name, chosen, force, safe, report, job))
            if found is not None:
                return found
        with self.turn(chosen):
            found = self._pull(name, chosen, force, safe, report)
            assert found is not None
            return found

    def peek(self, expression: str, ranks: RankSet) -> RankValues:
        """Evaluate an expression, see `Session.peek`."""
        chosen = self._liveness.parse(ranks)
        if not expression.strip():
            raise UsageError("peek needs a Python expression, such as history[-5:]")
        if (job := self._job_on(chosen)) is None:
            with self.turn(chosen):
                return self._peek(expression, chosen, None)
        return self._between_steps(job, chosen, lambda: self._peek(expression, chosen, job))

    def _peek(self, expression: str, ranks: list[int], job: CellRun | None) -> RankValues:
        with uninterrupted():
            asked = {
                rank: self._questions.ask(rank, lambda n: Peek(request=n, expression=expression)) for rank in ranks
            }
        answers = self._answers(asked, job)
        for rank, answer in answers.items():
            _check_answer(rank, expression, answer, force=False)
        _raise_errors(answers)
        texts = {rank: printable(answer.about) for rank, answer in answers.items()}
        steps = {rank: answer.steps for rank, answer in answers.items()}
        about = {rank: f"after {n} step{'s' * (n != 1)}: {texts[rank]}" for rank, n in steps.items() if n >= 0}
        return RankValues(texts, texts | about)

    def _job_on(self, ranks: Sequence[int]) -> CellRun | None:
        """Return the cell of a job that runs on some of these ranks, or None."""
        watched = self._cells.watched
        if watched is None or watched[1].takes_signals:  # the notebook waits for it, in another thread of the program
            return None
        run = watched[0]
        return run if set(run.pending) & set(ranks) else None

    def _between_steps(self, job: CellRun, ranks: list[int], read: Callable[[], _T]) -> _T:
        """Read something while a job runs.

        Raises:
            KeyboardInterrupt: the wait was interrupted.
        """
        self._liveness.check(ranks)
        try:
            return read()
        except KeyboardInterrupt as error:
            error.__traceback__ = None  # IPython keeps the last error; drop the frames and the data in them
            raise keyboard_interrupt(f"interrupted: nothing was read, and {job.name} continues") from None

    def _answers(self, asked: Mapping[int, Future[Pulled]], job: CellRun | None) -> dict[int, Pulled]:
        """Return the answers of ranks. Print a line if a job makes no optimizer step for a while."""
        if job is not None:
            waiting = futures.wait(asked.values(), _SAY_S).not_done
            if waiting:
                late = [rank for rank, future in asked.items() if future in waiting]
                print(
                    f"waiting for the next optimizer step of {job.name} on {list_ranks(late)}, or for its end. The "
                    "stop button ends this wait and not the job",
                    file=sys.stderr,
                )
        is_due = job is None
        return {rank: self._questions.wait_for(rank, future, is_due=is_due) for rank, future in asked.items()}

    def _pull(
        self, name: str, ranks: list[int], force: bool, is_safe: bool, report: Report, job: CellRun | None = None
    ) -> RankValues | None:
        """Return the values. If they can only be copied after the job has ended, print a line and return None."""
        memory = self._transfers.memory_name
        pull = Pull(request=0, name=name, force=force, safe=is_safe, memory=memory, at_step=job is not None)
        asked: dict[int, Future[Pulled]] = {}  # answers whose data was not fetched yet
        began_s = time.monotonic()  # ranks copy large values before they answer
        try:
            with uninterrupted():
                for rank in ranks:
                    asked[rank] = self._questions.ask(rank, lambda n: replace(pull, request=n))
            answers = self._answers(asked, job)
            for rank, answer in answers.items():
                _check_answer(rank, name, answer, force)
            if job is not None and (kinds := {one.waits_for_cell for one in answers.values() if one.waits_for_cell}):
                what = f"{name!r} ({printable(', '.join(sorted(kinds)))})"
                if kinds == {_DDP} and not _has_group():  # the value could not be unpickled after the wait
                    raise DDPNotebookError(
                        f"{what} cannot be pulled: it needs the process group of the ranks. After {job.name} has "
                        f"ended, pull its inner model: %on_all_ranks inner = {name}.module, then %ddp_pull inner"
                    )
                print(
                    f"{what} is read when {job.name} has ended: while it runs, only numbers, text, tensors, arrays and "
                    "containers of them are copied",
                    file=sys.stderr,
                )
                return None
            _raise_errors(answers)
            values = {}
            whole, done = sum(answer.nbytes for answer in answers.values()), 0
            for at, (rank, answer) in enumerate(answers.items()):
                of_all = f"{size(done)} of {size(whole)}, rank {rank} ({at + 1} of {len(answers)})"
                report(f"\r{name}: {of_all}")
                data = self._transfers.fetch(rank, answer)
                done += answer.nbytes
                del asked[rank]
                values[rank] = _read_safely(rank, name, data) if is_safe else _unpickle(rank, name, answer.about, data)
            if whole >= _TOLD_BYTES:
                each = f" from {len(answers)} ranks" if len(answers) > 1 else ""
                report(f"{name}: {size(whole)}{each} in {time.monotonic() - began_s:.1f} s")
            return RankValues(values, {rank: printable(answer.about) for rank, answer in answers.items()})
        finally:
            for rank, future in asked.items():  # immediately, or when the answer arrives
                future.add_done_callback(partial(self._transfers.drop_answer, rank))

    # ---- to the ranks

    def push(self, variables: Mapping[str, Any], ranks: RankSet, *, force: bool) -> None:
        """Push variables, see `Session.push`."""
        chosen = self._liveness.parse(ranks)
        differ = False  # True if ranks get different values
        for name, value in variables.items():
            if check_name(name) in RESERVED_NAMES:
                raise UsageError(f"`{name}` cannot be pushed: {_why_reserved(name)}. Push it under another name")
            if isinstance(value, RankValues):
                differ = True
                _check_has(name, value, chosen)
        for rank in chosen if differ else chosen[:1]:
            _check_can_be_sent(_of_rank(variables, rank), f"rank {rank}: " if differ else "", force)
        with self.turn(chosen, _PUSH_INTERRUPTED):
            answers = self._push(variables, chosen, differ)
        names = ", ".join(repr(name) for name in variables)
        _raise_errors(answers, f"{names} could not be set: ")
        if LOG_FUNCTION in variables:
            print(
                f"`log` on {name_ranks(chosen)} now hides the function log(loss=...), which records metrics. "
                "`import ddp_notebook` finds it as ddp_notebook.log",
                file=sys.stderr,
            )

    def _push(self, variables: Mapping[str, Any], ranks: list[int], differ: bool) -> dict[int, Pushed]:
        outgoing: dict[int, PushedData] = {}
        is_sent = False
        try:
            for rank in ranks:
                same = None if differ else outgoing.get(ranks[0])
                outgoing[rank] = same or PushedData(join(bulk.pickled(_with_buffers(_of_rank(variables, rank)))))
            is_sent = True
            return self._transfers.push(outgoing)
        except KeyboardInterrupt as error:
            error.__traceback__ = None  # IPython keeps the last error; drop the frames and the data in them
            if is_sent:
                raise
            raise keyboard_interrupt(_NOT_PUSHED) from None
        finally:
            for one in outgoing.values():
                one.close()

    # ---- both

    @contextmanager
    def turn(self, ranks: list[int], interrupted: str = _PULL_INTERRUPTED) -> Iterator[None]:
        """Wait until the ranks are alive and idle, and reserve them for a transfer while the block runs.

        Args:
            interrupted: sentence after an interrupt of the block.
        """
        try:
            with self._cells.run_queue:
                self._liveness.check(ranks)
                self._cells.check_idle(ranks)
                yield
        except KeyboardInterrupt as error:
            error.__traceback__ = None  # IPython keeps the last error; drop the frames and the data in them
            if hasattr(error, "_render_traceback_"):  # it has a more detailed message
                raise
            raise keyboard_interrupt(interrupted) from None


def check_name(name: object) -> str:
    """Check that a variable can have this name, and return it.

    Raises:
        UsageError: it is not a valid name.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"the name of a variable must be a Python identifier such as 'x', got {name!r}")
    return name


def _why_reserved(name: str) -> str:
    if name in IPYTHON_NAMES:
        return "IPython on the ranks needs its own value of it"
    what = "a module that every rank has imported" if name in IMPORTED_MODULES else "each rank's own value"
    return f"on the ranks it is {what}"


def _of_rank(variables: Mapping[str, Any], rank: int) -> dict[str, Any]:
    return {name: value[rank] if isinstance(value, RankValues) else value for name, value in variables.items()}


def _with_buffers(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: bulk.with_text_as_buffer(value) for name, value in variables.items()}


def _check_has(name: str, values: RankValues, ranks: list[int]) -> None:
    if missing := [rank for rank in ranks if rank not in values]:
        there = name_ranks(list(values)) if values else "no rank"
        raise UsageError(
            f"{name!r} has values for {there}, but none for {name_ranks(missing)}; add them, or select the ranks with "
            "--ranks (ranks=)"
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
            f"{where}{names}: {size(nbytes)} are more than {size(bulk.MOST_BYTES)}: send it with --force (force=True)"
        )


def _raise_errors(answers: Mapping[int, Pulled | Pushed], what: str = "") -> None:
    errors = group_by_value({rank: what + answer.error for rank, answer in answers.items() if answer.error})
    if errors:
        raise DDPNotebookError("; ".join(f"{name_ranks(ranks)}: {error}" for error, ranks in errors.items()))


@contextmanager
def _importing() -> Iterator[None]:
    """Import without interruption, in a directory that exists.

    A partly imported torch cannot be imported again. oneMKL ends a process that imports torch in a removed directory.
    """
    with uninterrupted():
        try:
            os.getcwd()
        except FileNotFoundError:
            removed = os.open(".", os.O_RDONLY)
        else:
            yield
            return
        try:
            os.chdir("/")
            yield
        finally:
            os.fchdir(removed)
            os.close(removed)


class _Unpickler(pickle.Unpickler):
    """Unpickler that imports modules safely, see `_importing`."""

    def find_class(self, module: str, name: str) -> Any:
        if module in sys.modules:
            return super().find_class(module, name)
        with _importing():
            return super().find_class(module, name)


class _Reader:
    """Memory as a file to unpickle from. `io.BytesIO` would copy it."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def read(self, size: int) -> bytes:
        return bytes(self._take(size))

    def readinto(self, target: memoryview) -> int:
        piece = self._take(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("not a pickle of protocol 5")  # only older protocols have lines

    def _take(self, size: int) -> memoryview:
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


def _has_group() -> bool:
    """Return whether this process has a process group of torch, without importing torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _unpickle(rank: int, name: str, about: str, data: bytearray | memoryview) -> Any:
    try:
        first, *buffers = split(data)
        return _Unpickler(_Reader(first), buffers=buffers).load()
    except Exception as error:
        what = f"{name!r}, {about}, cannot be unpickled here: {type(error).__name__}: {error}"
        if "process group" in str(error):
            what = (
                f"{what.rstrip('.')}. It needs the process group of the ranks, which a model in DDP does. Its inner "
                f"model does not: %on_all_ranks inner = {name}.module, then %ddp_pull inner"
            )
        raise DDPNotebookError(f"rank {rank}: {what}") from error


def _read_safely(rank: int, name: str, data: bytearray | memoryview) -> Any:
    try:
        with _importing():  # it may import torch
            return safe.read(data)
    except ImportError as error:
        raise DDPNotebookError(
            f"rank {rank}: {name!r} contains tensors, but the notebook cannot import torch: {error}"
        ) from error
    except Exception as error:
        raise DDPNotebookError(
            f"rank {rank} sent a value of {name!r} that is not in the safe format "
            f"({type(error).__name__}: {printable(str(error))}); it was dropped"
        ) from error


def _check_answer(rank: int, name: str, answer: Any, force: bool) -> None:
    """Check that an answer has the right types and a plausible size, because a rank may be compromised."""
    is_right = (
        isinstance(answer, Pulled)
        and all(isinstance(text, str) for text in (answer.error, answer.about, answer.waits_for_cell))
        and type(answer.steps) is int
        and all(type(number) is int and 0 <= number < 1 << 62 for number in (answer.transfer, answer.nbytes))
        and isinstance(answer.data, bytes)
        and isinstance(answer.memory, list)
    )
    if not is_right:
        raise DDPNotebookError(f"rank {rank} sent an invalid reply for {name!r}; it was dropped")
    if answer.nbytes > _MARGIN * bulk.MOST_BYTES and not force:
        raise DDPNotebookError(
            f"rank {rank}: {name!r} has {size(answer.nbytes)}, more than {size(bulk.MOST_BYTES)}: receive it with "
            "--force (force=True)"
        )


def printable(text: str) -> str:
    """Return a rank's text for one line: without control characters, at most 1,000 characters.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\ufffd[2Jb'
    """
    return "".join(one if one.isprintable() else "\ufffd" for one in text[:_MOST_SHOWN])
