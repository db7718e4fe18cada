"""Track the connections of this process, and close them so that every operation that waits for one ends.

gloo groups and clients of stores are registered when they are made. Groups get their board for the guard at the same
time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.distributed import distributed_c10d, get_backend_config

from ddp_notebook.rank import thread_count
from ddp_notebook.rank.group import stores
from ddp_notebook.rank.group.calls import check_longest, timeout_of, timeout_setter
from ddp_notebook.rank.group.connections import sockets
from ddp_notebook.rank.group.connections.stuck_waits import StuckWaits
from ddp_notebook.rank.group.recorder import Recorder
from ddp_notebook.rank.group.waiting import notice_interrupt
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, ctypes, functools, logging, threading

if TYPE_CHECKING:
    from ddp_notebook.rank.group.guard.board import Board


_SET, _GET = 29, 30  # PR_SET_TIMERSLACK, PR_GET_TIMERSLACK. Source: prctl(2)
_LATE_NS = 20_000_000
_libc = ctypes.CDLL(None)


@contextlib.contextmanager
def rare_ticks() -> Iterator[None]:
    """Give the threads that this thread starts inside the block a coarse timer, for fewer wakeups."""
    if sys.platform != "linux":
        yield
        return
    before = _libc.prctl(_GET, 0, 0, 0, 0)
    _libc.prctl(_SET, ctypes.c_ulong(_LATE_NS), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:  # gVisor has no timer slack
            _libc.prctl(_SET, ctypes.c_ulong(before), 0, 0, 0)


NCCL = ("nccl", "nccl2", "nccl-legacy")  # names of the two NCCL classes of torch, and another name of the older one


_THREADS = 3  # threads that a gloo group starts
_log = logging.getLogger(__name__)


class _Connecting(NamedTuple):
    """A group that is being made."""

    before: set[int]  # inodes of the earlier listeners
    size: int


class Connections:
    """Connections of this process.

    Args:
        recorder: knows the groups, and refuses operations.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._listeners: set[int] = set()  # inodes of the gloo listeners
        self._stores: set[sockets.Address] = set()
        self._connecting: dict[int, _Connecting] = {}  # groups that are being made, by thread
        self._starting: dict[int, set[int]] = {}  # earlier listeners, by thread that starts a store at any port
        self._making = threading.RLock()
        self._unseen = 0  # waits that the recorder does not see
        self._untold = StuckWaits()
        self._makers = 0  # calls that hold that lock; more than one for nested calls
        self._successors: dict[str, ProcessGroup] = {}  # groups whose connections are used, by name of a group
        # Makes the board of a group on which the guard compares calls; None without the guard.
        self.make_board: Callable[[ProcessGroup, Store, timedelta], Board[Any]] | None = None
        self.on_group: Callable[[ProcessGroup], object] = lambda _: None  # called with each new group
        self.rests = False  # new groups may be idle for hours, see `rare_ticks`

    def watch(self) -> None:
        """Register every gloo group and every client of a store when it is made."""
        connect_group, connect_store = ProcessGroupGloo.__init__, TCPStore.__init__

        def init_group(group: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
            thread = threading.get_ident()
            before = set(sockets.listeners())
            size = kwargs.get("size", args[2] if len(args) > 2 else 0)
            thread_count.check_startable(_THREADS)  # gloo ends the process if it can start only one of them
            self._connecting[thread] = _Connecting(before, size)
            try:
                with rare_ticks() if self.rests else contextlib.nullcontext():
                    connect_group(group, *args, **kwargs)
            finally:
                del self._connecting[thread]
                self._listeners.update(sockets.gloo_listeners(before))

        @functools.wraps(connect_store)
        def init_store(store: TCPStore, *args: Any, **kwargs: Any) -> None:
            host, port = kwargs.get("host_name", args[0] if args else ""), kwargs.get("port", [*args, 0, 0][1])
            thread = threading.get_ident()
            if port:
                self._stores |= sockets.addresses(host, port)
            else:
                self._starting[thread] = set(sockets.listeners())
            try:
                connect_store(store, *args, **kwargs)
            finally:
                self._starting.pop(thread, None)
                notice_interrupt()
            if not port:
                self._stores |= sockets.addresses(host, store.port)

        ProcessGroupGloo.__init__ = init_group  # type: ignore[method-assign,assignment]
        TCPStore.__init__ = init_store  # type: ignore[method-assign,assignment]
        self._watch_groups()

    def _watch_groups(self) -> None:
        """Give each new group a board for the guard. Redirect torch's queries of a group's backend to its current
        backend."""
        make = distributed_c10d._new_process_group_helper

        @functools.wraps(make)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            made, store = make(*args, **kwargs)
            if isinstance(made, ProcessGroup):
                self.on_group(made)
            make_board = self.make_board
            if make_board is not None and isinstance(made, ProcessGroup) and made.size() > 1 and _is_gloo(made):
                # Not stored in a `Group`: its ranks are not known yet.
                self._recorder.keep_board(made, make_board(made, store, timeout_of(made)))
            return made, store

        make_with_name = distributed_c10d._new_group_with_tag

        @functools.wraps(make_with_name)
        def make_in_turn(*args: Any, **kwargs: Any) -> Any:
            """Make groups one at a time, also from several threads.

            Threads would block each other at the store, whose client handles one request after the other. Without the
            guard's boards this happens with many threads, with the boards already with two.
            """
            with self._making:
                if (refuse := self._recorder.refusal) is not None:  # a rank has died, or the cell is being stopped
                    raise refuse(None)
                check_longest(kwargs.get("timeout", args[1] if len(args) > 1 else None))
                self._makers += 1
                try:
                    return make_with_name(*args, **kwargs)
                finally:
                    self._makers -= 1

        distributed_c10d._new_group_with_tag = make_in_turn
        set_timeout, names = timeout_setter()

        @functools.wraps(set_timeout)
        def set_timeouts(timeout: timedelta, group: Any = None) -> None:
            check_longest(timeout)  # torch would refuse it only after it has changed the group
            set_timeout(timeout, group)
            which = dist.group.WORLD if group is None else group
            board = None if which is None else self._recorder.board_of(which)
            if board is not None:  # the board has the timeout of its group
                board.set_timeout(timeout)

        distributed_c10d._new_process_group_helper = make_group
        for module, name in names:
            setattr(module, name, set_timeouts)
        for name in ("_get_backend", "_start_coalescing", "_end_coalescing", "set_timeout"):
            setattr(ProcessGroup, name, self._at_successor(getattr(ProcessGroup, name)))

    def _at_successor(self, method: Callable[..., Any]) -> Callable[..., Any]:
        groups = self._recorder.groups

        @functools.wraps(method)
        def of_successor(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            known = groups.get(id(group))
            if known is not None and known.successor is not None and known.reference() is group:
                group = known.successor
            return method(group, *args, **kwargs)

        return of_successor

    @contextlib.contextmanager
    def waiting_unseen(self) -> Iterator[None]:
        """Mark that the main thread waits in an internal group, which the recorder does not see."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    @property
    def is_connecting(self) -> bool:
        """Return whether some thread is making a group or waits in an internal one."""
        return bool(self._connecting or self._unseen)

    @property
    def is_making(self) -> bool:
        """Return whether some thread is in `new_group`, which may wait at the store."""
        return self._makers > 0

    def replace(self, successors: dict[str, ProcessGroup]) -> list[ProcessGroup]:
        """Route operations through these groups, by name, from now on. Return the earlier successors."""
        before, self._successors = list(self._successors.values()), successors
        return before

    def forget_listeners(self) -> None:
        """Forget the listeners of unused connections."""
        self._listeners.clear()

    # ---- cutting

    def cut_groups(self) -> int:
        """End every operation that waits in a group, on this rank and its peers. Callable from any thread.

        Call it repeatedly while an operation waits: one may be about to start, or gloo may not notify it.

        Returns:
            Number of closed connections.
        """
        self._recorder.cut_boards()
        own = set(self._listeners)
        for before, size in list(self._connecting.values()):
            new = sockets.gloo_listeners(before)
            own |= new.keys()
            for address in new.values():
                sockets.knock(address, size)
        count = sockets.cut_groups(own) + self._abort_nccl()
        self._untold.tell()
        return count

    def cut_stores(self) -> int:
        """End every wait at a store. Return the number of closed connections."""
        new = [sockets.listeners().keys() - before for before in list(self._starting.values())]
        return sockets.cut_stores(set(self._stores), set().union(*new)) + self.cut_session_store()

    def cut_session_store(self) -> int:
        """End every wait at the session's store. Return the number of closed connections."""
        return stores.cut()

    def _abort_nccl(self) -> int:
        """Abort all NCCL groups at the same time. An abort waits for the kernels of its group, and a GPU may have
        queued them behind those of another group.

        Source: https://github.com/pytorch/pytorch/issues/119797, https://docs.pytorch.org/docs/stable/distributed.html#shutdown
        """
        cuda, aborts = torch.device("cuda"), {}
        for group in [*distributed_c10d._world.pg_names, *self._successors.values()]:
            if cuda in group._device_types and (backend := group._get_backend(cuda)).name() in NCCL:
                aborts[id(backend)] = threading.Thread(target=_abort, args=[backend], daemon=True)
        for abort in aborts.values():
            abort.start()
        for abort in aborts.values():
            abort.join()
        return len(aborts)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError:  # the other groups are aborted anyway, and the user's cell must not show this error
        _log.info("a group of NCCL was not aborted", exc_info=True)


def _is_gloo(group: ProcessGroup) -> bool:
    return "gloo" in str(get_backend_config(group)) and "nccl" not in str(get_backend_config(group))
