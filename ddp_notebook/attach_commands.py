"""What runs without this notebook, and how it comes to have it: kept sessions and jobs of torchrun's."""

from __future__ import annotations

from ddp_notebook import attached_job
from ddp_notebook.errors import DDPNotebookError, SessionExistsError
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.registry import lookup
from ddp_notebook.registry.lookup import SESSION, TORCHRUN, AttachTarget
from ddp_notebook.run.interrupted import OF_FUNCTIONS, tells_interrupt
from ddp_notebook.session import Session, current

_MOST_NAMED = 3


def find(name: str = "") -> AttachTarget:
    """What a notebook attaches to by this name.

    Args:
        name: of a kept session or a job, or its stem; "": what this notebook has, or the kept session of its folder,
            or the only one.

    Raises:
        UsageError: there is none, or several; says which.
    """
    session, job = current(), attached_job.current()
    if not name and job is not None and job.is_running:
        return lookup.find(job.name, TORCHRUN)
    if not name and session is not None and session._is_kept and session.is_running:
        return lookup.find(session._kept_as, SESSION)
    return lookup.find(name)


@tells_interrupt(OF_FUNCTIONS["attach_session"])
def attach_session(name: str = "", *, take_over: bool = False, look: bool = False) -> Session:
    """Attach to a session that was started with `keep_h`, by another kernel of the same user on this machine.

    Where another notebook drives it this one looks on: it has the monitor, the recording and the status.

    Args:
        name: of the session, or its stem; "": the one of the notebook's folder, or the only one. `python -m
            ddp_notebook list` shows them.
        take_over: drive it all the same. The notebook that did has no ranks then.
        look: look on, also where nobody drives it.

    Raises:
        UsageError: there is none of this name, or it is of another version or environment.
        SessionExistsError: this notebook has other ranks.

    Example: in a script, where `%ddp_attach --wait` is not there::

        session = ddp_notebook.attach_session("kept-1")
        session._show_unseen(wait=True)
    """
    refuse_on_rank("ranks attach to no session: call attach_session")
    if (running := current()) is not None:
        if not running._is_kept:
            raise SessionExistsError(
                f"{running!r} is already running; end it with %ddp_stop before you attach to another"
            )
        is_it = running._kept_as == name or not name
        if is_it and running.is_running and (running._drives or not take_over) and not look:
            return running
        if running.is_running:
            lookup.find(name, SESSION)  # or its error, before this one is left
        running.detach()
        running.stop()
    from ddp_notebook.launch.keep import connect

    remote = connect.attach(name, take_over=take_over, looks=look)
    try:
        return Session(remote.options, remote=remote)
    except BaseException:
        remote.close("this notebook could not attach")
        raise


def others_in_a_line() -> str:
    """Name the kept sessions and torchrun jobs of this user on this machine that this notebook does not have, those of
    its folder first; "" if there are none."""
    session, job = current(), attached_job.current()
    own = {(SESSION, session._kept_as)} if session is not None else set()
    own |= {(TORCHRUN, job.name)} if job is not None else set()
    found = [one for one in lookup.everything() if (one.kind, one.name) not in own]
    found.sort(key=lambda one: (not one.is_here, one.kind != SESSION))
    if not found:
        return ""
    kinds = {SESSION: "kept ranks", TORCHRUN: "torchrun job"}
    named = [f"{one.name} ({kinds[one.kind]}{' of this folder' * one.is_here})" for one in found[:_MOST_NAMED]]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"also running: {', '.join(named)}{more}; attach with %ddp_attach {found[0].name}"


def kept_sessions() -> list[str]:
    """Return the names of the kept sessions that this notebook could attach to, those of its folder first."""
    try:
        found = [one for one in lookup.everything() if one.kind == SESSION]
    except (DDPNotebookError, OSError):  # the folder of entries cannot be read
        return []
    return [one.name for one in sorted(found, key=lambda one: not one.is_here)]
