"""A Slurm cluster of the tests: its controller on this machine, its nodes on hosts with separate networks.

All files are in one folder: configuration, munge's key and socket, state, logs. An existing Slurm of the machine is
neither read nor changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.ssh import namespaces

NODES = ("n1", "n2")
CPUS = 4  # of each node
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
_TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "unshare")
_UP_S = 20.0
_CONFIG = """
ClusterName=ddp
SlurmctldHost={hostname}({net}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=10
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,preempt_youngest_first
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """A running Slurm cluster.

    Args:
        directory: Folder for all files.
        network: Hosts of the nodes.

    Attributes:
        config: Path of slurm.conf, for the variable `SLURM_CONF`.
        addresses: Addresses of the nodes.
        shared_folder: Files that sessions write for their tasks, with `XDG_CACHE_HOME` as in `conftest`.
    """

    def __init__(self, directory: Path, network: namespaces.Namespaces) -> None:
        self.config = directory / "slurm.conf"
        self.shared_folder = directory / "shared" / "ddp_notebook"
        self._directory = directory
        self._network = network
        self.addresses = network.addresses
        self._env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.config)}
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self._make()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel_all()
        self._ends.close()

    def _make(self) -> None:
        here = self._directory
        (here / "state").mkdir()
        key = here / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        net = self._network.net
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={port} CPUs={CPUS} RealMemory=4000"
            for name, address in self._network.addresses.items()
        ]
        said = _CONFIG.format(directory=here, hostname=socket.gethostname(), net=net, port=port)
        self.config.write_text("\n".join([said, *nodes, ""]))
        files = {name: f"{here}/munge.{name}" for name in ("sock", "pid", "log", "seed")}
        self._run(
            *("munged", "--force", "--foreground", f"--key-file={key}", f"--socket={files['sock']}"),
            *(f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"),
        )
        wait_until(Path(files["sock"]).exists, _UP_S, "munged's socket")
        self._run("slurmctld", "-D", "-f", str(self.config))
        for name in self._network.addresses:
            # Debian gives the host's own name an address that other hosts cannot reach.
            hosts = here / f"hosts.{name}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{net}.1 {socket.gethostname()}\n")
            begin = f"hostname {name} && mount --bind {hosts} /etc/hosts && exec slurmd -D -N {name} -f {self.config}"
            # (`ip netns exec` would hide /sys/fs/cgroup, which slurmd needs.)
            namespace = f"--net=/run/netns/{self._network.links[name]}"
            self._run("nsenter", namespace, "unshare", "-u", "-m", "sh", "-c", begin)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == f"{len(NODES)} idle", _UP_S, "idle nodes")

    def _run(self, *command: str) -> None:
        log = (self._directory / "said.log").open("ab")
        with log:
            process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._ends.callback(_end, process)

    def ask(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        return subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=30).stdout.strip()

    def jobs(self) -> list[str]:
        """Return the numbers of the pending, running and ending jobs."""
        return self.ask("squeue", "-h", "-o", "%A").split()

    def cancel_all(self) -> None:
        """End all jobs, and wait until the nodes are idle."""
        for job in self.jobs():
            self.ask("scancel", job)
        wait_until(lambda: not self.jobs(), _UP_S, "an empty queue")

    @contextmanager
    def occupied(self) -> Iterator[str]:
        """Occupy all nodes with a job. Yield its number."""
        job = self.ask("sbatch", "--parsable", f"-N{len(NODES)}", "--exclusive", "-o", "/dev/null", "--wrap=sleep 600")
        try:
            wait_until(lambda: self.ask("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING", _UP_S, "the job to run")
            yield job
        finally:
            self.ask("scancel", job)
            wait_until(lambda: job not in self.jobs(), _UP_S, "the job to be gone")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def need() -> None:
    """Skip the test if Slurm is not installed."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: `make cluster-tools` installs Slurm")


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Start a Slurm cluster with two nodes. Skip the test if this is not possible."""
    need()
    with namespaces.hosts(directory, *NODES) as network, Cluster(directory, network) as made:
        yield made
