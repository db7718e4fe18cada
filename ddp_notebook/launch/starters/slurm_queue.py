"""What Slurm says of one job: why it waits, when it starts and ends, how it has ended."""

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

_ASK_S = 20.0  # a controller that is busy answers late
_SUBMIT_S = 120.0  # sbatch itself waits for a controller that restarts
_FORMAT = "%T|%r|%S|%e|%l|%N"
_ENDS = {
    "TIMEOUT": "has reached its time limit{limit}; ask for more with -t",
    "PREEMPTED": "was preempted: a job that goes before it has taken its nodes",
    "CANCELLED": "was cancelled, by scancel or by an administrator",
    "NODE_FAIL": "has lost a node, which failed",
    "OUT_OF_MEMORY": "has used more memory than it had; ask for more with --mem",
    "DEADLINE": "has reached its deadline",
    "BOOT_FAIL": "could not boot its nodes",
    "FAILED": "has failed",
    "COMPLETED": "has ended",
    "": "is not known to Slurm any more",
}
# Of a job that waits: it will not start, whatever ends. (Slurm lets it wait since an administrator may change a limit.)
_HOPELESS = {
    "PartitionConfig": "no nodes of the partition have what it asks for",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "BadConstraints": "no nodes have what it asks for",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "JobHeldUser": "it is held",
    "JobHeldAdmin": "it is held by an administrator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobState:
    """A job as Slurm sees it.

    Args:
        state: Slurm's word: PENDING, RUNNING, TIMEOUT ...; "": it knows no such job any more.
        reason: why it waits, in Slurm's word; "": it does not say.
        starts: about when a job that waits will start, in seconds since 1970; None: Slurm does not know.
        ends: when a job that runs will be ended at the latest; None: never, or it is not known.
        limit: the time that it may take, as Slurm writes it: "2:00:00".
        nodes: where it runs: "gpu[1-4]".
    """

    state: str
    reason: str = ""
    starts: float | None = None
    ends: float | None = None
    limit: str = ""
    nodes: str = ""

    @property
    def waits(self) -> bool:
        """Whether it may start later."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")

    @property
    def runs(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")

    @property
    def is_ending(self) -> bool:
        """It ends; how, Slurm says when all its processes are gone."""
        return self.state == "COMPLETING"

    @property
    def is_over(self) -> bool:
        return not (self.waits or self.runs or self.is_ending)

    @property
    def says_why(self) -> bool:
        """Whether it is over for a reason that its state names, so that nothing else has to be looked for."""
        return self.state in _ENDS and self.state not in ("FAILED", "COMPLETED", "")

    @property
    def hopeless(self) -> str:
        """Why it will never start; "": it may."""
        return _HOPELESS.get(self.reason, "") if self.state == "PENDING" else ""

    def left_s(self) -> float | None:
        """Seconds until it is ended; None: no end is known."""
        return None if self.ends is None or not self.runs else max(0.0, self.ends - time.time())

    def in_words(self) -> str:
        """Behind "job 42": "waits in the queue: Priority, starts about 14:10"."""
        if self.state == "CONFIGURING":
            return "has nodes, which are being made ready"
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
    """A job of Slurm's queue.

    Args:
        number: that Slurm knows it by.
        cluster: where it is, if not on the one that this machine's commands ask first.
    """

    def __init__(self, number: str, cluster: str = "") -> None:
        self.number = number
        self._on = ["-M", cluster] if cluster else []

    @classmethod
    def submit(cls, script: str, arguments: Sequence[str], env: Mapping[str, str]) -> SlurmJob:
        """Have a batch script run.

        Args:
            script: its text.
            arguments: of sbatch.
            env: variables on top of the notebook's.

        Raises:
            StartError: there is no sbatch, or it refuses; in its own words.
        """
        said = _run(["sbatch", "--parsable", *arguments], script, env, _SUBMIT_S)
        number, _, cluster = said.strip().rpartition("\n")[2].partition(";")  # a site's plugin may greet before it
        if not number.isdigit():
            raise StartError(f"sbatch has not said which job it made, but: {said.strip()!r}; see `squeue --me`")
        return cls(number, cluster)

    def state(self) -> SlurmJobState:
        """What Slurm says now.

        Raises:
            StartError: it does not answer.
        """
        try:
            said = _run(["squeue", "-h", "-t", "all", "-j", self.number, *self._on, "-o", _FORMAT])
        except StartError as error:
            if "Invalid job id" in str(error):  # it forgets jobs minutes after their end
                return SlurmJobState(state="")
            raise
        lines = [line for line in said.splitlines() if line.count("|") >= _FORMAT.count("|")]  # "CLUSTER: name" before
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
        """The file that its output goes to, as its nodes see it; "": Slurm does not say."""
        with contextlib.suppress(StartError):
            for line in _run(["scontrol", "show", "job", self.number, *self._on]).splitlines():
                name, _, value = line.strip().partition("=")
                if name == "StdOut":
                    return value
        return ""

    def kill_wait_s(self) -> float | None:
        """What its processes get from SIGTERM to SIGKILL when it ends; None: Slurm does not say."""
        with contextlib.suppress(StartError):
            for line in _run(["scontrol", "show", "config", *self._on]).splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "KillWait":
                    return float(value.split()[0])  # "30 sec"
        return None

    def cancel(self) -> None:
        """End it, whether it waits or runs. One that has ended is left alone.

        Raises:
            StartError: Slurm does not answer.
        """
        _run(["scancel", *self._on, self.number])


def try_out(script: str, arguments: Sequence[str]) -> str:
    """What sbatch would do with a batch script, in its own words: "Job 42 to start at ..." Nothing is submitted.

    Raises:
        StartError: it would refuse.
    """
    env = {"SLURM_TIME_FORMAT": "standard"}
    return _run(["sbatch", "--test-only", *arguments], script, env, timeout_s=_SUBMIT_S).strip()


def nodes_of(list_of_nodes: str = "") -> list[str]:
    """The addresses by which Slurm reaches nodes.

    Args:
        list_of_nodes: which, as Slurm writes it: "gpu[1-4]"; "": all.

    Raises:
        StartError: Slurm does not answer.
    """
    which = ["-n", list_of_nodes] if list_of_nodes else []
    return list(dict.fromkeys(_run(["sinfo", "-h", "-N", *which, "-o", "%o"]).split()))


def environment() -> dict[str, str]:
    """The notebook's, without what an allocation has left in it: Slurm's commands would take that for arguments."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {n: v for n, v in os.environ.items() if n in kept or not n.startswith(("SLURM_", "SLURMD_", "SQUEUE_"))}


def _run(
    command: Sequence[str], given: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = _ASK_S
) -> str:
    """Run one of Slurm's commands, and return what it prints."""
    if shutil.which(command[0]) is None:
        raise StartError(
            f"there is no {command[0]} on this machine; --slurm is for a machine that has Slurm's commands, such as a "
            "login node: is its module loaded?"
        )
    try:
        with signals.held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment(), "SLURM_TIME_FORMAT": "%s", **(env or {})},  # seconds
                start_new_session=True,  # an interrupt of the notebook must not leave a job that nobody knows
            )
        out, words = process.communicate(given, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise StartError(
            f"Slurm has not answered {command[0]} in {timeout_s:g} s; is its controller up? (sinfo)"
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
    return out or words  # `sbatch --test-only` answers there


def _time(said: str) -> float | None:
    return float(said) if said.isdigit() else None


def _at(when: float) -> str:
    """ "14:10", or with its day if that is another one."""
    then, now = datetime.fromtimestamp(when), datetime.now()
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b, %H:%M}"
