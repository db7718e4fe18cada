"""`ddp_notebook.start`: a session from what was asked for, or the one that runs already."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_notebook.errors import SessionExistsError
from ddp_notebook.launch.keep.limits import OUTPUT_MB, RECORDING_MB
from ddp_notebook.launch.options import LEASE_S, Backend, LiveMode, StartOptions
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.session import Progress, Session, current

_reusing = threading.Lock()


def start(
    world_size: int | None = None,
    *,
    backend: Backend = "auto",
    gpus: str | Sequence[str | int] | None = None,
    share_gpus: bool = False,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    grace_s: float | None = 3.0,
    hang_after_s: float | None = 10.0,
    guard: bool | None = None,
    heal: bool = False,
    live: LiveMode = "auto",
    fold: bool = True,
    hosts: str | Sequence[str] | None = None,
    slurm: str | None = None,
    mpi: str | None = None,
    profile: str | None = None,
    client: str | None = None,
    python: str | None = None,
    sync: str | os.PathLike[str] | None = None,
    sync_large: bool = False,
    lease_s: float = LEASE_S,
    ports: str | None = None,
    keep_h: float | None = None,
    keep_output_mb: float = OUTPUT_MB,
    keep_recording_mb: float = RECORDING_MB,
    on_preempt: str | None = None,
    reuse: bool = False,
    report: Progress = lambda _: None,
) -> Session:
    """Start ranks: one process per GPU, or CPU ranks, in an initialised process group.

    Args:
        world_size: number of ranks; None: one per GPU, or on a machine without any min(4, cores), at least 2.
        backend, gpus, share_gpus, env, timeout_s, grace_s, hang_after_s, guard, heal, live, fold, hosts, slurm, mpi,
            profile, client, python, sync, sync_large, lease_s, ports, keep_h, keep_output_mb, keep_recording_mb,
            on_preempt: see `StartOptions`.
        reuse: return the session that runs, if it was started with the same options, as a cell of marimo that runs
            again wants it. Any number of ranks will do where `world_size` is None.
        report: told a line about each stage that is done, and behind a carriage return how far one is.

    Raises:
        UsageError: an option that cannot be, or does not fit this machine; or this is a rank.
        SessionExistsError: ranks are running already; with `reuse`, with other options.
        StartError: the ranks did not come up; nothing of them is left.

    Example:
        >>> with ddp_notebook.start(2) as session:
        ...     session.run("print(rank)")[1].stdout
        [0] 0
        [1] 1
        '1\\n'
    """
    refuse_on_rank("ranks start no ranks: call start")
    asked = StartOptions(
        world_size=world_size,
        backend=backend,
        gpus=gpus,
        share_gpus=share_gpus,
        env={} if env is None else env,
        timeout_s=timeout_s,
        grace_s=grace_s,
        hang_after_s=hang_after_s,
        guard=guard,
        heal=heal,
        live=live,
        fold=fold,
        hosts=hosts,
        slurm=slurm,
        mpi=mpi,
        profile=profile,
        client=client,
        python=python,
        sync=sync,
        sync_large=sync_large,
        lease_s=lease_s,
        ports=ports,
        keep_h=keep_h,
        keep_output_mb=keep_output_mb,
        keep_recording_mb=keep_recording_mb,
        on_preempt=on_preempt,
    ).with_defaults()
    if not reuse:
        return Session(asked, report=report)
    with _reusing:  # several viewers of one app of marimo ask in threads of one process
        return _reusable(asked) or Session(asked, report=report)


def running() -> Session | None:
    """Return the session that runs, or None. A session whose hosts are gone is ended, unless it goes on in another
    notebook, which took it over: then this one stays attached until %ddp_stop."""
    session = current()
    if session is None or not session._ready:  # a second start next to a starting session is an error of `Session`
        return None
    if not session.is_running:
        if not session.outlives_stop:
            session.stop()
        return None
    return session


def options_of(session: Session) -> StartOptions:
    """Return the options that would start a session like this one, with its present number of ranks."""
    return replace(session.options, world_size=session.world_size)


def _reusable(asked: StartOptions) -> Session | None:
    if (session := running()) is None:
        return None
    its = options_of(session)
    if differing := asked.differing(its):
        differences = [f"{name} is {getattr(its, name)!r}, not {getattr(asked, name)!r}" for name in differing]
        raise SessionExistsError(
            f"{session!r} cannot be reused: its {', and its '.join(differences)}; ask for the same, or end it with "
            "%ddp_stop (session.stop())"
        )
    return session
