"""The hang card of a cell without progress: waiting ranks, and the cause. The display is updated in place."""

from __future__ import annotations

import html

from ddp_notebook.records.words import format_ranks, list_ranks
from ddp_notebook.run.groups.diagnosis import by_what_they_do, list_with_host, only_wait_for_children
from ddp_notebook.run.groups.rank_view import Views
from ddp_notebook.run.output.rate_limiter import RateLimiter, new_id

STOP = "The stop button ends the cell"
_ROWS = 12  # largest number of rows


class Card:
    """Shows, updates and removes the card.

    Args:
        rate_limiter: the rate limiter of the cell's output.
        ends: action that ends the cell, as text.
    """

    def __init__(self, rate_limiter: RateLimiter, ends: str = STOP) -> None:
        self._rate_limiter = rate_limiter
        self._ends = ends
        self._display_id = ""
        self._said = ""  # the last verdict that was printed, in a terminal

    @property
    def is_shown(self) -> bool:
        """Return whether there is a display to update."""
        return bool(self._display_id)

    def show(self, views: Views, seconds: float, why: str, ends_in_s: float | None = None) -> None:
        """Show the activity of the ranks.

        Args:
            views: activity by rank.
            seconds: longest wait of a rank.
            why: the verdict on the wait.
            ends_in_s: seconds after which the cell is ended without a press; None: it is not.
        """
        ends = self._ends
        if ends_in_s is not None:
            ends = f"The cell is stopped in {ends_in_s:.0f} s. {ends}"
        if not self._rate_limiter.can_update:
            if why != self._said:
                self._said = why
                self._rate_limiter.write("stderr", as_text(views, seconds, why, ends) + "\n")
                self._rate_limiter.drain()
            return
        said = seconds, why, ends
        data = {"text/plain": as_text(views, *said), "text/html": as_html(views, *said)}
        if self._display_id:
            self._rate_limiter.update(data, None, self._display_id)
        else:
            self._display_id = new_id()
            self._rate_limiter.show(data, display_id=self._display_id)
        self._rate_limiter.drain()

    def remove(self) -> None:
        """Remove the card: the cell makes progress again, or is over."""
        if self._display_id:
            self._rate_limiter.update({"text/plain": "", "text/html": ""}, None, self._display_id)
            self._rate_limiter.drain()
            self._display_id = ""


def _rows(views: Views) -> list[tuple[list[int], str, str]]:
    """Return sets of ranks, with their activity and its duration."""
    rows = []
    for ranks, doing in by_what_they_do(views, lambda view: view.doing):
        longest = max(max(views[rank].since_s, views[rank].child_s) for rank in ranks)
        rows.append((ranks, doing, f"{longest:.0f} s" if longest else ""))
    return rows[:_ROWS]


def _title(views: Views, seconds: float, why: str) -> str:
    # A child process may be working, for example on a download.
    what = "waiting" if only_wait_for_children(views) else "no progress"
    return f"{what} for {seconds:.0f} s" + (f": {why}" if why else "")


def as_text(views: Views, seconds: float, why: str, ends: str = STOP) -> str:
    """Return the card as plain text for a terminal.

    Args:
        views: activity by rank.
        seconds, why: as for `Card.show`.
        ends: action that ends the cell, as text.
    """
    rows = [
        f"  {list_with_host(views, ranks)}: {doing}" + (f", for {since}" if since else "")
        for ranks, doing, since in _rows(views)
    ]
    return "\n".join([_title(views, seconds, why), *rows, f"  {_what_to_do(views, ends)}"])


def _what_to_do(views: Views, ends: str) -> str:
    if any(view.runs == "script" for view in views.values()):
        return "%ddp_interrupt aborts these operations, which raise an error in the script, as if a peer had ended."
    if any(view.state == "silent" for view in views.values()):
        return f"{ends} on ranks that answer, which keep every variable."
    return f"{ends}; every variable is kept."


def as_html(views: Views, seconds: float, why: str, ends: str = STOP) -> str:
    """Return the card as HTML. The arguments are those of `as_text`."""
    cell = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;background:none"
    rows = "".join(
        f'<tr style="background:none"><td style="{cell}"><code>[{format_ranks(ranks)}]</code>'
        f"{html.escape(list_with_host(views, ranks).removeprefix(list_ranks(ranks)))}</td>"
        f'<td style="{cell}">{html.escape(doing)}</td><td style="{cell};white-space:nowrap">{since}</td></tr>'
        for ranks, doing, since in _rows(views)
    )
    return (
        '<div role="status" style="border-left:3px solid #d9822b;padding:4px 10px;margin:4px 0">'
        f"<div><b>{html.escape(_title(views, seconds, why))}</b></div>"
        f'<table style="border:none;margin:2px 0;font-size:inherit">{rows}</table>'
        f'<div style="opacity:.75">{_what_to_do(views, ends)}</div></div>'
    )
