"""The rank's process groups: form them, observe their operations, and release the rank from blocked waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d, get_rank, is_initialized

from ddp_notebook.messages.ranks import Form, Lost
from ddp_notebook.rank.cell.children import Children
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.cell.exceptions import chain, known_words
from ddp_notebook.rank.group import join, stores, waiting
from ddp_notebook.rank.group.call_site import calls_of
from ddp_notebook.rank.group.calls import Call, CollectiveMismatchError
from ddp_notebook.rank.group.cell_progress import Progress, uses_rpc
from ddp_notebook.rank.group.connections.abort import Connections
from ddp_notebook.rank.group.connections.models import Models
from ddp_notebook.rank.group.connections.reconnect import Reconnection
from ddp_notebook.rank.group.connections.stuck_waits import WORDS
from ddp_notebook.rank.group.cpp_log import quiet
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.release import Doing, RankLostError, Release
from ddp_notebook.rank.hide_from_profiler import filter_flight_recorder, is_possible
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import hashlib, os, re, threading, time


class GroupNames:
    """Names for process groups. All members derive the same name, from the group's ranks and a count."""

    def __init__(self) -> None:
        self._epoch = 0
        self._given: set[str] = set()  # names of this epoch: destroyed groups leave their addresses in the store

    def begin(self, epoch: int) -> None:
        """Start a new epoch: all ranks count from 0, since a joining rank knows no earlier groups.

        Args:
            epoch: the same number on all ranks.
        """
        self._epoch = epoch
        self._given.clear()

    def watch(self, connections: Connections) -> None:
        """Name groups from now on. A torch version that names them elsewhere keeps its own names."""
        if hasattr(distributed_c10d, "_hash_ranks_to_str"):
            distributed_c10d._hash_ranks_to_str = self.name
            connections.on_group = lambda group: self._given.add(group.group_name)

    def name(self, ranks: Sequence[int]) -> str:
        """Return the name of the next group with these ranks. If that group cannot be made, the next one gets its name.

        Example:
            >>> names = GroupNames()
            >>> names.name([0, 1]) == names.name([0, 1]) != names.name([0, 2])
            True
        """
        at = 0
        while (found := self._hash(ranks, at)) in self._given:
            at += 1
        return found

    def _hash(self, ranks: Sequence[int], at: int) -> str:
        words = f"{'_'.join(map(str, ranks))} {self._epoch} {at}"
        return hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()


# Errors of operations whose peer is dead: messages of gloo, NCCL, stores and this package.
_PEER_IS_GONE = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|Failed to recv, got 0 bytes|"
    rf"ncclRemoteError|NCCL.*abort|{WORDS}"
)
# A timeout, which the death of another rank does not cause. gloo also reports one if it cannot connect to a peer.
_TIMED_OUT = re.compile(r"imed out(?! connecting)")
# After any of these errors gloo refuses all further operations of the group. So the group is re-formed even if user
# code caught the error.
_GROUP_IS_BROKEN = re.compile(rf"gloo/|pair closure|Connection (closed|reset) by peer|ncclRemoteError|NCCL|{WORDS}")
Hook = Callable[[Form], object]
_LOOK_S = 0.02
_GLOO_S = 0.0005


def _let_gloo_finish() -> None:
    """Sleep before a fork until the gloo threads have released the tensors of their last operation.

    In Python 3.11 the child hangs if another thread creates or frees its thread state during the fork, as gloo's
    threads do. This was seen once, in a DataLoader worker.
    Source: `PyOS_AfterFork_Child`, which takes a lock before it recreates it; 3.12 recreates it first.
    """
    if sys.version_info < (3, 12) and is_initialized():
        time.sleep(_GLOO_S)


