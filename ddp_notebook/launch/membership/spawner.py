"""Start the processes of a session, admit them to the wire, and fence those that may come back."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from ddp_notebook.errors import HostError, StartError, StartTimeoutError
from ddp_notebook.launch import environment
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import RANK, Process, Processes
from ddp_notebook.messages.processes import ProcessSpec, RankSpec, Start, StoreSpec
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring
from ddp_notebook.wire.store import StoreAddress

_END_S = 5.0  # time limit for killed processes to end


class Spawner:
    """Starts processes.

    Args:
        processes: of the session; new ones are added here.
        wire: the notebook's endpoint.
        bulk: the endpoint for bulk data.
        keyring: of both endpoints.
        placement: gives the threads of each rank and the visible GPUs.
        env: the environment of local ranks.
        overlay: variables of ranks on other machines, on top of the remote environment.
    """

    def __init__(
        self,
        processes: Processes,
        wire: Endpoint,
        bulk: BulkFetcher,
        keyring: Keyring,
        placement: Placement,
        env: Mapping[str, str],
        overlay: Mapping[str, str],
    ) -> None:
        self.has_ended = False  # no more processes are started
        self._processes = processes
        self._wire = wire
        self._bulk = bulk
        self._keyring = keyring
        self._threads = placement.threads
        shown = placement.cuda_visible_devices
        self._env = {**env, **({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})}
        self._overlay = dict(overlay)

    def start_rank(self, rank: int, host: Host, *, mark_token: str, open_files: int, threads: int) -> Process:
        """Start the process of a rank. See `start` and `RankSpec` for the arguments."""

        def spec(process: Process) -> RankSpec:
            self._wire.expect(process.name)
            control, bulk = host.transport.reach(self._wire.url), host.transport.reach(self._bulk.url)
            address = self._keyring.invite(process.name, control=control, bulk=bulk)
            return RankSpec(process=process.number, address=address, mark_token=mark_token, open_files=open_files)

        return self.start(RANK, host, spec, rank, threads)

    def start(
        self, kind: str, host: Host, spec: Callable[[Process], ProcessSpec], rank: int = -1, threads: int = 0
    ) -> Process:
        """Start a process.

        Args:
            kind: RANK, STORE or CONTROLLER.
            host: to start it on.
            spec: returns the specification of the process.
            rank: of a RANK; -1 for other kinds.
            threads: number of torch threads; 0: as many as the ranks had when the session started.

        Raises:
            StartError: it could not be started.
            StartTimeoutError: the host did not answer in time.
        """
        if self.has_ended:
            raise StartError("the session was stopped")
        process = Process(number=host.next_number(), kind=kind, host=host, rank=rank)
        self._processes.all[process.name] = process
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores other types too
        threads, is_here = threads or self._threads, host.transport.is_here
        try:
            made = spec(process)
            start = Start(
                env=environment.rank_env(self._env, threads=threads) if is_here else self._overlay,
                cwd=host.folder or environment.working_directory(),
                sys_path=path if is_here else None,
                threads=threads,
                spec=made,
            )
            reply = host.start(process.number, start)
        except HostError as error:
            # remove the process that does not run: the next attempt creates another one
            del self._processes.all[process.name]
            kind_of_error = StartTimeoutError if isinstance(error, TimeoutError) else StartError
            raise kind_of_error(str(error)) from error
        process.pid, process.port = reply.pid, reply.port
        if isinstance(made, StoreSpec):
            process.store = StoreAddress(reply.store_at, made.key)
        return process

    def kill(self, processes: Sequence[Process]) -> None:
        """Kill replacement processes at once."""
        living = [process for process in processes if process.is_alive]
        for process in living:
            with contextlib.suppress(HostError):  # the host server is gone, and its processes too
                process.host.signal([process.number], signal.SIGKILL)
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: not any(process.is_alive for process in living), _END_S)

    def shut_out(self, process: Process) -> None:
        """Fence the process: revoke its key and drop its messages."""
        self._keyring.revoke(process.name)
        self._wire.forget(process.name)
