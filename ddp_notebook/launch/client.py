"""ipyparallel's client when its controller is gone."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ipyparallel

_log = logging.getLogger(__name__)
_FAIL_S = 2.0
_WHY = "ipyparallel's controller is gone, and the reply to this call with it; session.client starts it again"


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
