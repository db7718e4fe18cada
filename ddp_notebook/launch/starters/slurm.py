"""Slurm starts the tasks: in a new job that waits in the queue, or in the allocation of the notebook.

Each node gets one task with all resources of the job on that node, unless the arguments set a number of tasks. The
output of the tasks is kept for the error message of a failed start, and is removed with the session.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_notebook.errors import StartError, UsageError
from ddp_notebook.launch.starters import slurm_queue
from ddp_notebook.launch.starters.base import OUTPOST, Starter, address_towards, shared_folder
from ddp_notebook.launch.starters.slurm_queue import SlurmJob, SlurmJobState
from ddp_notebook.launch.transports import cleanup_process
from ddp_notebook.launch.transports.base import LOOPBACK
from ddp_notebook.registry import modes, private

_log = logging.getLogger(__name__)
NOTICE_S = (600.0, 120.0)  # before the end of a job
_FIRST_LOOK_S = 0.2
_LONGEST_PAUSE_S = 10.0  # longest interval of checks, since many users query the queue
_SLOWER = 1.3  # growth of the interval
_RUNNING_PAUSE_S = 30.0  # interval while the job runs: its time limit may be changed
_FRESH_S = 1.0
_ENDING_S = 3.0  # time for an ending job to end, so that Slurm reports how
_END_S = 2.0  # time for the job to end by itself after its tasks
_LAST_WORDS = 2000  # characters
_NODES_ASKED = 4  # number of nodes that are tried for a route
# Options with which the job would not run the tasks.
_REFUSED = {
    "--array": "a job array is many jobs",
    "-a": "a job array is many jobs",
    "--wrap": "the job's script is this package's own",
    "--wait": "sbatch would wait for the end of the job",
    "-W": "sbatch would wait for the end of the job",
    "--test-only": "it starts nothing; --check says what would be submitted",
}
_SCRIPT = """\
#!/bin/sh
#SBATCH --job-name=ddp_notebook
#SBATCH --output="{output}"
#SBATCH --no-requeue
#SBATCH --no-kill
# One task a node, which may use all cores that the job has there if its arguments set no number of tasks.
if [ -z "$SLURM_NTASKS" ]; then
    tasks="--ntasks-per-node=1 --cpu-bind=none"
else
    tasks="--ntasks=$SLURM_NTASKS ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}}"
