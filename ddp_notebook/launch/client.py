"""The ipyparallel client of a session: connect it to all engines, and close it when its controller has ended."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ddp_notebook.errors import ClientError, StartError
from ddp_notebook.launch import client_calls
from ddp_notebook.launch.client_calls import CallWatch
from ddp_notebook.launch.host import open_files

if TYPE_CHECKING:
    import ipyparallel

    from ddp_notebook.launch.cluster import Cluster

_CONNECT_S = 20.0
# after this time, check the controller again and connect a new client: this one may have missed an engine
_ATTEMPT_S = 3.0
_ANSWER_S = 0.5
_HEALED_S = 2.0
_LOOK_S = 0.02
_HALTED_S = 1.0  # during a longer wait, check for stopped or held ranks
# an expression, since the engine would have to import a function
_WHOSE = "(__import__('socket').gethostname(), __import__('os').getpid())"
_NO_CONTROLLER = (
    "the controller of ipyparallel has ended, and the reply to this call is lost; session.client starts it again"
)
_NO_RANKS = "the ranks have ended, and the reply to this call with them; %ddp_start starts new ones"
_CLOSED = "session.client was closed, and the reply to this call is lost"


Whose = tuple[str, int]  # host name and process id of a rank


def connect(
    file: str, ranks: Callable[[], dict[int, Whose]], until: float, check: Callable[[], None]
) -> tuple[ipyparallel.Client, set[Whose]]:
    """Return a client that knows the engines of all ranks, each of which has answered, and the ranks' processes.

    Args:
        file: the controller's connection file.
        ranks: returns the processes of the living ranks, by rank.
        until: time limit for the engines' answers, on the monotonic clock.
        check: called during the wait; raises an error if the wait cannot succeed.

    Raises:
        any exception of `check`.
        TimeoutError: the controller or an engine does not answer. The next attempt may succeed: an engine that
            registers while the client connects may be missing both in the list of engines and in the notifications
            after it.
    """
    import ipyparallel

    client = ipyparallel.Client(connection_info=file, timeout=_ATTEMPT_S)
    try:
        _wait_for_engines(client, ranks, check)
        return client, _hear(client, set(), ranks, until, check)
    except BaseException:
        client.close(linger=0)
        raise


def _wait_for_engines(
    client: ipyparallel.Client, ranks: Callable[[], dict[int, Whose]], check: Callable[[], None]
) -> None:
    """Wait until the client knows as many engines as there are ranks.

    Raises:
        any exception of `check`.
        TimeoutError: it does not within the time of an attempt.
    """
    until = time.monotonic() + _ATTEMPT_S
    while (known := len(client.ids)) < (count := len(ranks())):
        check()
        if time.monotonic() > until:
            raise TimeoutError(f"{known} of {count} engines have registered with it")
        time.sleep(_LOOK_S)


def _hear(
    client: ipyparallel.Client,
    heard: set[Whose],
    ranks: Callable[[], dict[int, Whose]],
    until: float,
    check: Callable[[], None],
) -> set[Whose]:
    """Wait until the engine of every rank has answered, and its output has arrived. Returns the ranks' processes.

    A restarted controller knows engines from its file before their connections are back, and drops messages to them
    until then. A client that has just subscribed to the engines' output may miss the first part: a call with output,
    such as `%%px`, would then wait for its end forever. A client that does not know yet that a rank was replaced sends
    to the dead engine.

    Args:
        client: of the session.
        heard: processes that have answered this client before. They get no request: they may run a long cell.
        ranks: returns the processes of the living ranks, by rank.
        until: time limit, on the monotonic clock.
        check: called during the wait; raises an error if the wait cannot succeed.
    """
    while True:
        missing = [rank for rank, whose in ranks().items() if whose not in heard]
        asked = []
        for rank in missing:
            with contextlib.suppress(IndexError):  # its engine has not registered, or has died
                asked.append(client[rank].apply_async(eval, _WHOSE))
        ask_until = time.monotonic() + _ANSWER_S
        answered = [one for one in asked if one.wait_for_output(max(0.0, ask_until - time.monotonic()))]
        heard = heard | {one.get() for one in answered if one.successful()}
        known = set(ranks().values())
        if known <= heard:
            return known
        check()
        if time.monotonic() > until:
            raise TimeoutError("its engines do not answer")
        time.sleep(_LOOK_S)


class SharedClient:
    """The client of a session, created at the first use, and again after its controller was restarted.

    Args:
        cluster: the ranks.
        why_silent: returns the reason for each rank that does not answer, where known.
        long_cells: names the cells that ranks have run for a second, in sentences; "" if there are none.
    """

    def __init__(
        self,
        cluster: Cluster,
        why_silent: Callable[[Collection[int]], Mapping[int, str]],
        long_cells: Callable[[Collection[int]], str],
    ) -> None:
        self._cluster = cluster
        self._long_cells = long_cells
        self.why_silent = why_silent
        self._made: tuple[ipyparallel.Client, int] | None = None  # with the pid of its controller
        self._known: set[Whose] = set()  # ranks that have answered this client
        self._watch: CallWatch | None = None

    @property
    def alive(self) -> list[int]:
        """Ranks with a living process."""
        return self._cluster.alive

    @property
    def ended(self) -> dict[int, str]:
        """Exit causes of dead ranks."""
        return {rank: self._cluster.process(rank).how for rank in self._cluster.gone}

    def get(self) -> ipyparallel.Client:
        """Return a client that knows all engines.

        Raises:
            ClientError: the controller or a rank cannot be reached, or this process has too few file descriptors left.
        """
        until = time.monotonic() + _CONNECT_S
        check = self._checked()
        while True:
            file, pid = self._cluster.client_file()  # a new controller, if it has ended since the last attempt
            check()
            if why := client_calls.halted(pid) if self._watch is None else self._watch.halted():
                raise ClientError(why)
            try:
                if self._made is None or self._made[1] != pid:
                    self.close(_NO_CONTROLLER)
                    open_files.check_free(open_files.OF_CLIENT, "session.client")
                    client, self._known = connect(file, self._processes, until, check)
                    self._made, self._watch = (client, pid), CallWatch(client, pid, self)
                else:
                    client = self._made[0]
                    self._hear_new(client, until, check)
                return client
            except ClientError:  # raised by `check`
                raise
            except StartError as error:
                raise ClientError(str(error)) from None
            except Exception as error:
                if isinstance(error, TimeoutError) and time.monotonic() < until:
                    continue
                raise ClientError(
                    f"ipyparallel's controller (pid {pid}) does not answer: {error}. Cells go on without it; "
                    "%ddp_restart brings it back"
                ) from error

    def _checked(self) -> Callable[[], None]:
        """Return a function that raises ClientError if a rank cannot register or does not answer.

        It checks for silent ranks, and for ranks that run a cell, only after one second.
        """
        look_at = time.monotonic() + _HALTED_S

        def check() -> None:
            nonlocal look_at
            self._cluster.check_registered()
            if time.monotonic() > look_at:
                look_at = time.monotonic() + _HALTED_S / 2
                if why := client_calls.reasons(self.why_silent(self._cluster.alive)):
                    raise ClientError(f"session.client needs all ranks. {why}. Cells go on without it")
                known = self._known if self._made else set()
                asked = [rank for rank, whose in self._processes().items() if whose not in known]
                if cells := self._long_cells(asked):
                    raise ClientError(
                        f"session.client connects between two cells. {cells}. "
                        "A client that has connected can be used during a cell, and its calls run after the cell"
                    )

        return check

    def on_healed(self) -> None:
        """Connect the client to replaced ranks, so that the next call reaches them."""
        made = self._made
        if made is not None:
            with contextlib.suppress(Exception):  # `get` tries again, and raises the reason
                self._hear_new(made[0], time.monotonic() + _HEALED_S, self._cluster.check_registered)

    def _hear_new(self, client: ipyparallel.Client, until: float, check: Callable[[], None]) -> None:
        if not self._known.issuperset(self._processes().values()):
            self._known = _hear(client, self._known, self._processes, until, check)

    def _processes(self) -> dict[int, Whose]:
        """Return the processes of the living ranks, by rank."""
        alive = {rank: self._cluster.process(rank) for rank in self._cluster.alive}
        return {rank: (process.host.hostname, process.pid) for rank, process in alive.items() if process.pid}

    def on_ended(self, rank: int, how: str) -> None:
        """Handle the end of a rank's process. In an I/O thread."""
        if (watch := self._watch) is not None:
            watch.on_ended(rank, how)

    def on_gone(self) -> None:
        """Handle the end of all processes of the session. In an I/O thread."""
        self._leave(_NO_RANKS)

    def on_controller_ended(self) -> None:
        """Handle the end of the controller. In an I/O thread."""
        self._leave(_NO_CONTROLLER)

    def _leave(self, why: str) -> None:
        made, self._made = self._made, None
        self._end_watch()
        if made is not None:
            threading.Thread(target=client_calls.give_up, args=(made[0], why), name="ddp-client", daemon=True).start()

    def close(self, why: str = _CLOSED) -> None:
        """Close the client, if there is one.

        Args:
            why: the error of calls that another thread waits for.
        """
        made, self._made = self._made, None
        self._end_watch()
        if made is None:
            return
        try:
            if made[0].outstanding:
                client_calls.give_up(made[0], why)
            else:
                made[0].close(linger=0)
        except Exception as error:
            print(f"closing ipyparallel's client failed: {error}", file=sys.stderr)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
