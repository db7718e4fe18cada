"""The state of one Slurm job: the reason to wait, its start and end times, and the cause of its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddp_notebook.errors import StartError
from ddp_notebook.wire import signals

_ASK_S = 20.0  # a busy controller answers late
_SUBMIT_S = 120.0  # sbatch itself waits for a restarting controller
_FORMAT = "%T|%r|%S|%e|%l|%N"
_ENDS = {
    "TIMEOUT": "has reached its time limit{limit}; ask for more with -t",
    "PREEMPTED": "was preempted: a job with higher priority has taken its nodes",
    "CANCELLED": "was cancelled, by scancel or by an administrator",
    "NODE_FAIL": "has lost a node that failed",
    "OUT_OF_MEMORY": "has used more memory than it had; ask for more with --mem",
    "DEADLINE": "has reached its deadline",
    "BOOT_FAIL": "could not boot its nodes",
    "FAILED": "has failed",
    "COMPLETED": "has ended",
    "": "is no longer known to Slurm",
}
# Reasons of a waiting job that will never start. (Slurm keeps it waiting since an administrator may change a limit.)
_HOPELESS = {
    "PartitionConfig": "no node of the partition has the requested resources",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "BadConstraints": "no node has the requested resources",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "JobHeldUser": "it is held",
    "JobHeldAdmin": "it is held by an administrator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobState:
    """A job as Slurm reports it.

    Args:
        state: Slurm state: PENDING, RUNNING, TIMEOUT ...; "" if the job is no longer known.
        reason: Slurm reason for waiting; "" if there is none.
        starts: estimated start of a waiting job, in seconds since 1970; None if not known.
        ends: latest end of a running job; None if there is none or it is not known.
        limit: time limit in Slurm format: "2:00:00".
        nodes: its nodes: "gpu[1-4]".
    """

    state: str
    reason: str = ""
    starts: float | None = None
    ends: float | None = None
    limit: str = ""
    nodes: str = ""

    @property
    def waits(self) -> bool:
        """True if it may start later."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")

    @property
    def runs(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")

    @property
    def is_ending(self) -> bool:
        """True if it is ending. Slurm reports how after the end of all its processes."""
        return self.state == "COMPLETING"

    @property
    def is_over(self) -> bool:
        return not (self.waits or self.runs or self.is_ending)

    @property
    def says_why(self) -> bool:
        """True if its state names the reason of its end, so that no other search is needed."""
        return self.state in _ENDS and self.state not in ("FAILED", "COMPLETED", "")

    @property
    def hopeless(self) -> str:
        """The reason why it will never start; "" if it may start."""
        return _HOPELESS.get(self.reason, "") if self.state == "PENDING" else ""

    def left_s(self) -> float | None:
        """Return the seconds until its end; None if no end is known."""
        return None if self.ends is None or not self.runs else max(0.0, self.ends - time.time())

    def in_words(self) -> str:
        """Return its state in words, to follow "job 42": "waits in the queue: Priority, starts about 14:10"."""
        if self.state == "CONFIGURING":
            return "has nodes, which are being prepared"
        if self.waits:
            starts = "" if self.starts is None else f"starts about {_at(self.starts)}"
            more = ", ".join(filter(None, [self.reason, starts]))
            return "waits in the queue" + (f": {more}" if more else "")
        if self.runs:
            return f"runs on {self.nodes}" if self.nodes else "runs"
        if self.is_ending:
            return "is ending"
        limit = f" of {self.limit}" if self.limit else ""
        return _ENDS.get(self.state, f"has ended: {self.state}").format(limit=limit)


class SlurmJob:
    """A job in the Slurm queue.

    Args:
        number: its id in Slurm.
        cluster: name of its cluster, if it is not the default one of this machine.
    """

    def __init__(self, number: str, cluster: str = "") -> None:
        self.number = number
        self._on = ["-M", cluster] if cluster else []

    @classmethod
    def submit(cls, script: str, arguments: Sequence[str], env: Mapping[str, str]) -> SlurmJob:
        """Submit a batch script.

        Args:
            script: its text.
            arguments: of sbatch.
            env: variables on top of the notebook's.

        Raises:
            StartError: sbatch is not installed, or rejects the script; with the message of sbatch.
        """
        said = _run(["sbatch", "--parsable", *arguments], script, env, _SUBMIT_S)
        # a plugin of the site may print lines before it
        number, _, cluster = said.strip().rpartition("\n")[2].partition(";")
        if not number.isdigit():
            raise StartError(
                f"sbatch must print a job number, got {said.strip()!r}; look for the job with `squeue --me`"
            )
        return cls(number, cluster)

    def state(self) -> SlurmJobState:
        """Return the current state.

        Raises:
            StartError: Slurm does not answer.
        """
        try:
            said = _run(["squeue", "-h", "-t", "all", "-j", self.number, *self._on, "-o", _FORMAT])
        except StartError as error:
            if "Invalid job id" in str(error):  # Slurm forgets jobs minutes after their end
                return SlurmJobState(state="")
            raise
        # "CLUSTER: name" comes before
        lines = [line for line in said.splitlines() if line.count("|") >= _FORMAT.count("|")]
        if not lines:
            return SlurmJobState(state="")
        state, reason, starts, ends, limit, nodes = lines[-1].split("|")
        return SlurmJobState(
            state=state,
            reason="" if reason == "None" else reason,
            starts=_time(starts),
            ends=_time(ends),
            limit="" if limit in ("UNLIMITED", "NOT_SET", "INVALID") else limit,
            nodes=nodes,
        )

    def output(self) -> str:
        """Return the path of its output file on its nodes; "" if Slurm does not report it."""
        with contextlib.suppress(StartError):
            for line in _run(["scontrol", "show", "job", self.number, *self._on]).splitlines():
                name, _, value = line.strip().partition("=")
                if name == "StdOut":
                    return value
        return ""

    def kill_wait_s(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL at the end of a job; None if Slurm does not report it."""
        with contextlib.suppress(StartError):
            for line in _run(["scontrol", "show", "config", *self._on]).splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "KillWait":
                    return float(value.split()[0])  # "30 sec"
        return None

    def cancel(self) -> None:
        """End the job, waiting or running. Does nothing if it has ended.

        Raises:
            StartError: Slurm does not answer.
        """
        _run(["scancel", *self._on, self.number])


def try_out(script: str, arguments: Sequence[str]) -> str:
    """Return the answer of `sbatch --test-only` for a batch script: "Job 42 to start at ...". Submits nothing.

    Raises:
        StartError: Slurm would reject it.
    """
    env = {"SLURM_TIME_FORMAT": "standard"}
    return _run(["sbatch", "--test-only", *arguments], script, env, timeout_s=_SUBMIT_S).strip()


def nodes_of(list_of_nodes: str = "") -> list[str]:
    """Return the addresses of nodes.

    Args:
        list_of_nodes: in Slurm format: "gpu[1-4]"; "": all.

    Raises:
        StartError: Slurm does not answer.
    """
    which = ["-n", list_of_nodes] if list_of_nodes else []
    return list(dict.fromkeys(_run(["sinfo", "-h", "-N", *which, "-o", "%o"]).split()))


def environment() -> dict[str, str]:
    """Return the notebook's environment without Slurm variables, which Slurm commands would treat as arguments."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {n: v for n, v in os.environ.items() if n in kept or not n.startswith(("SLURM_", "SLURMD_", "SQUEUE_"))}


def _run(
    command: Sequence[str], given: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = _ASK_S
) -> str:
    """Run a Slurm command, and return its output."""
    if shutil.which(command[0]) is None:
        raise StartError(
            f"{command[0]} was not found, and --slurm needs Slurm's commands: run the notebook on a login node, or "
            "load Slurm's module"
        )
    try:
        with signals.held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment(), "SLURM_TIME_FORMAT": "%s", **(env or {})},  # times in seconds
                start_new_session=True,  # an interrupt of the notebook must not leave an unknown job
            )
        out, words = process.communicate(given, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise StartError(
            f"Slurm did not answer {command[0]} within {timeout_s:g} s; check its controller with `sinfo`"
        ) from None
    if process.returncode != 0:
        if "establish a configuration source" in words:
            raise StartError(
                f"{command[0]} finds no cluster: this machine has no slurm.conf; run the notebook on a login node, or "
                "set SLURM_CONF"
            )
        prefix = f"{command[0]}: "
        lines = [line.removeprefix(prefix).removeprefix("error: ").strip() for line in words.splitlines()]
        said = "; ".join(line for line in lines if line and "--help" not in line)
        raise StartError(f"{command[0]} refuses: {said or f'status {process.returncode}'}")
    return out or words  # `sbatch --test-only` prints its answer to stderr


def _time(said: str) -> float | None:
    return float(said) if said.isdigit() else None


def _at(when: float) -> str:
    """Format a time: "14:10", with the day if it is not today."""
    then, now = datetime.fromtimestamp(when), datetime.now()
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b, %H:%M}"
