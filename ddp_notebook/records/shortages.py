"""Sentences about exhausted resources of this process, with the amount in use and the limit.

The amounts are limits and counters of the operating system at the time of the call. The text of an error only
determines which resources are checked.

| resource | limit | in use |
|---|---|---|
| file descriptors | `RLIMIT_NOFILE` | `/proc/self/fd` |
| memory | `RLIMIT_AS`, `RLIMIT_DATA`, `memory.max` of the cgroup | `/proc/self/status`, `memory.current` less files |
| threads and processes | `RLIMIT_NPROC`, `pids.max` of the cgroup | `/proc/*/status`, `pids.current` |
| disk, `/dev/shm` | size and number of files of the file system | `statvfs` |
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from ddp_notebook.records.error_text import text_of
from ddp_notebook.records.units import size
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib, errno, os, re, resource

SHM = "/dev/shm"
DESCRIPTORS, MEMORY, PROCESSES, DISK, SHARED = "descriptors", "memory", "processes", "disk", "shared memory"
_MIB = 1 << 20
_LITTLE_BYTES = 64 << 10  # a file system with less free space counts as full
_LITTLE_MEMORY = 16 * _MIB  # less free memory counts as exhausted: a thread or a malloc arena needs this much ...
_MUCH_MEMORY = 128 * _MIB  # ... and so does less than 5 % of the limit, up to this amount
_MANY_DESCRIPTORS = 1 << 20  # result without a limit
_NO_LIMIT_BYTES = 1 << 62  # cgroups of version 1 report a larger number if no limit is set
_TEXTS = {
    DESCRIPTORS: ("Too many open files", "too many open files"),  # the second text is from libuv, in TensorPipe
    MEMORY: ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "not enough memory"),
    PROCESSES: ("can't start new thread", "Resource temporarily unavailable"),
    DISK: ("No space left on device", "Disk quota exceeded"),
    SHARED: ("out of shared memory",),  # text of torch errors, also from a DataLoader
}
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.")
_ERRNOS = {
    errno.EMFILE: DESCRIPTORS,
    errno.ENFILE: DESCRIPTORS,
    errno.ENOMEM: MEMORY,
    errno.ENOSPC: DISK,
    errno.EDQUOT: DISK,
}


def kinds(error: BaseException) -> set[str]:
    """Return the resources whose exhaustion may have caused an error: `{"descriptors"}`.

    Example:
        >>> kinds(OSError(errno.EMFILE, "Too many open files")), kinds(ValueError("no"))
        ({'descriptors'}, set())
    """
    if isinstance(error, MemoryError):
        return {MEMORY}
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return {_ERRNOS[error.errno]}
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return {PROCESSES, MEMORY}  # the stack of a thread needs memory
    if worker_of(error) >= 0 and text_of(error).partition(" in DataLoader")[0].endswith("MemoryError"):
        return {MEMORY}  # torch cannot make each error again, such as that of NumPy
    if not isinstance(error, RuntimeError | OSError) or not error.args or not isinstance(error.args[0], str):
        return set()
    found = {kind for kind, texts in _TEXTS.items() if any(text in error.args[0] for text in texts)}
    if "</torch_" in error.args[0] and found & {DISK, MEMORY}:  # torch's files in /dev/shm have such names
        found.add(SHARED)
    return found | {MEMORY} if PROCESSES in found else found


def worker_of(error: BaseException) -> int:
    """Return the number of the DataLoader worker in which an error was raised; -1 if it was not raised in a worker.

    The rank raises the error again, with the text of torch.

    Example:
        >>> worker_of(RuntimeError("Caught MemoryError in DataLoader worker process 3."))
        3
        >>> worker_of(MemoryError())
        -1
    """
    found = _IN_WORKER.search(text_of(error))
    return -1 if found is None else int(found[1])


def sentences(
    who: str,
    wanted: Collection[str],
    *,
    paths: Collection[str] = (),
    descriptors: int | None = None,
    lent_bytes: int = 0,
    has_failed: bool = False,
) -> list[str]:
    """Return a sentence for each resource that is exhausted in this process.

    Args:
        who: name of the process for the sentence: "rank 1".
        wanted: resources to check.
        paths: folders whose file systems to check.
        descriptors: number of descriptors in use; None to count them.
        lent_bytes: size of a memory reserve that counts as used.
        has_failed: whether an allocation failed. Then the tightest memory limit is named even if some memory is left.

    Example:
        >>> sentences("this process", {DESCRIPTORS})
        []
    """
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        if DESCRIPTORS in wanted:
            found += _descriptors(who, descriptors)
    with contextlib.suppress(OSError, ValueError):
        if MEMORY in wanted:
            found += _memory(who, lent_bytes, has_failed=has_failed)
    with contextlib.suppress(OSError, ValueError):
        if PROCESSES in wanted:
            found += _processes(who)
    if DISK in wanted:
        for path in paths:
            with contextlib.suppress(OSError):
                found += _disk(who, path)
    if SHARED in wanted and not any(SHM in sentence for sentence in found):
        with contextlib.suppress(OSError):
            found += _disk(who, SHM, has_failed=True)
    return list(dict.fromkeys(found))


def places(error: BaseException) -> list[str]:
    """Return folders on a possibly full disk: those of the error's files, and the commonly used folders."""
    named = [getattr(error, name, None) for name in ("filename2", "filename")]
    folders = [os.path.dirname(os.path.abspath(path)) for path in named if isinstance(path, str)]
    for find in (os.getcwd, tempfile.gettempdir):
        with contextlib.suppress(OSError):
            folders.append(find())
    return [*folders, SHM]


