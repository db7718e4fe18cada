"""The monitors of one session, and its recording after the session has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_notebook.messages.record_options import profile_of
from ddp_notebook.run import ended_recording
from ddp_notebook.run.notebook_kernel import ipython
from ddp_notebook.run.output.display_target import DisplayTarget
from ddp_notebook.run.session_hooks import SessionFeature

if TYPE_CHECKING:
    from ddp_notebook.run.session_parts import SessionParts
    from ddp_notebook.widgets.ended_session import EndedSession
    from ddp_notebook.widgets.under_cell import UnderCell
    from ddp_notebook.widgets.view_placement import ViewPlacement


class SessionViews(SessionFeature):
    """The views of a session. There are none without a recording."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self.views: ViewPlacement | None = None
        recordings: Any = parts.hooks.features.get("recording")
        self._recordings = recordings
        if recordings is not None:
            from ddp_notebook.widgets.view_placement import ViewPlacement

            self.views = ViewPlacement(
                recordings.observer.recording, lambda: recordings.now, parts.cells, self._title, parts.options.live
            )
            self.side_view = self.views.beside  # type: ignore[method-assign] # saves one frame in every cell

    def _title(self) -> str:
        placement = self.parts.cluster.placement
        return f"{placement.world_size} rank{'s' * (placement.world_size != 1)}, {placement.backend}"

    def started(self, *, is_attached: bool) -> None:
        if self.views is not None:
            self.views.prepare()

    def side_view(self, target: DisplayTarget, code: str) -> UnderCell | None:
        return None if self.views is None else self.views.beside(target, code)

    def resized(self) -> None:
        if self.views is not None:
            self.views.on_resized()

    def stops(self) -> None:
        if self.views is None:
            return
        try:
            if ipython() is not None:  # in a script, no magic can show the recording
                ended_recording.keep(self._ended(self.views))
        finally:
            self.views.close()

    def _ended(self, views: ViewPlacement) -> EndedSession:
        from ddp_notebook.widgets.ended_session import EndedSession

        recording = self._recordings.observer.recording
        if recording.catch_up is not None and not self.parts.cluster.unheard:
            recording.catch_up()
        remote = self.parts.remote
        has_left = remote is not None and remote.goes_on
        whose = f"this notebook has left {remote.welcome.name}" if remote and has_left else "the ranks are gone"
        profiled = sorted({profile_of(file)[1] for file in self._recordings.profiles()})
        return EndedSession(recording, whose, self._title(), profiled, draws_html=views.draws_html)
