"""On which ports is listened: on those that the system hands out, or on some that a firewall lets through."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from ddp_notebook.errors import StartError, UsageError

T = TypeVar("T")
ANY = range(1)  # port 0: the system hands one out
# Listeners that may be on one machine: for calls of tasks, for messages and bulk data of the notebook's wire, the
# session's store, and the store for the user's programs.
FEWEST = 5
_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class Listening:
    """Where somebody listens: an address of this machine, and its ports."""

    host: str = "127.0.0.1"
    ports: range = ANY

    def bind(self, socket: zmq.Socket[Any]) -> None:
        """Let a socket listen there.

        Raises:
            StartError: all ports are taken.
        """
        socket.ipv6 = ":" in self.host
        where = f"[{self.host}]" if socket.ipv6 else self.host
        first_free(lambda port: socket.bind(f"tcp://{where}:{port or '*'}"), self.host, self.ports)


LOOPBACK_ONLY = Listening()


def parse(text: str) -> range:
    """Read `40000-40100`.

    Raises:
        UsageError: it is no such range, or too few ports.

    Example:
        >>> parse("40000-40100")
        range(40000, 40101)
    """
    first, dash, last = (part.strip() for part in str(text).partition("-"))
    if not (dash and all(one.isdecimal() and len(one) < 10 for one in (first, last))):
        raise UsageError(f"--ports {text} is not a range of ports; give the first and the last one, e.g. {_EXAMPLE}")
    ports = range(int(first), int(last) + 1)
    if ports.start < _LOWEST or ports.stop > _HIGHEST + 1:
        raise UsageError(f"--ports {text}: ports are {_LOWEST} to {_HIGHEST}, e.g. {_EXAMPLE}")
    if len(ports) < FEWEST:
        raise UsageError(f"--ports {text}: a machine needs at least {FEWEST} ports, e.g. {_EXAMPLE}")
    return ports


def in_words(ports: range) -> str:
    """As `parse` reads them."""
    return f"{ports.start}-{ports.stop - 1}"


def first_free(bind: Callable[[int], T], host: str, ports: range) -> T:
    """What `bind` returns of the first port that nobody has. On loopback, where no firewall is, that is any one.

    Args:
        bind: listens at a port, or raises that the address is in use.
        host: the address that it listens at.

    Raises:
        StartError: all of them are taken.

    Example:
        >>> import socket
        >>> first_free(lambda port: socket.create_server(("127.0.0.1", port)), "127.0.0.1", ANY).close()
    """
    if ipaddress.ip_address(host).is_loopback:
        ports = ANY
    for port in ports:
        try:
            return bind(port)
        except (OSError, zmq.ZMQError) as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise StartError(f"ports {in_words(ports)} of {host} are all taken; give more of them: {_EXAMPLE}")


_EXAMPLE = "--ports 40000-40100"
