"""`%ddp_torchrun`: a torchrun job that is started here, shows its output in the cell, and ends with the kernel."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from ddp_notebook import attached_job
from ddp_notebook.errors import JobFailedError, UsageError
from ddp_notebook.launch.elastic import log_folder
from ddp_notebook.launch.elastic.rendezvous import BACKEND
from ddp_notebook.line_parser import LineParser
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.registry import entries
from ddp_notebook.registry.torchrun import NAME_VARIABLE, OUTPUT_VARIABLE
from ddp_notebook.run.cells.cell import OutputItem
from ddp_notebook.run.cells.interrupt import ONE_PRESS_S, Interrupts, keyboard_interrupt
from ddp_notebook.run.output.display_target import ThreadTarget
from ddp_notebook.run.output.rate_limiter import FLUSH_S
from ddp_notebook.run.output.screen import Screen
from ddp_notebook.torchrun.job import TorchrunJob
from ddp_notebook.torchrun.output_pipes import TORCHRUN, PipeReader, Written
from ddp_notebook.wire.store import listen_here

_MOST_AGENTS = 256  # on this machine
_OURS = {
    f"--{name}"
    for name in ("rdzv-endpoint", "rdzv-id", "rdzv-backend", "standalone", "master-addr", "master-port", "node-rank")
}
_NPROC = ("auto", "cpu", "gpu", "xpu")  # or a number
_NO_RANKS = {"--no-python", "--run-path"}
_TO_FILES = {"-r", "--redirects", "-t", "--tee"}  # options that make torchrun write the output of ranks to files
# The default times of torch are for clusters: 30 s for further agents, 15 s until a silent agent counts as dead.
_TIMES = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
_MOST_RANKS = 8  # the limit of the shown text is that of this number of ranks
_ALONE_S = 20.0  # a line is shown after this time without a rank
_REFRESH_S = 0.1  # longest interval between updates of continuous output
_END_S = 2.0  # time to wait for more output of ranks after torchrun has ended and all output is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunOptions:
    """Parsed line of `%ddp_torchrun`."""

    options: list[str]  # options of torchrun
    program: list[str]  # the script, or `-m` and a module, with arguments
    name: str  # name of the job
    agents: int  # number of agents to start on this machine
    folds: bool = True  # merge lines of several ranks
    key: str = field(default_factory=lambda: f"notebook-{os.getpid()}-{secrets.token_hex(4)}")

    def command(self, endpoint: str) -> list[str]:
        """Return the arguments of `torchrun` for one agent."""
        rendezvous = [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self.key}"]
        times = [] if any(word.startswith(("--rdzv-conf", "--rdzv_conf")) for word in self.options) else _times()
        return [*rendezvous, *times, *self.options, "-m", "ddp_notebook.attach", *self.program]

    def joins(self, endpoint: str) -> str:
        """Return the command that starts one more agent, in a shell on this machine in the same directory."""
        command = [sys.executable, "-m", "ddp_notebook.launch.elastic.elastic_agent", *self.command(endpoint)]
        return f"{NAME_VARIABLE}={shlex.quote(self.name)} {shlex.join(command)}"

    @property
    def has_files(self) -> bool:
        """True if torchrun writes the output of ranks to files."""
        return any(word.partition("=")[0] in _TO_FILES or word[:2] in ("-r", "-t") for word in self.options)

    @property
    def least_agents(self) -> int:
        """The number of agents for which torchrun waits: 1 with `--nnodes 1:3`."""
        return self._agents()[0]

    @property
    def most_agents(self) -> int:
        """The highest number of agents that torchrun accepts: 3 with `--nnodes 1:3`."""
        return self._agents()[1]

    def why_alone(self, endpoint: str) -> str:
        """Return the reason why no rank can start, behind a sentence; "" if enough agents were started here."""
        if self.least_agents <= self.agents:
            return ""
        started = f"torchrun waits for {self.least_agents} agents, and {self.agents} started here"
        return f": {started}; one more, in a shell: {self.joins(endpoint)}"

    def _agents(self) -> tuple[int, int]:
        for word, behind in zip(self.options, [*self.options[1:], ""], strict=False):
            name, is_joined, value = word.partition("=")
            least, _, most = (value if is_joined else behind).partition(":")
            if name == "--nnodes" and least.isdecimal():
                return int(least), int(most or least)
        return 1, 1


@functools.cache
def torchrun_line() -> LineParser:
    """Return the declaration of the line of `%ddp_torchrun`."""
    parser = LineParser(
        "%ddp_torchrun", "%ddp_torchrun --nproc-per-node 4 train.py --lr 0.1", "%ddp_torchrun --nnodes 1:3 -m train"
    )
    parser.add_argument("--agents", metavar="N", default="1", help="number of agents to start on this machine (1)")
    parser.add_argument("--name", metavar="NAME", default="", help="name of the job for %%ddp_attach")
    parser.add_argument(
        "--fold", metavar="on|off", default="on", help="merge lines of ranks (on); off: in order of arrival"
    )
    parser.add_argument("options", metavar="OPTION", nargs="*", help="options of torchrun, such as --nproc-per-node 4")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or -m and a module")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of the script")
    return parser


def read(line: str) -> TorchrunOptions:
    """Parse the line of the magic.

    Raises:
        UsageError: it is wrong; the message names a correct form.

    Example:
        >>> asked = read("--name big --nnodes 1:3 --nproc-per-node 2 -m train --lr 0.1")
        >>> asked.name, asked.options, asked.program
        ('big', ['--nnodes', '1:3', '--nproc-per-node', '2'], ['-m', 'train', '--lr', '0.1'])
    """
    declared = torchrun_line()
    try:
        words = shlex.split(line)
    except ValueError as error:
        declared.error(f"{error}: {line!r}")
    refuse_on_rank("%ddp_torchrun")
    own, options, program = _split(words, declared)
    agents = own["--agents"]
    if not agents.isdecimal() or not 0 < int(agents[:10]) <= _MOST_AGENTS:
        declared.error(f"--agents must be a number from 1 to {_MOST_AGENTS} (got {agents[:40]!r})")
    if own["--fold"] not in ("on", "off"):
        declared.error(f"--fold must be on or off (got {own['--fold']!r})")
    if not program:
        where = f" in {line!r}" if options else " to run"
        declared.error(f"there is no script{where}")
    _check_numbers(options)
    _check_ours(options)
    if program[0].endswith(".py"):
        if not os.path.isfile(program[0]):
            raise UsageError(f"{program[0]!r} must be a file in {os.getcwd()}, but does not exist")
        stem = os.path.basename(program[0]).removesuffix(".py")
    elif len(program) > 1:
        program[0] = "-m"
        stem = program[1].rpartition(".")[2]
    else:
        declared.error(f"{program[0]} needs the name of a module")
    name = own["--name"] or f"{stem}-{secrets.token_hex(2)}"
    return TorchrunOptions(options=options, program=program, name=name, agents=int(agents), folds=own["--fold"] == "on")


def _split(words: Sequence[str], declared: LineParser) -> tuple[dict[str, str], list[str], list[str]]:
    """Split the words of a line.

    Returns:
        The values of the magic's own options by name, the options of torchrun, and the program. The program begins with
        the script or with `-m`, and is empty if there is neither.
    """
    own: dict[str, str] = {f"--{name}": declared.get_default(name) for name in ("agents", "name", "fold")}
    options, left = [], deque(words)
    while left and not left[0].endswith(".py") and left[0] not in ("-m", "--module"):
        word = left.popleft()
        name, is_joined, value = word.partition("=")
        if name not in own:
            options.append(word)
        elif is_joined or left:
            own[name] = value if is_joined else left.popleft()
        else:
            declared.error(f"{name} needs a value")
    return own, options, list(left)


def _check_ours(options: Sequence[str]) -> None:
    """Raise UsageError for options of torchrun that the magic sets itself, and for options that start no ranks."""
    for word in options:
        option = word.partition("=")[0].replace("_", "-")
        if option in _NO_RANKS:
            raise UsageError(f"%ddp_torchrun runs a Python script or, with -m, a module in each rank: leave out {word}")
        if option in _OURS:
            raise UsageError(
                f"%ddp_torchrun sets up the rendezvous itself, so leave out {word}; for your own rendezvous, start the "
                "job in a shell (torchrun ... -m ddp_notebook.attach train.py), and use %ddp_attach"
            )


def _check_numbers(options: Sequence[str]) -> None:
    """Raise UsageError for wrong numbers. torch would print a traceback after the start of the job."""
    for word, behind in zip(options, [*options[1:], ""], strict=False):
        option, is_joined, value = word.partition("=")
        name, value = option.replace("_", "-"), value if is_joined else behind
        if name == "--nproc-per-node" and not (value in _NPROC or _is_count(value) or _is_a_device(value)):
            raise UsageError(f"--nproc-per-node must be a number of ranks or one of {', '.join(_NPROC)}, got {value!r}")
        if name == "--nnodes":
            least, _, most = value.partition(":")
            most = most if ":" in value else least
            if not (_is_count(least) and _is_count(most)) or int(most) < int(least):
                raise UsageError(
                    f"--nnodes must be a number of agents, or a minimum and maximum such as 1:3, got {value!r}"
                )


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _is_a_device(word: str) -> bool:
    """Return whether torchrun accepts a word as a device type, such as one of an extension.

    The check runs in a separate process, because the notebook imports no torch.
    """
    code = "import sys; from torch.distributed.run import determine_local_world_size as count; count(sys.argv[1])"
    command = [sys.executable, "-c", code, word]
    return word.isidentifier() and subprocess.run(command, capture_output=True).returncode == 0


def _times() -> list[str]:
    return [f"--rdzv-conf={_TIMES}"]


def run(asked: TorchrunOptions) -> TorchrunJob:
    """Start a job, show its output, and wait for its end; the stop button ends it. For the main thread.

    Raises:
        JobFailedError: it has failed.
        KeyboardInterrupt: the stop button has ended it.
    """
    listener, place = listen_here(str(entries.folder()))
    taker, taker_place = listen_here(str(entries.folder()))
    job = attached_job.become(TorchrunJob(asked.key, asked.name))
    job.keep_logs(log_folder.make())
    began_s = time.monotonic()
    with Interrupts(lambda: None) as interrupts:
        with listener:
            process = _start(asked, place.at, listener.fileno(), "" if asked.has_files else taker_place.at)
        assert process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            pipes = PipeReader(taker, [os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno())])
        try:
            _Follower(asked, place.at, job, process, pipes, interrupts).follow()
        finally:
            try:
                for one in pipes.close():
                    _log(job, one)
            finally:
                _end(process)
    return _ended(job, process.returncode, time.monotonic() - began_s, interrupts.count > 0)


def _start(asked: TorchrunOptions, endpoint: str, listener: int, output: str) -> subprocess.Popen[bytes]:
    parent = [sys.executable, "-m", "ddp_notebook.launch.elastic.parent", str(asked.agents), str(listener)]
    return subprocess.Popen(
        [*parent, *asked.command(endpoint)],
        pass_fds=[listener],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, NAME_VARIABLE: asked.name, OUTPUT_VARIABLE: output},
        start_new_session=True,  # the stop button signals the kernel's process group, but the job must end in order
    )


class _Follower:
    """Shows a job under the cell until it ends. For the arguments see `run`; `endpoint`: of the rendezvous."""

    def __init__(
        self,
        asked: TorchrunOptions,
        endpoint: str,
        job: TorchrunJob,
        process: subprocess.Popen[bytes],
        pipes: PipeReader,
        interrupts: Interrupts,
    ) -> None:
        self._asked, self._job, self._process = asked, job, process
        self._pipes, self._interrupts = pipes, interrupts
        self._joins = asked.joins(endpoint)  # the command that starts one more agent
        self._view: tuple[int, Any] | None = None  # number of an attempt, and the view under its output
        self._screen = Screen(range(_MOST_RANKS), holds=self._holds, folds=asked.folds, log="attach_job().log(rank)")
        self._why_alone = asked.why_alone(endpoint)
        self._presses = 0  # presses of the stop button that were sent to torchrun
        self._alone_s = time.monotonic() + _ALONE_S  # time of the line that no rank has started
        self._ends_s = float("inf")  # end of the wait for more output
        self._pieces: int | None = None  # most pieces written before torchrun ended; None while torchrun runs
        self._refreshed_s, self._pause_s = time.monotonic(), FLUSH_S

    def follow(self) -> None:
        """Show the output until torchrun has ended."""
        output = self._pipes.output
        if self._asked.most_agents > self._asked.agents:
            self._screen.write("stderr", f"one more agent joins from a shell with: {self._joins}\n")
        while time.monotonic() < self._ends_s or (self._pieces and not output.empty()):
            if not self._pipes.is_open and output.empty():
                break
            with contextlib.suppress(queue.Empty):
                self._show(output.get(timeout=self._pause_s))
            now_s = time.monotonic()
            if output.empty() or self._screen.is_due or now_s - self._refreshed_s > _REFRESH_S:
                self._refresh(now_s)
            self._forward_presses(now_s)
            self._view = _update_view(self._job, self._view)
            if self._job.round is None and now_s > self._alone_s:
                self._alone_s = float("inf")
                self._screen.write("stderr", f"no rank has started within {_ALONE_S:.0f} s{self._why_alone}\n")
            if self._pipes.has_ended and self._ends_s == float("inf"):
                # A process that has left the job may hold a pipe open, and may continue to write.
                self._pieces = self._pipes.most_waiting if self._pieces is None else self._pieces
                if output.empty() or not self._pieces:
                    self._ends_s = now_s + _END_S
        self._screen.finish()
        if self._view is not None:
            self._view[1].end(self._view[0])

    def _holds(self, waits_s: float, quiet_s: float) -> bool:
        """See `SideView.holds`."""
        return self._view is not None and self._view[1].holds(waits_s, quiet_s)

    def _show(self, one: Written) -> None:
        _log(self._job, one)
        if one.rank == TORCHRUN:
            self._screen.write(one.stream, one.text)
        elif one.text:
            self._screen.show(OutputItem(one.rank, one.text, one.stream))
        if self._pieces:
            self._pieces -= 1

    def _refresh(self, now_s: float) -> None:
        """Show folded output, and set the time until the next update."""
        is_idle = self._pipes.output.empty()
        wait_s = self._screen.refresh(self._pipes.talking)
        self._pause_s = 0.0 if not is_idle else FLUSH_S if wait_s is None else min(FLUSH_S, wait_s)
        self._refreshed_s = now_s

    def _forward_presses(self, now_s: float) -> None:
        """Request the end of the job after a press of stop; a second press soon after kills it."""
        if self._interrupts.count > self._presses:
            if not self._presses:
                self._screen.hurry()
            is_second = self._presses and now_s - self._interrupts.pressed_s < ONE_PRESS_S
            _write_word(self._process.stdin, "kill" if is_second else "stop")
            self._presses = self._interrupts.count


def _log(job: TorchrunJob, one: Written) -> None:
    """Write the text of a rank into its log."""
    if one.rank != TORCHRUN and one.text:
        job.log_of(one.rank).write(one.text)


def _update_view(job: TorchrunJob, view: tuple[int, Any] | None) -> tuple[int, Any] | None:
    """Update the monitor under the cell; each attempt has its own."""
    run = job.round
    if run is None:
        return view
    if view is None or view[0] != run.number:
        if view is not None:
            view[1].end(view[0])
        beside = job._views.beside(ThreadTarget(), "%run")  # the view of a cell that runs the script
        view = None if beside is None else (run.number, beside)
    if view is not None:
        view[1].look(view[0])
    return view


def _write_word(pipe: IO[bytes] | None, word: str) -> None:
    assert pipe is not None
    with contextlib.suppress(OSError):  # the process has ended
        pipe.write(f"{word}\n".encode())
        pipe.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the input of the agents' parent, which then ends all its processes, and wait for its end."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()


def _ended(job: TorchrunJob, status: int, for_s: float, was_stopped: bool) -> TorchrunJob:
    job.settle()
    run = job.round
    if was_stopped:
        raise keyboard_interrupt(f"job {job.name} was ended; %ddp_report and %ddp_monitor show its recording")
    if status:
        how = "no rank of it has started" if run is None else run.how_it_ended or "see above"
        raise JobFailedError(f"job {job.name} has failed (status {status}) after {for_s:.1f} s: {how}")
    return job
