"""Recording level of a session's cells, and the recording up to now."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from ddp_notebook.errors import UsageError
from ddp_notebook.messages.ranks import ClockProbe, RunCell
from ddp_notebook.messages.record_options import LEVELS, PROFILES, RecordOptions
from ddp_notebook.observe.observer import Observer
from ddp_notebook.run.call_arguments import fits, in_words, short
from ddp_notebook.run.message_handlers import Handlers
from ddp_notebook.run.notebook_kernel import is_users_thread
from ddp_notebook.run.record.notebook_recording import Recording
from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.launch.cluster import Cluster
    from ddp_notebook.launch.keep.keeper_client import KeeperClient
    from ddp_notebook.run.session_parts import SessionParts

_ANSWER_S = 1.0  # time for ranks to send their records
_FAR_ANSWER_S = 6.0  # on other hosts: a cell's end may arrive over a connection that recovers before the wire
_KINDS = get_type_hints(RecordOptions)


class Recordings(SessionFeature):
    """The recording of one session."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        cluster = parts.cluster
        self._usual = RecordOptions(level="values")  # used if a cell has no options
        self.catches_nan = False  # see `Session.catch_nan`
        self.observer = Observer(
            parts.world_size, cluster.send, lambda: cluster.alive, lambda: cluster.placement.names_of_machines
        )
        self._questions = parts.questions
        self._cells = parts.cells
        self._liveness = parts.liveness
        self._has_news = False  # a cell has run since the recording was last completed
        self.observer.recording.catch_up = self._catch_up

    def handlers(self) -> Handlers:
        return self.observer.handlers

    def attached(self, remote: KeeperClient) -> None:
        from ddp_notebook.launch.keep.recording_store import batches

        self.observer.read_earlier(itertools.chain(remote.welcome.left, batches(remote.welcome.recorded)))

    def started(self, *, is_attached: bool) -> None:
        self.observer.start()

    def close(self) -> None:
        self.observer.close()
        # a caller that keeps the recording must not keep other parts of the session
        self.observer.recording.catch_up = None

    def cell_begins(self, cell: RunCell) -> None:
        self._has_news = True

    def cell_named(self, cell: int, prompt: str) -> None:
        self.observer.recording.prompts.update({cell: prompt})

    def rank_moved(self, rank: int) -> None:
        self.observer.on_moved(rank)

    def before_renumbering(self) -> None:
        _ = self.now

    def renumbered(self, stayed: Mapping[int, int]) -> None:
        self.observer.on_renumbered(stayed, self.parts.cluster.placement.world_size)

    def profiles(self) -> Iterator[Path]:
        """Return the profiles that cells have stored; none after the end of the session."""
        return iter(()) if self._liveness.has_ended else iter(self.parts.cluster.files(PROFILES))

    def set_level(self, level: str) -> None:
        """Set the recording level, see `Session.record`."""
        _check_level(level)
        self._usual = RecordOptions(level=level)

    @property
    def level(self) -> str:
        """Recording level of cells without options."""
        return self._usual.level

    def for_cell(self, asked: RecordOptions | None) -> RecordOptions:
        """Return the recording options of a cell that starts now.

        Args:
            asked: options of this cell; None: the options of the session.

        Raises:
            UsageError: an option or the level is invalid.
        """
        if asked is None:
            return replace(self._usual, catch_nan=self.catches_nan and self.level != LEVELS[0])
        if not isinstance(asked, RecordOptions):
            raise UsageError(
                f"record must be RecordOptions, got {type(asked).__name__}: record=RecordOptions(profile=True)"
            )
        if asked.level:
            _check_level(asked.level)
        # Ranks would fail at the start or end of the cell, with an error that does not mention the argument.
        for name, kind in _KINDS.items():
            if not fits(value := getattr(asked, name), kind):
                raise UsageError(f"RecordOptions: {name} must be {in_words(kind)}, got {short(value)}")
        if not all(isinstance(name, str) for name in asked.watch):
            raise UsageError(f"RecordOptions: watch must be names of variables, got {short(asked.watch)}")
        return replace(
            asked,
            level=asked.level or self.level,
            profiles=_folder_of(self.parts.cluster) if asked.profile else "",
            catch_nan=asked.catch_nan or (self.catches_nan and asked.solo is None and asked.level != LEVELS[0]),
        )

    @property
    def now(self) -> Recording:
        """Return the complete recording, see `Session.recording`."""
        if (ranks := self._liveness.to_ask) is not None:

            def ask(request: int) -> ClockProbe:
                return ClockProbe(request=request, sent_ns=time.monotonic_ns(), flush=True)

            self._has_news = self._cells.watched is not None
            self._questions.ask_for(ranks, ask, _ANSWER_S if self._liveness.are_here else _FAR_ANSWER_S)
        self.observer.flush()
        return self.observer.recording

    def _catch_up(self) -> None:
        """Complete a recording that the user keeps in a variable, at an access after a cell."""
        is_users = is_users_thread()
        watched = self._cells.watched
        # not during a cell of this notebook
        if is_users and self._has_news and (watched is None or not watched[1].takes_signals):
            _ = self.now


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise UsageError(f"the recording level must be off, meta, values or all, got {level!r}")


def _folder_of(cluster: Cluster) -> str:
    """Return the folder in which ranks store profiles.

    Raises:
        UsageError: they are on other machines.
    """
    if not cluster.is_here:
        raise UsageError("--profile needs all ranks on the notebook's machine: profiles are stored on the ranks' hosts")
    return cluster.directory
