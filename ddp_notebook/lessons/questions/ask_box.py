"""The widget of `lessons.ask`: choices or fields, and the buttons Guess and Show me."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ipywidgets

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.lessons.language import translated
from ddp_notebook.lessons.questions import guesses
from ddp_notebook.lessons.questions.judging import Question

_WIDE = ipywidgets.Layout(width="auto", max_width="100%")
_FIELD = ipywidgets.Layout(width="calc(100% - 4px)", max_width="420px")
_PART = ipywidgets.Layout(width="160px")
_LONGEST_KEY = 48  # characters; a longer key wraps
_ROW = ipywidgets.Layout(flex_flow="row wrap", align_items="center")
_NOT_CHOSEN = "choose"
_CLASS = "ddp-ask"
# ipywidgets gives each choice the height of one line, so that choices of two lines overlap.
_STYLE = f"""<style>
.{_CLASS} .widget-radio-box label {{ display: flex; height: auto; line-height: 1.4; white-space: normal }}
.{_CLASS} .widget-radio-box input {{ flex: none; float: none; order: -1; margin-right: 6px }}
</style>"""


class AskBox:
    """The choices of one question. The result is not known to it.

    Args:
        name: Name of the question.
        question: The question.
    """

    def __init__(self, name: str, question: Question) -> None:
        self._name = name
        self._question = question
        self._right = question.right()  # its type determines how a field is read
        keys = list(self._right) if isinstance(self._right, Mapping) else []
        self.controls: dict[Any, Any] = {key: self._control(is_part=True) for key in keys}
        width = ipywidgets.Layout(width=f"{min(max(map(len, map(_words, keys)), default=0), _LONGEST_KEY)}ch")
        rows = [
            ipywidgets.HBox([ipywidgets.HTML(html.escape(_words(key)), layout=width), control], layout=_ROW)
            for key, control in self.controls.items()
        ]
        if not keys:
            self.controls[None] = self._control(is_part=False)
            rows = [self.controls[None]]
        self.guess = ipywidgets.Button(description="Guess", button_style="primary", tooltip="Keep this answer")
        self.show_me = ipywidgets.Button(description="Show me", tooltip="Show the result without a guess")
        self.guess.on_click(self._on_guess)
        self.show_me.on_click(self._on_show_me)
        self.said = ipywidgets.HTML()
        buttons = ipywidgets.HBox([self.guess, self.show_me, self.said], layout=_ROW)
        self.box = ipywidgets.VBox([*rows, buttons], layout=ipywidgets.Layout(width="100%"))
        self.box.add_class(_CLASS)
        self._say(guesses.already(name))

    def display(self) -> None:
        """Display the widget, with a text for front ends without widgets and for the saved notebook."""
        from IPython.display import display

        text = guesses.in_text(self._name, self._question)
        display({**self.box._repr_mimebundle_(), "text/plain": text}, raw=True)  # type: ignore[no-untyped-call,unused-ignore]

    def _control(self, *, is_part: bool) -> Any:
        labels = [(translated(label), label) for label in self._question.labelled_choices()]
        if not labels:
            layout = _PART if is_part else _FIELD
            return ipywidgets.Text(placeholder=f"such as {self._question.placeholder}", layout=layout)
        if is_part:
            return ipywidgets.Dropdown(options=[(_NOT_CHOSEN, _NOT_CHOSEN), *labels], value=_NOT_CHOSEN, layout=_WIDE)
        return ipywidgets.RadioButtons(options=labels, index=None, layout=_WIDE)

    def _on_guess(self, _: Any) -> None:
        try:
            values = {key: self._value(key, control) for key, control in self.controls.items()}
            self._say(guesses.keep(self._name, values if isinstance(self._right, Mapping) else values[None]))
        except DDPNotebookError as error:
            self._say(str(error))

    def _value(self, key: Any, control: Any) -> Any:
        if isinstance(control, ipywidgets.Text):
            right = self._right if key is None else self._right[key]
            return guesses.value_of(control.value, right)
        return ... if control.value in (None, _NOT_CHOSEN) else control.value

    def _on_show_me(self, _: Any) -> None:
        try:
            self._say(guesses.keep(self._name, guesses.SHOW_ME))
        except DDPNotebookError as error:
            self._say(str(error))

    def _say(self, text: str) -> None:
        self.said.value = f'{_STYLE}<span role="status">{html.escape(text)}</span>'


def _words(key: Any) -> str:
    return f"rank {key}" if type(key) is int else translated(str(key))
