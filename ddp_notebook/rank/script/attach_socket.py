"""Unix socket of a rank, at which one notebook at a time can attach. Closing the connection detaches the notebook.

    notebook -> rank   ObserveScript
    rank -> notebook   Admitted, or Refused
    rank -> notebook   Replaced: another notebook has attached instead, as requested

No other data uses this connection, so a notebook that does not read cannot block the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ddp_notebook.messages.first_messages import Admitted, ObserveScript, Refused, Replaced
from ddp_notebook.registry import entries, unix_sockets
from ddp_notebook.stdlib import logging, os, select, socket, threading

_GREETING_S = 2.0  # timeout for the first message of a notebook
_LOOK_S = 2.0  # interval of the check whether a cleaner has removed the socket
_log = logging.getLogger(__name__)


class AttachSocket:
    """Attach socket of a rank, served by a thread that sleeps while idle.

    Args:
        path: path of the socket.
        begin: called in the thread with the request of an attaching notebook.
        end: called in the thread when the notebook has detached.

    Raises:
        OSError: the socket cannot be created.
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
        """Close the sockets in a forked child, because a notebook would take its copy for the rank's connection."""
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
            except Exception:  # the script continues, and another notebook may attach
                _log.info("a connection to the attach socket has failed", exc_info=True)

    def keep(self, entry: entries.Entry) -> None:
        """Recreate this entry and its socket from now on when a cleaner has removed one of them."""
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
        """Read the request of a notebook.

        Raises:
            AttachSocketError: the request was rejected, and the notebook received the reason.
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
