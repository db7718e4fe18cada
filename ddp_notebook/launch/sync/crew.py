"""Something done for all hosts at once, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ddp_notebook.launch.host.host import Host

_T = TypeVar("_T")
_LOOK_S = 0.1
_GIVE_UP_S = 2.0  # what threads get to end after an interrupt


class StoppedError(Exception):
    """Somebody has pressed stop, or it failed for another host."""


class Crew:
    """Ends all together: at the first error, and when `check` raises.

    Args:
        check: called often, in the caller's thread; what it raises ends the work.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._stop = threading.Event()

    def check(self) -> None:
        """For the threads, to be called often.

        Raises:
            StoppedError: it is to end.
        """
        if self._stop.is_set():
            raise StoppedError

    def work(
        self, hosts: Sequence[Host], work: Callable[[Host], _T], tell: Callable[[], None] = lambda: None
    ) -> dict[str, _T]:
        """Do something for each host, and wait for all.

        Args:
            hosts: whose names are the keys of what is returned.
            work: gets a host, in a thread.
            tell: called several times a second, in the caller's thread.

        Raises:
            whatever `work` or the crew's `check` raises first.
        """
        results: dict[str, _T] = {}
        errors: list[BaseException] = []

        def run(host: Host) -> None:
            try:
                results[host.name] = work(host)
            except BaseException as error:
                errors.append(error)
                self._stop.set()

        threads = [threading.Thread(target=run, args=(host,), name="ddp-sync", daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    self._check()
                    tell()
        except BaseException:
            self._stop.set()
            until = time.monotonic() + _GIVE_UP_S
            for thread in threads:  # one may wait for a link that takes nothing; the end of its host ends that
                thread.join(max(0.0, until - time.monotonic()))
            raise
        if errors:
            raise next((error for error in errors if not isinstance(error, StoppedError)), errors[0])
        return results
