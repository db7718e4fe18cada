"""`mpirun`, with the user's arguments unchanged.

By default each host gets one task, which forks the ranks of that host and is fastest. `-np 4` starts four tasks, each
with a share of the ranks. Open MPI binds a task, and so its ranks, to one core by default. This package turns that off
unless the arguments set it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch import processes
from ddp_notebook.launch.defaults import file
from ddp_notebook.launch.starters.starter import OUTPOST, Starter, address_for, address_towards
from ddp_notebook.launch.transports.ssh_config import host_name
from ddp_notebook.registry import private
from ddp_notebook.wire import signals

_PROGRAM = "mpirun"
_END_S = 15.0  # time for the tasks to end in order: a host server cannot react while it imports torch
_TRACEBACK = "Traceback (most recent call last)"
_MOST_WORDS = 600  # characters
_MOST_READ = 1 << 20  # bytes
_HOSTS = ("H", "host")
_HOST_FILES = ("hostfile", "machinefile", "default-hostfile")
_RANK_FILES = {"rf", "rankfile"}
_MAPS = {"np", "n", "c", "N", "map-by", "npernode", "pernode", "npersocket", "bynode", "byslot", *_RANK_FILES}
_BINDS = {"bind-to", "bind-to-core", "bind-to-socket", "cpus-per-proc", "cpu-set", "cpu-list", *_RANK_FILES}
# Open MPI uses the hosts of these resource managers without an argument.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")
_FIXES = (
    ("not enough slots", "write slots=N after the host in the hostfile, NAME:N after --host, or add --oversubscribe"),
    ("unable to open the hostfile", "its path is relative to {directory}"),
    ("Could not resolve hostname", "check the spelling of the name, and ~/.ssh/config"),
    ("connect to host", "check that an ssh server runs there and that this machine can reach it"),
    (
        "has changed and you have requested strict checking",
        "a host key has changed; if you expect that, remove the old key with the command that ssh NAME prints in a "
        "terminal, and connect again",
    ),
    ("Host key verification failed", "run ssh NAME once in a terminal and accept its host key"),
    ("Permission denied", "ssh asks for a password, which cannot be typed here; set up a key: ssh-copy-id NAME"),
    ("execute an executable", "pass the path of a Python with torch on that host with --python"),
    ("No module named", "install it on that host too, or pass another Python with --python"),
    ("unable to reliably start", "check that Open MPI is installed there and is on the PATH of a non-login shell"),
)


class MpiStarter(Starter):
    """Starts tasks with one `mpirun`.

    Args:
        line: arguments, as in a shell: "--hostfile hosts -np 4".

    Raises:
        UsageError: the line cannot be parsed.
    """

    def __init__(self, line: str) -> None:
        try:
            self._args = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"--mpi {line!r} cannot be read: {error}") from error
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def words(self) -> str:
        return shlex.join([_PROGRAM, *self._args])

    @property
    def address(self) -> str:
        hosts = list(self._hosts())
        if not hosts and any(name in os.environ for name in _ALLOCATIONS):
            return address_towards("")
        return address_for(map(host_name, hosts))  # Open MPI starts its daemons with ssh

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        folder = private.temporary()
        with private.writing_to(folder):
            self._log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # `end` closes it; it has no name that would be left
        try:
            line = self._line(command, env)
            # The tasks get both signals again: they are children of a child that unblocks them.
            with signals.held_back():
                self._process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={**_by_ssh(), **os.environ, **env},
                    start_new_session=True,  # an interrupt of the notebook is sent to its whole process group
                )
        except OSError as error:
            raise StartError(
                f"{_PROGRAM} cannot be run: {error}; install Open MPI, or put its bin folder on the PATH "
                "(module load openmpi) before Jupyter starts"
            ) from error

    def preview(self) -> str:
        """Return the command."""
        try:
            return shlex.join(self._line(OUTPOST, ("DDP_NOTEBOOK_INVITATION",)))
        except OSError as error:
            return f"{_PROGRAM} cannot be run: {error}"

    def trouble(self, *, now: bool = False) -> str:
        if self._process is None or self._log is None or self._process.poll() is None:
            return ""
        written = os.pread(self._log.fileno(), _MOST_READ, 0)  # does not move the file position, at which mpirun writes
        words, fix = explain_log(written.decode(errors="replace"))
        words = words or f"it ended with status {self._process.returncode}"
        return f"{self.words}: {words}" + (f"; {fix.format(directory=os.getcwd())}" if fix else "")

    def end(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                processes.end(processes.descendants(self._process.pid))
                self._process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _line(self, command: Sequence[str], handed_on: Iterable[str]) -> list[str]:
        known_by = subprocess.run([_PROGRAM, "--version"], capture_output=True, text=True).stdout
        own = self._own_args(handed_on) if "Open MPI" in known_by else []  # other implementations have other options
        return [_PROGRAM, *own, *self._args, *command]

    def _own_args(self, handed_on: Iterable[str]) -> list[str]:
        """Return options for defaults that the user has not set, and the names of variables for the tasks."""
        said = {word.lstrip("-") for word in self._args if word.startswith("-")}
        own = [word for name in handed_on for word in ("-x", name)]
        if os.geteuid() == 0:
            own += ["--allow-run-as-root"]
        if not said & _MAPS:
            own += ["--map-by", "ppr:1:node"]
        if not said & _BINDS and not any(":pe=" in word.lower() for word in self._args):
            own += ["--bind-to", "none"]
        return own

    def _hosts(self) -> Iterator[str]:
        """Yield the hosts that the arguments name."""
        for word, value in zip(self._args, self._args[1:], strict=False):
            option = word.lstrip("-") if word.startswith("-") else ""
            if option in _HOSTS:
                yield from (name.partition(":")[0] for name in value.split(","))
            elif option in _HOST_FILES and Path(value).is_file():
                for line in Path(value).read_text(errors="replace").splitlines():
                    if words := line.partition("#")[0].split():
                        yield words[0]


def explain_log(log: str) -> tuple[str, str]:
    r"""Return the essential part of the output of mpirun and its tasks, and a fix.

    Args:
        log: the whole output.

    Example:
        >>> explain_log('Traceback (most recent call last):\n  File "a"\nKeyError: 1')
        ('KeyError: 1', '')
        >>> log = ["-----", "Open RTE was unable to open the hostfile:", "    hosts", "-----", "An internal error"]
        >>> explain_log("\n".join(log))[0]
        'Open RTE was unable to open the hostfile: hosts'
    """
    boxes = [box.strip() for box in re.split(r"^-{5,}$", log, flags=re.MULTILINE) if box.strip()]
    box, fix = next(((box, fix) for box in boxes for text, fix in _FIXES if text in box), ("\n".join(boxes[:2]), ""))
    if _TRACEBACK in box:
        return _error_of(box) or box.splitlines()[-1].strip(), fix
    return " ".join("\n".join(re.split(r"\n\s*\n", box)[:2])[:_MOST_WORDS].split()), fix


def _error_of(text: str) -> str:
    """Return the line of the error in the last complete traceback; "" if there is none.

    Other tasks may still be writing their tracebacks.
    """
    error, before = "", None
    for line in text.splitlines():
        if _TRACEBACK in line:
            before = line[: line.index(_TRACEBACK)]
        elif before is not None and line.startswith(before) and line[len(before) :][:1].strip():
            error, before = line.strip(), None
    return error


def _by_ssh() -> dict[str, str]:
    """Return variables for ssh in Open MPI up to 4, and from 5 on."""
    said = {
        "args": "-o BatchMode=yes",  # a question of ssh could not be answered
        # Its daemons then detach from ssh: the stop button of VS Code sends SIGINT to every process below the kernel.
        "no_tree_spawn": "1",
    }
    if agent := os.environ.get("DDP_NOTEBOOK_SSH") or file.read().ssh:
        said["agent"] = agent
    return {
        f"{prefix}_{name}": value for prefix in ("OMPI_MCA_plm_rsh", "PRTE_MCA_plm_ssh") for name, value in said.items()
    }
