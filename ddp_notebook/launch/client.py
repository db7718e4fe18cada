"""ipyparallel's client: one that knows all engines, and one whose controller is gone."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.errors import ClientError, StartError
from ddp_notebook.launch import processes
from ddp_notebook.launch.host import open_files

if TYPE_CHECKING:
    import ipyparallel

_log = logging.getLogger(__name__)
_CONNECT_S = 20.0
_ATTEMPT_S = 3.0  # after which the controller may have ended, and the client is taken for one that has missed an engine
_ANSWER_S = 0.5
_HEALED_S = 2.0
_LOOK_S = 0.02
_FAIL_S = 2.0
_WATCH_S = 1.0  # between two looks whether processes of the controller run, while a call waits
_WHOSE = "(__import__('socket').gethostname(), __import__('os').getpid())"  # a function of ours would be imported there
_WHY = "ipyparallel's controller is gone, and the reply to this call with it; session.client starts it again"


Whose = tuple[str, int]  # the name of a rank's host, and its process id there


def connect(
    file: str, ranks: Callable[[], set[Whose]], until: float, check: Callable[[], None]
) -> tuple[ipyparallel.Client, set[Whose]]:
    """A client that knows the engines of all ranks, each of which has answered, and the ranks' processes.

    Args:
        file: the controller's connection file.
        ranks: tells the processes of the ranks that live.
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
        return client, _hear_all(client, ranks, until, check)
    except BaseException:
        client.close(linger=0)
        raise


def _wait_for_engines(client: ipyparallel.Client, ranks: Callable[[], set[Whose]], check: Callable[[], None]) -> None:
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


def _hear_all(
    client: ipyparallel.Client, ranks: Callable[[], set[Whose]], until: float, check: Callable[[], None]
) -> set[Whose]:
    """Wait until the engine of every rank answers, and what it says besides is heard. Returns the ranks' processes.

    A controller that was started again knows engines from its file before their connections are back, and drops what is
    sent to them until then. A client that has only just subscribed to what they publish may miss it: then a call with
    output, `%%px` say, would wait for its end for ever. And one that has not heard yet that a rank was replaced sends
    to the engine that has died.
    """
    while True:
        asked = []
        with contextlib.suppress(IndexError):  # it has heard just now that one has died
            asked = [client[engine].apply_async(eval, _WHOSE) for engine in client.ids]
        ask_until = time.monotonic() + _ANSWER_S
        heard = [one for one in asked if one.wait_for_output(max(0.0, ask_until - time.monotonic()))]
        answers = {one.get() for one in heard if one.successful()}
        known = ranks()
        if known <= answers:
            return known
        check()
        if time.monotonic() > until:
            raise TimeoutError("its engines do not answer")
        time.sleep(_LOOK_S)


def give_up(client: ipyparallel.Client) -> None:
    """Give errors to the calls that wait for a reply, as the client itself does when an engine has died, and close it:
    without its controller every call would wait for ever. Call it in a thread of its own."""
    from ipyparallel import error

    has_failed = threading.Event()

    def fail() -> None:
        for msg_id in list(client.outstanding):
            try:
                raise error.EngineError(_WHY)
            except error.EngineError:
                reply = client.session.msg("apply_reply", content=error.wrap_exception())
            reply["parent_header"]["msg_id"] = msg_id
            client._handle_apply_reply(reply)
        has_failed.set()

    try:
        client._io_loop.add_callback(fail)
        has_failed.wait(_FAIL_S)
        client.close(linger=0)
    except Exception:  # of another version, or closed already: the stop button ends a wait
        _log.exception("calls to ipyparallel's controller, which is gone, could not be ended")


