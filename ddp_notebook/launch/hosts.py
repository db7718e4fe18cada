"""The hosts of one session: take or start their servers, query them, and give them back or end them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import HostError, StartError, StartTimeoutError, UsageError
from ddp_notebook.launch import warm
from ddp_notebook.launch.cluster import Hosts
from ddp_notebook.launch.host import open_files
from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import Placement, place, place_on_hosts
from ddp_notebook.launch.transports import folders
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.launch.transports.ports import Listening

if TYPE_CHECKING:
    from ddp_notebook.launch.starters.tasks import Tasks
    from ddp_notebook.launch.sync.sync import Synced
    from ddp_notebook.launch.transports.ssh import SshTransport
from ddp_notebook.messages.hosts import DoneReply, TrialRequest


class DirectHosts(Hosts):
    """Hosts of a session that is started with these options. The servers import torch in the background, in parallel.

    Args:
        options: of the start.

    Attributes:
        listening: local address and ports at which the ranks reach the notebook.
        fit: the preflight check passed. Then servers on other machines may wait for the next session.
        began_s: monotonic start time of the start's time limit: after the queue, and without the time of uploads.

    Raises:
        HostError: ssh cannot be run.
        StartError: no tasks can be started.
        UsageError: the folder to send does not exist.
    """

    def __init__(self, options: StartOptions) -> None:
        self.all: list[Host] = []
        self.listening = Listening(LOOPBACK, options.port_range)
        self.fit = False
        self.began_s = time.monotonic()
        self._options = options
        self._here: Host | None = None  # local host server; also in `all` if the ranks are local
        self._give_back = False  # return the local server to `warm`
        self._tasks: Tasks | None = None
        self._folder = "."  # the folder to send if no other is named
        open_files.allow(open_files.needed(1))
        open_files.check_free(open_files.OF_START, "a start")
        elsewhere = self._elsewhere = options.elsewhere
        if elsewhere is None:
            self._here, self._give_back = warm.claim({**os.environ, **options.env})
            self.all.append(self._here)
            return
        from ddp_notebook.launch.starters.choice import choose

        if elsewhere.sync is not None:
            from ddp_notebook.launch.sync.selection import resolved

            self._folder = str(resolved(os.fspath(elsewhere.sync)))  # before any process is started
        try:
            if starter := choose(options):
                from ddp_notebook.launch.starters.tasks import Tasks

                self._tasks = Tasks(
                    starter,
                    elsewhere.python,
                    options.env,
                    lease_s=elsewhere.lease_s,
                    ports=options.port_range,
                    saves=options.on_preempt is not None,
                )
                self.listening = self._tasks.listening
            for name in options.ranks_of_hosts:
                self.all.append(warm.take_far(self._key(name)) or Host(self._transport(name)))
        except BaseException:
            self.end()
            raise

    def place(
        self, env: Mapping[str, str], check: Callable[[], None], report: Callable[[str], None] = lambda _: None
    ) -> Placement:
        """Place the ranks. Waits until all servers have imported torch.

        Args:
            env: environment of local ranks.
            check: called often during the wait; an exception from it ends the wait.
            report: called with the state of a queue during the wait.

        Raises:
            HostError: a server ended while hosts tested their connections.
            StartError: a server ended or took too long, or a group of these hosts would not form.
            UsageError: the ranks do not fit, or the limit of open files is too low.
        """
        shares: Mapping[str, int] = {}
        if self._tasks is not None:
            transports = self._tasks.wait(self._options.timeout_s, check, report)
            self.all += [Host(transport) for transport in transports]
            shares = self._tasks.shares(transports)
            self.began_s = self._tasks.began_s
        until = self.began_s + self._options.timeout_s
        facts: dict[str, Mapping[str, Any]] = {}
        for host in self.all:
            try:
                facts[host.name] = host.facts(max(0.1, until - time.monotonic()), check)
            except StartTimeoutError as error:
                raise StartTimeoutError(
                    f"the start took too long: the host server was importing torch ({error})"
                ) from None
        if self._options.is_here:
            return placed(self._options, facts, {}, env)
        from ddp_notebook.launch.preflight.fit import require

        require(self.all, check, self._options.port_range)
        self.fit = True
        machines = {host.name: host.transport.machine for host in self.all}
        return placed(self._options, facts, machines, env, shares)

    def check_startable(self, ranks: int) -> None:
        env = {**os.environ, **self._options.env}
        open_files.check_free(open_files.OF_START, "a start")
        folders.remove(folders.make("ddp_notebook-", is_large=True, is_guarded=False))
        if self._options.is_here and self.all[0].is_alive and not self.all[0].fits(env):
            warm.prepare_anew(env).facts()
        try:
            for host in self.all:
                if host.is_alive and not host.trouble():
                    self._check_ready(host, ranks, env)
                # a stopped server is resumed when the session ends
                elif host.is_alive and self._options.is_here and not host.is_stopped:
                    warm.prepare_anew(env).facts()  # the server hangs; the restart replaces it
        except HostError as error:
            raise StartError(str(error)) from error

    def _check_ready(self, host: Host, ranks: int, env: Mapping[str, str]) -> None:
        try:
            host.request(TrialRequest(ranks=ranks), DoneReply)
        except HostError as error:
            if not self._options.is_here or os.strerror(errno.EMFILE) not in str(error):
                raise
            warm.prepare_anew(env).facts()  # the limit of descriptors is per process: test a fresh server

    def sync_first(self, check: Callable[[], None], progress: Callable[[str], None]) -> Synced:
        """Send the folder of the start before ranks are started, which then start in it. Call `place` first.

        Raises:
            UsageError: as `launch.sync.sync.sync`.
            StartError: a host cannot store the files.
        """
        began = time.monotonic()
        try:
            done = self.sync(None, overwrite=False, also=(), is_large=False, check=check, progress=progress)
        except HostError as error:
            raise StartError(str(error)) from error
        for host in self.all:
            host.folder = done.folders[host.name]
        self.began_s += time.monotonic() - began
        return done

    def sync(
        self,
        folder: str | None,
        *,
        overwrite: bool,
        also: Sequence[str],
        is_large: bool,
        check: Callable[[], None],
        progress: Callable[[str], None],
    ) -> Synced:
        if all(host.transport.is_here for host in self.all):
            raise UsageError("only ranks on other machines need a sync; these read the notebook's own files")
        from ddp_notebook.launch.sync.sync import sync

        return sync(
            folder or self._folder,
            self.all,
            overwrite=overwrite,
            also=also,
            is_large=is_large or (self._elsewhere is not None and self._elsewhere.sync_large),
            check=check,
            progress=progress,
        )

    def status(self) -> str:
        return "" if self._tasks is None else self._tasks.status()

    def notices(self) -> list[str]:
        of_hosts = [notice for host in self.all for notice in host.notices()]
        return of_hosts + ([] if self._tasks is None else self._tasks.notices())

    def tell_of_warnings(self, on_warned: Callable[[str], object]) -> None:
        if self._tasks is not None:
            self._tasks.tell_of_warnings(on_warned)

    def here(self) -> Host:
        """Return a local host server for processes that are not ranks. The first call takes or starts it, and a later
        call starts a new one if it has ended.
        """
        if self._options.is_here:
            return self.all[0]
        if self._here is None or not self._here.is_alive:
            self._here, self._give_back = warm.claim(os.environ)
        return self._here

    @property
    def are_alive(self) -> bool:
        return any(host.is_alive for host in self.all)

    def again(self, lost: Host) -> Host | None:
        """Return a new connection to a lost host; None if it cannot be reached from this machine.

        Raises:
            HostError: ssh cannot be run.
        """
        host = lost.again()
        if host is not None:
            self.all[self.all.index(lost)] = host
        return host

    @property
    def pids(self) -> list[int]:
        return [host.pid for host in self.all if host.is_alive]

    @property
    def stage(self) -> str:
        """The name of the first stage of a start. Call `place` first."""
        if len(self.all) == 1:
            return self.all[0].stage
        troubles = [f"{host.label}: {host.device_trouble}" for host in self.all if host.device_trouble]
        return f"{len(self.all)} host servers" + (f" ({'; '.join(troubles)})" if troubles else "")

    @property
    def words(self) -> str:
        return ", ".join(dict.fromkeys(host.label for host in self.all if host.is_alive))

    def end(self, *, healthy: bool = True) -> None:
        far = [host for host in self.all if host is not self._here]
        # closing one may take seconds
        ending = [threading.Thread(target=self._end, args=(host, healthy)) for host in far]
        for one in ending:
            one.start()
        if self._here is not None and self._give_back:
            warm.give_back(self._here, healthy=healthy)
        elif self._here is not None:
            self._here.close()
        for one in ending:
            one.join()
        if self._tasks is not None:
            self._tasks.end()

    def _end(self, host: Host, healthy: bool) -> None:
        if healthy and self.fit and self._options.hosts is not None:
            warm.give_back_far(self._key(host.name), host)
        else:
            host.close()

    def _transport(self, name: str) -> SshTransport:
        options, elsewhere = self._options, self._elsewhere
        assert elsewhere is not None
        lasts = options.keep is not None
        from ddp_notebook.launch.transports.ssh import SshTransport

        return SshTransport(name, python=elsewhere.python, env=options.env, lease_s=elsewhere.lease_s, lasts=lasts)

    def _key(self, name: str) -> Hashable:
        """Return the options that a host server was started with."""
        from ddp_notebook.launch.transports.ssh_config import ssh_command

        options, elsewhere = self._options, self._elsewhere
        assert elsewhere is not None
        env = tuple(sorted(options.env.items()))
        return name, elsewhere.python, env, elsewhere.lease_s, tuple(ssh_command())


def placed(
    options: StartOptions,
    facts: Mapping[str, Mapping[str, Any]],
    machines: Mapping[str, str],
    env: Mapping[str, str],
    shares: Mapping[str, int] | None = None,
) -> Placement:
    """Place the ranks on hosts that have sent their facts.

    Args:
        options: of the start.
        facts: replies of the host servers, by name.
        machines: machine of each host, by host name, for hosts other than the notebook's.
        env: environment of local ranks.
        shares: see `place_on_hosts`.

    Raises:
        UsageError: they do not fit, or the limit of open files is too low.
    """
    if options.is_here:
        placement = place(options, next(iter(facts.values())), env)
    else:
        placement = place_on_hosts(options, facts, machines, shares)
    _check_open_files(placement, facts)
    return placement


def _check_open_files(placement: Placement, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise the limit of open files of this process as needed. A host server does so when it starts a rank."""
    world_size = placement.world_size
    open_files.check(world_size, open_files.most(), "this machine")
    open_files.allow(open_files.needed(world_size))
    for host, of_host in facts.items():
        open_files.check(world_size, of_host["open_files"], host)
