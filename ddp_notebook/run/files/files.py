"""Methods of `session.files`: send files to the hosts of the ranks, and fetch files from them."""

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
        synced: files that were sent before the ranks were started; None if there were none.
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
        """Send changed files of a folder to the hosts that do not share it.

        Nothing is deleted on a host. Modules that ranks have already imported do not change: use `importlib.reload` or
        `%ddp_restart`.

        Args:
            folder: a folder of the notebook's host; None: the one given at the start, else the notebook's folder.
            overwrite: also replace files that are newer on a host.
            also: file names or patterns to send although they look like key files.
            large: allow more than 1 GB or 20,000 files.
            report: called repeatedly with the progress, after a carriage return.

        Raises:
            UsageError: the folder does not exist or is too large, or the ranks are on this machine.
            HostError: a host is dead or cannot receive a file; the message has the remedy.
            KeyboardInterrupt: the transfer was interrupted; no host has an incomplete file.

        Example:
            >>> session.files.sync()  # doctest: +SKIP
            gpu1: 1 file (2.1 kB) sent to /home/me/project in 0.1 s, 41 were there already
        """
        if isinstance(also, str):
            raise UsageError(f"the argument also must be a list of names, got {also!r}: pass also=[{also!r}]")
        self._parts().liveness.check_host()
        synced: Synced | None = None
        with Interrupts(lambda: None) as interrupts:
            try:
                synced = self._parts().hosts.sync(
                    None if folder is None else os.fspath(folder),
                    overwrite=overwrite,
                    also=also,
                    is_large=large,
                    check=interrupts.check,
                    progress=report,
                )
            except KeyboardInterrupt:
                pass  # raised below, so that the traceback has no frames of this package
        if synced is not None:
            interrupts.raise_late("all files were sent")
            return synced
        raise keyboard_interrupt("interrupted: the files sent so far are complete, the others were not sent")

    def fetch(
        self,
        path: str | os.PathLike[str],
        ranks: RankSet = None,
        to: str | os.PathLike[str] = ".",
        overwrite: bool = False,
        report: Progress = lambda _: None,
    ) -> Fetched:
        """Copy files of ranks to the notebook's host.

        A file that several ranks share is copied once. If ranks have different files with the same name, those of each
        rank go to a folder `rank0`, `rank1` and so on.

        Args:
            path: a file, a folder or a pattern (`runs/*.pt`, `**/metrics.csv`), relative to the rank's working
                directory. It must not be the home folder or a folder above it, and match at most 20,000 files.
            ranks: selection of ranks, as for `run`; None: all.
            to: target folder, which is created if it does not exist.
            overwrite: replace existing files. A file of the same size and time is always kept.
            report: called repeatedly with the progress, after a carriage return.

        Returns:
            The written paths.

        Raises:
            UsageError: a rank does not exist.
            DDPNotebookError: a rank has no such file or too many, a file exists already, or a link in the target folder
                leads out of it; nothing was fetched. Or a file changes while it is read; complete files are kept.
            CannotWriteError: the files are larger than the free space of the local disk; nothing was fetched. Or the
                disk becomes full; complete files are kept.
            KeyboardInterrupt: the transfer was interrupted; there is no incomplete file.

        Example:
            >>> session.files.fetch("checkpoints/*.pt", ranks=0, to="results")
            1 file (... kB) of rank 0 in results
        """
        from ddp_notebook.run.files.fetching import Fetching

        parts = self._parts()
        fetching = Fetching(parts.exchange.turn, parts.questions, parts.transfers, parts.liveness)
        return fetching.fetch(os.fspath(path), ranks, os.fspath(to), overwrite=overwrite, report=report)
