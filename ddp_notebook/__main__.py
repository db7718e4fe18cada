"""Shell commands for kept sessions, torchrun jobs and recordings.

`python -m ddp_notebook list | stop NAME | logs NAME | diff A B`
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.keep.descriptions import ask, in_a_line
from ddp_notebook.messages.first_messages import StopKeeper
from ddp_notebook.registry import entries, lookup
from ddp_notebook.registry.entries import Entry
from ddp_notebook.registry.identities import is_running
from ddp_notebook.registry.lookup import SESSION, AttachTarget
from ddp_notebook.registry.torchrun import launcher

_END_S = 45.0  # torchrun gives its workers 30 s
_LOOK_S = 0.05


def end_job(ranks: Sequence[Entry]) -> None:
    """End a torchrun job with SIGTERM to its agents, which end their workers. Ranks without an agent get the signal
    directly.

    Args:
        ranks: the ranks of the job on this machine.

    Raises:
        UsageError: the job has not ended after 45 s.
    """
    to_end = {launcher(entry.about) or entry.who for entry in ranks}
    for pid, _ in filter(is_running, to_end):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    left, until = to_end | {entry.who for entry in ranks}, time.monotonic() + _END_S
    while left := {one for one in left if is_running(one)}:
        if time.monotonic() > until:
            pids = " ".join(str(pid) for pid, _ in sorted(left))
            raise UsageError(f"{ranks[0].name} has not ended within {_END_S:g} s; to end it at once: kill -KILL {pids}")
        time.sleep(_LOOK_S)
    for entry in ranks:
        entry.remove()


USAGE = "usage: python -m ddp_notebook list | stop NAME | logs NAME | diff A B"


def main(arguments: list[str]) -> int:
    """Run a command line, and return its exit status."""
    try:
        match arguments:
            case ["diff", *words]:
                from ddp_notebook.observe.compare import command

                return command.run(words)
            case [*_, "-h" | "--help"]:
                print(USAGE)
            case ["list"]:
                lines = [*(in_a_line(one) for one in lookup.everything()), *entries.strangers()]
                print("\n".join(lines) or "nothing runs on this machine that can be attached to")
            case ["stop", name]:
                _stop(lookup.find(name))
            case ["logs", name]:
                _print_logs(lookup.find(name))
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except DDPNotebookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _stop(found: AttachTarget) -> None:
    """Stop a session or job, even one of another version of this package."""
    if found.kind == SESSION:
        ask(found.entries[0], StopKeeper)
    else:
        end_job(found.entries)
    print(f"stopped {found.name}")


def _print_logs(found: AttachTarget) -> None:
    """Print the output of each rank under its number, then the log of the keeper."""
    if found.kind != SESSION:
        raise UsageError(
            f"{found.name} is a torchrun job, whose output is in the terminal that started it; "
            "torchrun --log-dir DIR --tee 3 writes it to files too"
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
