"""What is removed though the notebook's process is killed: a process that outlives it knows the paths.

A host server of this machine removes what is its own. Where all are on other machines, a shell waits here for the end
of a pipe, for as long as there is something to guard.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading

# Whoever stops the notebook may send its signals to every process below it.
_SCRIPT = (
    'trap "" HUP INT TERM; echo; set --; while IFS= read -r path; do set -- "$@" "$path"; done; exec rm -rf -- "$@"'
)

_lock = threading.Lock()
_guarded: set[str] = set()
_shell: subprocess.Popen[bytes] | None = None
_owner_pid = 0


def guard(path: str) -> None:
    """Have a file or folder removed when this process has ended, however it ends.

    Args:
        path: absolute, and nobody else's: its name was made up.
    """
    global _shell, _owner_pid
    with _lock:
        if _owner_pid != os.getpid():  # a forked child of the notebook has nothing to guard yet
            _guarded.clear()
            _shell, _owner_pid = None, os.getpid()
        with contextlib.suppress(OSError):  # no shell, or it was killed: then nobody guards
            if _shell is None:
                _shell = _start()
            assert _shell.stdin is not None
            os.write(_shell.stdin.fileno(), os.fsencode(path) + b"\n")
        _guarded.add(path)


def release(path: str) -> None:
    """It was removed. With the last one the shell ends."""
    global _shell
    with _lock:
        if _owner_pid != os.getpid() or path not in _guarded:
            return
        _guarded.discard(path)
        if not _guarded and _shell is not None:
            _shell.kill()  # it would not see the pipe's end as long as a child that the user has forked has it too
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
    shell.stdout.readline()  # until then a signal would end it
    shell.stdout.close()
    return shell
