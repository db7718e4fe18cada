"""The door of a rank: a Unix socket at which one notebook at a time comes in. That it is there is all that this process
knows of it: the connection ends with the notebook, however that ends.

    notebook -> rank   ObserveScript
    rank -> notebook   Admitted, or Refused
    rank -> notebook   Replaced: another notebook has attached instead, as it asked for

Nothing else travels here, so a notebook that does not read keeps nobody waiting.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path

from ddp_notebook.messages.first_messages import Admitted, ObserveScript, Refused, Replaced
from ddp_notebook.registry import entries, unix_sockets
from ddp_notebook.stdlib import logging, os, socket, threading

_GREETING_S = 2.0  # what who comes in gets to say who it is
_LOOK_S = 2.0  # between two looks whether a cleaner has removed the socket
_log = logging.getLogger(__name__)


class AttachSocket:
    """Listens, in a thread, which sleeps while nobody comes or goes.

    Args:
        path: of the socket.
        begin: a notebook has come, and said this. In the thread.
        end: it has gone. In the thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, begin: Callable[[ObserveScript], object], end: Callable[[], object]) -> None:
        self._listener = unix_sockets.listen(path)
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
            said = self._accepted(guest)
            if self._guest is not None:
                unix_sockets.send_line(self._guest, Replaced(by=said.who))
                self._on_gone()
            unix_sockets.send_line(guest, Admitted())
        except OSError:  # a process that only tests the socket also closes it
            guest.close()
            return
        self._guest, self._who = guest, said.who
        self._begin(said)

    def _accepted(self, guest: socket.socket) -> ObserveScript:
        """Read what a notebook asks for.

        Raises:
            AttachSocketError: it is refused, and was told why.
        """
        try:
            said = unix_sockets.hear(guest, ObserveScript)
            if self._guest is not None and not said.takes:
                raise unix_sockets.AttachSocketError(f"{self._who} is attached to it")
        except unix_sockets.AttachSocketError as error:
            unix_sockets.send_line(guest, Refused(why=str(error)))
            raise
        return said

    def _on_gone(self) -> None:
        guest, self._guest, self._who = self._guest, None, ""
        if guest is not None:
            guest.close()
            self._end()
