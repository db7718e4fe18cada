"""How the ranks of a session begin, whichever process has them: hosts are asked and take files, then ranks start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ddp_notebook.launch.cluster import Check, Cluster, Listener, Startup
from ddp_notebook.launch.direct import DirectCluster
from ddp_notebook.launch.hosts import DirectHosts
from ddp_notebook.launch.options import StartOptions


class DirectStartup(Startup):
    """Of the ranks that were asked for. Their hosts begin at once.

    Args:
        options: what was asked for.
        check: called often while something waits; what it raises ends the beginning.
        report: told a line about each stage that is done, and behind a carriage return how far one is.
        kind: of cluster.

    Raises:
        what `DirectHosts` raises.
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
            what `DirectHosts.place` and `DirectHosts.sync_first` raise.
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
