"""The door of a rank: a Unix socket at which one notebook at a time comes in. That it is there is all that this process
knows of it: the connection ends with the notebook, however that ends.

    notebook -> rank   {"wire": 1, "who": "...", "takes": false, ...}   what `ScriptObserver.begin` needs
    rank -> notebook   {"welcome": true}, or {"refused": "why"}
    rank -> notebook   {"taken": "who"}   another one was let in instead, who asked for that

Nothing else travels here, so a notebook that does not read keeps nobody waiting.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_notebook.registry import entries, unix_sockets
from ddp_notebook.stdlib import logging, os, socket, threading

_GREETING_S = 2.0  # what who comes in gets to say who it is
_LOOK_S = 2.0  # between two looks whether a cleaner has removed the socket
_log = logging.getLogger(__name__)


class AttachSocket:
    """Listens, in a thread, which sleeps while nobody comes or goes.

    Args:
        path: of the socket.
        wire: version of the wire; a notebook that speaks another one is sent away.
        begin: a notebook has come, and said this. In the thread.
        end: it has gone. In the thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self, path: Path, wire: int, begin: Callable[[dict[str, Any]], object], end: Callable[[], object]
    ) -> None:
        self._listener = unix_sockets.listen(path)
        self._wire = wire
        self._begin = begin
        self._end = end
        self._guest: socket.socket | None = None
        self.entry: entries.Entry | None = None
        self._who = ""
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._run, name="ddp-door", daemon=True).start()

    def _leave(self) -> None:
        """In a forked child: a notebook would take the connection that it holds for the rank's."""
        for one in (self._listener, self._guest):
            if one is not None:
                one.close()

    def _run(self) -> None:
        while True:
            guest = self._guest
            readable, _, _ = select.select([self._listener, *([guest] if guest else [])], [], [], _LOOK_S)
            try:
                if not readable:
                    self._restore()
                if guest in readable:
                    self._on_gone()
                if self._listener in readable:
                    self._let_in(self._listener.accept()[0])
            except Exception:  # the script goes on, and the next notebook may come
                _log.info("what came in at the door has failed", exc_info=True)

    def keep(self, entry: entries.Entry) -> None:
        """Make this entry and the socket again from now on, when a cleaner has removed one of them."""
        self.entry = entry

    def _restore(self) -> None:
        if self.entry is None or entries.is_complete(self.entry):
            return
        listener = unix_sockets.listen(entries.door(self.entry.kind))
        before, self._listener = self._listener, listener
        before.close()
        self.entry = entries.enter_again(self.entry)

    def _let_in(self, guest: socket.socket) -> None:
        guest.settimeout(_GREETING_S)
        try:
            unix_sockets.check_user(guest)
            said = unix_sockets.hear(guest)
            if why := self._why_not(said):
                unix_sockets.say(guest, refused=why)
                raise unix_sockets.AttachSocketError(why)
            if self._guest is not None:
                unix_sockets.say(self._guest, taken=said["who"])
                self._on_gone()
            unix_sockets.say(guest, welcome=True)
        except (OSError, KeyError):  # among them one that only looks whether somebody listens
            guest.close()
            return
        self._guest, self._who = guest, said["who"]
        self._begin(said)

    def _why_not(self, said: dict[str, Any]) -> str:
        if said["wire"] != self._wire:
            return f"the rank speaks version {self._wire} of the wire, this notebook {said['wire']}"
        if self._guest is not None and not said["takes"]:
            return f"{self._who} is attached to it"
        return ""

    def _on_gone(self) -> None:
        guest, self._guest, self._who = self._guest, None, ""
        if guest is not None:
            guest.close()
            self._end()
