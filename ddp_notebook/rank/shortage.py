"""Sentences about exhausted resources of this rank, for errors, `%ddp_status` and failed group formation."""

from __future__ import annotations

import tempfile
from collections.abc import Collection

from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import chain
from ddp_notebook.records import shortages
from ddp_notebook.records.shortages import DESCRIPTORS, DISK, MEMORY, PROCESSES, SHM
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, os, resource

_OF_NETWORKS = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "afs", "9p", "beegfs")
_rank = -1


def settle(rank: int) -> None:
    """Set the rank of this process for the sentences."""
    global _rank
    _rank = rank


def of_error(error: BaseException) -> str:
    """Return a sentence that explains an error by an exhausted resource; "" if there is none or it cannot be found."""
    wanted: set[str] = set()
    paths: list[str] = []
    has_failed = False
    try:
        for one in chain(error):
            kinds = shortages.kinds(one)
            has_failed |= kinds == {MEMORY} and shortages.worker_of(one) < 0
            wanted |= kinds
            paths += shortages.places(one)
        return "; ".join(_look(wanted, paths, has_failed=has_failed)) if wanted else ""
    except MemoryError:
        raise
    except Exception:  # a cell has replaced a function that the check needs
        return ""


def now() -> list[str]:
    """Return a sentence for each exhausted resource; [] if they cannot be checked. Takes about 1 ms.

    The agent's thread calls it and must never block, so network file systems are skipped.
    """
    try:
        return _now()
    except MemoryError:
        raise
    except Exception:  # as in `of_error`
        return []


def _now() -> list[str]:
    paths = [SHM]
    with contextlib.suppress(OSError):
        paths.insert(0, tempfile.gettempdir())  # this searches for a folder at its first call
    with contextlib.suppress(OSError):
        if _is_local(folder := os.getcwd()):
            paths.append(folder)
    return _look({DESCRIPTORS, MEMORY, PROCESSES, DISK}, paths)


def lacks_memory() -> bool:
    """Return whether hardly any memory is left below the tightest limit."""
    return bool(_look({MEMORY}, []))


def of_descriptors(needed: int, what: str) -> str:
    """Return a sentence if there are fewer free descriptors than needed; "" if there are enough.

    The reserve counts as free if it is lent.

    Args:
        needed: required number of descriptors.
        what: name of their user, for the sentence.
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
    """Return whether a path is on a local file system, according to the list of mounts."""
    best, kind = "", ""
    with open("/proc/self/mounts") as mounts:
        for line in mounts:
            _, at, of, *_ = line.split()
            if len(at) >= len(best) and (path == at or path.startswith(at.rstrip("/") + "/")):
                best, kind = at, of
    return not kind.startswith(_OF_NETWORKS)
