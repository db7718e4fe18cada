"""Test connections between hosts before a group forms.

The tests connect like gloo and the store: from the address of the route, to two addresses of the target. These are the
address of the host for the notebook, and the address at which gloo listens, the first one of its interface. Each
direction is tested, since a firewall may allow only one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ddp_notebook.errors import DDPNotebookError, StartError
from ddp_notebook.launch.host.host import Host, is_loopback
from ddp_notebook.launch.preflight.query import at_once
from ddp_notebook.launch.transports.ports import ANY, in_words
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.hosts import (
    ConnectReply,
    ConnectRequest,
    ConnectTarget,
    DoneReply,
    ListenPlace,
    ListenReply,
    ListenRequest,
    StopListeningRequest,
)

_R = TypeVar("_R", bound=Message)
ALL_PAIRS_UP_TO = 8  # machines; with more, a ring, and each with the machine of the store
TRY_S = 2.0  # a lost packet is sent again after 1 s
_ELSEWHERE_S = 0.6  # on other networks
_ANSWER_S = 5.0


class HostAddress(NamedTuple):
    """An address at which a host may be reached."""

    address: str
    interface: str
    is_asked: bool = False  # requested with `GLOO_SOCKET_IFNAME`
    ports: range = ANY

    def __str__(self) -> str:
        more = [self.interface] * bool(self.interface) + [f"ports {in_words(self.ports)}"] * (self.ports != ANY)
        return f"{self.address} ({', '.join(more)})" if more else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A failed connection from one host to another."""

    source: str
    target: str
    place: HostAddress
    why: str
    instead: tuple[HostAddress, ...] = ()  # addresses at which the connection succeeds
    is_taken: bool = False  # the target cannot listen on these ports


