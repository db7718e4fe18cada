"""Features of the notebook, which extend the core.

A feature is declared once, as `FEATURE` in the module that `FEATURES` names. That module is imported with the magics,
so its functions import their dependencies when they are called. `rank/hooks` lists the features of ranks, some with the
same names. `run/session_hooks` has the hooks of a session. They are called in the order of `FEATURES`:

- `jobs` comes first. So no job starts during the stop of a session, before the recording is complete.
- `recording` comes before `findings` and `nan`, which add lines to its report, and before `monitor`, which shows it.
- `keep` comes after `jobs` and `recording`, because it restores their state from an earlier notebook.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from IPython.core.magic import cell_magic, line_magic

from ddp_notebook.line_parser import LineParser, line_of
from ddp_notebook.records import switches
from ddp_notebook.run.interrupted import tells_interrupt

FEATURES = {
    "jobs": "ddp_notebook.run.jobs.feature",
    "recording": "ddp_notebook.run.record.feature",
    "findings": "ddp_notebook.run.findings.feature",
    "divergence": "ddp_notebook.run.divergence.feature",
    "forecast": "ddp_notebook.run.forecast.feature",
    "nan": "ddp_notebook.run.nan.feature",
    "monitor": "ddp_notebook.widgets.feature",
    "resize": "ddp_notebook.run.resize.feature",
    "survive": "ddp_notebook.run.survive.feature",
    "faults": "ddp_notebook.run.faults.feature",
    "twice": "ddp_notebook.run.twice.feature",
    "sharding": "ddp_notebook.run.sharding.feature",
    "verify": "ddp_notebook.run.verify.feature",
    "completion": "ddp_notebook.run.completion.feature",
    "whos": "ddp_notebook.run.whos.feature",
    "debug": "ddp_notebook.run.debug.feature",
    "files": "ddp_notebook.run.files.feature",
    "keep": "ddp_notebook.run.kept.feature",
    "torchrun": "ddp_notebook.torchrun.feature",
}
T = TypeVar("T", bound=type)
Commands = Callable[[], Any]  # imports and returns the module `session_commands`


@dataclass(frozen=True, slots=True)
class FeatureMagic:
    """A magic of a feature. The docstring of `run` is its help.

    Args:
        line: returns the declaration of its line; all calls return the same object.
        run: called with a function that returns `session_commands`, with the line, and with the cell of a cell magic.
        interrupted: the message after an interrupt.
        section: its section in `%ddp_help`.
        after: the magic before it in that section; "": it is appended to its section.
        is_cell: it is a cell magic, written above a cell.
    """

    line: Callable[[], LineParser]
    run: Callable[..., None]
    interrupted: str
    section: str
    after: str = ""
    is_cell: bool = False


@dataclass(frozen=True, slots=True)
class NotebookFeature:
    """Declaration of a feature in the notebook.

    Args:
        magics: magics by name.
        session: imports and returns the `SessionFeature` subclass of the feature; None: it has none.
    """

    magics: Mapping[str, FeatureMagic] = field(default_factory=dict)
    session: Callable[[], type[Any]] | None = None


def load() -> dict[str, NotebookFeature]:
    """Import the declarations of the enabled features. Return them by name, in the order of `FEATURES`."""
    off = switches.without()
    return {name: importlib.import_module(module).FEATURE for name, module in FEATURES.items() if name not in off}


def add_magics(commands: Commands) -> Callable[[T], T]:
    """Decorate a class of magics: add the magics of the enabled features.

    Args:
        commands: imports and returns the module `session_commands`.
    """

    def decorate(magics: T) -> T:
        for feature in load().values():
            for name, magic in feature.magics.items():
                declare = cell_magic if magic.is_cell else line_magic
                run: Any = declare(line_of(magic.line)(_with_commands(magic.run, commands)))
                run.section, run.after = magic.section, magic.after  # `magic_help` reads these
                setattr(magics, name, tells_interrupt(magic.interrupted)(run))
        return magics

    return decorate


def _with_commands(run: Callable[..., None], commands: Commands) -> Callable[..., None]:
    def magic(_: Any, line: str, *cell: str) -> None:
        run(commands, line, *cell)

    signature = inspect.signature(magic)  # not that of `run`: the first argument of a method is its object
    functools.update_wrapper(magic, run).__signature__ = signature  # type: ignore[attr-defined]
    return magic
