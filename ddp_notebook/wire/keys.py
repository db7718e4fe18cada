"""Keys of a session: a key pair for each invited process, and the ZAP handler that rejects all other clients.

CURVE encrypts, but a server alone accepts any client key. With ZAP, ZeroMQ calls a handler that admits or rejects each
client. The handler has a fixed address in its context, so each session needs its own context. `Context.instance()` is
not usable, because ipykernel uses it.

Source: https://rfc.zeromq.org/spec/27/ (ZAP), https://rfc.zeromq.org/spec/26/ (CurveZMQ)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from ddp_notebook.messages.processes import Address
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"ddp_notebook"
Bind = Callable[[zmq.Socket[Any]], object]  # binds a socket to an address


def on_loopback(socket: zmq.Socket[Any]) -> None:
    """Bind a socket to a free TCP port on the loopback interface."""
    socket.bind("tcp://127.0.0.1:*")


class Keyring:
    """Key pair of the notebook and public keys of the invited processes.

    Example:
        >>> ring = Keyring()
        >>> address = ring.invite("local/0", control="tcp://127.0.0.1:1", bulk="tcp://127.0.0.1:2")
        >>> ring.admits(z85.decode(address.public_key.encode()))
        True
    """

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self._invited: dict[bytes, str] = {}  # public key -> identity

    def invite(self, identity: str, *, control: str, bulk: str) -> Address:
        """Create a key pair for one process and return the address with which it connects."""
        public, secret = zmq.curve_keypair()
        self._invited[z85.decode(public)] = identity
        return Address(
            control=control,
            bulk=bulk,
            server_key=self._public.decode(),
            public_key=public.decode(),
            secret_key=secret.decode(),
            identity=identity,
        )

    def revoke(self, identity: str) -> None:
        """Revoke the keys of an invited process. Thread-safe."""
        for key in [key for key, whose in list(self._invited.items()) if whose == identity]:
            del self._invited[key]

    def admits(self, client_key: bytes) -> bool:
        """Return whether a client's public key (32 bytes) was created by `invite` and not revoked."""
        return client_key in self._invited

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Make a server socket check every client with the ZAP handler. Call it before `bind`."""
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret
        socket.zap_domain = _ZAP_DOMAIN


def unlock(socket: zmq.Socket[Any], address: Address) -> None:
    """Set the keys of a client socket, and IPv6 if the address needs it. Call it before `connect`."""
    socket.ipv6 = "[" in address.control  # tcp://[fd00::1]:40123
    socket.curve_serverkey = address.server_key.encode()
    socket.curve_publickey = address.public_key.encode()
    socket.curve_secretkey = address.secret_key.encode()


class ConnectionFilter:
    """ZAP handler: one per context, bound before any guarded socket."""

    def __init__(self, context: zmq.Context[Any], keyring: Keyring) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)
        self._keyring = keyring

    def answer(self) -> None:
        """Answer the pending ZAP request.

        Its frames are version, request id, domain, address, identity, mechanism and credentials (the client's public
        key).
        """
        version, request_id, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        admitted = (
            domain == _ZAP_DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and self._keyring.admits(credentials[0])
        )
        status = [b"200", b"OK"] if admitted else [b"400", b"no key of this session"]
        self.socket.send_multipart([version, request_id, *status, b"", b""])
