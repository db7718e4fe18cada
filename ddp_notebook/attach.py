"""Run a script so that notebooks can attach: `torchrun --nproc-per-node 4 -m ddp_notebook.attach train.py`.

The script needs no changes, and runs unchanged whether or not a notebook attaches. In any notebook of the same user on
the same machine

    %ddp_attach

shows the ranks of the job, the calls in which they wait, and their recording. `--name NAME` before the script, or
`DDP_NOTEBOOK_NAME` in the environment, names the job.
"""

from __future__ import annotations

import atexit
import os
import sys

_USAGE = "usage: python -m ddp_notebook.attach [--name NAME] [-m] SCRIPT [ARGUMENT ...]"


def main() -> None:
    """Run a script, or with `-m` a module, as Python would, and open a Unix socket for notebooks."""
    name, arguments = _read(sys.argv[1:])
    from ddp_notebook.rank.script.output import to_notebook

    to_notebook()
    watched = _open(name, arguments)
    from ddp_notebook.rank.script import program

    failure: BaseException | None = None
    try:
        program.run(arguments)
    except BaseException as error:
        failure = error
        raise
    finally:
        if watched is not None:
            watched.end(failure)
        del failure, watched


def _read(arguments: list[str]) -> tuple[str, list[str]]:
    name = ""
    if arguments[:1] == ["--name"] and len(arguments) > 1:
        name, arguments = arguments[1], arguments[2:]
    if not arguments or arguments == ["-m"] or arguments[0] == "--name":
        sys.exit(_USAGE)
    return name, arguments


def _open(name: str, arguments: list[str]):  # type: ignore[no-untyped-def]  # the return type would import torch
    """Register this rank and open its Unix socket. On failure, print the reason, and let the script run."""
    from ddp_notebook.errors import UsageError
    from ddp_notebook.messages.encoding import VERSION
    from ddp_notebook.rank.imports import after_import
    from ddp_notebook.rank.script.attach_socket import AttachSocket
    from ddp_notebook.rank.script.script_observer import ScriptObserver
    from ddp_notebook.registry import entries
    from ddp_notebook.registry.lookup import TORCHRUN
    from ddp_notebook.registry.torchrun import place

    script, *rest = arguments[1:] if arguments[0] == "-m" else arguments
    here = place(script, rest, name, VERSION)
    watched = ScriptObserver(here)
    try:
        door = AttachSocket(entries.door(TORCHRUN), watched.begin, watched.leave)
        door.keep(entries.enter(TORCHRUN, here.name, here.to_json()))
    except (OSError, UsageError) as error:
        print(f"ddp_notebook: no notebook can attach to rank {here.rank}: {error}", file=sys.stderr)
        return None
    pid = os.getpid()
    atexit.register(lambda: door.entry.remove() if door.entry is not None and os.getpid() == pid else None)
    after_import("torch", watched.install)
    return watched


if __name__ == "__main__":
    main()
