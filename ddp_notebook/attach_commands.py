"""Find kept sessions and torchrun jobs, and attach to kept sessions."""

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
    """Return the session or job that a name selects.

    Args:
        name: a kept session or a torchrun job, or the stem of its name. "": the one that this notebook is attached to,
            else the kept session of its folder, else the only one.

    Raises:
        UsageError: none matches, or several do; the message lists them.
    """
    session, job = current(), attached_job.current()
    if not name and job is not None and job.is_running:
        return lookup.find(job.name, TORCHRUN)
    if not name and session is not None and session._is_kept and session.is_running:
        return lookup.find(session._kept_as, SESSION)
    return lookup.find(name)


@tells_interrupt(OF_FUNCTIONS["attach_session"])
def attach_session(name: str = "", *, take_over: bool = False, look: bool = False, wait: bool = False) -> Session:
    """Attach to a session that another kernel of the same user on this machine started with `keep`.

    If another notebook drives the session, this one observes it: monitor, recording and status.

    Args:
        name: name of the session, or its stem; "": the session of the notebook's folder, or the only one. `python -m
            ddp_notebook list` shows the names.
        take_over: drive the session. The notebook that drove it loses the ranks.
        look: only observe, even if no notebook drives the session.
        wait: print the output that no notebook has shown, and wait for the end of the running cell.

    Raises:
        UsageError: no session has this name, or it has another version or environment.
        SessionExistsError: this notebook has another session.
        RankError: with `wait`, the cell failed; or any other error of `Session.run`.

    Example: in a script::

        session = ddp_notebook.attach_session("kept-1", wait=True)
    """
    session = _attach(name, take_over, look)
    if wait:
        session._show_unseen(wait=True)
    return session


def _attach(name: str, take_over: bool, look: bool) -> Session:
    refuse_on_rank("attach_session()")
    if (running := current()) is not None:
        if not running._is_kept:
            raise SessionExistsError(
                f"{running!r} is already running; end it with %ddp_stop before you attach to another"
            )
        is_it = running._kept_as == name or not name
        if is_it and running.is_running and (running._drives or not take_over) and not look:
            return running
        if running.is_running:
            lookup.find(name, SESSION)  # raises before the notebook detaches from its session
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
    """Return a line with the kept sessions and torchrun jobs of this user on this machine, or "".

    Those of this notebook are left out. Those of its folder come first.
    """
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
    """Return the names of the kept sessions that this notebook could attach to. Those of its folder come first."""
    try:
        found = [one for one in lookup.everything() if one.kind == SESSION]
    except (DDPNotebookError, OSError):  # the registry folder cannot be read
        return []
    return [one.name for one in sorted(found, key=lambda one: not one.is_here)]
