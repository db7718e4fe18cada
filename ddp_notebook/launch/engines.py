"""ipyparallel in a session: the engines of the ranks, and the controller that they register with on demand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ddp_notebook.errors import ClientError, HostError, StartError
from ddp_notebook.launch import controller
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.process import CONTROLLER, RANK, Process, Processes
from ddp_notebook.launch.transports.ports import Listening
from ddp_notebook.messages.processes import ControllerSpec
from ddp_notebook.messages.ranks import Engine, Register, Registered
from ddp_notebook.registry import private

_ANSWER_S = 0.3
_AT_ONCE = 16  # hosts that connect to the controller in parallel


class Engines:
    """The engines of one session.

    Args:
        directory: the session's directory.
        at: local address and ports at which the ranks reach it.
        processes: of the session.
        start: starts a controller with this specification on this machine.
        send: sends a message to a rank.
    """

    def __init__(
        self,
        directory: str,
        at: Listening,
        processes: Processes,
        start: Callable[[ControllerSpec], Process],
        send: Callable[[int, Engine | Register], None],
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._start = start
        self._send = send
        self._refused = ""  # the reason why no controller can be started
        try:
            self._spec = controller.make_spec(directory, at)
        except ClientError as error:  # cells need no controller
            self._refused = str(error)
            self._spec = controller.make_spec(directory)
        self._asking = threading.Lock()  # held while the controller is requested
        self._registered: set[str] = set()  # names of processes whose engines got a request to register

    @property
    def have_had_controller(self) -> bool:
        """True if there has been a controller, which knows the engines of that time."""
        return self._spec.restores

    def call(self, ranks: list[int]) -> None:
        """Make ranks engines. They need no controller yet."""
        connection, _ = controller.for_engines(self._spec)
        for rank in ranks:
            self._send(rank, Engine(connection=connection, engine_id=rank))

    def client_file(self) -> tuple[str, int]:
        """See `Cluster.client_file`."""
        if self._refused:
            raise ClientError(f"session.client is not available: {self._refused}. Cells go on without it")
        with self._asking:
            try:
                were_missing = controller.write_files(self._spec)
            except OSError as error:
                raise ClientError(f"{private.cannot_write(self._directory, error)}. Cells go on without it") from error
            except StartError as error:
                raise ClientError(f"{error}. Cells go on without it") from error
            running = self._processes.living(CONTROLLER)
            if were_missing and not running:  # the list of engines, which a controller would restore, is gone too
                self._forget()
            has_been = self.have_had_controller
            if running:
                pid = running[-1].pid
            else:
                try:
                    pid = self._start(self._spec).pid
                except StartError as error:
                    raise ClientError(
                        f"ipyparallel's controller did not start ({error}); cells go on without it, and %ddp_restart "
                        "brings it back"
                    ) from error
                self._spec = replace(self._spec, restores=True, waits=True)
            self._register(replace=has_been)
        return str(controller.connection_file(self._directory, "client")), pid

    def check_registered(self) -> None:
        """Raise an error if engines could not register. The next `client_file` makes them try again.

        Raises:
            ClientError: names the engines and the reasons.
        """
        with self._asking:
            refused = [process for process in self._processes.living(RANK) if process.not_registered]
            reasons = [process.not_registered for process in refused]
            for process in refused:
                process.not_registered = ""
                self._registered.discard(process.name)
        if reasons:
            raise ClientError(f"session.client needs all ranks, and {'; '.join(reasons)}. Cells go on without it")

    def replace(self) -> bool:
        """Let new engines register in place of dead ones. Returns whether there is a controller to register with."""
        with self._asking:
            if self.have_had_controller:
                self._register(replace=True)
            return self.have_had_controller

    def forget_all(self) -> None:
        """End the controller after ranks were renumbered. The next one gets the engines with their new numbers."""
        with self._asking:
            self._forget()
            for process in self._processes.living(CONTROLLER):
                with contextlib.suppress(HostError):  # its host server is gone, and the controller with it
                    process.host.end([process.number], 0.0)

    def _forget(self) -> None:
        """Let the next controller start without known engines."""
        self._spec = replace(self._spec, restores=False)
        self._registered.clear()

    def _register(self, *, replace: bool) -> None:
        """Let engines register with the controller if they have not yet.

        Args:
            replace: new engines take the place of dead ones.

        Raises:
            ClientError: a host cannot be connected to the controller.
        """
        living = self._processes.living(RANK)
        new = [one for one in living if "Ready" in one.said and one.name not in self._registered]
        if not new:
            return
        hosts = list({process.host for process in new})
        _, addresses = controller.for_engines(self._spec)
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:  # ssh takes 6 to 8 ms per address
                reached_at = dict(zip(hosts, pool.map(partial(_reach, addresses), hosts), strict=True))
        except HostError as error:
            raise ClientError(
                f"ipyparallel's controller is not reached by all hosts: {error}. Cells go on without it"
            ) from error
        for process in new:
            self._registered.add(process.name)
            with self._processes.changed:
                process.said.discard(Registered.__name__)
            at = reached_at[process.host]
            self._send(process.rank, Register(engine_id=process.rank, replaces=replace, reached_at=at))
        # A rank that runs no cell reports a failed registration at once.
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: all(Registered.__name__ in one.said for one in new), _ANSWER_S)


def _reach(addresses: list[str], host: Host) -> dict[str, str]:
    """Return the addresses that differ on this host, with the address to use there."""
    pairs = [(address, host.transport.reach(address)) for address in addresses]
    return {address: reached for address, reached in pairs if reached != address}
