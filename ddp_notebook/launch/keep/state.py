"""Session state: hosts and processes, as sent to notebooks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.launch.direct import DirectCluster
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.process import RANK, Process, Processes
from ddp_notebook.messages.encoding import to_json
from ddp_notebook.messages.keeper import OfHost, OfProcess, SessionState

_SILENT_S = 1.5  # a rank sends a heartbeat each second


def folder_of(number: int) -> str:
    """Return the prefix of the name of a notebook's folder, which is in the session's folder."""
    return f"ddp_notebook-session-{number}-"


class OwnCluster(DirectCluster):
    """The keeper's own cluster."""

    @property
    def processes(self) -> list[Process]:
        """Processes that were not replaced."""
        return self._processes.current


def state_of(cluster: OwnCluster, hosts: DirectHosts) -> SessionState:
    """Return the current state of a session."""
    of_hosts = [
        OfHost(
            name=host.name,
            label=host.label,
            hostname=host.hostname,
            is_here=host.transport.is_here,
            is_alive=host.is_alive,
            unheard=host.unheard,
            silent_s=host.silent_s,
            pid=host.pid,
            stopped=host.stopped,
        )
        for host in hosts.all
    ]
    return SessionState(
        epoch=cluster.epoch,
        placement=to_json(cluster.placement),
        hosts=of_hosts,
        processes=[
            OfProcess(
                number=one.number,
                kind=one.kind,
                host=one.host.name,
                rank=one.rank,
                pid=one.pid,
                status=one.status,
                lost=one.lost,
                tails=dict(one.tails),
            )
            for one in cluster.processes
        ],
        is_running=cluster.is_running,
        is_stopped=cluster.is_stopped,
        words=hosts.words,
        trouble=cluster.pulse(),
        silent=silent_ranks(cluster),
        unheard=cluster.unheard,
    )


def silent_ranks(cluster: Cluster) -> dict[int, float]:
    """Return silent ranks, with the monotonic time of their last message."""
    now = time.monotonic()
    silent_s = {rank: cluster.silent_s(rank) for rank in cluster.alive}
    return {rank: now - seconds for rank, seconds in silent_s.items() if seconds > _SILENT_S}


def update(state: SessionState, hosts: dict[str, Host], processes: Processes) -> None:
    """Update a notebook's hosts and processes. Existing objects are updated in place."""
    for new in state.hosts:
        old = cast("OfHost | None", hosts.get(new.name))
        if old is None:
            hosts[new.name] = cast(Host, new)
        else:
            old.is_alive, old.unheard, old.silent_s = new.is_alive, new.unheard, new.silent_s
            old.stopped = new.stopped
    with processes.changed:
        by_rank: dict[int, Process] = {}
        for told in state.processes:
            name = f"{told.host}/{told.number}"
            process = processes.all.get(name)
            if process is None:
                host = hosts.get(told.host) or _unknown(told.host)
                process = Process(told.number, told.kind, host, tails=dict(told.tails))
                processes.all[name] = process
            process.kind, process.rank = told.kind, told.rank
            process.pid, process.status, process.lost = told.pid, told.status, told.lost
            if told.kind == RANK:
                by_rank[told.rank] = process
        processes.by_rank = by_rank
        processes.changed.notify_all()


def _unknown(name: str) -> Host:
    """Return a placeholder for a host without ranks: the host of the controller if all ranks are on other hosts."""
    of = OfHost(name=name, label=name, hostname=name, is_here=True, is_alive=True, unheard="", silent_s=0.0, pid=0)
    return cast(Host, of)


def silent(hosts: Sequence[Host | OfHost]) -> bool:
    """Return whether a host is silent, so that its state changes each second."""
    return any(host.silent_s > 1.0 for host in hosts)
