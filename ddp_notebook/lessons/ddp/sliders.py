"""The options of `inside_ddp` as sliders. Each change starts a new run on the ranks and updates the picture.

The picture and the table have separate displays next to the controls, so that they stay in a saved notebook. After the
end of the ranks, a line of text replaces the controls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.display import DisplayHandle

from ddp_notebook.errors import DDPNotebookError

if TYPE_CHECKING:
    from ddp_notebook.lessons.ddp.inside import InsideDDP
    from ddp_notebook.lessons.ddp.runs import Run
    from ddp_notebook.session import Session

_NONE = "none"
_NOTHING = -1  # stands for None, which a drop-down list would show as an empty line
_WIDE = {"description_width": "130px"}
_LAYOUT = ipywidgets.Layout(width="340px")  # two columns on a page of 800 pixels


class DDPSliders:
    """Controls of an `InsideDDP`.

    Args:
        inside: Lesson to control.
        session: Session that it runs in.
    """

    def __init__(self, inside: InsideDDP, session: Session) -> None:
        self._inside = inside
        self._session = session
        self._busy = False
        given = inside.options
        hooks = [
            (_NONE, _NOTHING),
            ("fp16_compress_hook", "fp16"),
            ("bf16_compress_hook", "bf16"),
            ("PowerSGD", "powersgd"),
        ]
        ranks = [(_NONE, _NOTHING), *((f"rank {rank}", rank) for rank in range(session.world_size))]
        speeds: list[tuple[str, float]] = [("as it is", _NOTHING)]
        speeds += [(f"{mb_s} MB/s", mb_s) for mb_s in (400, 200, 100, 50, 25)]
        if given.link_mb_s is not None and given.link_mb_s not in [speed for _, speed in speeds]:
            speeds.append((f"{given.link_mb_s:g} MB/s", given.link_mb_s))
        wide: dict[str, Any] = {"style": _WIDE, "layout": _LAYOUT, "continuous_update": False}
        list_style: dict[str, Any] = {"style": _WIDE, "layout": _LAYOUT}
        self.controls: dict[str, Any] = {
            "bucket_cap_mb": ipywidgets.FloatLogSlider(
                value=given.bucket_cap_mb, base=10, min=-1, max=2, step=0.1, readout_format=".3g", **wide
            ),
            "no_sync": ipywidgets.IntSlider(value=given.no_sync, min=0, max=8, **wide),
            "straggler_ms": ipywidgets.FloatSlider(value=given.straggler_ms, min=0, max=100, step=5, **wide),
            "straggler": ipywidgets.Dropdown(options=ranks, value=_shown(given.straggler), **list_style),
            "link_mb_s": ipywidgets.Dropdown(options=speeds, value=_shown(given.link_mb_s), **list_style),
            "comm_hook": ipywidgets.Dropdown(options=hooks, value=_shown(given.comm_hook), **list_style),
            "powersgd_rank": ipywidgets.IntSlider(value=given.powersgd_rank, min=1, max=16, **wide),
            **{
                name: ipywidgets.Checkbox(value=getattr(given, name), indent=False, layout=_LAYOUT)
                for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "unused")
            },
        }
        for name, control in self.controls.items():
            control.description = "an unused layer" if name == "unused" else name
            control.observe(self._on_change, names="value")
        self._disable_unused()
        self.box = ipywidgets.GridBox(
            list(self.controls.values()), layout=ipywidgets.Layout(grid_template_columns="repeat(2, 350px)")
        )
        self._displays: dict[str, DisplayHandle] = {}

    def show(self) -> None:
        """Run once, and show the picture and the controls."""
        picture, text = self._made()
        self._displays = {name: DisplayHandle() for name in ("controls", "picture", "text")}
        self._displays["controls"].display(self.box)
        self._displays["picture"].display(picture)
        self._displays["text"].display(text, raw=True)
        self._session.ranks.when_stopped(self._freeze)

    def run(self) -> Run:
        """Run with the values of the controls."""
        chosen = {name: control.value for name, control in self.controls.items()}
        return self._inside.run(4, **{name: None if value == _NOTHING else value for name, value in chosen.items()})

    def _disable_unused(self) -> None:
        """Disable options that have no effect: the delay without a straggler, and the rank without PowerSGD."""
        self.controls["straggler_ms"].disabled = self.controls["straggler"].value == _NOTHING
        self.controls["powersgd_rank"].disabled = self.controls["comm_hook"].value != "powersgd"

    def _on_change(self, _: Any) -> None:
        self._disable_unused()
        if self._busy or not self._displays:
            return
        self._busy = True
        try:
            words = f"{self._session.world_size} ranks are at work ..."
            self._displays["text"].update(_text(words), raw=True)
            picture, text = self._made()
            if picture is not None:
                self._displays["picture"].update(picture)
            self._displays["text"].update(text, raw=True)
        finally:
            self._busy = False

    def _made(self) -> tuple[Any, dict[str, str]]:
        try:
            found = self.run()
        except DDPNotebookError as error:  # the error of torch is part of the lesson
            return None, _text(str(error).partition("\n")[0])
        return found.picture(), _text(f"{self._inside.table(found)}\n{found.agreement!r}")

    def _freeze(self) -> None:
        """Replace the controls by a text, because the ranks have ended."""
        self._displays["controls"].update(_text("(The sliders ended with the ranks.)"), raw=True)
        self.box.close()


def _shown(value: Any) -> Any:
    return _NOTHING if value is None else value


def _text(words: str) -> dict[str, str]:
    return {"text/plain": words}
