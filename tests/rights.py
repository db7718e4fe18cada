"""Permissions of the tests on this machine: root in a container may lack some of root's usual permissions."""

from __future__ import annotations

import functools
import subprocess

# Each is tried in a separate namespace, which is discarded.
MOUNT = ("unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt")
TIME = ("unshare", "--time", "true")
FIREWALL = ("unshare", "-n", "iptables", "-L")
_NETWORK = (
    "ip link add br0 type bridge && ip link set br0 up && ip link add v0 type veth peer name v1"
    " && ip link set v0 master br0 up && mount --make-rprivate / && mount -t tmpfs none /run && ip netns add host"
    " && ip link set v1 netns host && ip -n host addr add 10.79.0.1/24 dev v1 && ip netns exec host true"
)
NETWORK = ("unshare", "-n", "-m", "sh", "-c", _NETWORK)


@functools.cache
def may(*command: str) -> bool:
    """Return whether one of the commands above succeeds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
