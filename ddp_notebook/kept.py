"""Sessions that are kept while no notebook is there: attaching to one, and what `%ddp_start` says of others."""

from __future__ import annotations

from ddp_notebook.errors import SessionExistsError
from ddp_notebook.launch.keep import reach, registry
from ddp_notebook.launch.keep.words import in_a_line
from ddp_notebook.session import Session, current


def attach(name: str = "", *, take_over: bool = False, look: bool = False) -> Session:
    """Attach to a session that was started with `keep_h`, by another kernel of the same user on this machine.

    Where another notebook drives it this one looks on: it has the monitor, the recording and the status.

    Args:
        name: of the session; "": the only one. `python -m ddp_notebook list` shows them.
        take_over: drive it all the same. The notebook that did has no ranks then.
        look: look on, also where nobody drives it.

    Raises:
        UsageError: there is none of this name, or it is of another version or environment.
        SessionExistsError: this notebook has other ranks.

    Example: in a script, where `%ddp_attach --wait` is not there::

        session = ddp_notebook.attach("kept-1")
        session.show_unseen(wait=True)
    """
    if (running := current()) is not None:
        if not running.is_kept:
            raise SessionExistsError(
                f"{running!r} is there already; end it with %ddp_stop before you attach to another"
            )
        is_it = running.kept_as == name or not name
        if is_it and running.is_running and (running.drives or not take_over) and not look:
            return running
        running.detach()
        running.stop()
    remote = reach.attach(name, take_over=take_over, looks=look)
    try:
        return Session(remote.welcome.options, remote=remote)
    except BaseException:
        remote.close("this notebook could not attach")
        raise


def others() -> list[str]:
    """A line about each session of this user that is kept on this machine, without this notebook's own."""
    running = current()
    own = "" if running is None else running.kept_as
    return [in_a_line(entry) for entry in registry.everything() if entry.name != own]
