"""Who may speak on the wire: key pairs made for one session, and the handler that admits nobody else.

CURVE encrypts, but by itself a server accepts any client's key; with ZAP, ZeroMQ asks a handler whom to admit. The
handler has a fixed name in its Context, so each session has a Context of its own (`Context.instance()` belongs to
ipykernel).

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
Bind = Callable[[zmq.Socket[Any]], object]  # has a socket listen


def on_loopback(socket: zmq.Socket[Any]) -> None:
    """At any port."""
    socket.bind("tcp://127.0.0.1:*")


class Keyring:
    """The notebook's key pair and the public keys of the processes that it invited.

    Example:
        >>> ring = Keyring()
        >>> address = ring.invite("local/0", control="tcp://127.0.0.1:1", bulk="tcp://127.0.0.1:2")
        >>> ring.admits(z85.decode(address.public_key.encode()))
        True
    """

    def __init__(self) -> None:
        self._public, self._secret = zmq.curve_keypair()
        self._invited: dict[bytes, str] = {}  # identities, by public keys

    def invite(self, identity: str, *, control: str, bulk: str) -> Address:
        """A fresh key pair for one process, and the endpoints where it is admitted."""
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
        """Do not admit a process again that was invited. From any thread."""
        for key in [key for key, whose in list(self._invited.items()) if whose == identity]:
            del self._invited[key]

    def admits(self, client_key: bytes) -> bool:
        """Whether a client's public key (32 bytes) was made by `invite`, and not revoked."""
        return client_key in self._invited

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Make a server socket ask the handler about every client. Call it before `bind`."""
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret
        socket.zap_domain = _ZAP_DOMAIN


def unlock(socket: zmq.Socket[Any], address: Address) -> None:
    """Give a client socket its keys, and the version of IP of the address. Call it before `connect`."""
    socket.ipv6 = "[" in address.control  # tcp://[fd00::1]:40123
    socket.curve_serverkey = address.server_key.encode()
    socket.curve_publickey = address.public_key.encode()
    socket.curve_secretkey = address.secret_key.encode()


class ConnectionFilter:
    """Answers ZAP requests: one per Context, bound before any guarded socket."""

    def __init__(self, context: zmq.Context[Any], keyring: Keyring) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)
        self._keyring = keyring

    def answer(self) -> None:
        """Answer the request that is waiting. Frames: version, request id, domain, address, identity,
        mechanism, then the credentials: the client's public key."""
        version, request_id, domain, _, _, mechanism, *credentials = self.socket.recv_multipart()
        admitted = (
            domain == _ZAP_DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and self._keyring.admits(credentials[0])
        )
        status = [b"200", b"OK"] if admitted else [b"400", b"no key of this session"]
        self.socket.send_multipart([version, request_id, *status, b"", b""])
