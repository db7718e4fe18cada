"""Write the recording as a Chrome trace, with the profiles that cells have stored in the session's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ddp_notebook.errors import UsageError
from ddp_notebook.messages.record_options import profile_of
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.trace.profiles import read
from ddp_notebook.observe.trace.trace import save


def write(
    recording: Recording, path: str | os.PathLike[str], cell: int | None, profiles: Iterable[Path]
) -> tuple[list[int], list[int]]:
    """Write the trace. See `Session.trace`.

    Args:
        profiles: the files that cells have stored.

    Returns:
        The ranks whose profiles it contains, and those whose profiles are lost.
    """
    last: dict[int, tuple[int, Path]] = {}  # the last profile of each rank
    for file in profiles:
        of_cell, rank = profile_of(file)
        if cell in (None, of_cell):
            last[rank] = max(last.get(rank, (0, file)), (of_cell, file))
    found, lost = {}, []
    for rank, (_, file) in sorted(last.items()):
        try:
            found[rank] = read(rank, file)
        except UsageError:  # the disk was full, or the rank died; write the rest anyway
            lost.append(rank)
    save(recording, path, cell, found)
    return list(found), lost
