"""What a rank does with the others: its groups, what is under way in them, and how it gets out of that."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.rank.cell.exceptions import chain, known_words
from ddp_notebook.rank.cell.where import Where
from ddp_notebook.rank.group import join, waiting
from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.connections import Connections
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.guard import CollectiveMismatchError, Guard
from ddp_notebook.rank.group.progress import Progress
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.release import Doing, RankLostError, Release
from ddp_notebook.wire.events import Form, Listening, Lost, Message, Peers

# How an operation fails whose peer is gone: gloo's and NCCL's words, and those of a store.
_PEER_IS_GONE = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|NCCL.*abort")
# After any of these gloo refuses all further operations of the group. It is formed anew, whoever has caught the error.
_GROUP_IS_BROKEN = re.compile(r"gloo/|pair closure|Connection (closed|reset) by peer|ncclRemoteError|NCCL")
_LOOK_S = 0.02


class Network:
    """One rank's. Made once, in the rank's main thread.

    Args:
        send: takes messages for the notebook, from any thread.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.where = Where()
        self.recorder = Recorder()
        self.connections = Connections(self.recorder, lambda ports: send(Listening(ports=ports)))
        self.release = Release(self.recorder, self.connections, self.where, lambda: self._cell)
        self._guard = Guard()
        self._progress = Progress(self.recorder)
        self._cell: int | None = None
        self._store_port = 0  # of the session's store
        self._is_broken = False  # an operation has failed for good, and a group with it
        try:
            self.recorder.install()
            self.connections.watch()
            waiting.install()
        except (AttributeError, RuntimeError, TypeError) as error:  # another torch than this was written for
            self._progress.sees_operations = False
            print(
                f"ddp_notebook: torch {torch.__version__} does not let operations be observed ({error}): messages do "
                "not name them, a blocked one cannot be stopped, and a group does not form again by itself",
                file=sys.stderr,
            )
        self.release.start()
        self._show_end_of_thread = threading.excepthook
        threading.excepthook = self._on_end_of_thread
        os.register_at_fork(after_in_child=self._leave)

    # ---- groups

    def form(self, place: Form) -> list[str]:
        """Be in the group of `place.epoch`. Returns what the user has to know.

        Raises:
            whatever torch raises when a group does not form.
        """
        join.enter(place)
        self._store_port = place.store_port
        notes: list[str] = []
        self.release.forms()
        self.connections.makes_twins = place.guard
        if place.epoch == 1:
            join.join(place, f"{place.store_prefix}/{place.epoch}")
        else:
            notes = self.connections.renew(place)
        self.recorder.guard = self._guard if place.guard else None
        self.release.renewed()
        self._is_broken = False
        return notes

    def take_over(self, forming: threading.Lock) -> None:
        """Acquire this lock, which is held while a group forms. One of an earlier epoch, which nobody waits for any
        more, is ended now and not by its own timeout."""
        if forming.acquire(blocking=False):
            return
        with quiet():
            while not forming.acquire(timeout=_LOOK_S):  # it may not be connected yet
                self.connections.cut_groups()
                self.connections.cut_store(self._store_port)

    def _leave(self) -> None:
        """A forked child has the rank's connections, but not gloo's threads: an operation would never end."""
        if dist.is_initialized():
            self.connections.retire(join.not_of_child(dist.get_rank()))

    def on_message(self, message: Peers | Lost) -> None:
        """What the notebook says of the other ranks. Called by the agent."""
        if isinstance(message, Peers):
            self.connections.on_peer_ports(message.ports)
        else:
            self.release.lose(message.why)

    def _on_end_of_thread(self, end: threading.ExceptHookArgs) -> None:
        """A thread of the user's has failed. The message about a stop says what it was in: its traceback, of torch's
        words about a connection that we have cut, would come after it."""
        is_ours = any(
            isinstance(error, KeyboardInterrupt) or _PEER_IS_GONE.search(known_words(error))
            for error in chain(end.exc_value)
        )
        if not (is_ours and self.release.was_just_now):
            self._show_end_of_thread(end)

    # ---- cells

    def begin_cell(self, cell: int) -> None:
        """A cell begins."""
        self._cell = cell
        self._progress.begin()
        self.release.begin()

    def end_cell(self, failure: BaseException | None) -> dict[str, Any]:
        """The cell has ended: what `CellDone` says of it. Of one that ended well by itself, nothing but that its ranks
        train apart."""
        self._cell = None
        apart = {"trains_apart": True} if self._progress.trains_apart else {}
        release = self.release
        release.end()
        main = threading.get_ident()
        self.recorder.unwaited.pop(main, None)  # a call that was stopped before its wait
        self.recorder.waiting.pop(main, None)
        unwaited = list(self.recorder.live.values())  # in DDP's backward, of the user's other threads, or by nobody
        failed_call = None if failure is None else next((call for call in unwaited if call.has_failed), None)
        if unwaited:
            self.recorder.prune()
            for call in list(self.recorder.live.values()):
                if call.thread == main or call.work is not None:  # else another thread is about to begin it
                    call.compact()
        failed = self.recorder.failed
        errors = [*chain(failure), *([] if failed is None else [failed.error])]
        self._is_broken |= any(
            isinstance(one, RuntimeError) and _GROUP_IS_BROKEN.search(known_words(one)) for one in errors
        )
        if failure is None and release.doing is None and not release.was_cut and not self._is_broken:
            return apart
        was_freed = failure is not None and self._is_for_want_of_others(failure)
        doing = release.doing or self._failed_in(failure, failed_call if was_freed else None)
        self.recorder.failed = None  # and with it the frames of its traceback
        return {
            "place": doing.place or self._place_of(failure),
            "operation": None if doing.operation is None else doing.operation.to_json(),
            "was_freed": was_freed,
            "group": self.state(),
            **apart,
        }

    def vitals(self) -> dict[str, Any]:
        """What the main thread is in. From any thread."""
        doing = self.release.now()
        return {
            "where": doing.place,
            "failed": self.where.failed,
            "operation": None if doing.operation is None else doing.operation.to_json(),
            "thread": doing.thread,
            "group": self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Whether this rank is in step with others, as JSON."""
        return {
            "counts": self.recorder.counts,
            "made": self.connections.groups_made,
            "is_cut": self.release.was_cut or self._is_broken,
            "is_busy": bool(self.recorder.operations()),
            "has_models": self.connections.has_models,
            "has_communicated": self._progress.has_communicated,
            "steps": self._progress.steps,
        }

    def _failed_in(self, failure: BaseException | None, unwaited: Call | None) -> Doing:
        """Where a cell has failed, and in what: the operation that raised, or the first of those that has failed."""
        failed, place = self.recorder.failed, self._place_of(failure)
        if failed is not None and any(error is failed.error for error in chain(failure)):
            return Doing(place, failed.call.describe())
        return Doing(place, None if unwaited is None else unwaited.describe())

    def _place_of(self, failure: BaseException | None) -> str:
        return self.where.of_traceback(None if failure is None else failure.__traceback__)

    def _is_for_want_of_others(self, failure: BaseException) -> bool:
        """Whether it failed in an operation, because others did not take part."""
        if self.release.doing is not None:
            return True
        if isinstance(failure, CollectiveMismatchError) or "imed out" in known_words(failure):
            return False
        return any(
            isinstance(error, RankLostError)
            or (isinstance(error, RuntimeError) and _PEER_IS_GONE.search(known_words(error)))
            for error in chain(failure)
        )
