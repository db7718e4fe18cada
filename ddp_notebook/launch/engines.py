"""ipyparallel's side of a session: the engines of the ranks, and the controller that they register with on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ddp_notebook.errors import ClientError, StartError
from ddp_notebook.launch import controller
from ddp_notebook.launch.process import CONTROLLER, Process, Processes
from ddp_notebook.wire.events import Engine, Register


class Engines:
    """The engines of one session.

    Args:
        directory: the session's.
        processes: of the session.
        start: starts a controller by this specification; None: the ranks are where none would reach them.
        send: sends a message to a rank.
    """

    def __init__(
        self,
        directory: str,
        processes: Processes,
        start: Callable[[dict[str, Any]], Process] | None,
        send: Callable[[int, Engine | Register], None],
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._start = start
        self._send = send
        self._spec = controller.make_spec(directory)
        self._asking = threading.Lock()  # for the controller
        self._registered: set[str] = set()  # names of processes whose engines were told that there is one

    @property
    def have_had_controller(self) -> bool:
        """Whether there has been a controller, which knows the engines of that time."""
        return bool(self._spec["restore"])

    def call(self, ranks: list[int]) -> None:
        """Have ranks become engines, which need no controller yet."""
        connection_file = str(controller.connection_file(self._directory, "engine"))
        for rank in ranks:
            self._send(rank, Engine(connection_file=connection_file, engine_id=rank))

    def client_file(self) -> tuple[str, int]:
        """See `Cluster.client_file`."""
        if self._start is None:
            raise ClientError(
                "session.client and %%px are there for ranks on the notebook's machine only; use session.run and "
                "%%on_all_ranks"
            )
        with self._asking:
            has_been = self.have_had_controller
            if running := self._processes.living(CONTROLLER):
                pid = running[-1].pid
            else:
                try:
                    pid = self._start(self._spec).pid
                except StartError as error:
                    raise ClientError(
                        f"ipyparallel's controller did not start ({error}); cells go on without it, and %ddp_restart "
                        "brings it back"
                    ) from error
                self._spec["restore"] = True
            self._register(replace=has_been)
        return str(controller.connection_file(self._directory, "client")), pid

    def replace(self) -> bool:
        """Let new engines register in place of those that have died. Returns whether there is a controller for it."""
        with self._asking:
            if self.have_had_controller:
                self._register(replace=True)
            return self.have_had_controller

    def _register(self, *, replace: bool) -> None:
        """Let engines register with the controller that have not yet."""
        for rank in self._processes.alive:
            process = self._processes.by_rank[rank]
            if "Ready" in process.said and process.name not in self._registered:
                self._registered.add(process.name)
                self._send(rank, Register(replaces=replace))
