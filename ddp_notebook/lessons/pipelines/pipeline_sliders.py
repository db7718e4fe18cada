"""Controls for the schedule, the microbatches and a guess of the bubble. The button starts the run on the ranks.

The picture and the text have separate displays below the controls, so that they stay in a saved notebook. After the end
of the ranks, a line of text replaces the controls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import DisplayHandle

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.lessons.pipelines.schedules import MOST_MICROBATCHES, SCHEDULES

if TYPE_CHECKING:
    from ddp_notebook.lessons.pipelines.pipeline import PipelineLesson

_STYLE = {"description_width": "110px"}


_LAYOUT = ipywidgets.Layout(width="420px")


def _text(words: str) -> dict[str, str]:
    return {"text/plain": words}


class PipelineSliders:
    """Controls of a `PipelineLesson`.

    Args:
        lesson: Lesson to control.
    """

    def __init__(self, lesson: PipelineLesson) -> None:
        self._lesson = lesson
        wide: dict[str, Any] = {"style": _STYLE, "layout": _LAYOUT}
        size = lesson.session.world_size
        self.schedule = ipywidgets.Dropdown(options=list(SCHEDULES), value="GPipe", description="schedule", **wide)
        self.microbatches = ipywidgets.IntSlider(
            value=2 * size, min=1, max=MOST_MICROBATCHES, description="microbatches", **wide
        )
        self.guess = ipywidgets.FloatSlider(
            value=0.0, min=0.0, max=0.9, step=0.01, readout_format=".0%", description="my guess", **wide
        )
        self.button = ipywidgets.Button(description=f"Run on {size} ranks", layout=ipywidgets.Layout(width="200px"))
        self.button.on_click(self._on_click)
        self.box = ipywidgets.VBox([self.schedule, self.microbatches, self.guess, self.button])
        self._displays: dict[str, DisplayHandle] = {}

    def show(self) -> None:
        """Show the controls, and empty displays for the results."""
        self._displays = {name: DisplayHandle() for name in ("controls", "text", "picture")}
        self._displays["controls"].display(self.box)
        self._displays["text"].display(_text("How much of the ranks' time will be bubble? Guess, then run."), raw=True)
        self._displays["picture"].display(_text(""), raw=True)
        self._lesson.session.ranks.when_stopped(self._freeze)

    def run(self) -> str:
        """Run with the values of the controls. Show the picture, and return the result as text."""
        try:
            found = self._lesson.run(self.schedule.value, self.microbatches.value, self.guess.value)
        except DDPNotebookError as error:  # the error of torch is part of the lesson
            return str(error).partition("\n")[0]
        self._displays["picture"].update(found.picture())
        return f"{found!r}\n{self._lesson.table()}"

    def _on_click(self, _: Any) -> None:
        if self.button.disabled or not self._displays:
            return
        self.button.disabled = True
        try:
            self._displays["text"].update(_text(f"{self._lesson.session.world_size} ranks are at work ..."), raw=True)
            self._displays["text"].update(_text(self.run()), raw=True)
        finally:
            self.button.disabled = False

    def _freeze(self) -> None:
        """Replace the controls by a text, because the ranks have ended."""
        self._displays["controls"].update(_text("(The sliders ended with the ranks.)"), raw=True)
        self.box.close()
