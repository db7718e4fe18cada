"""How much the cells of a session record, and its recording up to now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import get_type_hints

from ddp_notebook.errors import UsageError
from ddp_notebook.messages.ranks import ClockProbe
from ddp_notebook.messages.record_options import LEVELS, RecordOptions
from ddp_notebook.observe.observer import Observer
from ddp_notebook.observe.recording import Recording
from ddp_notebook.run.call_arguments import fits, in_words, short
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.notebook_kernel import is_users_thread
from ddp_notebook.run.rank_requests import Questions

_ANSWER_S = 1.0  # what ranks get to pass on what they have recorded
_FAR_ANSWER_S = 6.0  # and on other hosts: a cell's end may come through a connection that is back before the wire's is
_KINDS = get_type_hints(RecordOptions)


class Recordings:
    """One session's.

    Args:
        observer: takes in what ranks send.
        questions: to ask them for it.
        cells: theirs.
        liveness: tells which of them can be asked.
        folder: tells where profiles go.
    """

    def __init__(
        self, observer: Observer, questions: Questions, cells: Cells, liveness: Liveness, folder: Callable[[], str]
    ) -> None:
        self._usual = RecordOptions(level="values")  # what is recorded where a cell does not say it
        self._observer = observer
        self._questions = questions
        self._cells = cells
        self._liveness = liveness
        self._folder = folder
        self._has_news = False  # a cell has run since the recording was brought up to date
        observer.recording.catch_up = self._catch_up

    def set_level(self, level: str) -> None:
        """See `Session.record`."""
        _check_level(level)
        self._usual = RecordOptions(level=level)

    @property
    def level(self) -> str:
        """How much is recorded where a cell does not say it."""
        return self._usual.level

    def for_cell(self, asked: RecordOptions | None) -> RecordOptions:
        """What a cell that begins now is to record.

        Args:
            asked: for this cell; None: nothing beside what is always recorded.

        Raises:
            UsageError: it is something else, or names no level.
        """
        if asked is None:
            return self._usual
        if not isinstance(asked, RecordOptions):
            raise UsageError(
                f"record takes RecordOptions, not {type(asked).__name__}: record=RecordOptions(profile=True)"
            )
        if asked.level:
            _check_level(asked.level)
        # Ranks would fail at the beginning or the end of the cell, without a sentence about the argument.
        for name, kind in _KINDS.items():
            if not fits(value := getattr(asked, name), kind):
                raise UsageError(f"RecordOptions: {name} must be {in_words(kind)}, got {short(value)}")
        if not all(isinstance(name, str) for name in asked.watch):
            raise UsageError(f"RecordOptions: watch must be names of variables, got {short(asked.watch)}")
        return replace(asked, level=asked.level or self.level, profiles=self._folder() if asked.profile else "")

    def on_cell(self) -> None:
        """A cell begins."""
        self._has_news = True

    @property
    def now(self) -> Recording:
        """See `Session.recording`."""
        if (ranks := self._liveness.to_ask) is not None:

            def ask(request: int) -> ClockProbe:
                return ClockProbe(request=request, sent_ns=time.monotonic_ns(), flush=True)

            self._has_news = self._cells.watched is not None
            self._questions.ask_for(ranks, ask, _ANSWER_S if self._liveness.are_here else _FAR_ANSWER_S)
        self._observer.flush()
        return self._observer.recording

    def end(self) -> None:
        """Nothing comes any more: whoever keeps the recording keeps nothing else of the session."""
        self._observer.recording.catch_up = None

    def _catch_up(self) -> None:
        """A recording that is kept in a variable is asked again after a cell."""
        is_users = is_users_thread()
        watched = self._cells.watched
        if is_users and self._has_news and (watched is None or not watched[1].takes_signals):  # not beside a cell here
            _ = self.now


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise UsageError(f"ranks record off, meta, values or all, not {level!r}")
