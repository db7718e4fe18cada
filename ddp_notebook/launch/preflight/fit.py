"""What would keep a group of hosts from forming, said before it forms: gloo would wait, and name nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_notebook.errors import StartError
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.preflight.compare import Finding, addresses, connections, versions
from ddp_notebook.launch.preflight.pairs import try_pairs
from ddp_notebook.launch.preflight.query import Answer, ask_all
from ddp_notebook.launch.preflight.table import HostTable
from ddp_notebook.launch.transports.ports import ANY

_TABLE_S = 5.0


def fatal(hosts: Sequence[Host], check: Callable[[], None] = lambda: None, ports: range = ANY) -> list[Finding]:
    """Why no group of these hosts would form.

    Args:
        hosts: whose facts were asked for. The first one has the store.
        check: called often while it waits; what it raises ends the wait.
        ports: on which their store is to listen.

    Raises:
        HostError: one of them ended.
        StartError: one of them has not the interface that it is to use.
    """
    answers = [Answer(host=host.name, machine=host.transport.machine, facts=host.facts()) for host in hosts]
    return [*versions(answers), *addresses(answers)] or connections(try_pairs(hosts, check, ports), ports)


def require(hosts: Sequence[Host], check: Callable[[], None] = lambda: None, ports: range = ANY) -> None:
    """See that a group of these hosts can form.

    Args:
        hosts, check, ports: see `fatal`.

    Raises:
        StartError: it cannot. Says why and what to do, and shows the hosts side by side.
    """
    if found := fatal(hosts, check, ports):
        table = HostTable(answers=tuple(ask_all(hosts, _TABLE_S, check=check)), findings=tuple(found))
        raise StartError("\n".join([*(finding.sentence for finding in found), "", *table.rows()]))
