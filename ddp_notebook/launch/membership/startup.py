"""Startup of a session, in whichever process owns the ranks: query hosts, upload files, then start ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ddp_notebook.launch.cluster import Check, Cluster, Listener, Startup
from ddp_notebook.launch.direct import DirectCluster
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.options import StartOptions


class DirectStartup(Startup):
    """Startup of ranks with the given options. Creating it starts the hosts.

    Args:
        options: of the start.
        check: called often during a wait; an exception from it ends the startup.
        report: called with a line for each completed stage, and with the progress of a stage after a carriage return.
        kind: class of the cluster.

    Raises:
        any error of `DirectHosts`.
    """

    def __init__(
        self,
        options: StartOptions,
        check: Check,
        report: Callable[[str], None],
        kind: type[DirectCluster] = DirectCluster,
    ) -> None:
        self.hosts: DirectHosts
        super().__init__(DirectHosts(options))
        self._options = options
        self._check = check
        self._report = report
        self._kind = kind
        self._began_s = time.monotonic()

    def _stage(self, name: str) -> None:
        self._report(f"{name} {time.monotonic() - self._began_s:.1f} s")

    def make(self, listener: Listener) -> DirectCluster:
        """Return the cluster, whose ranks are not started yet.

        Raises:
            any error of `DirectHosts.place` and `DirectHosts.sync_first`.
        """
        options, hosts = self._options, self.hosts
        env = {**os.environ, **options.env}
        placement = hosts.place(env, self._check, self._report)
        self._stage(hosts.stage)
        if options.elsewhere is not None and options.elsewhere.sync is not None:
            self.synced = hosts.sync_first(self._check, self._report)
            self._stage("sync")
        guard = placement.backend == "gloo" if options.guard is None else options.guard
        return self._kind(
            hosts.all,
            placement,
            env,
            listener,
            guard=guard,
            overlay=options.env,
            at=hosts.listening,
            again=hosts.again,
            here=hosts.here,
        )

    def start(self, cluster: Cluster) -> None:
        cluster.start(self.hosts.began_s + self._options.timeout_s, self._stage, self._check)
