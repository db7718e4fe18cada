"""Remove files even if the notebook's process is killed: a separate process outlives it and knows the paths.

A local host server removes its own files. If all hosts are on other machines, a shell waits for the end of a pipe, as
long as there are paths to guard.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading

# The notebook may be stopped with signals to every process below it, which the shell ignores.
_SCRIPT = (
    'trap "" HUP INT TERM; echo; set --; while IFS= read -r path; do set -- "$@" "$path"; done; exec rm -rf -- "$@"'
)

_lock = threading.Lock()
_guarded: set[str] = set()
_shell: subprocess.Popen[bytes] | None = None
_owner_pid = 0


def guard(path: str) -> None:
    """Register a file or folder for removal at the end of this process, even if it is killed.

    Args:
        path: absolute, with a generated name that no other program uses.
    """
    global _shell, _owner_pid
    with _lock:
        if _owner_pid != os.getpid():  # a forked child of the notebook guards nothing yet
            _guarded.clear()
            _shell, _owner_pid = None, os.getpid()
        with contextlib.suppress(OSError):  # no shell, or it was killed: continue without a guard
            if _shell is None:
                _shell = _start()
            assert _shell.stdin is not None
            os.write(_shell.stdin.fileno(), os.fsencode(path) + b"\n")
        _guarded.add(path)


def release(path: str) -> None:
    """Unregister a path after its removal. The shell ends with the last path."""
    global _shell
    with _lock:
        if _owner_pid != os.getpid() or path not in _guarded:
            return
        _guarded.discard(path)
        if not _guarded and _shell is not None:
            _shell.kill()  # closing the pipe is not enough: a child forked by the user may hold it open
            assert _shell.stdin is not None
            _shell.stdin.close()
            _shell.wait()
            _shell = None


def _start() -> subprocess.Popen[bytes]:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    assert shell.stdout is not None
    shell.stdout.readline()  # before this line a signal would end the shell
    shell.stdout.close()
    return shell