fi
# Tasks that end, and nodes that fail, end no others.
exec srun $tasks {options} {command}
"""
_OPTIONS = ("--quiet", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--export=ALL")


def starter(arguments: str) -> SlurmStarter:
    """Return the Slurm starter.

    Args:
        arguments: of `sbatch`, unchanged; "": use the allocation of the notebook.

    Raises:
        UsageError: an argument is not supported, or there is no allocation.
    """
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UsageError(f"--slurm: {error}: {arguments!r}") from None
    for word in words:
        if why := _REFUSED.get(word.partition("=")[0]):
            raise UsageError(f"--slurm takes no {word}: {why}; leave it out")
    if words:
        return Submitted(words)
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        raise UsageError(
            "--slurm without arguments needs a notebook inside an allocation, but SLURM_JOB_ID is not set; "
            'pass arguments of sbatch: --slurm "-N2 --gpus-per-node=8 -t 2:00:00"'
        )
    return SlurmAllocation(SlurmJob(number))


class SlurmStarter(Starter):
    """Tasks of one job, whose state is checked from time to time.

    Args:
        notice_s: seconds before the job's end at which a notice is shown.
    """

    def __init__(self, notice_s: Sequence[float] = NOTICE_S) -> None:
        self._job: SlurmJob | None = None
        self._seen = SlurmJobState(state="PENDING")
        self._looked_s = float("-inf")
        self._silence = ""  # error of a Slurm command that did not answer
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._notice_s = sorted(notice_s, reverse=True)
        self._notices: deque[str] = deque()
        self._output = ""  # file with the output of the tasks
        self._output_is_ours = True  # the file is removed with the session

    @property
    def words(self) -> str:
        return "Slurm" if self._job is None else f"Slurm job {self._job.number}"

    @property
    def address(self) -> str:
        """The address on the route to the nodes."""
        with contextlib.suppress(StartError):
            for node in slurm_queue.nodes_of(os.environ.get("SLURM_JOB_NODELIST", ""))[:_NODES_ASKED]:
                if (address := address_towards(node)) != LOOPBACK:
                    return address
        return address_towards("")

    @property
    def is_queued(self) -> bool:
        return self._seen.waits

    def state(self) -> str:
        return f"{self.words}: {self._silence}" if self._silence else f"{self.words} {self._seen.in_words()}"

    def status(self) -> str:
        left_s = self._seen.left_s()
        return f"{self.words} {self._seen.in_words()}" + ("" if left_s is None else f", {_in_words(left_s)} left")

    def notices(self) -> list[str]:
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def trouble(self, *, now: bool = False) -> str:
        if self._job is None:
            return ""
        seen = self._state(0.0 if now else _FRESH_S) if now or not self._seen.waits else self._seen
        until = time.monotonic() + _ENDING_S
        while now and seen.is_ending and time.monotonic() < until:
            time.sleep(_FIRST_LOOK_S)
            seen = self._state(0.0)
        if why := seen.hopeless:
            return f"job {self._job.number} will not start: {why} ({seen.reason}); it is taken out of the queue"
        if seen.waits or seen.runs or (seen.is_ending and not now):
            return ""
        return f"{self.words} {seen.in_words()}" + ("" if seen.says_why else self._last_words())

    def killed_in_s(self) -> float | None:
        job, began_s = self._job, time.monotonic()
        # the job has a grace time, at whose end SIGTERM is sent again
        if job is None or not self._state(0.0).is_ending:
            return None
        wait_s = job.kill_wait_s()
        return None if wait_s is None else wait_s - (time.monotonic() - began_s)  # a busy Slurm answers late

    def end(self) -> None:
        self._over.set()
        job, self._job = self._job, None
        if job is None:
            return
        try:
            self._end(job)
        except StartError as error:
            _log.warning(
                "Slurm job %s could not be ended (%s); do it by hand: scancel %s", job.number, error, job.number
            )
        if self._output_is_ours:
            with contextlib.suppress(OSError):
                os.unlink(self._output)
            cleanup_process.release(self._output)

    @abstractmethod
    def _end(self, job: SlurmJob) -> None:
        """End the tasks, and the job if it was created for them."""

    # ---- looking

    def _watch(self, job: SlurmJob) -> None:
        self._job = job
        threading.Thread(target=self._keep_looking, name="ddp-slurm", daemon=True).start()

    def _keep_looking(self) -> None:
        pause_s = _FIRST_LOOK_S
        while not self._over.wait(pause_s):
            seen = self._state(0.0)
            if seen.is_over:
                return
            self._take_notice(seen)
            pause_s = min(pause_s * _SLOWER, _RUNNING_PAUSE_S if seen.runs else _LONGEST_PAUSE_S)
            if (left_s := seen.left_s()) is not None and self._notice_s:
                pause_s = max(_FIRST_LOOK_S, min(pause_s, left_s - self._notice_s[0]))

    def _state(self, age_s: float) -> SlurmJobState:
        """Return a state of at most this age."""
        with self._looking:
            if self._job is not None and time.monotonic() - self._looked_s >= age_s:
                try:
                    self._seen, self._silence = self._job.state(), ""
                except StartError as error:  # a restarting controller does not answer, and the job continues
                    self._silence = str(error)
                self._looked_s = time.monotonic()
            return self._seen

    def _take_notice(self, seen: SlurmJobState) -> None:
        left_s = seen.left_s()
        if left_s is None or not self._notice_s or left_s > self._notice_s[0]:
            return
        self._notice_s = [at for at in self._notice_s if at < left_s]
        self._notices.append(
            f"{self.words} ends in {_in_words(left_s)}, and all ranks with it: save what is to be kept"
        )

    def _last_words(self) -> str:
        try:
            said = Path(self._output).read_text(errors="replace").strip()[-_LAST_WORDS:]
        except OSError:
            return f"; its output, {self._output}, cannot be read here: with -o name a file in a folder that all share"
        return f"; its last words:\n{said}" if said else ""


class Submitted(SlurmStarter):
    """A new job.

    Args:
        arguments: of `sbatch`.
        notice_s: see `SlurmStarter`.

    Example:
        >>> print(Submitted(["-N2"]).script(["hostname"]).splitlines()[-1])
        exec srun $tasks --quiet --kill-on-bad-exit=0 --no-kill --wait=0 --export=ALL hostname
    """

    def __init__(self, arguments: Sequence[str], notice_s: Sequence[float] = NOTICE_S) -> None:
        super().__init__(notice_s)
        self._arguments = list(arguments)

    def script(self, command: Sequence[str]) -> str:
        """Return the batch script that runs this command as each task."""
        output = shared_folder() / "slurm-%j.out"
        return _SCRIPT.format(output=output, options=" ".join(_OPTIONS), command=shlex.join(command))

    def preview(self) -> str:
        """Return the submission, and the answer of Slurm to a test of it.

        Raises:
            StartError: Slurm would reject it.
        """
        script = self.script(OUTPOST)
        said = slurm_queue.try_out(script, self._arguments)
        return f"sbatch {shlex.join(self._arguments)} would be given\n\n{script}\n{said}"

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        job = SlurmJob.submit(self.script(command), self._arguments, env)
        self._watch(job)
        self._output = job.output()
        self._output_is_ours = Path(self._output).parent == shared_folder()  # the arguments may set another file
        if self._output_is_ours:
            cleanup_process.guard(self._output)

    def _end(self, job: SlurmJob) -> None:
        until = time.monotonic() + (0.0 if self._seen.waits else _END_S)
        while not (seen := job.state()).is_over and time.monotonic() < until:
            time.sleep(_FIRST_LOOK_S / 2)
        if not seen.is_over:
            job.cancel()


class SlurmAllocation(SlurmStarter):
    """Tasks in the allocation of the notebook, which continues after their end.

    Args:
        job: the allocation.
        notice_s: see `SlurmStarter`.
    """

    def __init__(self, job: SlurmJob, notice_s: Sequence[float] = NOTICE_S) -> None:
        super().__init__(notice_s)
        self._seen = SlurmJobState(state="RUNNING")
        self._allocation = job
        self._srun: subprocess.Popen[bytes] | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs this command as each task."""
        number = self._allocation.number
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
        return ["srun", f"--jobid={number}", "--overlap", f"--nodes={nodes}", *_tasks(), *_OPTIONS, *command]

    def preview(self) -> str:
        return shlex.join(self.command(OUTPOST))

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        fd, self._output = modes.new_file("ddp_notebook-", ".out", private.temporary())
        cleanup_process.guard(self._output)
        with open(fd, "wb") as output:
            try:
                self._srun = subprocess.Popen(
                    self.command(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**slurm_queue.environment(), **env},
                    start_new_session=True,  # an interrupt of the notebook is sent to its whole process group
                )
            except OSError as error:
                os.unlink(self._output)
                cleanup_process.release(self._output)
                raise StartError(f"srun cannot be run: {error}; load Slurm's module before Jupyter starts") from error
        self._watch(self._allocation)

    def trouble(self, *, now: bool = False) -> str:
        if self._srun is not None and self._srun.poll() is not None:
            why = super().trouble(now=True)  # the whole allocation may have ended
            return why or f"srun in job {self._allocation.number} has ended{self._last_words()}"
        return super().trouble(now=now)

    def _end(self, job: SlurmJob) -> None:
        assert self._srun is not None
        for end in (lambda: None, self._srun.terminate, self._srun.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(_END_S)
                return


def _tasks() -> list[str]:
    """Return srun options for the allocation's tasks; one per node if it has no number of tasks.

    Variables of a job step are ignored.
    """
    count = os.environ.get("SLURM_NTASKS", "") if "SLURM_STEP_ID" not in os.environ else ""
    if not count:
        return ["--ntasks-per-node=1", "--cpu-bind=none"]
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return [f"--ntasks={count}", *([f"--cpus-per-task={cores}"] if cores else [])]


def _in_words(seconds: float) -> str:
    """Format the remaining time.

    Example:
        >>> _in_words(6720), _in_words(600), _in_words(95)
        ('1 h 52 min', '10 min', '95 s')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
