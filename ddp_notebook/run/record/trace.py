"""The recording as a Chrome trace, with the profiles that cells have left in the session's folder."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.trace.profiles import read
from ddp_notebook.observe.trace.trace import save
from ddp_notebook.wire.record_options import profiles_in


def write(
    recording: Recording, path: str | os.PathLike[str], cell: int | None, folder: str | None
) -> tuple[list[int], list[int]]:
    """Write it. See `Session.trace`.

    Args:
        folder: where profiles lie; None: there are none any more.

    Returns:
        The ranks whose profiles it holds, and those whose profiles are lost.
    """
    last: dict[int, tuple[int, Path]] = {}  # the last profile of each rank
    for of_cell, rank, file in profiles_in(folder) if folder else ():
        if cell in (None, of_cell):
            last[rank] = max(last.get(rank, (0, file)), (of_cell, file))
    profiles, lost = {}, []
    for rank, (_, file) in sorted(last.items()):
        try:
            profiles[rank] = read(rank, file)
        except UsageError:  # the disk was full, or the rank has died: the rest is worth its file
            lost.append(rank)
    save(recording, path, cell, profiles)
    return list(profiles), lost
