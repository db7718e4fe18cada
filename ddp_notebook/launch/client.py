"""ipyparallel's client: one that knows all engines, and one whose controller is gone."""

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
_ATTEMPT_S = 3.0  # after which the controller may have ended, and the client is taken for one that has missed an engine
_ANSWER_S = 0.5
_HEALED_S = 2.0
_LOOK_S = 0.02
_HALTED_S = 1.0  # a wait of this length checks whether ranks are stopped or held
_WHOSE = "(__import__('socket').gethostname(), __import__('os').getpid())"  # a function of ours would be imported there
_NO_CONTROLLER = (
    "the controller of ipyparallel has ended, and the reply to this call is lost; session.client starts it again"
)
_NO_RANKS = "the ranks have ended, and the reply to this call with them; %ddp_start starts new ones"
_CLOSED = "session.client was closed, and the reply to this call is lost"


Whose = tuple[str, int]  # the name of a rank's host, and its process id there


def connect(
    file: str, ranks: Callable[[], dict[int, Whose]], until: float, check: Callable[[], None]
) -> tuple[ipyparallel.Client, set[Whose]]:
    """A client that knows the engines of all ranks, each of which has answered, and the ranks' processes.

    Args:
        file: the controller's connection file.
        ranks: returns the processes of the living ranks, by rank.
        until: what the engines get to answer, on the monotonic clock.
        check: called while this waits; raises an error if the wait is in vain.

    Raises:
        whatever `check` raises.
        TimeoutError: the controller or an engine does not answer. At the next attempt it may: an engine that registers
            while the client connects may be neither in the list that the client is given, nor in what it is told once
            it has subscribed, and it never hears of it then.
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
        whatever `check` raises.
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

    A controller that was started again knows engines from its file before their connections are back, and drops what is
    sent to them until then. A client that has only just subscribed to what they publish may miss it: then a call with
    output, `%%px` say, would wait for its end for ever. And one that has not heard yet that a rank was replaced sends
    to the engine that has died.

    Args:
        heard: the processes that have answered this client before. They are not asked: they may run a long cell.
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
    """The client of a session, made at the first use, and again when its controller was started again.

    Args:
        cluster: the ranks.
        why_silent: returns why ranks do not answer, of those for which this is known.
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
        self._made: tuple[ipyparallel.Client, int] | None = None  # and the pid of its controller
        self._known: set[Whose] = set()  # ranks that it has heard
        self._watch: CallWatch | None = None

    @property
    def alive(self) -> list[int]:
        """Ranks whose process lives."""
        return self._cluster.alive

    @property
    def ended(self) -> dict[int, str]:
        """How the processes of dead ranks ended."""
        return {rank: self._cluster.process(rank).how for rank in self._cluster.gone}

    def get(self) -> ipyparallel.Client:
        """A client that knows all engines.

        Raises:
            ClientError: the controller or a rank cannot be reached, or this process has too few file descriptors left.
        """
        until = time.monotonic() + _CONNECT_S
        check = self._checked()
        while True:
            file, pid = self._cluster.client_file()  # another one, where it has ended since the last attempt
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
            except ClientError:  # of `check`
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
        """Return a function that raises ClientError if a rank cannot register or does not answer. It does not look for
        ranks that do not answer, or that run a cell, before a second has passed."""
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
        """Ranks were replaced: a call that follows at once is to reach the new ones."""
        made = self._made
        if made is not None:
            with contextlib.suppress(Exception):  # `get` tries again, and says why not
                self._hear_new(made[0], time.monotonic() + _HEALED_S, self._cluster.check_registered)

    def _hear_new(self, client: ipyparallel.Client, until: float, check: Callable[[], None]) -> None:
        if not self._known.issuperset(self._processes().values()):
            self._known = _hear(client, self._known, self._processes, until, check)

    def _processes(self) -> dict[int, Whose]:
        """The processes of the living ranks, by rank."""
        alive = {rank: self._cluster.process(rank) for rank in self._cluster.alive}
        return {rank: (process.host.hostname, process.pid) for rank, process in alive.items() if process.pid}

    def on_ended(self, rank: int, how: str) -> None:
        """A rank's process has ended. In an I/O thread."""
        if (watch := self._watch) is not None:
            watch.on_ended(rank, how)

    def on_gone(self) -> None:
        """All processes of the session have ended. In an I/O thread."""
        self._leave(_NO_RANKS)

    def on_controller_ended(self) -> None:
        """Its controller has ended. In an I/O thread."""
        self._leave(_NO_CONTROLLER)

    def _leave(self, why: str) -> None:
        made, self._made = self._made, None
        self._end_watch()
        if made is not None:
            threading.Thread(target=client_calls.give_up, args=(made[0], why), name="ddp-client", daemon=True).start()

    def close(self, why: str = _CLOSED) -> None:
        """Close it, if there is one.

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
