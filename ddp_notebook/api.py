"""`ddp_notebook.start` starts a session, or returns the running one. `ddp_notebook.check` compares hosts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import SessionExistsError, UsageError
from ddp_notebook.launch.options import Backend, Client, Keep, LiveMode, Mpi, Profile, Slurm, Ssh, StartOptions
from ddp_notebook.launch.start_line import with_defaults
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.run.call_arguments import no_argument
from ddp_notebook.run.interrupted import OF_FUNCTIONS, tells_interrupt
from ddp_notebook.session import Progress, Session, current

if TYPE_CHECKING:
    from ddp_notebook.launch.preflight.table import HostTable

_reusing = threading.Lock()


@tells_interrupt(OF_FUNCTIONS["start"])
def start(
    world_size: int | None = None,
    *,
    backend: Backend = "auto",
    gpus: str | Sequence[str | int] | None = None,
    share_gpus: bool = False,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    live: LiveMode = "auto",
    fold: bool = True,
    grace_s: float | None = 3.0,
    hang_after_s: float | None = 10.0,
    guard: bool | None = None,
    quiet_findings: bool = False,
    heal: bool = False,
    on_preempt: str | None = None,
    hosts: str | Sequence[str] | Ssh | None = None,
    slurm: str | Slurm | None = None,
    mpi: str | Mpi | None = None,
    profile: str | Profile | None = None,
    client: str | Client | None = None,
    keep: Keep | None = None,
    reuse: bool = False,
    report: Progress = lambda _: None,
) -> Session:
    """Start ranks: one process per GPU, or CPU ranks, in an initialised process group.

    Args:
        world_size: number of ranks. None: one per GPU; without GPUs min(4, cores), at least 2.
        backend: "auto" selects nccl if each rank has its own GPU, else gloo.
        gpus: indices within CUDA_VISIBLE_DEVICES, or UUIDs: "0,1" or a sequence. None: all. "none": CPU ranks only.
            "each": GPUs only if there is one for each rank.
        share_gpus: allow more ranks than GPUs.
        env: additional environment variables of the ranks.
        timeout_s: limit of the start in seconds, at most a week.
        live: "auto": show a small view under a cell that logs or synchronises gradients; HTML if the front end has no
            widgets. "html": always HTML. "off": show no view automatically.
        fold: merge lines of several ranks that are equal or differ only in a few numbers.
        grace_s: seconds from the failure of a rank until the other ranks are stopped; None: do not stop them.
        hang_after_s: seconds that a rank waits in an operation before the cell shows the waiting ranks; None: never.
        guard: compare the calls of all ranks before each collective. None: only with gloo.
        quiet_findings: show findings about training steps in `%ddp_report` only, not under cells.
        heal: replace dead ranks before each cell, as `%ddp_heal` does.
        on_preempt: a folder. `survive` loops save their state there and end at a preemption signal. The signal is
            SIGTERM or SIGUSR1 to the kernel, the keeper or a job task, or a file `preempt` in the folder.
        hosts: hosts reached by ssh: "gpu1,gpu[3-5]:8", a sequence, or `Ssh` with more options.
        slurm: start the ranks in a Slurm job: sbatch arguments, "" for the notebook's allocation, or `Slurm`.
        mpi: start the ranks by mpirun: its arguments, or `Mpi`.
        profile: start the ranks by the launcher of an ipyparallel profile: its name, or `Profile`.
        client: run the ranks in engines of an ipyparallel cluster: "profile=NAME", "cluster_id=ID", or `Client`.
        keep: `Keep(hours=12)` lets the ranks outlive the notebook. None: they end with the notebook.
        reuse: return the running session if its options are equal, as marimo needs when it runs a cell again. If
            `world_size` is None, any number of ranks matches.
        report: called with a line per completed stage, and with progress texts that start with a carriage return.

    Raises:
        UsageError: an option is out of range or does not fit this machine, or this process is a rank.
        SessionExistsError: a session is running; with `reuse`, one with other options.
        StartError: the ranks could not be started; no process of them is left.

    Example:
        >>> with ddp_notebook.start(2) as session:
        ...     session.run("print(rank)")[1].stdout
        [0] 0
        [1] 1
        '1\\n'
        >>> hosts = Ssh("gpu1,gpu2", python="/envs/x/bin/python", sync=".")
        >>> ddp_notebook.start(4, hosts=hosts, keep=Keep(hours=12))  # doctest: +SKIP
        <Session: 4 ranks on gpu1 and gpu2, nccl>
    """
    refuse_on_rank("start()")
    asked = with_defaults(
        StartOptions(
            world_size=world_size,
            backend=backend,
            gpus=gpus,
            share_gpus=share_gpus,
            env={} if env is None else env,
            timeout_s=timeout_s,
            live=live,
            fold=fold,
            grace_s=grace_s,
            hang_after_s=hang_after_s,
            guard=guard,
            quiet_findings=quiet_findings,
            heal=heal,
            on_preempt=on_preempt,
            hosts=hosts,
            slurm=slurm,
            mpi=mpi,
            profile=profile,
            client=client,
            keep=keep,
        )
    )
    if not reuse:
        return Session(asked, report=report)
    with _reusing:  # viewers of one marimo app run in threads of the same process
        return _reusable(asked) or Session(asked, report=report)


@tells_interrupt(OF_FUNCTIONS["check"])
def check(world_size: int | None = None, **options: Any) -> HostTable:
    """Compare hosts and check whether ranks could be started, without starting any.

    Args:
        world_size: see `start`.
        options: those of `start`.

    Returns:
        A comparison of the hosts, with the conflicts and their remedies. A host that cannot be reached is a row. For
        `slurm`, `mpi` and `profile` also the script that would be submitted.

    Raises:
        UsageError: an option is invalid.
        HostError: the ssh command cannot be run.
        StartError: the queue would reject the job.

    Example:
        >>> ddp_notebook.check(2)
        host          reached at      user  Python  torch ...
        this machine  127.0.0.1 (lo) ...
        2 ranks would start, by gloo
    """
    from ddp_notebook.launch.preflight.check import survey

    names = [one.name for one in fields(StartOptions)]
    for name in options:
        if name not in names:
            raise UsageError(no_argument("check", name, names))
    return survey(with_defaults(StartOptions(world_size=world_size, **options)))


def running() -> Session | None:
    """Return the running session, or None. If its hosts are gone, end it.

    A session that another notebook has taken over stays attached until %ddp_stop.
    """
    session = current()
    # for a second start while the first is in progress, `Session` raises the error
    if session is None or not session._ready:
        return None
    if not session.is_running:
        if not session._outlives_stop:
            session.stop()
        return None
    return session


def options_of(session: Session) -> StartOptions:
    """Return the options that would start a session like this one, with its present number of ranks."""
    return replace(session.options, world_size=session.world_size)


def as_asked(asked: StartOptions, session: Session) -> StartOptions:
    """Return `options_of(session)`, but with `asked.backend` if both backends select the same one.

    `--backend auto` equals the backend that it selects, which is gloo on CPUs.
    """
    its = options_of(session)
    if asked.backend != its.backend:
        on_cpus = set(session._parts.cluster.placement.devices) == {"cpu"}
        chooses = session.backend if its.backend == "auto" else "gloo" if on_cpus else ""
        if chooses == (its.backend if asked.backend == "auto" else asked.backend):
            return replace(its, backend=asked.backend)
    return its


def _reusable(asked: StartOptions) -> Session | None:
    if (session := running()) is None:
        return None
    its = as_asked(asked, session)
    if differing := asked.differing(its):
        differences = [f"{one.name} is {one.value(its)!r}, not {one.value(asked)!r}" for one in differing]
        raise SessionExistsError(
            f"{session!r} cannot be reused: its {', and its '.join(differences)}; ask for the same, or end it with "
            "%ddp_stop (session.stop())"
        )
    return session
