"""The reader's answers: one JSON file next to the notebooks.

The environment variable `DDP_NOTEBOOK_ANSWERS` is the path of another file. With the value `shown`, results are
displayed without a guess, and answers stay in memory: for tests, documentation and pictures.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from ddp_notebook.errors import UsageError

FILE = "my_answers.json"
_VARIABLE = "DDP_NOTEBOOK_ANSWERS"
_SHOWN = "shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """One answer of the reader, with the verdict of that time."""

    answer: str  # as displayed
    is_right: bool
    reason: str  # explanation of the verdict
    at: str  # local time, ISO 8601


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The reader's answers to one question, the first one first."""

    guesses: tuple[Guess, ...] = ()
    is_shown: bool = False  # the result was requested before a right guess

    @property
    def is_open(self) -> bool:
        """Return whether the result stays hidden."""
        return not (self.guesses or self.is_shown)

    @property
    def status(self) -> str:
        """Return "first try", "later", "wrong" (no guess is right so far), "shown" or "open" (no guess)."""
        if self.is_shown:
            return "shown"
        if not self.guesses:
            return "open"
        if self.guesses[0].is_right:
            return "first try"
        return "later" if any(guess.is_right for guess in self.guesses) else "wrong"


class AnswersFile:
    """Answers by question, read and written as a whole.

    Args:
        path: JSON file; None keeps the answers in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._in_memory: dict[str, Answered] = {}

    def read(self) -> dict[str, Answered]:
        """Return the answers by question. A missing file has none.

        Raises:
            UsageError: The file is not a file of answers.
        """
        if self.path is None:
            return dict(self._in_memory)
        return read(self.path) if self.path.exists() else {}

    def of(self, name: str) -> Answered:
        """Return the answers to one question."""
        return self.read().get(name, Answered())

    def add(self, name: str, answer: str, verdict: tuple[bool, str]) -> None:
        """Append a guess to those of a question."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        guess = Guess(answer=answer, is_right=verdict[0], reason=verdict[1], at=now)
        self._change(name, lambda old: replace(old, guesses=(*old.guesses, guess)))

    def show(self, name: str) -> None:
        """Note that the reader has requested the result. After a right guess this changes nothing."""
        self._change(name, lambda old: replace(old, is_shown=old.is_shown or old.status in ("open", "wrong")))

    def forget(self, names: set[str]) -> None:
        """Delete the answers to these questions."""
        self._write({name: answered for name, answered in self.read().items() if name not in names})

    def _change(self, name: str, change: Callable[[Answered], Answered]) -> None:
        answers = self.read()
        self._write({**answers, name: change(answers.get(name, Answered()))})

    def _write(self, answers: Mapping[str, Answered]) -> None:
        """Replace the file at once, so that an interrupt leaves either the old or the new one."""
        if self.path is None:
            self._in_memory = dict(answers)
            return
        text = json.dumps({"answers": {name: asdict(one) for name, one in answers.items()}}, indent=1)
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                file.write(text + "\n")
            Path(file.name).replace(self.path)
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path} ({error.strerror}): {_VARIABLE}=FILE keeps answers elsewhere"
            ) from None


def read(path: Path) -> dict[str, Answered]:
    """Return the answers in a file by question.

    Raises:
        UsageError: The file is not a file of answers.
    """
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["answers"]
        return {str(name): _answered(one) for name, one in answers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is not a file of answers ({reason}); delete it, or move it away") from None


def _answered(one: Any) -> Answered:
    return Answered(guesses=tuple(Guess(**guess) for guess in one["guesses"]), is_shown=bool(one["is_shown"]))


@cache
def answers_file() -> AnswersFile:
    """Return the file of this process. Its folder is the working directory at the first call: that of the notebook."""
    given = os.environ.get(_VARIABLE, "")
    if given == _SHOWN:
        return AnswersFile(None)
    return AnswersFile(Path(given or FILE).absolute())


def shows_all() -> bool:
    """Return whether results are displayed without a guess."""
    return os.environ.get(_VARIABLE) == _SHOWN
