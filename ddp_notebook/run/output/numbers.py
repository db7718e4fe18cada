"""Merge lines that differ only in numbers.

    loss 0.661  and  loss 0.676   ->   loss 0.661 | 0.676

The text around the numbers must be equal. Addresses, dates, clock times and units belong to the numbers. Some lines are
easier to read unmerged: those in which more than four numbers differ, or several numbers of one list or tensor. A line
without a letter is not merged either, because two bare numbers may mean different things.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_notebook.records.words import format_ranks

MOST_LISTED = 8  # ranks whose values are listed; for more ranks the minimum, mean and maximum are shown
_MOST_DIFFERENT = 4  # lines in which more numbers differ are not merged
_LONGEST_CHARS = 1000  # longer lines are not merged
_MOST_NUMBERS = 40  # lines with more numbers are not merged
_TIMES = {"ns": 1e-9, "µs": 1e-6, "μs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_UNITS = _TIMES | _SIZES
# A number is not part of a longer token, such as 10.0.0.1 or 3-5. `*+` and `(?>` prevent matches of shorter parts.
_NUMBER = re.compile(
    r"""(?=[-+\ \d.niNI])(?P<space>(?<!\ )\ *+)(?:        # a quick check; spaces are read once
    (?P<address>0x[0-9a-fA-F]+\b)
    |(?P<clock>(?<![\w:])(?:\d{4}-\d\d-\d\d(?:[\ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?)?
        |\d\d:\d\d:\d\d(?:[.,]\d+)?)(?!-?\w|:))
    |(?:(?<![\w.])(?<!\d-)|(?<=[Rr]ank)|(?<=RANK)|(?<=[Gg]pu)|(?<=GPU))
     (?:(?P<number>(?>
          (?:(?<!\d,)[-+]?\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d*)?   # or several numbers, which are written whole too
            |[-+]?(?:\d+(?:\.\d*)?|\.\d+))
          (?:[eE][-+]?\d+)?)(?![.-]\d))
        (?P<unit>\ ?(?:ns|[µμu]s|ms|s|min(?![\ :=]+[-+\d.](?!\d*\ ?s\b))|h|[kKMGT]i?B|B)\b)?   # "min 0.5" is a minimum
       |(?P<special>[-+]?(?:nan|inf|NaN|Inf)\b))
    )""",
    re.VERBOSE,
)
_STRIDE = _NUMBER.groups + 1
_NUMBER_AT = _NUMBER.groupindex["number"]
_LETTER = re.compile(r"[^\W\d_]")
_OWNERS = ("rank", "gpu", "worker", "process", "pid", "device", "cuda")  # words before the number of a process


@dataclass(slots=True)
class LinePattern:
    """A line, split at its numbers.

    Args:
        shape: the text around the numbers. Lines of one shape differ only in numbers.
        marker: the shape with the integers, which mostly count steps. Lines with one marker belong to one step.
        parts: text, and for each number the groups of `_NUMBER` and the text after it.
    """

    shape: str
    marker: str
    parts: list[str | None]


class NumberInLine(NamedTuple):
    """A number in a line, as written, without spaces before it. One of the first three or the last field is
    not None.
    """

    address: str | None
    clock: str | None
    number: str | None
    unit: str
    special: str | None  # not finite

    @property
    def text(self) -> str:
        return self.number or self.special or self.address or self.clock or ""

    @property
    def value(self) -> float:
        """Return the number, in seconds or bytes if it has a unit."""
        return float(self.text.replace(",", "")) * _UNITS.get(self.unit.strip(), 1.0)


def form_of(line: str) -> LinePattern | None:
    """Split a line at its numbers. Return None if the line cannot be merged with others.

    Example:
        >>> form_of("step 4 loss 0.5").shape
        'step\\x00 loss\\x00'
    """
    if len(line) > _LONGEST_CHARS or "\n" in line:
        return None
    parts: list[str | None] = _NUMBER.split(line)
    if len(parts) == 1 or len(parts) > _MOST_NUMBERS * _STRIDE:
        return None
    texts = parts[::_STRIDE]
    shape = "\0".join(texts)  # type: ignore[arg-type]  # only groups may be None
    if not _LETTER.search(shape):
        return None
    if "  " in shape:
        shape = re.sub(" +", " ", shape)
    marker = shape
    for at in range(_NUMBER_AT, len(parts), _STRIDE):
        number = parts[at]
        if number is not None and number.replace(",", "").isdecimal() and parts[at + 1] is None:
            before = texts[at // _STRIDE] or ""
            if not before[-10:].lower().rstrip(" :=#_[(").endswith(_OWNERS):
                marker += f"\0{number}"
    return LinePattern(shape, marker, parts)


def merged(ranks: Sequence[int], forms: Sequence[LinePattern]) -> str | None:
    """Return the lines of several ranks as one.

    Args:
        ranks: in ascending order.
        forms: the line of each rank, all with the same shape.

    Returns:
        The line, or None if too many numbers differ, in total or in one list.

    Example:
        >>> lines = ["loss 0.661", "loss 0.676"]
        >>> merged([0, 1], [form_of(line) for line in lines])
        'loss 0.661 | 0.676'
    """
    first = forms[0].parts
    written = [first[0] or ""]
    different = 0
    is_in_list, in_list, most_in_list = False, 0, 0
    for at in range(1, len(first), _STRIDE):
        groups = first[at + 1 : at + _STRIDE - 1]
        of_ranks = [form.parts[at + 1 : at + _STRIDE - 1] for form in forms]
        written.append(first[at] or "")  # spaces
        if (before := (first[at - 1] or "").strip()) not in ("", ","):
            is_in_list, in_list = before.endswith(("[", "(")), 0
        if all(one == groups for one in of_ranks):
            written += filter(None, groups)
        else:
            numbers = [NumberInLine(one[0], one[1], one[2], one[3] or "", one[4]) for one in of_ranks]
            text = _merged_number(ranks, numbers, before)
            if text is None:
                return None
            written.append(text)
            if not (numbers[0].address or numbers[0].clock):
                different += 1
                in_list += is_in_list
                most_in_list = max(most_in_list, in_list)
        written.append(first[at + _STRIDE - 1] or "")
    if most_in_list > 1 and len(forms) <= MOST_LISTED:  # "[0.72 | 0.16, 0.89 | 0.71]"
        return None
    return None if different > _MOST_DIFFERENT else "".join(written)


def _merged_number(ranks: Sequence[int], numbers: Sequence[NumberInLine], before: str) -> str | None:
    """Return one number of a line, merged from all ranks. Return None if the numbers have different kinds or no mean.

    Args:
        before: the text before the number.
    """
    if len(numbers) > MOST_LISTED and before.endswith(("[", "(")) and any("," in one.text for one in numbers):
        return None  # each may be several numbers
    if all(one.address for one in numbers):
        return "0x…"
    if clocks := [one.clock for one in numbers if one.clock]:
        return f"{min(clocks)}..{max(clocks)}" if len(clocks) == len(numbers) else None
    return None if any(one.address for one in numbers) else _values(ranks, numbers)


def _values(ranks: Sequence[int], numbers: Sequence[NumberInLine]) -> str:
    units = {number.unit for number in numbers}
    unit = units.pop() if len(units) == 1 else None
    if len(numbers) <= MOST_LISTED:
        return " | ".join(one.text + ("" if unit is not None else one.unit) for one in numbers) + (unit or "")
    if [number.text for number in numbers] == [str(rank) for rank in ranks]:
        return format_ranks(ranks) + (unit or "")
    return _summary(numbers)


def _summary(numbers: Sequence[NumberInLine]) -> str:
    """Return the minimum, mean and maximum over many ranks."""
    finite = sorted((one for one in numbers if math.isfinite(one.value)), key=lambda one: one.value)
    others: dict[str, int] = {}
    for one in numbers:
        if not math.isfinite(one.value):
            others[one.text] = others.get(one.text, 0) + 1
    parts = []
    if finite:
        least, most = finite[0], finite[-1]
        parts.append(f"min {least.text}{least.unit} mean {_mean(finite)}{most.unit} max {most.text}{most.unit}")
    parts += [f"{text} on {count} rank{'s' * (count > 1)}" for text, count in others.items()]
    return ", ".join(parts)


def _mean(numbers: Sequence[NumberInLine]) -> str:
    """Return the mean of finite numbers, in the unit of the last one."""
    texts = [one.text.replace(",", "") for one in numbers]
    comma = "," if any("," in one.text for one in numbers) else ""
    if len({one.unit for one in numbers}) == 1 and all(text.lstrip("+-").isdecimal() for text in texts):
        whole, rest = divmod(total := sum(map(int, texts)), len(texts))
        return f"{total / len(texts):{comma}.1f}" if rest else f"{whole:{comma}}"
    mean = sum(one.value for one in numbers) / len(numbers) / _UNITS.get(numbers[-1].unit.strip(), 1.0)
    digits = max(len(text.partition(".")[2]) for text in texts)
    is_plain = digits > 0 and not any("e" in text.lower() for text in texts)
    return f"{mean:{comma}.{digits}f}" if is_plain else f"{mean:.4g}"
