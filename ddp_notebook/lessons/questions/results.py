"""`lessons.result`: displays a result after the reader's guess, with the verdict. A later guess updates the display."""

from __future__ import annotations

import html
import sys
from typing import Any

from ddp_notebook.display import has_front_end
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.language import translated
from ddp_notebook.lessons.questions.answers_file import Answered, answers_file, shows_all
from ddp_notebook.lessons.questions.catalogue import QUESTIONS, unknown
from ddp_notebook.lessons.questions.judging import Question

_NAMES = {"gloo", "irecv", "isend", "nvidia-smi", "recv", "torch"}
GUESS_FIRST = "Guess first, in the cell above, or press 'Show me' there."


def result(name: str, *shown: object) -> None:
    """Display the result of a question, as soon as the reader has guessed or requested it.

    The verdict on the last guess follows. Until a guess is made, one line says so.

    Args:
        name: Name of the question.
        shown: Texts, figures, widgets, or functions without arguments that return one of these. Functions are called
            only when the result is displayed.

    Raises:
        UsageError: There is no question of this name.

    Example:
        >>> lessons.result("05/changed", lambda: lessons.exchanges())
        Guess first, in the cell above, or press 'Show me' there.
    """
    if name not in QUESTIONS:
        raise UsageError(unknown(name))
    for one in shown:
        _close(one)
    shows = _Result(name, shown)
    _results.setdefault(name, {})[_cell()] = shows
    shows.display()


def update(name: str) -> None:
    """Update the displayed results of a question after a guess."""
    for shows in _results.get(name, {}).values():
        shows.update()


class _Result:
    """The display of one result: its parts, and the verdict below them."""

    def __init__(self, name: str, shown: tuple[object, ...]) -> None:
        self._name = name
        self._shown = shown
        self._output: Any = None  # the widget for parts that are displayed later
        self._verdict: Any = None  # display handle

    def display(self) -> None:
        from IPython.display import display

        answered = answers_file().of(self._name)
        is_hidden = answered.is_open and not shows_all()
        if not is_hidden:
            self._show_parts()
        elif has_front_end():
            import ipywidgets

            self._output = ipywidgets.Output()
            view = self._output._repr_mimebundle_()
            display({**view, "text/plain": ""}, raw=True)  # type: ignore[no-untyped-call,unused-ignore]
        bundle = said(QUESTIONS[self._name], answered)
        if has_front_end():
            self._verdict = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            print(bundle["text/plain"])

    def update(self) -> None:
        """Display the parts, if they are still hidden, and the verdict on the last guess."""
        if self._verdict is None:
            return
        if self._output is not None:
            output, self._output = self._output, None
            with output:
                self._show_parts()
        self._verdict.update(said(QUESTIONS[self._name], answers_file().of(self._name)), raw=True)

    def _show_parts(self) -> None:
        from IPython.display import display

        for one in self._shown:
            part = one() if callable(one) else one
            _close(part)
            if isinstance(part, str):
                print(part)
            elif part is not None:
                display(part)  # type: ignore[no-untyped-call,unused-ignore]


_results: dict[str, dict[str, _Result]] = {}  # keys are names of questions, then ids of cells


def said(question: Question, answered: Answered) -> dict[str, str]:
    """Return the line below a result as text and HTML: the verdict, the answer, or the request to guess."""
    if answered.is_open and not shows_all():
        return _line("", translated(GUESS_FIRST))
    right = question.in_words(question.right(), translated)
    answer = f"{translated('The answer is')} {right}: {translated(question.why)}"
    if not answered.guesses:
        return _line("", answer)
    guess = answered.guesses[-1]
    guessed = f"{translated(guess.answer)}. {_capital(guess.reason)}"
    if guess.is_right:
        return _line(f"\N{CHECK MARK} {translated('right')}", guessed)
    return _line(f"\N{BALLOT X} {translated('not right')}", guessed, answer)


def _capital(sentence: str) -> str:
    """Return a sentence with a capital letter, unless it begins with a name of code or of a program."""
    word = sentence.split(" ", 1)[0]
    is_name = word in _NAMES or not word.replace("-", "").isalpha()
    return sentence if is_name else sentence[:1].upper() + sentence[1:]


def _line(head: str, *texts: str) -> dict[str, str]:
    start = f"<b>{head}</b>: " if head else ""
    paragraphs = "<br>".join(map(html.escape, texts))
    return {
        "text/plain": f"{head}{': ' * bool(head)}{' '.join(texts)}",
        "text/html": '<div role="status" style="border-left:4px solid currentColor;padding:4px 12px;margin:4px 0">'
        f"{start}{paragraphs}</div>",
    }


def _close(part: object) -> None:
    """Close a figure, because the inline backend displays all open figures at the end of a cell."""
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        from matplotlib.figure import Figure

        if isinstance(part, Figure):
            pyplot.close(part)


def _cell() -> str:
    """Return the id of the running cell; "" if the front end does not name it."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    parent = getattr(shell, "parent_header", None) or {}
    return str((parent.get("metadata") or {}).get("cellId", ""))
