"""Format numbers with units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import math


def two_figures(value: float) -> str:
    """Format a number: two significant figures below 10, an integer above.

    Example:
        >>> two_figures(1234.5), two_figures(9.26), two_figures(0.0)
        ('1,234', '9.3', '0')
    """
    return f"{value:,.0f}" if value >= 9.95 or value == 0 else f"{value:.2g}"


def at_most_three_figures(value: float) -> str:
    """Format a number with at most three significant figures; an integer from 1000 to a million.

    Example:
        >>> at_most_three_figures(0.8), at_most_three_figures(2.3456), at_most_three_figures(51440.0)
        ('0.8', '2.35', '51,440')
    """
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e6 else f"{value:.3g}"


def three_figures(value: float) -> str:
    """Format a metric with three significant figures, or as an integer from 1000 on.

    The monitor in the browser uses the same format (data/format.js).

    Example:
        >>> [three_figures(value) for value in (0.1, 2.3456, 7616.0, 1e-5, math.inf)]
        ['0.100', '2.35', '7,616', '1.00e-5', 'Inf']
    """
    if value == 0 or math.isnan(value):
        return "NaN" if value else "0"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    Example:
        >>> duration(42), duration(600), duration(7200)
        ('42 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_TIMES = (("ns", 1, 1e3), ("µs", 1e3, 0.9995e6), ("ms", 1e6, 999.5e6), ("s", 1e9, math.inf))  # unit, ns, limit in ns


def ms(ns: float) -> str:
    """Format a time in nanoseconds with a suitable unit, as the browser's monitor does (data/format.js).

    Example:
        >>> ms(51_234_567), ms(340_000), ms(2_050_000_000), ms(45), ms(0), ms(125e9)
        ('51.2 ms', '340 µs', '2.05 s', '45.0 ns', '0 ms', '2 min 5 s')
    """
    if ns == 0:
        return "0 ms"
    if abs(ns) >= 120e9:
        return f"{math.floor(ns / 60e9)} min {ns % 60e9 / 1e9:.0f} s"
    unit, of_ns = next((unit, of_ns) for unit, of_ns, below in _TIMES if abs(ns) < below)
    return f"{ns / of_ns:#.3g}".removesuffix(".") + f" {unit}"


def size(nbytes: float) -> str:
    """Format a size in bytes, with decimal prefixes (1 kB = 1000 B).

    Example:
        >>> size(512), size(4096), size(26_214_400)
        ('512 B', '4.1 kB', '26 MB')
    """
    value, unit = nbytes, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"


def files(count: int, nbytes: float) -> str:
    """Format a number of files with their size.

    Example:
        >>> files(1200, 4_200_000), files(1, 0)
        ('1,200 files (4.2 MB)', '1 file (0 B)')
    """
    return f"{count:,} file{'s' * (count != 1)} ({size(nbytes)})"


def percent(share: float) -> str:
    """Format a fraction (0 to 1) as a percentage.

    Example:
        >>> percent(0.724), percent(0.004), percent(0.0)
        ('72 %', '0.4 %', '0 %')
    """
    value = 100 * share
    return f"{value:.0f} %" if value >= 0.95 or value == 0 else f"{value:.1g} %"


def bundle_chars(data: Mapping[str, Any]) -> int:
    """Return the number of characters of all texts in a MIME bundle.

    Example:
        >>> bundle_chars({"text/plain": "abc", "text/html": "<b>"})
        6
    """
    return sum(len(value) for value in data.values() if isinstance(value, str))
