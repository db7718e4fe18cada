"""Methods of `session.files`: send files to the ranks' hosts, and fetch files of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError
from ddp_notebook.run.cells.interrupt import Interrupts, keyboard_interrupt
from ddp_notebook.run.interrupted import OF_FILES, tells_interrupts
from ddp_notebook.run.rank_sets import RankSet
from ddp_notebook.run.session_parts import SessionParts

if TYPE_CHECKING:
    from ddp_notebook.launch.sync.sync import Synced
    from ddp_notebook.run.files.fetching import Fetched

Progress = Callable[[str], None]


@tells_interrupts(OF_FILES)
class SessionFiles:
    """Files of a session.

    Attributes:
        synced: what was sent before the ranks were started; None if nothing was.
    """

    def __init__(self, parts: Callable[[], SessionParts], synced: Synced | None) -> None:
        self._parts = parts
        self.synced = synced

    def sync(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        also: Sequence[str] = (),
        large: bool = False,
        report: Progress = lambda _: None,
    ) -> Synced:
        """Send what has changed in a folder to the hosts that do not share it. Nothing is deleted there. Modules that
        ranks have imported are as they were: `importlib.reload`, or `%ddp_restart`.

        Args:
            folder: of the notebook; None: the one of the start, else the notebook's own.
            overwrite: also files that are newer there.
            also: names of files, or patterns of them, that are sent although such names are those of keys.
            large: it may have more than 1 GB or 20,000 files.
            report: told how far it is, again and again, behind a carriage return.

        Raises:
            UsageError: there is no such folder, it is too large, or the ranks are on this machine.
            HostError: a host is gone or cannot take a file; says what to do.
            KeyboardInterrupt: it was interrupted; no half file is there.

        Example:
            >>> session.files.sync()  # doctest: +SKIP
            gpu1: 1 file (2.1 kB) sent to /home/me/project in 0.1 s, 41 were there already
        """
        if isinstance(also, str):
            raise UsageError(f"also takes a list of names, not {also!r}: also=[{also!r}]")
        self._parts().liveness.check_host()
        with Interrupts(lambda: None) as interrupts:
            try:
                return self._parts().hosts.sync(
                    None if folder is None else os.fspath(folder),
                    overwrite=overwrite,
                    also=also,
                    is_large=large,
                    check=interrupts.check,
                    progress=report,
                )
            except KeyboardInterrupt:
                pass  # told below, without our frames behind it
        raise keyboard_interrupt("interrupted: what was sent by then is there, and no half file")

    def fetch(
        self,
        path: str | os.PathLike[str],
        ranks: RankSet = None,
        to: str | os.PathLike[str] = ".",
        overwrite: bool = False,
        report: Progress = lambda _: None,
    ) -> Fetched:
        """Bring files of ranks here. What is one file for several ranks comes once; where ranks have files of their own
        by that name, those of each go to a folder `rank0`, `rank1` and so on.

        Args:
            path: a file, a folder or a pattern (`runs/*.pt`, `**/metrics.csv`), as a rank finds it from its working
                directory.
            ranks: whose, as for `run`; None: of all.
            to: the folder here that gets them; it is made if need be.
            overwrite: replace files that are there. One of the same size and time is left alone in any case.
            report: told how far it is, again and again, behind a carriage return.

        Returns:
            The paths that were written.

        Raises:
            UsageError: no such rank.
            DDPNotebookError: a rank has nothing of that name, or a file is here already; nothing was fetched. Or one
                changes while it is read, or the disk is full here; the files that were whole by then are here.
            KeyboardInterrupt: it was interrupted; no half file is here.

        Example:
            >>> session.files.fetch("checkpoints/*.pt", ranks=0, to="results")
            1 file (... kB) of rank 0 in results
        """
        from ddp_notebook.run.files.fetching import Fetching

        parts = self._parts()
        fetching = Fetching(parts.exchange.turn, parts.questions, parts.transfers, parts.liveness)
        return fetching.fetch(os.fspath(path), ranks, os.fspath(to), overwrite=overwrite, report=report)