class _Watch:
    """Names processes of the controller that are stopped, or that a debugger holds.

    Calls by the client wait in ipyparallel's code, which says nothing of that: a thread does, under the running cell.

    Args:
        client: whose calls may wait.
        controller: its process id, on this machine.
    """

    def __init__(self, client: ipyparallel.Client, controller: int) -> None:
        self._client = client
        self._controller = controller
        self._pids = [process.pid for process in processes.descendants(controller)]
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ddp-client-watch", daemon=True).start()

    def halted(self) -> str:
        """Name the processes that do not run, and the remedy, in a sentence; "" if all run."""
        return halted(self._controller, self._pids)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        said = ""
        while not self._closed.wait(_WATCH_S):
            why = self.halted() if self._client.outstanding else ""
            if why and why != said:
                print(f"a call of session.client waits: {why}", file=sys.stderr, flush=True)
            said = why


def halted(controller: int, pids: Sequence[int] = ()) -> str:
    """Name the processes of a controller that do not run, and the remedy, in a sentence; "" if all run.

    Args:
        controller: its process id, on this machine.
        pids: of all its processes, if they are known.
    """
    pids = pids or [process.pid for process in processes.descendants(controller)]
    stopped = [pid for pid in pids if processes.is_stopped_anywhere(pid)]
    whose = f"ipyparallel's controller (process {controller})"
    if stopped:
        resume = f"kill -CONT {' '.join(map(str, stopped))}"
        which = (
            "is stopped"
            if stopped == [controller]
            else f"has processes that are stopped ({', '.join(map(str, stopped))})"
        )
        return f"{whose} {which}: {resume} lets it go on, and nothing is lost. Cells go on without it"
    held = next(filter(None, map(processes.held, pids)), "")
    return f"{whose} does not answer: {held}. Cells go on without it" if held else ""


class SharedClient:
    """The client of a session, made at the first use, and anew where its controller has been started again.

    Args:
        ranks: tells the processes of the ranks that live.
        file: gives the controller's connection file and process id, and starts one where there is none.
        check: raises ClientError if the engine of a rank cannot register.
    """

    def __init__(
        self, ranks: Callable[[], set[Whose]], file: Callable[[], tuple[str, int]], check: Callable[[], None]
    ) -> None:
        self._ranks = ranks
        self._file = file
        self._check = check
        self._made: tuple[ipyparallel.Client, int] | None = None  # and the pid of its controller
        self._known: set[Whose] = set()  # ranks that it has heard
        self._watch: _Watch | None = None

    def get(self) -> ipyparallel.Client:
        """A client that knows all engines.

        Raises:
            ClientError: the controller cannot be reached, or this process has too few file descriptors left.
        """
        until = time.monotonic() + _CONNECT_S
        while True:
            file, pid = self._file()  # another one, where it has ended since the last attempt
            self._check()
            if why := halted(pid) if self._watch is None else self._watch.halted():
                raise ClientError(why)
            try:
                if self._made is None or self._made[1] != pid:
                    self.close()
                    open_files.check_free(open_files.OF_CLIENT, "session.client")
                    client, self._known = connect(file, self._ranks, until, self._check)
                    self._made, self._watch = (client, pid), _Watch(client, pid)
                else:
                    client = self._made[0]
                    self._hear_new(client, until)
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

    def on_healed(self) -> None:
        """Ranks were replaced: a call that follows at once is to reach the new ones."""
        made = self._made
        if made is not None:
            with contextlib.suppress(Exception):  # `get` tries again, and says why not
                self._hear_new(made[0], time.monotonic() + _HEALED_S)

    def _hear_new(self, client: ipyparallel.Client, until: float) -> None:
        if not self._known.issuperset(self._ranks()):
            self._known = _hear_all(client, self._ranks, until, self._check)

    def on_controller_ended(self) -> None:
        """Its controller has ended. In an I/O thread."""
        made, self._made = self._made, None
        self._end_watch()
        if made is not None:
            threading.Thread(target=give_up, args=(made[0],), name="ddp-client", daemon=True).start()

    def close(self) -> None:
        """Close it, if there is one."""
        made, self._made = self._made, None
        self._end_watch()
        if made is not None:
            try:
                made[0].close(linger=0)
            except Exception as error:
                print(f"closing ipyparallel's client failed: {error}", file=sys.stderr)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
