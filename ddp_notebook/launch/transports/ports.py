"""Ports to listen on: chosen by the system, or in a range that a firewall allows."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from ddp_notebook.errors import StartError, UsageError

T = TypeVar("T")
ANY = range(1)  # port 0: chosen by the system
# Listeners that may be on one machine: callbacks of tasks, messages and bulk data of the notebook's wire, the session's
# store, and the store for the user's programs.
FEWEST = 5
_LOWEST, _HIGHEST = 1024, 65535


@dataclass(frozen=True, slots=True)
class Listening:
    """An address of this machine, and a range of ports to listen on."""

    host: str = "127.0.0.1"
    ports: range = ANY

    def bind(self, socket: zmq.Socket[Any]) -> None:
        """Bind a socket to the first free port.

        Raises:
            StartError: all ports are in use.
        """
        socket.ipv6 = ":" in self.host
        where = f"[{self.host}]" if socket.ipv6 else self.host
        first_free(lambda port: socket.bind(f"tcp://{where}:{port or '*'}"), self.host, self.ports)


LOOPBACK_ONLY = Listening()


def parse(text: str) -> range:
    """Parse a range such as `40000-40100`.

    Raises:
        UsageError: it is not a valid range, or has too few ports.

    Example:
        >>> parse("40000-40100")
        range(40000, 40101)
    """
    first, dash, last = (part.strip() for part in str(text).partition("-"))
    if not (dash and all(one.isdecimal() and len(one) < 10 for one in (first, last))):
        raise UsageError(f"--ports must be the first and last port of a range, e.g. {_EXAMPLE}, got {text}")
    ports = range(int(first), int(last) + 1)
    if ports.start < _LOWEST or ports.stop > _HIGHEST + 1:
        raise UsageError(f"--ports must be within {_LOWEST} to {_HIGHEST}, e.g. {_EXAMPLE}, got {text}")
    if len(ports) < FEWEST:
        raise UsageError(f"--ports must have at least {FEWEST} ports, e.g. {_EXAMPLE}, got {text}")
    return ports


def in_words(ports: range) -> str:
    """Format a range as `parse` reads it."""
    return f"{ports.start}-{ports.stop - 1}"


def first_free(bind: Callable[[int], T], host: str, ports: range) -> T:
    """Return the result of `bind` for the first free port. On loopback, which has no firewall, any port is used.

    Args:
        bind: listens on a port, or raises an error that the address is in use.
        host: the address to listen on.
        ports: to try in order.

    Raises:
        StartError: all ports are in use.

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
    raise StartError(f"ports {in_words(ports)} of {host} are all taken; pass a wider range, e.g. {_EXAMPLE}")


_EXAMPLE = "--ports 40000-40100"
