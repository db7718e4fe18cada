"""Run `pip install` with short progress: each large download, and the time every few seconds.

    python tools/pip_install.py -c constraints.txt torch==2.13.0

pip itself prints either nothing or some hundred lines. Its last lines are printed if it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

LARGE_MB = 10.0  # downloads that get a line
_EVERY_S = 10.0
_LAST = 30  # lines of pip that are kept for a failure
_DOWNLOAD = re.compile(r"\s*(Downloading|Using cached) (\S+) \(([\d.]+) (kB|MB|GB)\)")
_INSTALLING = re.compile(r"Installing collected packages: (.*)")
_MB = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}


class Progress:
    """Turns the lines of pip into progress lines.

    Args:
        out: where to print them.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began_s = self._printed_s = time.monotonic()
        self._packages = 0
        self._installing = ""  # until pip installs, it downloads
        self._lock = threading.Lock()

    def read(self, line: str) -> None:
        """Take a line of pip."""
        with self._lock:
            if found := _DOWNLOAD.match(line):
                verb, file, size, unit = found.groups()
                self._packages += not file.endswith(".metadata")
                if float(size) * _MB[unit] >= LARGE_MB:
                    self._print(f"{verb.lower()} {file.rpartition('/')[2]} ({size} {unit})")
            elif found := _INSTALLING.match(line):
                self._installing = f"installing {_count(len(found[1].split(', ')))}"
                self._print(self._installing)

    def show_time(self) -> None:
        """Print the time if nothing was printed for a while."""
        with self._lock:
            if time.monotonic() - self._printed_s >= _EVERY_S:
                self._print(self._installing or f"{_count(self._packages)} downloaded so far")

    def _print(self, text: str) -> None:
        self._printed_s = time.monotonic()
        print(f"  {self._printed_s - self._began_s:4.0f} s  {text}", file=self._out, flush=True)


def _count(packages: int) -> str:
    return "1 package" if packages == 1 else f"{packages} packages"


def install(arguments: list[str], out: TextIO = sys.stdout) -> int:
    """Run `pip install` with some arguments, and print its progress. Returns its exit status."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    progress, last = Progress(out), deque[str](maxlen=_LAST)
    is_over = threading.Event()

    def show_time() -> None:
        while not is_over.wait(1.0):
            progress.show_time()

    clock = threading.Thread(target=show_time, daemon=True)
    clock.start()
    try:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*pip, *arguments], **pipes) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line)
                progress.read(line)
    finally:
        is_over.set()
        clock.join()
    if process.returncode:
        print("".join(last), file=sys.stderr, flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
