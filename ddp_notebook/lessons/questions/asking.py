"""`lessons.ask`: asks a question before its result is displayed, and keeps the guess.

The text of the question stands in the notebook. In a front end the choices are a widget, and elsewhere a text.
"""

from __future__ import annotations

from typing import Any

from ddp_notebook.display import has_front_end
from ddp_notebook.lessons.language import translated
from ddp_notebook.lessons.questions import guesses


def ask(name: str, answer: Any = ..., /) -> None:
    """Ask a question of a lesson, or keep a guess.

    Guesses are kept in `my_answers.json` next to the notebook. The first guess of a question is never overwritten.

    Args:
        name: Name of the question: the number of the lesson and a word.
        answer: Guess, for front ends without widgets; "show me" requests the result. By default, the question is
            displayed.

    Raises:
        UsageError: There is no question of this name, or the answer is not among its choices.

    Example:
        >>> lessons.ask("04/world-size", 24)
        Your guess is kept: 24. lessons.result shows the result.
    """
    question = guesses.find(name)
    if answer is not None and answer is not ...:
        print(guesses.keep(name, answer), translated("lessons.result shows the result."))
        return
    if has_front_end():
        from ddp_notebook.lessons.questions.ask_box import AskBox

        AskBox(name, question).display()
    else:
        print(guesses.in_text(name, question))
