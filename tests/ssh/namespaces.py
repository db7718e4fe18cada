"""Hosts with separate networks: namespaces on a bridge, with an ssh server in each. Their links can be cut."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests import rights
from tests.ssh.sshd import SSHD

_CONFIG = """
Port 22
ListenAddress {address}
HostKey {directory}/hostkey
AuthorizedKeysFile {directory}/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
"""
_NAMES = """
Host *
  User root
  IdentityFile {directory}/id
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {directory}/known_hosts
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


_numbers = itertools.count()


class Namespaces:
    """Some hosts.

    Args:
        directory: Folder of keys and configuration.
        names: Names of the hosts.

    Attributes:
        links: Name of each host's link and namespace.
        net: First three numbers of the addresses; this machine is .1.
        addresses: Address of each host.
        address: Address of this machine for the hosts.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        # For names that the whole machine shares. One process may have several networks, such as for tests of Slurm.
        mark = (os.getpid() + 997 * next(_numbers)) % 10_000
        self.links = {name: f"ddpl{mark}{name}" for name in names}
        self.command = f"ssh -F {directory}/ssh_config"
        self._directory = directory
        self._bridge, self.net = f"ddpb{mark}", f"10.79.{mark % 250}"
        self.address = f"{self.net}.1"
        self.addresses = {name: f"{self.net}.{11 + number}" for number, name in enumerate(names)}
        self._ends = ExitStack()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _make(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        self._ends.callback(_ip, "link", "del", self._bridge)
        _ip("addr", "add", f"{self.net}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._directory / name], check=True)
        host_key = (self._directory / "hostkey.pub").read_text()
        known, hosts = [], []
        for name, address in self.addresses.items():
            self._add(name, self.links[name], address)
            known.append(f"{address} {host_key}")
            hosts.append(f"Host {name}\n  HostName {address}\n")
        (self._directory / "known_hosts").write_text("".join(known))
        names = _NAMES.format(directory=self._directory)
        (self._directory / "ssh_config").write_text("".join(hosts) + names)

    def _add(self, name: str, link: str, address: str) -> None:
        namespace = link
        _ip("netns", "add", namespace)
        self._ends.callback(_ip, "netns", "del", namespace)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        config = self._directory / f"sshd_config.{name}"
        config.write_text(_CONFIG.format(directory=self._directory, address=address))
        server = subprocess.Popen(
            ["ip", "netns", "exec", namespace, str(SSHD), "-D", "-e", "-f", config], stderr=subprocess.DEVNULL
        )
        self._servers[name] = server
        self._ends.callback(self._end_connections, name)
        self._ends.callback(server.wait)
        self._ends.callback(server.terminate)
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection((address, 22), timeout=1).close()
                return
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "sshd does not start"
                time.sleep(0.02)

    def cut(self, name: str, *, is_up: bool = False) -> None:
        """Cut a host's link, or restore it."""
        _ip("link", "set", self.links[name], "up" if is_up else "down")

    def _processes(self, name: str) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.links[name]], check=True, capture_output=True, text=True)
        found = []
        for pid in listed.stdout.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def _end_connections(self, name: str) -> None:
        """End the connections of an ended ssh server.

        If a client has left while the link was cut, its connection would keep the network alive for hours.
        """
        for process in self._processes(name):
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    process.kill()

    def started(self, name: str) -> list[int]:
        """Return the processes of a host without its ssh server."""
        found = []
        for process in self._processes(name):
            with suppress(psutil.NoSuchProcess):
                if not process.name().startswith("sshd") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def are_idle(self) -> bool:
        """Return whether all hosts run only their ssh server, without connections."""
        return all([p.pid for p in self._processes(name)] == [server.pid] for name, server in self._servers.items())

    def kill(self, name: str) -> None:
        """Kill all processes of a host, including the ssh server's processes for connections.

        Also removes their temporary files: a dead machine would lose its folder, but this one is shared, and no process
        is left to remove them.
        """
        killed = [process for process in self._processes(name) if process.pid != self._servers[name].pid]
        opened: list[Path] = []
        for process in killed:
            with suppress(psutil.Error):
                opened += [Path(file.path) for file in process.open_files()]
        for process in killed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for folder in {folder for file in opened for folder in file.parents if folder.name.startswith("ddp_notebook-")}:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Prevent hosts from reaching each other in this block. The notebook still reaches all of them."""
        for link in self.links.values():
            _ip("link", "set", link, "type", "bridge_slave", "isolated", "on")
        try:
            yield
        finally:
            for link in self.links.values():
                _ip("link", "set", link, "type", "bridge_slave", "isolated", "off")
            # An ARP request without an answer fails after 3 s, and new connections fail with it.
            for namespace in self.links.values():
                _ip("-n", namespace, "neigh", "flush", "all")

    def join(self, device: str, net: str) -> None:
        """Create a separate network between two hosts, which is down.

        Args:
            device: Device name on both hosts.
            net: First three numbers of its addresses, which end in 1 and 2.
        """
        one, other = self.links.values()
        _ip("link", "add", device, "netns", one, "type", "veth", "peer", "name", device, "netns", other)
        for number, namespace in enumerate((one, other), 1):
            _ip("-n", namespace, "addr", "add", f"{net}.{number}/24", "dev", device)

    def become_ipv6(self, net: str) -> None:
        """Remove IPv4 between the hosts and this machine. Their ssh servers are then unreachable.

        Args:
            net: First 64 bits of their addresses.
        """
        _ip("addr", "flush", "dev", self._bridge)
        _ip("addr", "add", f"{net}::1/64", "dev", self._bridge, "nodad")
        for number, (name, link) in enumerate(self.links.items(), 11):
            _ip("-n", link, "-4", "addr", "flush", "dev", "eth0")
            self.addresses[name] = f"{net}::{number:x}"
            _ip("-n", link, "addr", "add", f"{self.addresses[name]}/64", "dev", "eth0", "nodad")
        self.address = f"{net}::1"

    def inside(self, name: str, *command: str) -> None:
        """Run a command on a host."""
        _ip("netns", "exec", self.links[name], *command)


@contextmanager
def hosts(directory: Path, *names: str) -> Iterator[Namespaces]:
    """Create hosts with these names. Skip the test if this is not possible."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ip") is None:
        pytest.skip("no ssh server, or no iproute2: `make cluster-tools` installs them")
    if os.geteuid() != 0 or not rights.may(*rights.NETWORK):
        pytest.skip("network namespaces cannot be made here: it takes root")
    os.makedirs("/run/sshd", exist_ok=True)
    with Namespaces(directory, names) as made:
        yield made
