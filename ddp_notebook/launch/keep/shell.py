"""`python -m ddp_notebook list | stop NAME | logs NAME`: kept sessions from a shell."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.keep import registry
from ddp_notebook.launch.keep.words import ask, in_a_line

USAGE = "usage: python -m ddp_notebook list | stop NAME | logs NAME"


def main(arguments: list[str]) -> int:
    """Do what a shell's line says. Returns its exit status."""
    try:
        match arguments:
            case ["list"]:
                lines = [in_a_line(entry) for entry in registry.everything()]
                print("\n".join(lines) or "nothing is kept on this machine")
            case ["stop", name]:
                ask(_of(name), "stop")
                print(f"stopped {name}")
            case ["logs", name]:
                _print_logs(_of(name))
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except DDPNotebookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _of(name: str) -> registry.Entry:
    """Of whatever version: it can be ended from any."""
    entry = registry.read(name)
    if entry is None:
        names = ", ".join(one.name for one in registry.everything())
        raise UsageError(f"there is no {name!r}" + (f"; there is {names}" if names else "; nothing is kept here"))
    return entry


def _print_logs(entry: registry.Entry) -> None:
    """What ranks have written, each under its number, and what went wrong in the keeper."""
    folder = Path(entry.folder)
    for log in sorted(folder.glob("rank*.log"), key=lambda path: (len(path.name), path.name)):
        older = log.with_suffix(".log.1")
        text = b"".join(path.read_bytes() for path in (older, log) if path.exists()).decode(errors="replace")
        if text:
            print(f"---- {log.stem.replace('rank', 'rank ')}")
            print(text, end="" if text.endswith("\n") else "\n")
    keeper = folder / "keeper.log"
    if keeper.exists() and (words := keeper.read_text(errors="replace").strip()):
        print(f"---- the keeper\n{words}")