def routes(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the connections to test between machines, one pair for each direction.

    Args:
        names: of the machines. The first one has the store.

    Example:
        >>> routes(["a", "b"])
        [('a', 'b'), ('b', 'a')]
        >>> len(routes([f"gpu{n}" for n in range(8)])), len(routes([f"gpu{n}" for n in range(100)]))
        (56, 394)
    """
    if len(names) <= ALL_PAIRS_UP_TO:
        return [(one, other) for one in names for other in names if one != other]
    ring = zip(names, [*names[1:], names[0]], strict=True)
    pairs = [*ring, *((names[0], other) for other in names[1:])]
    return list(dict.fromkeys(transport for one, other in pairs for transport in ((one, other), (other, one))))


def places(facts: Mapping[str, Any], ports: range = ANY) -> list[HostAddress]:
    """Return the addresses at which a host's store and gloo will listen.

    These are the address of the host for the notebook, and the first address of an interface. That is the interface of
    this address, or the one named in `GLOO_SOCKET_IFNAME`.

    Args:
        facts: of the host.
        ports: of the store. Gloo and NCCL cannot be given a port for their listeners.

    Raises:
        StartError: the host does not have the requested interface.

    Example:
        >>> found = places({"address": "10.0.0.5", "interfaces": {"10.0.0.4": "eth0", "10.0.0.5": "eth0"}, "env": {}})
        >>> [str(place) for place in found]
        ['10.0.0.5 (eth0)', '10.0.0.4 (eth0)']
    """
    address, interfaces = facts["address"], _interfaces(facts)
    asked = facts["env"].get("GLOO_SOCKET_IFNAME", "")
    interface = asked or interfaces.get(address, "")
    first = next((one for one, name in interfaces.items() if name == interface), "")
    if asked and not first:
        has = ", ".join(dict.fromkeys(interfaces.values()))
        raise StartError(f"GLOO_SOCKET_IFNAME must be one of the host's interfaces ({has}), got {asked}")
    found = [HostAddress(address, interfaces.get(address, ""))]
    if ports != ANY:
        found.append(HostAddress(address, interfaces.get(address, ""), ports=ports))
    return found + [HostAddress(first, interface, bool(asked))] * bool(first and first != address)


def try_pairs(hosts: Sequence[Host], check: Callable[[], None] = lambda: None, ports: range = ANY) -> list[Unreached]:
    """Test connections between hosts, and return those that fail.

    It takes `TRY_S` if a host does not answer, and a little more to find an address that works.

    Args:
        hosts: their facts must be available. The first one has the store. One host per machine is tested.
        check: called often during the wait; an exception from it ends the wait.
        ports: see `places`.

    Raises:
        HostError: one of them ended.
        StartError: a host does not have the requested interface.
    """
    machines: dict[str, Host] = {}
    for host in hosts:
        machines.setdefault(host.transport.machine, host)
    by_name = {host.name: host for host in machines.values()}
    if len(by_name) < 2:
        return []
    used: dict[str, list[HostAddress]] = {}
    for name, host in by_name.items():
        try:
            used[name] = places(host.facts(), ports)
        except StartError as error:
            raise StartError(f"{name}: {error}") from error
    trial = _Trial(by_name, check)
    failed = trial.run(routes(list(by_name)), used, TRY_S)
    if not failed:
        return []
    directions = list(dict.fromkeys((one.source, one.target) for one in failed))
    targets = {target for _, target in directions}
    others = {name: _other_places(host.facts(), used[name]) for name, host in by_name.items() if name in targets}
    in_vain = {(one.source, one.target, one.place) for one in trial.run(directions, others, _ELSEWHERE_S)}
    return [
        Unreached(
            source=one.source,
            target=one.target,
            place=one.place,
            why=one.why,
            is_taken=one.is_taken,
            instead=tuple(place for place in others[one.target] if (one.source, one.target, place) not in in_vain),
        )
        for one in failed
    ]


def _cannot(target: str, place: HostAddress) -> str:
    return f"{target} cannot listen there" + (", or all of these are taken" if place.ports != ANY else "")


def _other_places(facts: Mapping[str, Any], used: Collection[HostAddress]) -> list[HostAddress]:
    return [
        place
        for place in (HostAddress(address, name) for address, name in _interfaces(facts).items())
        if place not in used
        and (":" in place.address) == (":" in facts["address"])
        and "%" not in place.address  # link-local addresses
        and not is_loopback(place.address)
    ]


def _interfaces(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the interfaces by IP address, without hardware addresses."""
    found = {}
    for address, name in facts["interfaces"].items():
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(address)
            found[address] = name
    return found


class _Trial:
    """Connection tests between hosts.

    Args:
        hosts: by name.
        check: called often during the wait; an exception from it ends the wait.
    """

    def __init__(self, hosts: Mapping[str, Host], check: Callable[[], None]) -> None:
        self._hosts = hosts
        self._check = check
        self._word = secrets.token_hex(8)

    def run(
        self, directions: Sequence[tuple[str, str]], where: Mapping[str, Sequence[HostAddress]], timeout_s: float
    ) -> list[Unreached]:
        """Return the connections that fail.

        Args:
            directions: pairs of source and target.
            where: addresses at which each target listens.
            timeout_s: seconds for a connection.
        """
        try:
            ports = self._ask(
                where,
                lambda name: ListenRequest(
                    places=[
                        ListenPlace(place.address, place.ports.start, place.ports.stop, self._of(name))
                        for place in where[name]
                    ]
                ),
                ListenReply,
            )
            goals = {
                source: [
                    (target, place, port)
                    for one, target in directions
                    if one == source
                    for place, port in zip(where[target], ports[target].ports, strict=True)
                ]
                for source, _ in directions
            }
            tried = self._ask(
                goals,
                lambda name: ConnectRequest(
                    targets=[
                        ConnectTarget(place.address, port, self._of(target)) for target, place, port in goals[name]
                    ],
                    within_s=timeout_s,
                ),
                ConnectReply,
                timeout_s,
            )
        finally:
            at_once([self._hosts[name] for name in where], lambda host: host.request(StopListeningRequest(), DoneReply))
        return [
            Unreached(
                source=source,
                target=target,
                place=place,
                why=why if port else _cannot(target, place),
                is_taken=not port,
            )
            for source in goals
            for (target, place, port), why in zip(goals[source], tried[source].tried, strict=True)
            if why
        ]

    def _of(self, name: str) -> str:
        """Return the word that a host sends to each connection."""
        return f"{self._word}/{list(self._hosts).index(name)}"

    def _ask(
        self, names: Iterable[str], make: Callable[[str], Message], expected: type[_R], more_s: float = 0.0
    ) -> dict[str, _R]:
        asked = [self._hosts[name] for name in names]
        answers = at_once(
            asked,
            lambda host: host.request(make(host.name), expected, timeout_s=_ANSWER_S + more_s),
            self._check,
        )
        found = {}
        for name, answer in answers.items():
            if isinstance(answer, DDPNotebookError):
                raise answer
            found[name] = answer
        return found
