"""A front end that only waits, so that it measures the kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import zmq

from tests.kernels import NotebookKernel, Reply

_DELIMITER = b"<IDS|MSG>"
WAIT_UNTIL_WARM = """
import os
from ddp_notebook.launch import warm
warm.prepare()
_host, _ = warm.claim(os.environ)
_host.facts()
warm.give_back(_host)
del _host, warm
"""
LEAST = "%%least\npass"


_JOIN = """
import socket, torch, torch.distributed as dist
torch.set_num_threads(1)
os.environ.update(GLOO_SOCKET_IFNAME="lo", RES_OPTIONS="attempts:0")  # like the ranks, without a name service
with socket.create_server(("127.0.0.1", 0)) as one: _port = one.getsockname()[1]
def _join(rank):
    store = dist.TCPStore("127.0.0.1", _port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_world_size)
"""


def least(world_size: int, *, in_group: bool = False, is_bare: bool = False) -> str:
    """Return a cell that sets `LEAST` up: a magic that writes a byte to each of `world_size` processes and reads their
    answers.

    In each process IPython's `run_cell` runs `pass`. No cell on ranks with their own shells can be faster, unless it
    leaves out a part of `run_cell`.

    Args:
        in_group: The processes have torch and form a gloo group like ranks. Their cells wait until it has formed.
        is_bare: The processes answer without IPython.
    """
    return f"""
import os, signal, sys
_world_size = {world_size}
for _end in sum(globals().get("_least", []), ()): os.close(_end)  # ends earlier processes
{_JOIN if in_group else "def _join(_): pass"}
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import register_cell_magic
from traitlets.config import Config
def _serve(rank, cells, done):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise it would run as a kernel after the kernel's end
    _join(rank)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    shell = InteractiveShell(config=Config(HistoryManager=dict(enabled=False)))  # a fork ends the old shell's threads
    while os.read(cells, 1):
        {"pass" if is_bare else "shell.run_cell('pass', store_history=True)"}
        os.write(done, b".")
    os._exit(0)
_least = []
for _rank in range({world_size}):
    (cells, to), (of, done) = os.pipe(), os.pipe()
    if not os.fork():
        for one in (to, of, *(end for pair in _least for end in pair)): os.close(one)
        _serve(_rank, cells, done)
    os.close(cells), os.close(done)
    _least.append((to, of))
@register_cell_magic
def least(line, cell):
    for to, _ in _least: os.write(to, b".")
    for _, of in _least: os.read(of, 1)
"""


class FrontEnd:
    """Runs cells in a real kernel and measures them like a front end.

    A cell is done when both its reply (shell channel) and its idle status (iopub) have arrived: only then does a
    notebook show it as done.
    """

    def __init__(self, kernel: NotebookKernel) -> None:
        self.kernel = kernel
        self._poller = zmq.Poller()
        self._sockets = [kernel.client.shell_channel.socket, kernel.client.iopub_channel.socket]
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def set_up(self, code: str, timeout_s: float = 120.0) -> Reply:
        """Run a cell that is not measured and must succeed.

        Raises:
            RuntimeError: The cell failed.
        """
        reply = self.kernel.run(code, timeout_s)
        if reply.status != "ok":
            raise RuntimeError(f"{code!r} failed: {reply.evalue}\n{reply.traceback}")
        return reply

    def run_s(self, code: str, timeout_s: float = 60.0) -> float:
        """Run a cell. Return the seconds from sending it to receiving its reply and its idle status.

        Raises:
            RuntimeError: The cell failed.
            TimeoutError: The cell did not end.
        """
        began = time.perf_counter()
        message_id = self.kernel.client.execute(code).encode()
        missing = {"execute_reply", "idle"}
        while missing:
            left_s = began + timeout_s - time.perf_counter()
            ready = dict(self._poller.poll(max(0, round(left_s * 1000))))
            if not ready:
                raise TimeoutError(f"{code!r}: no {' and no '.join(sorted(missing))} in {timeout_s:g} s")
            for socket in self._sockets:
                if socket in ready:
                    missing -= _what_ended(socket.recv_multipart(), message_id, code)
        return time.perf_counter() - began

    def alternate_ms(self, cells: Mapping[str, str], *, blocks: int, per_block: int) -> dict[str, list[list[float]]]:
        """Run blocks of each cell in alternation, after a discarded block of each.

        Returns:
            Milliseconds by name, as a list for each block.
        """
        for code in cells.values():
            self._block_ms(code, per_block)
        taken: dict[str, list[list[float]]] = {name: [] for name in cells}
        for number in range(blocks):
            for name in list(cells) if number % 2 == 0 else reversed(list(cells)):
                taken[name].append(self._block_ms(cells[name], per_block))
                print(f"cells, block {number + 1}, {name}: {median(taken[name][-1]):.2f} ms", flush=True)
        return taken

    def _block_ms(self, code: str, count: int) -> list[float]:
        return [self.run_s(code) * 1000 for _ in range(count)]


def _what_ended(frames: list[bytes], message_id: bytes, code: str) -> set[str]:
    """Return which of the two signs of a cell's end a message is, if any."""
    header, parent, _, content = frames[frames.index(_DELIMITER) + 2 :][:4]
    if message_id not in parent:
        return set()
    kind: str = json.loads(header)["msg_type"]
    if kind == "status":
        return {str(json.loads(content)["execution_state"])}
    if kind == "execute_reply":
        told: dict[str, Any] = json.loads(content)
        if told["status"] != "ok":
            raise RuntimeError(f"{code!r} failed: {told.get('ename')}: {told.get('evalue')}")
    return {kind}
