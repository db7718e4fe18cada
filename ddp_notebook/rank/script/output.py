"""Separate output pipes for each torchrun rank of a notebook's job. The notebook reads their other ends.

torchrun gives all ranks one pipe, in which lines are mixed and split.
"""

from __future__ import annotations

import sys

from ddp_notebook.registry import unix_sockets
from ddp_notebook.registry.torchrun import OUTPUT_VARIABLE
from ddp_notebook.stdlib import os, secrets, socket
from ddp_notebook.wire.store import StoreAddress
from ddp_notebook.wire.stream_order import ChangeMarks, open_stream

_ANSWER_S = 5.0  # timeout for the notebook to accept the pipes


def to_notebook() -> None:
    """Send the output of this process to the notebook that has started the job, if there is one.

    Child processes inherit these pipes. If the notebook does not accept them, a line is printed and the output stays
    with torchrun. The order of Python's text on stdout and stderr is preserved (`wire.stream_order`).
    """
    at = os.environ.pop(OUTPUT_VARIABLE, "")  # not inherited: the output of children belongs to this rank
    if not at:
        return
    reads: list[int] = []
    writes: list[int] = []
    try:
        for _ in range(2):
            read, write = os.pipe()
            reads.append(read)
            writes.append(write)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(_ANSWER_S)
            line.connect(StoreAddress(at).address)
            unix_sockets.check_user(line)
            token = secrets.token_hex(8)
            said = f"{os.environ.get('RANK', '0')} {os.environ.get('WORLD_SIZE', '1')} {token}"
            socket.send_fds(line, [said.encode()], reads)
            if not line.recv(1):
                raise ConnectionError("the notebook has closed the connection")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, write in zip((1, 2), writes, strict=True):
            os.dup2(write, fd)
        changes = ChangeMarks({fd: os.dup(fd) for fd in (1, 2)}, token)
        for name, fd in (("stdout", 1), ("stderr", 2)):
            open_stream(name, fd, changes)
    except OSError as error:
        print(f"ddp_notebook: cannot create the output pipes of this rank: {error}", file=sys.stderr)
    finally:
        for fd in reads + writes:
            os.close(fd)
