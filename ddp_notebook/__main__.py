"""`python -m ddp_notebook list | stop NAME | logs NAME`: from a shell, what notebooks can attach to."""

from __future__ import annotations

import sys
from pathlib import Path

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.elastic import ending
from ddp_notebook.launch.keep.words import ask, in_a_line
from ddp_notebook.registry import entries, finding
from ddp_notebook.registry.finding import SESSION, Found

USAGE = "usage: python -m ddp_notebook list | stop NAME | logs NAME"


def main(arguments: list[str]) -> int:
    """Do what a shell's line says. Returns its exit status."""
    try:
        match arguments:
            case ["list"]:
                lines = [*(in_a_line(one) for one in finding.everything()), *entries.strangers()]
                print("\n".join(lines) or "nothing runs on this machine that can be attached to")
            case ["stop", name]:
                _stop(finding.find(name))
            case ["logs", name]:
                _print_logs(finding.find(name))
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except DDPNotebookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _stop(found: Found) -> None:
    """Of whatever version: it can be ended from any."""
    if found.kind == SESSION:
        ask(found.entries[0], "stop")
    else:
        ending.end(found.entries)
    print(f"stopped {found.name}")


def _print_logs(found: Found) -> None:
    """What ranks have written, each under its number, and what went wrong in the keeper."""
    if found.kind != SESSION:
        raise UsageError(
            f"what {found.name} writes is where torchrun was started; torchrun --log-dir DIR --tee 3 keeps it in files"
        )
    folder = Path(found.entries[0].folder)
    for log in sorted(folder.glob("rank*.log"), key=lambda path: (len(path.name), path.name)):
        older = log.with_suffix(".log.1")
        text = b"".join(path.read_bytes() for path in (older, log) if path.exists()).decode(errors="replace")
        if text:
            print(f"---- {log.stem.replace('rank', 'rank ')}")
            print(text, end="" if text.endswith("\n") else "\n")
    keeper = folder / "keeper.log"
    if keeper.exists() and (words := keeper.read_text(errors="replace").strip()):
        print(f"---- the keeper\n{words}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
