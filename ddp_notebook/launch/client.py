"""ipyparallel's client: one that knows all engines, and one whose controller is gone."""

from __future__ import annotations

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
_FAIL_S = 2.0
_WHY = "ipyparallel's controller is gone, and the reply to this call with it; session.client starts it again"


def connect(file: str, world_size: int, until: float) -> ipyparallel.Client:
    """A client that knows the engines of all ranks, each of which has answered.

    Args:
        file: the controller's connection file.
        until: what the engines get to answer, on the monotonic clock.

    Raises:
        TimeoutError: the controller or an engine does not answer. At the next attempt it may: an engine that registers
            while the client connects may be neither in the list that the client is given, nor in what it is told once
            it has subscribed, and it never hears of it then.
    """
    import ipyparallel

    client = ipyparallel.Client(connection_info=file, timeout=_ATTEMPT_S)
    try:
        client.wait_for_engines(world_size, timeout=_ATTEMPT_S, interactive=False)
        _wait_for_answers(client, until)
    except BaseException:
        client.close(linger=0)
        raise
    return client


def _wait_for_answers(client: ipyparallel.Client, until: float) -> None:
    """Wait until every engine answers, and what it says besides is heard. A controller that was started again knows
    engines from its file before their connections are back, and drops what is sent to them until then. And a client
    that has only just subscribed to what they publish may miss it: then a call with output, `%%px` say, would wait for
    its end for ever."""
    while True:
        if client[:].apply_async(int).wait_for_output(_ANSWER_S):
            return
        if time.monotonic() > until:
            raise TimeoutError("its engines do not answer")


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
        world_size: number of engines.
        file: gives the controller's connection file and process id, and starts one where there is none.
    """

    def __init__(self, world_size: int, file: Callable[[], tuple[str, int]]) -> None:
        self._world_size = world_size
        self._file = file
        self._made: tuple[ipyparallel.Client, int] | None = None  # and the pid of its controller

    def get(self) -> ipyparallel.Client:
        """A client that knows all engines.

        Raises:
            ClientError: the controller cannot be reached.
        """
        until = time.monotonic() + _CONNECT_S
        while True:
            file, pid = self._file()  # another one, where it has ended since the last attempt
            if self._made is not None and self._made[1] == pid:
                # one of them may be new
                self._made[0].wait_for_engines(self._world_size, timeout=_CONNECT_S, interactive=False)
                return self._made[0]
            self.close()
            try:
                client = connect(file, self._world_size, until)
            except Exception as error:
                if isinstance(error, TimeoutError) and time.monotonic() < until:
                    continue
                raise ClientError(
                    f"ipyparallel's controller (pid {pid}) does not answer: {error}. Cells go on without it; "
                    "%ddp_restart brings it back"
                ) from error
            self._made = (client, pid)
            return client

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
