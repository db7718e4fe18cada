"""Implement %ddp_start, %ddp_attach and %ddp_stop, and print their messages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ddp_notebook import api, attach_commands, attached_job
from ddp_notebook import session as sessions
from ddp_notebook.errors import NoSessionError, SessionExistsError, UsageError
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.records.words import name_ranks
from ddp_notebook.registry.lookup import SESSION
from ddp_notebook.run import ended_recording, progress
from ddp_notebook.run.ended_recording import EndedRecording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_notebook.launch.options import Option, StartOptions
    from ddp_notebook.run.consistency.agreement import Agreement
    from ddp_notebook.torchrun.job import TorchrunJob

_RESTART = "%ddp_restart starts new ranks"


def start(asked: StartOptions) -> None:
    """Start ranks, or report that ranks with these options are already running.

    Raises:
        SessionExistsError: ranks with other options are running; the message lists these options.
    """
    before = sessions.current()
    running = api.running()
    if running is not None and running._drives:
        print(_already(asked, running))
        return
    if before is not None and running is None and sessions.current() is None:
        print("the earlier ranks are gone; new ones start")
    if others := attach_commands.others_in_a_line():
        print(others)
    waits = "importing torch" if asked.is_here else ""
    with progress.shown("starting:", waits) as report:
        session = sessions.Session(asked, report=report)
    _let_go_of_job()
    if session._synced_first is not None:
        print(session._synced_first)
    print(session.status())


def _already(asked: StartOptions, running: sessions.Session) -> str:
    """Return the line about running ranks with the same options.

    Raises:
        SessionExistsError: they have other options.
    """
    its = api.as_asked(asked, running)
    count = running.world_size
    if differing := asked.differing(its):
        have = ", ".join(option.written(its) for option in differing)
        want = ", ".join(_with_default(option, asked) for option in differing)
        resize = f"%ddp_resize {asked.world_size} changes the number of ranks, " * (
            [option.name for option in differing] == ["world_size"]
        )
        they, them = ("it has", "it") if count == 1 else ("they have", "them")
        raise SessionExistsError(
            f"{_ranks(running)} {_is(count)} already running, with other options: {they} {have}, and this line asks "
            f"for {want}. {resize}%ddp_stop ends {them}"
        )
    kept = f" (kept as {running._kept_as})" if running._is_kept else ""
    sync = "; %ddp_sync sends changed files" if asked.elsewhere is not None and asked.elsewhere.sync is not None else ""
    dead = running._dead
    if len(dead) == count:
        which = "the only rank of this session" if count == 1 else f"all {count} ranks of this session"
        return f"{which}{kept} {'has' if count == 1 else 'have'} died; {_RESTART}"
    living = count - len(dead)
    keep = "keeps its variables" if living == 1 else "keep their variables"
    if not dead:
        return f"{_ranks(running)} {_is(living)} already running{kept} and {keep}{sync}; {_RESTART}"
    return (
        f"{living} of {_ranks(running)}{kept} {_is(living)} already running and {keep}; {name_ranks(dead)} died, and "
        f"%ddp_heal replaces dead ranks{sync}; {_RESTART}"
    )


def _with_default(option: Option, asked: StartOptions) -> str:
    """Return an option as written on the line of `%ddp_start`, marked if it has its default value.

    Example:
        >>> from ddp_notebook.launch.options import BY_NAME, StartOptions
        >>> [_with_default(BY_NAME["grace_s"], StartOptions(grace_s=grace_s)) for grace_s in (3.0, 5.0)]
        ['--grace 3 (the default)', '--grace 5']
    """
    is_default = option.default is not None and option.value(asked) == option.default
    return option.written(asked) + " (the default)" * is_default


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def check(asked: StartOptions) -> None:
    """Print whether ranks could be started."""
    from ddp_notebook.launch.preflight.check import survey

    with progress.shown("checking:") as report:
        table = survey(asked, report)
    print(table)


def attach(name: str, *, take_over: bool, look: bool, wait: bool) -> None:
    """Attach to a kept session or to a torchrun job.

    Args:
        name: name of the session or job, or its stem; "": the only one.
        take_over: take it over from another notebook.
        look: only observe the session.
        wait: wait for the end of the running cell.

    Raises:
        UsageError: none matches, or several do, or an option does not apply to a job.
    """
    refuse_on_rank("%ddp_attach")
    found = attach_commands.find(name)
    if found.kind == SESSION:
        session = attach_commands.attach_session(found.name, take_over=take_over, look=look)
        _let_go_of_job()
        print(f"{session._kept_as}: {session!r}" if session._drives else session._trouble)
        if runs := session._show_unseen(wait=wait):
            print("\n".join(runs))
    elif look or wait:
        raise UsageError(
            f"{found.name} is a torchrun job, which runs no cells for the notebook: leave out "
            f"{'--look' if look else '--wait'}"
        )
    else:
        print(attached_job.attach_job(found.name, take_over=take_over).status())


def stop() -> None:
    """End the ranks, or detach from a torchrun job."""
    if _let_go_of_job():
        if (left := sessions.current()) is not None:
            print(f"{_ranks(left)} of the notebook's session remain: %ddp_stop {_stop_verb(left)} them")
        return
    session = of_session()
    print(end(session))


def end(session: sessions.Session) -> str:
    """End a session and return a line that reports it. If another notebook has the session, only detach.

    Print the host servers that do not answer and the jobs that have not ended.
    """
    if session._outlives_stop or session._ended_elsewhere:
        keep = "keeps" if session.world_size == 1 else "keep"
        whether = "it has ended" if session._ended_elsewhere else f"its {_ranks(session)} {keep} running"
        session.stop()
        return f"detached from {session._kept_as}; {whether}"
    if session.is_running and (trouble := session._trouble):
        pids = ", ".join(map(str, session.ranks.pids("host server")))
        which = trouble if session._is_kept else f"the host server (pid {pids}) does not answer"
        print(f"{which}; its processes are ended anyway")
    left = session._parts.hooks.unended()
    session.stop()
    for job in left:
        print(job)
    return f"stopped {_ranks(session)}"


def has_session() -> bool:
    """Return whether there are ranks that can run cells."""
    session = sessions.current()
    return session is not None and session.is_running and session._drives


def restart(session: sessions.Session) -> None:
    """End a session and start one with the same options, after a check that it can be started.

    Raises:
        StartError: it cannot be started; the session is unchanged.
    """
    session._check_restart()
    end(session)
    start(session.options)


def _ranks(session: sessions.Session) -> str:
    return f"{session.world_size} rank{'' if session.world_size == 1 else 's'}"


def shown() -> sessions.Session | TorchrunJob:
    """Return the attached torchrun job, or else the session.

    If the job has ended, the next command for the session's ranks detaches from it.

    Raises:
        NoSessionError: neither exists.
    """
    return attached_job.current() or of_session()


def recorded() -> sessions.Session | TorchrunJob | EndedRecording:
    """Return the session or job that has a recording. Otherwise return the last recording, and print a note about it.

    Raises:
        NoSessionError: nothing was recorded.
    """
    left = ended_recording.last()
    if left is None or attached_job.current() is not None or sessions.current() is not None:
        return shown()
    print(left.words)
    return left


def compare_variables(names: Sequence[str]) -> Agreement:
    """Compare variables between ranks. Without names, findings that were shown before are folded."""
    return of_session()._parts.checking.report(names)


def failure_opener() -> Callable[[], None] | None:
    """Return the function that opens a debugger in the failed cell of the ranks; None without that feature."""
    session = of_session()
    feature = session._parts.hooks.features.get("debug")
    return None if feature is None else functools.partial(feature.open_failure, session.run)


def of_session() -> sessions.Session:
    """Return the session.

    Raises:
        NoSessionError: there is no session.
    """
    session = sessions.current()
    if session is not None:
        _forget_ended_job()
        return session
    if (job := attached_job.current()) is not None:
        raise NoSessionError(
            f"{job.name} is a torchrun job, whose ranks run a script and no cells; %ddp_start 4 starts ranks for cells"
        )
    kept = [f"%ddp_attach {name}" for name in attach_commands.kept_sessions()]
    if kept:
        message = f"this notebook has no ranks; kept ranks are running: {' or '.join(kept)} attaches to them"
        message += ". %ddp_start 4 starts new ones"
    else:
        message = "no ranks are running; start them with %ddp_start 4"
    if ended_recording.last() is not None:
        message += ". %ddp_report, %ddp_monitor and %ddp_trace still show what the last ranks have recorded"
    raise NoSessionError(message)


def _stop_verb(session: sessions.Session) -> str:
    return "detaches from" if session._outlives_stop or session._ended_elsewhere else "ends"


def _forget_ended_job() -> None:
    """Detach from an ended job, so that reports refer to the session's ranks again."""
    if (job := attached_job.current()) is not None and not job.is_running:
        attached_job.let_go()
        ended_recording.keep(None)


def _let_go_of_job() -> bool:
    """Detach from the attached job, and return whether there was one."""
    if done := attached_job.let_go():
        print(done)
    if sessions.current() is not None:
        ended_recording.keep(None)  # reports refer to the session's ranks
    return bool(done)
