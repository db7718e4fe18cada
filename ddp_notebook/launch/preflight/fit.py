"""Find problems that keep a group of hosts from forming. Gloo would wait, without naming a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_notebook.errors import StartError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.preflight.compare import HostFinding, addresses, connections, versions
from ddp_notebook.launch.preflight.pairs import try_pairs
from ddp_notebook.launch.preflight.query import Answer, ask_all
from ddp_notebook.launch.preflight.table import HostTable
from ddp_notebook.launch.transports.ports import ANY

_TABLE_S = 5.0


def fatal(hosts: Sequence[Host], check: Callable[[], None] = lambda: None, ports: range = ANY) -> list[HostFinding]:
    """Return problems that keep a group of these hosts from forming.

    Args:
        hosts: their facts must be available. The first one has the store.
        check: called often during the wait; an exception from it ends the wait.
        ports: for their store.

    Raises:
        HostError: one of them ended.
        StartError: a host does not have the requested interface.
    """
    answers = [Answer(host=host.name, machine=host.transport.machine, facts=host.facts()) for host in hosts]
    return [*versions(answers), *addresses(answers)] or connections(try_pairs(hosts, check, ports), ports)


def require(hosts: Sequence[Host], check: Callable[[], None] = lambda: None, ports: range = ANY) -> None:
    """Raise an error if a group of these hosts cannot form.

    Args:
        hosts, check, ports: see `fatal`.

    Raises:
        StartError: it cannot form. The message has the reason, a fix, and a table of the hosts.
    """
    if found := fatal(hosts, check, ports):
        table = HostTable(answers=tuple(ask_all(hosts, _TABLE_S, check=check)), findings=tuple(found))
        raise StartError("\n".join([*(finding.sentence for finding in found), "", *table.rows()]))
