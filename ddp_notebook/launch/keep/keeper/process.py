"""The keeper's process: it owns the ranks of a session that outlives its notebooks."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import cast

from ddp_notebook.errors import DDPNotebookError, StartError, UsageError
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.keep.exception_data import failure_of
from ddp_notebook.launch.keep.keeper.journal import Journal
from ddp_notebook.launch.keep.keeper.notebooks import Notebook, Notebooks
from ddp_notebook.launch.keep.keeper.queue import Queue
from ddp_notebook.launch.keep.keeper.rank_events import RankEvents
from ddp_notebook.launch.keep.keeper.request_handler import RequestHandler
from ddp_notebook.launch.keep.recording_store import KeptRecording
from ddp_notebook.launch.keep.state import OwnCluster, folder_of, silent, silent_ranks, state_of
from ddp_notebook.launch.membership.startup import DirectStartup
from ddp_notebook.launch.options import Ssh, StartOptions
from ddp_notebook.launch.preemption import Preemption
from ddp_notebook.messages.dispatch import Table
from ddp_notebook.messages.encoding import to_json
from ddp_notebook.messages.first_messages import (
    Admitted,
    AttachSession,
    GetKeeperState,
    KeeperState,
    Refused,
    StopKeeper,
)
from ddp_notebook.messages.framing import Numbered, Unpacker
from ddp_notebook.messages.hosts import Notice
from ddp_notebook.messages.keeper import (
    AllSent,
    KeeperSpec,
    SessionEnded,
    SessionState,
    StartStage,
    StateChanged,
    Welcome,
)
from ddp_notebook.registry import entries, modes, private, unix_sockets
from ddp_notebook.registry.lookup import SESSION
from ddp_notebook.version import __version__
from ddp_notebook.wire import signals

_FIRST_WORD_S = 5.0
_FIRST_S = 20.0  # time limit for the notebook that has started the session to attach
_LOOK_S = 1.0
_LOOK_IN_CELL_S = 0.25  # shorter, since the user waits for the name of a hanging process
_ENDS_S = 30.0


class Keeper:
    """The keeper of one session.

    Args:
        spec: options of the start, and the environment of the notebook.
    """

    def __init__(self, spec: KeeperSpec) -> None:
        self._options = StartOptions.from_json(spec.options)
        assert self._options.keep is not None
        self._keep = self._options.keep
        self._notebooks = Notebooks()
        self._queue = Queue()
        self._asked: RequestHandler | None = None
        self._failure: BaseException | None = None
        self._cluster: OwnCluster | None = None
        self._preemption: Preemption | None = None
        self._said: deque[str] = deque()  # lines that notebooks have not received
        self._state: SessionState | None = None
        self._why = ""  # why the session ends; "" while it runs
        # a queue, since an Event must not be set in a signal handler
        self._told_end: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._answering: list[threading.Thread] = []  # threads that answer a stop request from a shell
        self._first_messages: Table[None] = Table(
            {AttachSession: self._attach, GetKeeperState: self._send_state, StopKeeper: self._stop}
        )
        self._began_s = self._left_s = time.monotonic()  # when the last notebook left
        self._secret = secrets.token_hex(32)  # only a process that can read the entry may send requests
        about = {"secret": self._secret, "directory": spec.cwd}
        door = entries.door(SESSION)
        with contextlib.ExitStack() as undo:  # remove everything if a step fails
            self._spool = modes.new_folder(entries.SPOOL, private.temporary())
            undo.callback(shutil.rmtree, self._spool)
            self._server = unix_sockets.listen(door)
            undo.callback(door.unlink)
            self.entry = entries.enter_next(SESSION, "kept", about, folder_with_it=self._spool)
            undo.pop_all()
        signal.signal(signal.SIGTERM, lambda *_: self.end("SIGTERM"))

    def run(self) -> None:
        """Run the keeper until the session ends."""
        self._begin_accepting()
        hosts: DirectHosts | None = None
        try:
            until = time.monotonic() + _FIRST_S
            while not self._notebooks.all and time.monotonic() < until:
                self._is_to_end(0.01)
            beginning = DirectStartup(self._with_lease(), self._check, self._say_stage, OwnCluster)
            hosts = beginning.hosts
            self._start(beginning)
            while not self._is_to_end(_LOOK_IN_CELL_S if self._journal.running else _LOOK_S):
                self._look(hosts)
        except BaseException as error:
            self._failure = _told(error)
            if not isinstance(error, DDPNotebookError | KeyboardInterrupt):
                with contextlib.suppress(OSError):  # the disk may be full
                    traceback.print_exc()
        self._end(hosts)

    def _with_lease(self) -> StartOptions:
        """Return the options with a lease of the hosts that is at least as long as the keeper waits for a notebook."""
        options = self._options
        if not isinstance(options.hosts, Ssh):
            return options
        lease_s = max(options.hosts.lease_s, self._keep.alone_s)
        return replace(options, hosts=replace(options.hosts, lease_s=lease_s))

    def _start(self, beginning: DirectStartup) -> None:
        keep, hosts = self._keep, beginning.hosts
        heard = RankEvents(self._notebooks, self._gone)
        self._cluster = cluster = cast(OwnCluster, beginning.make(heard))
        cluster.tell_what_is_slow(lambda text: self._notebooks.broadcast(Notice(text=text)))
        journal = Journal(cluster.mark_token, keep.output_bytes)
        recorded = KeptRecording(self._spool, keep.recording_bytes)
        heard.begin(cluster, journal, self._queue, recorded, self._spool, self._changed)
        beginning.start(cluster)
        self._heard, self._journal, self._recorded = heard, journal, recorded
        self._hosts, self._synced = hosts, beginning.synced
        told = self._changed, heard.on_renumbered, lambda: self.end("stopped", wait=True)
        asked = RequestHandler(cluster, hosts, journal, self._queue, self._notebooks, heard, *told)
        if (folder := self._options.on_preempt) is not None:
            self._preemption = Preemption(folder, cluster, lambda: journal.is_in_loop, self._said.append)
            self._preemption.begin()
        with self._notebooks.lock:
            self._asked = asked
            for notebook in self._notebooks.all:
                self._welcome(notebook)

    def _check(self) -> None:
        """End the start if no notebook waits for it any more."""
        if self._why or not self._notebooks.all:
            raise KeyboardInterrupt

    def _say_stage(self, line: str) -> None:
        with self._notebooks.lock:
            for notebook in self._notebooks.all:
                notebook.send(StartStage(line=line))

    def end(self, why: str, *, wait: bool = False) -> None:
        """End the session.

        Args:
            why: the reason in words.
            wait: return after its end.
        """
        self._why = self._why or why
        self._told_end.put(why)
        if wait:
            self._ended.wait(_ENDS_S)

    def _is_to_end(self, wait_s: float) -> bool:
        with contextlib.suppress(queue.Empty):
            self._told_end.get(timeout=wait_s)
        return bool(self._why)

    def _end(self, hosts: DirectHosts | None) -> None:
        healthy = True
        if self._preemption is not None:
            self._preemption.end()
        with contextlib.suppress(Exception):
            if self._cluster is not None:
                healthy = self._cluster.stop()
        if hosts is not None:
            hosts.end(healthy=healthy)
        if self._asked is not None:
            self._recorded.close()
        self._server.close()
        self.entry.remove()
        self._ended.set()
        failure = self._failure
        told = None if failure is None or isinstance(failure, KeyboardInterrupt) else failure_of(failure)
        with self._notebooks.lock:
            for notebook in self._notebooks.all:
                notebook.send(SessionEnded(why=self._why or "it failed", failure=told))
        for thread in self._answering:
            thread.join(_FIRST_WORD_S)
        self._notebooks.close()

    # ---- time

    def _look(self, hosts: DirectHosts) -> None:
        keep = self._keep
        assert self._cluster is not None
        self._restore()
        self._notebooks.remove_dead()
        for number in self._notebooks.ended():
            for folder in Path(self._spool).glob(f"{folder_of(number)}*"):
                shutil.rmtree(folder, ignore_errors=True)
        self._begin_waiting(self._cluster)
        now = time.monotonic()
        if self._notebooks.all:
            self._left_s = now
            was_silent = self._state is not None and silent(self._state.hosts)
            if silent(self._cluster.hosts) or was_silent or self._runs_otherwise(self._cluster):
                self._changed()
            said = [self._said.popleft() for _ in range(len(self._said))]
            for notice in [*hosts.notices(), *self._heard.notices(), *said]:
                self._notebooks.broadcast(Notice(text=notice))
        elif now - self._left_s > keep.alone_s:
            self.end(f"no notebook was attached for {keep.alone_s / 3600:g} h")
        elif not self._journal.running and now - max(self._left_s, self._journal.busy_until_s) > keep.idle_s:
            self.end(f"no notebook was attached for {keep.idle_s / 3600:g} h, and nothing has run")

    def _restore(self) -> None:
        """Write the entry and files again if a cleanup has removed them. Without entry and socket no notebook finds the
        session.
        """
        with contextlib.suppress(OSError, UsageError, StartError):  # the next check tries again
            if not entries.is_complete(self.entry):
                server = unix_sockets.listen(entries.door(SESSION))
                before, self._server = self._server, server
                with contextlib.suppress(OSError):
                    before.shutdown(socket.SHUT_RDWR)  # ends the `accept` of the listening thread
                before.close()
                self._begin_accepting()
                self.entry = entries.enter_again(self.entry)
            private.restore(self._spool)
            with self._notebooks.lock:
                self._recorded.restore()
            self._heard.restore()

    def _runs_otherwise(self, cluster: OwnCluster) -> bool:
        """Return whether a process was stopped, hangs, goes on or has ended since notebooks received the last state."""
        if (told := self._state) is None:
            return False
        before = told.is_stopped, told.trouble, told.silent.keys(), [host.stopped for host in told.hosts]
        stopped = [host.stopped for host in self._hosts.all]
        statuses = [one.status for one in told.processes], [one.status for one in cluster.processes]
        now = cluster.is_stopped, cluster.pulse(), silent_ranks(cluster).keys(), stopped
        return before != now or statuses[0] != statuses[1]

    def _begin_waiting(self, cluster: OwnCluster) -> None:
        """Start the next waiting job for a notebook that has left."""
        with self._notebooks.lock:
            if self._notebooks.may_come:
                return
            begun = self._queue.begin(self._journal, ranks=cluster.ranks, alive=cluster.alive)
            self._heard.tell_running()
        if begun is not None:
            cluster.put_in_inboxes(*begun)

    def _gone(self) -> None:
        """End the session after the last host, and so all ranks, have ended."""
        self.end("the host server ended, and all ranks with it")

    def _changed(self) -> None:
        """Send the session state to attached notebooks."""
        if self._cluster is not None and self._asked is not None:
            with self._notebooks.lock:
                self._state = state_of(self._cluster, self._hosts)
                self._notebooks.broadcast(StateChanged(state=self._state))

    # ---- who comes

    def _begin_accepting(self) -> None:
        threading.Thread(target=self._accept, args=(self._server,), name="ddp-accept", daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                stream, _ = server.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    return
                time.sleep(_LOOK_S)  # a descriptor may be free by then
                continue
            threading.Thread(target=self._answer, args=(stream,), daemon=True).start()

    def _answer(self, stream: socket.socket) -> None:
        """Handle a connection: check that it comes from the same user, with the secret of the entry."""
        try:
            stream.settimeout(_FIRST_WORD_S)
            unix_sockets.check_user(stream)
            request = unix_sockets.hear(stream, AttachSession, GetKeeperState, StopKeeper)
            if not hmac.compare_digest(request.secret.encode(), self._secret.encode()):
                stream.close()
            else:
                self._first_messages.handle(stream, request)
        except OSError:  # the connection was closed, or uses another protocol
            stream.close()

    def _stop(self, stream: socket.socket, request: StopKeeper) -> None:
        self._answering.append(threading.current_thread())
        self.end("python -m ddp_notebook stop", wait=True)
        self._send_state(stream, request)

    def _send_state(self, stream: socket.socket, request: GetKeeperState | StopKeeper) -> None:
        unix_sockets.send_line(stream, self._keeper_state())
        stream.close()

    def _attach(self, stream: socket.socket, request: AttachSession) -> None:
        if request.version != __version__ or request.environment != sys.prefix:
            unix_sockets.send_line(
                stream, Refused(why=f"it runs ddp_notebook {__version__} in the environment {sys.prefix}")
            )
            stream.close()
            return
        pid, _ = unix_sockets.peer_of(stream)
        unix_sockets.send_line(stream, Admitted())
        with self._notebooks.lock:
            notebook = self._notebooks.add(stream, pid, request.about or f"process {pid}")
            if not request.looks:
                self._notebooks.give(notebook, take_over=request.take_over)
            if self._asked is not None:
                self._welcome(notebook)
        try:
            self._serve(notebook)
        finally:
            self._notebooks.remove(notebook)
            if notebook.has_driven and self._asked is not None:
                self._asked.let_flow(None)

    def _serve(self, notebook: Notebook) -> None:
        while self._asked is None:
            if not notebook.lives:
                return
            if self._ended.wait(0.01):
                notebook.hear()  # until `_end` has sent the reason and closes the stream
                return
        if notebook.drives:
            self._asked.let_flow(notebook)
        self._asked.serve(notebook)

    def _welcome(self, notebook: Notebook) -> None:
        """Send the session state, the journal, and from now on all events. Call it with the lock."""
        cluster, journal = self._cluster, self._journal
        assert cluster is not None and self._asked is not None
        now = time.monotonic()
        driver = self._notebooks.driver
        self._state = state_of(cluster, self._hosts)
        welcome = Welcome(
            name=self.entry.name,
            number=notebook.number,
            drives=notebook.drives,
            driver="" if driver is None else driver.about,
            options=self._options.to_json(),
            synced=None if self._synced is None else to_json(self._synced),
            state=self._state,
            mark_token=cluster.mark_token,
            folder=self._spool,
            cells=[(cell.told, cell.ranks, now - cell.began_s) for cell in journal.cells.values()],
            last_cell=journal.last_cell,
            lacking=self._asked.lacking,
            waiting=list(self._queue.waiting) if notebook.drives else [],
            recorded=self._recorded.parts(),
            left=self._recorded.left(),
        )
        notebook.welcome([welcome, *journal.events(), self._heard.running(now), AllSent()])

    def _keeper_state(self) -> KeeperState:
        """Return the state for `python -m ddp_notebook list`."""
        if self._cluster is None or self._asked is None:
            return KeeperState(is_running=False, running=[])
        now = time.monotonic()
        with self._notebooks.lock:
            driver, running = self._notebooks.driver, self._journal.running
            return KeeperState(
                is_running=True,
                ranks=self._cluster.placement.world_size,
                hosts=self._hosts.words,
                driver="" if driver is None else driver.about,
                running=[(cell.told.execution_count, now - cell.began_s) for cell in running],
                unshown=len(self._journal.cells) - len(running),
                waiting=len(self._queue.waiting),
                alone_s=0.0 if self._notebooks.all else now - self._left_s,
            )


def _told(error: BaseException) -> BaseException:
    """Return the error for the user."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"{private.runtime()} or {private.temporary()}"
        return StartError(f"a kept session needs files, and the disk is full: free some of it ({where})")
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES) and isinstance(error.filename, str):
        return StartError(private.cannot_write(os.path.dirname(error.filename), error))
    return error


def main() -> None:
    """Run a keeper: first detach from the starting process, and send it the session's name."""
    [came] = Unpacker().feed(sys.stdin.buffer.read())
    assert isinstance(came, Numbered) and isinstance(came.message, KeeperSpec)
    spec = came.message
    tells = os.dup(1)
    if os.fork():
        os._exit(0)  # the keeper gets no parent in the kernel's process tree
    os.setsid()
    signals.ignore_strangers()  # also drops signals that arrived while this was a descendant of the kernel
    for number in (signal.SIGINT, signal.SIGHUP):  # a handler, because child processes do not inherit it
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError):
        os.chdir(spec.cwd)
    sys.path[:] = spec.sys_path
    try:
        keeper = Keeper(spec)
    except Exception as error:
        os.write(tells, f"\n{_told(error)}".encode())
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STRANGERS)  # the starting process has blocked them
    null = os.open(os.devnull, os.O_RDWR)
    log = open(Path(keeper.entry.folder) / "keeper.log", "wb", opener=modes.opener)  # noqa: SIM115
    for fd, of in ((0, null), (1, log.fileno()), (2, log.fileno())):
        os.dup2(of, fd)
    os.write(tells, keeper.entry.name.encode())
    os.close(tells)
    keeper.run()
