"""ipyparallel's client: one that knows all engines, and one whose controller is gone."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddp_notebook.errors import ClientError

if TYPE_CHECKING:
    import ipyparallel

_log = logging.getLogger(__name__)
_CONNECT_S = 20.0
_ATTEMPT_S = 3.0  # after which the controller may have ended, and the client is taken for one that has missed an engine
_ANSWER_S = 0.5
_HEALED_S = 2.0
_LOOK_S = 0.02
_FAIL_S = 2.0
_WHOSE = "(__import__('socket').gethostname(), __import__('os').getpid())"  # a function of ours would be imported there
_WHY = "ipyparallel's controller is gone, and the reply to this call with it; session.client starts it again"


Whose = tuple[str, int]  # the name of a rank's host, and its process id there


def connect(file: str, ranks: Callable[[], set[Whose]], until: float) -> tuple[ipyparallel.Client, set[Whose]]:
    """A client that knows the engines of all ranks, each of which has answered, and the ranks' processes.

    Args:
        file: the controller's connection file.
        ranks: tells the processes of the ranks that live.
        until: what the engines get to answer, on the monotonic clock.

    Raises:
        TimeoutError: the controller or an engine does not answer. At the next attempt it may: an engine that registers
            while the client connects may be neither in the list that the client is given, nor in what it is told once
            it has subscribed, and it never hears of it then.
    """
    import ipyparallel

    client = ipyparallel.Client(connection_info=file, timeout=_ATTEMPT_S)
    try:
        client.wait_for_engines(len(ranks()), timeout=_ATTEMPT_S, interactive=False)
        return client, _hear_all(client, ranks, until)
    except BaseException:
        client.close(linger=0)
        raise


def _hear_all(client: ipyparallel.Client, ranks: Callable[[], set[Whose]], until: float) -> set[Whose]:
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


class SharedClient:
    """The client of a session, made at the first use, and anew where its controller has been started again.

    Args:
        ranks: tells the processes of the ranks that live.
        file: gives the controller's connection file and process id, and starts one where there is none.
    """

    def __init__(self, ranks: Callable[[], set[Whose]], file: Callable[[], tuple[str, int]]) -> None:
        self._ranks = ranks
        self._file = file
        self._made: tuple[ipyparallel.Client, int] | None = None  # and the pid of its controller
        self._known: set[Whose] = set()  # ranks that it has heard

    def get(self) -> ipyparallel.Client:
        """A client that knows all engines.

        Raises:
            ClientError: the controller cannot be reached.
        """
        until = time.monotonic() + _CONNECT_S
        while True:
            file, pid = self._file()  # another one, where it has ended since the last attempt
            try:
                if self._made is None or self._made[1] != pid:
                    self.close()
                    client, self._known = connect(file, self._ranks, until)
                    self._made = client, pid
                else:
                    client = self._made[0]
                    self._hear_new(client, until)
                return client
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
            self._known = _hear_all(client, self._ranks, until)

    def on_controller_ended(self) -> None:
        """Its controller has ended. In an I/O thread."""
        made, self._made = self._made, None
        if made is not None:
            threading.Thread(target=give_up, args=(made[0],), name="ddp-client", daemon=True).start()

    def close(self) -> None:
        """Close it, if there is one."""
        made, self._made = self._made, None
        if made is not None:
            try:
                made[0].close(linger=0)
            except Exception as error:
                print(f"closing ipyparallel's client failed: {error}", file=sys.stderr)
