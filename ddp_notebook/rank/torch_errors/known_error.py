"""One entry of the catalogue: a message of torch, the facts that it needs, its cause and its fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_notebook.rank.torch_errors.raised import Raised
from ddp_notebook.stdlib import functools, re

Values = Mapping[str, Any]
Facts = Callable[[Raised, Mapping[str, str]], Values | None]
_FIELD = re.compile(r"\{(\w*)(:d)?\}")


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """One message of torch.

    Args:
        name: name of the entry in tests.
        text: torch's text from its start, with `{name}` for any text, `{name:d}` for digits, and `{}` for text that
            is not used.
        kind: names of the exception classes, separated by spaces.
        where: pattern of the function of torch that raised the error, such as `"distributed_c10d:all_gather$"`; "" if
            C++ code raised it in a call of the user's code.
        cause: the cause, with the values of the text and of `facts` in braces.
        fix: the fix, with the same values.
        facts: returns more values, or None if the facts contradict the cause. Then the error stays as it is.
        other_texts: texts in other versions of torch.
    """

    name: str
    text: str
    kind: str
    where: str
    cause: str
    fix: str
    facts: Facts | None = None
    other_texts: tuple[str, ...] = ()

    def explain(self, raised: Raised) -> str:
        """Return cause and fix of an error in one sentence; "" if this entry does not fit.

        Example:
            >>> entry = KnownError(
            ...     name="size", text="got {size:d}", kind="ValueError", where="", cause="it has {size}", fix="pass 2"
            ... )
            >>> entry.explain(Raised("ValueError", "got 3", ""))
            'it has 3: pass 2'
            >>> entry.explain(Raised("TypeError", "got 3", "")), entry.explain(Raised("ValueError", "got 3", "torch:f"))
            ('', '')
        """
        if raised.kind not in self.kind.split() or not self._is_from(raised.where):
            return ""
        for text in (self.text, *self.other_texts):
            if (match := _pattern(text).match(raised.text)) is not None:
                values: Values | None = match.groupdict()
                if self.facts is not None:
                    found = self.facts(raised, match.groupdict())
                    values = None if found is None else {**match.groupdict(), **found}
                return "" if values is None else f"{self.cause}: {self.fix}".format_map(values)
        return ""

    def _is_from(self, where: str) -> bool:
        return re.search(self.where, where) is not None if self.where else not where


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a text with fields."""
    parts, end = [], 0
    for field in _FIELD.finditer(text):
        parts.append(re.escape(text[end : field.start()]))
        end = field.end()
        value = r"\d+" if field[2] else ".*?"
        parts.append(f"(?P<{field[1]}>{value})" if field[1] else value)
    parts.append(re.escape(text[end:]) if end < len(text) or text.endswith(":d}") else r"(?=\n|$)")
    return re.compile("".join(parts), re.DOTALL)
