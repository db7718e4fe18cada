"""Two solutions of each puzzle: a naive one that misses the target, and a good one.

They are in the modules `solutions_*` of this folder, which are found by their names. `PAIRS` maps the name of a puzzle
to both, and `LONG_PAIRS` to both and a number of ranks, for puzzles that take longer or need more than two ranks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
LONG_PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {}
for _name in sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])):
    if _name.startswith("solutions_"):
        _module = import_module(f"tests.lessons.{_name}")
        PAIRS |= getattr(_module, "PAIRS", {})
        LONG_PAIRS |= getattr(_module, "LONG_PAIRS", {})