class Network:
    """Network of one rank. Made once, in its main thread."""

    def __init__(self) -> None:
        self.where = CurrentLine()
        self.children = self.where.children = Children(self.where.waits)
        self.recorder = Recorder()
        self.connections = Connections(self.recorder)
        self.connections.rests = True
        self._names = GroupNames()
        self._models = Models()
        self._renewal = Reconnection(self.recorder, self.connections, self._models)
        self.release = Release(self.recorder, self.connections, self.where, lambda: self._cell)
        self._progress = Progress(self.recorder, self._models.kind_of)
        self._cell: int | None = None
        self._last_cell = 0
        self._groups_before = 0  # number of counted groups before the cell
        self._main = threading.main_thread().ident or 0
        self._is_broken = False  # an operation failed and broke its group
        try:
            self.recorder.install()
            self.connections.watch()
            self._names.watch(self.connections)
            self._models.watch()
            waiting.install()
            stores.install()
        except (AttributeError, RuntimeError, TypeError) as error:  # an unknown version of torch
            self._progress.sees_operations = False
            print(
                f"ddp_notebook: operations of torch {torch.__version__} cannot be observed ({error}): messages "
                "do not name them, stop cannot end a blocked operation, and groups are not formed again",
                file=sys.stderr,
            )
        filter_flight_recorder()
        if not is_possible():
            print(
                f"ddp_notebook: profiles of torch {torch.__version__} also show the operators of ddp_notebook",
                file=sys.stderr,
            )
        self.release.start()
        # The module itself, not its copy: the threads of cells look up the hook there.
        python_threading: Any = sys.modules["threading"]
        self._show_end_of_thread = python_threading.excepthook
        python_threading.excepthook = self._on_end_of_thread
        os.register_at_fork(before=_let_gloo_finish, after_in_child=self._leave)

    # ---- groups

    def form(self, place: Form, before: Iterable[Hook] = (), after: Iterable[Hook] = ()) -> list[str]:
        """Form the group of `place.epoch`.

        Args:
            before: called with the place before the group forms.
            after: called with the place once it has formed, before operations are allowed again.

        Returns:
            Notes for the user.

        Raises:
            Any exception of torch if the group does not form.
        """
        join.use_device(place)
        notes: list[str] = []
        self.release.forms()
        for hook in before:
            hook(place)
        self._names.begin(place.epoch)
        if place.epoch == 1:
            join.join(place, f"{place.store_prefix}/{place.epoch}")
            self._renewal.joined(place)
        else:
            notes = self._renewal.renew(place)
        for hook in after:
            hook(place)
        self.release.renewed()
        self._is_broken = False
        return notes

    def take_over(self, forming: threading.Lock) -> None:
        """Acquire the lock that is held while a group forms.

        If a group of an earlier epoch is still forming, no rank needs it any more. It is aborted now instead of at its
        timeout.
        """
        if forming.acquire(blocking=False):
            return
        with quiet():
            while not forming.acquire(timeout=_LOOK_S):  # the group may not be connected yet
                self.connections.cut_groups()
                self.connections.cut_session_store()

    def _leave(self) -> None:
        """Disable the groups in a forked child.

        It has the rank's connections, but not gloo's threads, so an operation would never end.
        """
        if is_initialized():
            self.recorder.retire(join.not_of_child(get_rank()))

    def on_message(self, message: Lost) -> None:
        """Handle the notebook's message about lost ranks. The agent calls this."""
        self.release.lose(message.why)

    def _on_end_of_thread(self, end: threading.ExceptHookArgs) -> None:
        """Handle an exception that ended a thread of the user.

        No traceback is shown if this package has closed the thread's connection: the message about the stop names its
        operation.
        """
        is_ours = any(
            isinstance(error, KeyboardInterrupt) or _PEER_IS_GONE.search(known_words(error))
            for error in chain(end.exc_value)
        )
        if not (is_ours and self.release.was_just_now):
            self._show_end_of_thread(end)

    # ---- cells

    def begin_cell(self, cell: int, groups_made: int = 0) -> None:
        """Prepare for a cell.

        Args:
            groups_made: least number of groups to count from.
        """
        _count_groups_from(groups_made)
        self._groups_before = _groups_made()
        self._cell = self._last_cell = cell
        self.children.seen = None
        self._progress.begin()
        self.release.begin()

    @property
    def trains_apart(self) -> bool:
        """Return whether the running cell trains without communication."""
        return bool(self._progress.trains_apart)

    def end_cell(self, failure: BaseException | None, *, before_stop: bool = False) -> dict[str, Any]:
        """Clean up after a cell.

        Args:
            failure: the exception that ended the cell.
            before_stop: the cell had failed before any stop.

        Returns:
            Fields of `CellDone`. Empty after a cell that ended normally, unless its ranks train without
            synchronization, or have made groups.
        """
        self._cell = None
        apart: dict[str, Any] = {"trains_apart": how} if (how := self._progress.trains_apart) else {}
        if (made := _groups_made()) != self._groups_before:
            apart["groups_made"] = made
        release = self.release
        release.end()
        recorder = self.recorder
        recorder.leave(threading.get_ident())
        failed_call = None if failure is None else recorder.first_failed()
        recorder.compact(threading.get_ident())
        failed = recorder.failed
        if failure is not None or failed is not None:
            errors = [*chain(failure), *([] if failed is None else [failed.error])]
            self._is_broken |= any(
                issubclass(type(one), RuntimeError) and _GROUP_IS_BROKEN.search(known_words(one)) for one in errors
            )
        self._is_broken |= recorder.is_cut
        if failure is None and release.doing is None and not release.was_cut and not self._is_broken:
            return apart
        doing = None if before_stop else release.doing
        was_freed = failure is not None and (doing is not None or _lacks_others(failure))
        doing = doing or self._failed_in(failure, failed_call if was_freed else None)
        recorder.forget_failure()
        return {
            "place": doing.place or self._place_of(failure),
            "operation": None if doing.operation is None else doing.operation.to_json(),
            "was_freed": was_freed,
            "group": self.state(),
            **apart,
        }

    def vitals(self) -> dict[str, Any]:
        """Return the fields of `Vitals` about the main thread's current operation. Callable from any thread."""
        doing = self.release.now()
        return {
            "where": doing.place,
            "failed": self.where.failed,
            "operation": None if doing.operation is None else doing.operation.to_json(),
            "thread": doing.thread,
            "group": self.state(),
            "child": {} if doing.operation is not None else self.children.to_json(),
            "store": {} if doing.operation is not None else waiting.store_wait(self._main),
            "may_serve": uses_rpc(),
            "last_cell": self._last_cell,
        }

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state that shows whether this rank is in step with the others."""
        return {
            "counts": self.recorder.counts,
            "made": _groups_made(),
            "is_cut": self.release.was_cut or self._is_broken or self.recorder.is_cut,
            "is_busy": self.recorder.is_torn or bool(self.recorder.operations()),
            "has_models": self._models.exist,
            "has_communicated": self._progress.has_communicated,
            "steps": self._progress.steps,
            "stepped": self._models.kind_of(self._progress.stepped),
        }

    def _failed_in(self, failure: BaseException | None, unwaited: Call | None) -> Doing:
        """Return the place and the operation of a failure: the operation that raised, or the first failed one."""
        failed, place = self.recorder.failed, self._place_of(failure)
        if failed is not None and any(error is failed.error for error in chain(failure)):
            return Doing(place, failed.call.describe())
        return Doing(place, None if unwaited is None else unwaited.describe())

    def place_of_call(self, call: Call) -> str:
        """Return the line of a call; "" if it is not known, as without a recording.

        The frames of the thread are not read: a reference to the frame that reads it would keep all its callers alive.
        """
        return "" if call.site is None else self.where.of_calls(calls_of(call.site))

    def _place_of(self, failure: BaseException | None) -> str:
        return self.where.of_traceback(None if failure is None else failure.__traceback__)

    def is_broken_off(self, failure: BaseException, *, in_our_own_wait: bool) -> bool:
        """Return whether code failed because other ranks are dead or stopped, and not by a stop of this rank.

        Args:
            in_our_own_wait: the failure came from a wait of this package, not from user code.
        """
        if self.release.is_under_way:
            return False
        if in_our_own_wait and self.release.has_lost:
            return True
        return (
            self.release.doing is not None
            or _lacks_others(failure)
            or any(
                isinstance(one, RuntimeError) and _GROUP_IS_BROKEN.search(known_words(one)) for one in chain(failure)
            )
        )


def _lacks_others(failure: BaseException) -> bool:
    """Return whether a cell failed in an operation because other ranks did not take part."""
    if issubclass(type(failure), CollectiveMismatchError) or _TIMED_OUT.search(known_words(failure)):
        return False
    return any(
        issubclass(type(error), RankLostError)
        or (issubclass(type(error), RuntimeError) and _PEER_IS_GONE.search(known_words(error)))
        for error in chain(failure)
    )


def _groups_made() -> int:
    """Return the number of groups that torch has counted. It is in the name of the next group, by which ranks meet.

    Returns 0 without a default group: the rest of a group that did not form is removed before the next one.
    """
    return int(distributed_c10d._world.group_count) if is_initialized() else 0


def _count_groups_from(least: int) -> None:
    """Let torch count the next group from this number on, at least.

    A cell may have made groups on some ranks only. The next group would have different names on the ranks, and they
    would wait for each other.
    """
    if 0 < _groups_made() < least:
        distributed_c10d._world.group_count = least
