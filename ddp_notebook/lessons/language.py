"""Sentences of the lessons in the language of the notebook.

A translated notebook lies next to a file `lesson_sentences.json`, which maps each English sentence to its translation
(tools/course writes both). The English notebooks have no such file.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

FILE = "lesson_sentences.json"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def translated(text: str) -> str:
    """Return a sentence in the language of the notebook, or the English sentence if it has no translation.

    Args:
        text: An English sentence. Its numbers may differ from those in the file: a key and its translation have `{0}`,
            `{1}`, ... in place of the numbers.

    Example:
        >>> translated("Guess first.")  # an English notebook
        'Guess first.'
    """
    sentences = _sentences(Path.cwd())
    if text in sentences:
        return sentences[text]
    found = sentences.get(without_numbers(text))
    return text if found is None else found.format(*_NUMBER.findall(text))


def without_numbers(text: str) -> str:
    """Return a text with `{0}`, `{1}`, ... in place of its numbers, as a key of the file.

    Example:
        >>> without_numbers("Rank 3 sends 0.5 MB.")
        'Rank {0} sends {1} MB.'
    """
    numbers = iter(range(len(text)))
    return _NUMBER.sub(lambda _: f"{{{next(numbers)}}}", text)


@functools.lru_cache(maxsize=8)
def _sentences(folder: Path) -> dict[str, str]:
    file = folder / FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}  # else another program's file of this name