def open_descriptors() -> int:
    """Return the number of open file descriptors of this process. Counting needs a free descriptor."""
    return len(os.listdir("/proc/self/fd")) - 1


def free_descriptors() -> int:
    """Return the number of file descriptors that this process may still open. Counting needs a free descriptor.

    Raises:
        OSError: no descriptor is free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MANY_DESCRIPTORS
    return limit - sum(int(number) < limit for number in os.listdir("/proc/self/fd")) + 1


def _descriptors(who: str, used: int | None) -> Iterator[str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if used is None:
        try:
            used = open_descriptors()
        except OSError as error:  # no free descriptor to count them
            if error.errno != errno.EMFILE:
                raise
            used = limit
    if used >= limit:
        yield f"{who} has no file descriptor left: {used} of {limit}"


def _memory(who: str, lent_bytes: int, *, has_failed: bool) -> Iterator[str]:
    for rest, used, limit, what in memory_limits(lent_bytes)[:1]:
        is_little = rest < max(_LITTLE_MEMORY, min(limit // 20, _MUCH_MEMORY))
        if is_little or has_failed:
            left = "no memory" if rest < _LITTLE_MEMORY else f"{size(rest)} of memory"
            yield f"{who} has {left} left: {size(used)} of {size(limit)} ({what})"


def memory_limits(lent_bytes: int = 0) -> list[tuple[int, int, int, str]]:
    """Return the memory limits of this process, the tightest first: bytes left, in use, limit, and its name.

    Args:
        lent_bytes: size of a memory reserve that counts as used.

    Raises:
        OSError, ValueError: `/proc` cannot be read.
    """
    its = _fields("/proc/self/status")
    limits = [
        ("address space, RLIMIT_AS", _kib(its["VmSize"]) + lent_bytes, _soft(resource.RLIMIT_AS)),
        ("data, RLIMIT_DATA", _kib(its["VmData"]) + lent_bytes, _soft(resource.RLIMIT_DATA)),
    ]
    for folder in cgroups("memory"):
        if (limit := memory_limit(folder)) is not None and (used := _in_use(folder)) is not None:
            limits.append((f"memory of the cgroup {folder}", used, limit))
    return sorted((limit - used, min(used, limit), limit, what) for what, used, limit in limits if limit is not None)


def resident_memory() -> tuple[int, int]:
    """Return the resident memory of this process in bytes, and its maximum so far.

    Raises:
        OSError, ValueError: `/proc` cannot be read.
    """
    its = _fields("/proc/self/status")
    return _kib(its["VmRSS"]), _kib(its["VmHWM"])


def memory_limit(cgroup: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes; None if there is none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (limit := _number(cgroup / name)) is not None and limit < _NO_LIMIT_BYTES:
            return limit
    return None


def _in_use(cgroup: Path) -> int | None:
    """Return the memory in use in a cgroup, without file pages, which the kernel drops when memory is low."""
    for name, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        if (used := _number(cgroup / name)) is not None:
            with contextlib.suppress(OSError, ValueError):
                lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
                wanted = f"{prefix}inactive_file", f"{prefix}active_file"
                used -= sum(int(number) for key, number in lines if key in wanted)
            return used
    return None


def _processes(who: str) -> Iterator[str]:
    for folder in cgroups("pids"):
        used, limit = _number(folder / "pids.current"), _number(folder / "pids.max")
        if used is not None and limit is not None and used >= limit:
            yield f"{who} can start no thread or process: {used} of {limit} (pids of the cgroup {folder})"
            return
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.getuid():  # root has no such limit
        all_tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        used = sum(_threads_of_user(os.getuid())) if all_tasks >= limit else 0  # counting is slow
        if used >= limit:
            yield f"{who} can start no thread or process: {used} of {limit} (of user {os.getuid()}, RLIMIT_NPROC)"


def _threads_of_user(user: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, KeyError, ValueError):  # the process has just ended
                its = _fields(str(folder / "status"))
                if int(its["Uid"].split()[0]) == user:
                    yield int(its["Threads"])


def _disk(who: str, path: str, *, has_failed: bool = False) -> Iterator[str]:
    its = os.statvfs(path)
    unit = its.f_frsize
    whole, left = its.f_blocks * unit, its.f_bavail * unit
    is_full = whole and left < _LITTLE_BYTES
    if is_full or (whole and has_failed and not (its.f_files and not its.f_favail)):
        how = "no" if is_full else "too little"
        yield f"{who} has {how} space left in {_mount(path)}: {size(whole - left)} of {size(whole)}"
    elif its.f_files and not its.f_favail:
        yield f"{who} can make no further file in {_mount(path)}: {its.f_files:,} of {its.f_files:,}"


def _mount(path: str) -> str:
    """Return the mount point of the file system that contains a path."""
    path = os.path.realpath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of its parents, for cgroups of version 2 or 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = [Path("/sys/fs/cgroup", *([controller] if controllers else []))]
        roots += [] if controllers else [Path("/sys/fs/cgroup/unified")]
        for root in roots:
            folder = root / path.lstrip("/")
            while folder != root and root in folder.parents:
                yield folder
                folder = folder.parent
            yield root


def _number(file: Path) -> int | None:
    """Return the number in a file; None if the file does not exist or contains "max" (no limit)."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _fields(file: str) -> dict[str, str]:
    lines = (line.partition(":") for line in Path(file).read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


def _kib(words: str) -> int:
    return int(words.split()[0]) * 1024


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft
