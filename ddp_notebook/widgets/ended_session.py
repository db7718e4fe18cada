"""Recording of an ended session or torchrun job.

`%ddp_report`, `%ddp_monitor` and `%ddp_trace` show it until the notebook has ranks again. Only the recording is kept.
Its memory is bounded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddp_notebook.observe.recording import Recording
from ddp_notebook.run.notebook_kernel import has_front_end
from ddp_notebook.widgets.placed_views import StillView, View, WidgetView
from ddp_notebook.widgets.view_placement import check_cell

if TYPE_CHECKING:
    from ddp_notebook.observe.report.report import Report


class EndedSession:
    """Recording of a session or job that has ended.

    Args:
        recording: Recording of the session or job.
        whose: Reason why the ranks are gone, for messages.
        title: Title of the session or the job.
        profiled: Ranks whose torch profiles are no longer available.
        draws_html: Draw views as HTML, because no widget has answered or because the user asked for HTML.
    """

    def __init__(self, recording: Recording, whose: str, title: str, profiled: list[int], *, draws_html: bool) -> None:
        self.recording = recording
        self.words = f"{whose}; the recording remains ({title})"
        self._title = title
        self._profiled = profiled
        self._draws_html = draws_html
        self._shown: View | None = None

    def report(self) -> Report:
        """See `Session.report`."""
        return self.recording.report()

    def monitor(self, cell: int | None = None) -> None:
        """See `Session.monitor`."""
        check_cell(self.recording, cell)
        self.close()
        self._shown = self._view(cell)

    def _write_trace(self, path: str | os.PathLike[str]) -> tuple[list[int], list[int]]:
        """See `Session.trace`. The torch profiles are no longer available."""
        from ddp_notebook.run.record import chrome_trace

        chrome_trace.write(self.recording, path, None, ())
        return [], self._profiled

    def close(self) -> None:
        """Replace the shown view by a picture."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.freeze(self.recording, shown.cell)

    def _view(self, cell: int | None) -> View:
        if not has_front_end():
            return StillView(self.recording, cell)
        if self._draws_html:
            from ddp_notebook.widgets.html.view import HtmlView

            return HtmlView(self.recording, cell, self._title, None)
        from ddp_notebook.widgets.monitor import Monitor

        shown = WidgetView(Monitor(self.recording, cell), cell, None, has_picture=True)
        shown.keep_picture(self.recording)
        return shown
