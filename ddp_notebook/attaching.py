"""What runs without this notebook, and how it comes to have it: kept sessions and jobs of torchrun's."""

from __future__ import annotations

from ddp_notebook.errors import SessionExistsError
from ddp_notebook.launch.keep import reach
from ddp_notebook.launch.keep.words import in_a_line
from ddp_notebook.on_rank import refuse_on_rank
from ddp_notebook.registry import finding
from ddp_notebook.registry.finding import SESSION, TORCHRUN, Found
from ddp_notebook.session import Session, current
from ddp_notebook.torchrun import current as jobs


def find(name: str = "") -> Found:
    """What a notebook attaches to by this name.

    Args:
        name: of a kept session or a job, or its stem; "": what this notebook has, or the only one that is there.

    Raises:
        UsageError: there is none, or several; says which.
    """
    session, job = current(), jobs.current()
    if not name and job is not None and job.is_running:
        return finding.find(job.name, TORCHRUN)
    if not name and session is not None and session.is_kept and session.is_running:
        return finding.find(session.kept_as, SESSION)
    return finding.find(name)


def attach_session(name: str = "", *, take_over: bool = False, look: bool = False) -> Session:
    """Attach to a session that was started with `keep_h`, by another kernel of the same user on this machine.

    Where another notebook drives it this one looks on: it has the monitor, the recording and the status.

    Args:
        name: of the session, or its stem; "": the only one. `python -m ddp_notebook list` shows them.
        take_over: drive it all the same. The notebook that did has no ranks then.
        look: look on, also where nobody drives it.

    Raises:
        UsageError: there is none of this name, or it is of another version or environment.
        SessionExistsError: this notebook has other ranks.

    Example: in a script, where `%ddp_attach --wait` is not there::

        session = ddp_notebook.attach_session("kept-1")
        session.show_unseen(wait=True)
    """
    refuse_on_rank("ranks attach to no session: call attach_session")
    if (running := current()) is not None:
        if not running.is_kept:
            raise SessionExistsError(
                f"{running!r} is there already; end it with %ddp_stop before you attach to another"
            )
        is_it = running.kept_as == name or not name
        if is_it and running.is_running and (running.drives or not take_over) and not look:
            return running
        if running.is_running:
            finding.find(name, SESSION)  # or its error, before this one is left
        running.detach()
        running.stop()
    remote = reach.attach(name, take_over=take_over, looks=look)
    try:
        return Session(remote.welcome.options, remote=remote)
    except BaseException:
        remote.close("this notebook could not attach")
        raise


def others() -> list[str]:
    """A line about each kept session and job of torchrun's on this machine, without what this notebook has."""
    session, job = current(), jobs.current()
    own = {(SESSION, session.kept_as)} if session is not None else set()
    own |= {(TORCHRUN, job.name)} if job is not None else set()
    return [in_a_line(one) for one in finding.everything() if (one.kind, one.name) not in own]
