"""Resources that this rank has run out of, as sentences for an error, for `%ddp_status` and for a group that does not
form."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Collection

from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import chain
from ddp_notebook.records import shortages
from ddp_notebook.records.shortages import DESCRIPTORS, DISK, MEMORY, PROCESSES, SHM
from ddp_notebook.stdlib import contextlib, os

_OF_NETWORKS = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "afs", "9p", "beegfs")
_rank = -1


def settle(rank: int) -> None:
    """Tell this module the rank of this process."""
    global _rank
    _rank = rank


def of_error(error: BaseException) -> str:
    """Return the sentence that explains an error by a resource that has run out; "" if none has."""
    wanted: set[str] = set()
    paths: list[str] = []
    has_failed = False
    for one in chain(error):
        kinds = shortages.kinds(one)
        has_failed |= kinds == {MEMORY}
        wanted |= kinds
        paths += shortages.places(one)
    return "; ".join(_look(wanted, paths, has_failed=has_failed)) if wanted else ""


def now() -> list[str]:
    """Return a sentence for each resource that has run out now, in about 1 ms. Called in the agent's thread, which must
    never wait: a file system of a network is not looked at."""
    paths = [SHM]
    with contextlib.suppress(OSError):
        paths.insert(0, tempfile.gettempdir())  # it looks for a folder if nothing has called it before
    with contextlib.suppress(OSError):
        if _is_local(folder := os.getcwd()):
            paths.append(folder)
    return _look({DESCRIPTORS, MEMORY, PROCESSES, DISK}, paths)


def lacks_memory() -> bool:
    """Return whether hardly any memory is left below the tightest limit."""
    return bool(_look({MEMORY}, []))


def of_descriptors(needed: int, what: str) -> str:
    """Return the sentence that refuses something which needs more descriptors than are free; "" if there are enough.
    The reserve counts as free if it is lent.

    Args:
        needed: how many it needs.
        what: the thing, for the sentence.
    """
    try:
        free = shortages.free_descriptors()
    except OSError:  # none is free to count them with
        free = 0
    if free >= needed:
        return ""
    if found := _look({DESCRIPTORS}, []):
        return found[0]
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = limit - free
    return f"{_who()} has too few file descriptors left: {used} of {limit} are in use, and {what} needs {needed}"


def _who() -> str:
    return "this process" if _rank < 0 else f"rank {_rank}"


def _look(wanted: Collection[str], paths: Collection[str], *, has_failed: bool = False) -> list[str]:
    who, used = _who(), reserve.used_descriptors()

    def look() -> list[str]:
        lent = reserve.lent_bytes()
        return shortages.sentences(who, wanted, paths=paths, descriptors=used, lent_bytes=lent, has_failed=has_failed)

    if not used:
        return reserve.use(look)
    with reserve.lent():
        return look()


def _is_local(path: str) -> bool:
    """Return whether the file system of a path is one of this machine, by the system's list of mounts."""
    best, kind = "", ""
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, at, of, *_ = line.split()
            if len(at) >= len(best) and (path == at or path.startswith(at.rstrip("/") + "/")):
                best, kind = at, of
    return not kind.startswith(_OF_NETWORKS)
