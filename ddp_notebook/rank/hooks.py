"""Hooks through which features extend the core of a rank.

The core starts the rank, runs cells, sends their output, stops them and forms the group. Everything else is a feature.
A feature is a subclass of `Feature` in its own module, which overrides the hooks that it needs. `FEATURES` lists these
modules in the order in which their hooks are called; only `cell_ends` is called in the opposite order. The order
matters here:

- `faults` comes first. A fault at the first line of a cell strikes before anything else of that cell is prepared. At
  the end of a cell, its recording ends before `faults` reports a fault that did not strike.
- `sharding` comes before `recording`. Both wrap DTensor's autograd functions. The recording's wrapper must be the outer
  one, since it notes the module that sharding reads.
- `recording` comes before `findings`, which follows its steps, and before `rpc`, which writes its calls to the
  recording's event buffer.
- `survive` comes after those that prepare a cell. In a new process it waits for variables of another rank before a
  cell's code runs.
- `debug` comes after all features that run code around a cell, so a debugger does not stop in it.
- `torch_errors` comes last. Other features explain errors of their own subject first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp_notebook.rank.variables.between import BetweenSteps
from ddp_notebook.records import switches
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import contextlib

if TYPE_CHECKING:
    from ddp_notebook.messages.encoding import Message
    from ddp_notebook.messages.ranks import Form, RunCell
    from ddp_notebook.rank.group.network import Network
    from ddp_notebook.rank.record.rank_recording import RankRecording

FEATURES = {
    "faults": "ddp_notebook.rank.faults",
    "sharding": "ddp_notebook.rank.sharding.feature",
    "recording": "ddp_notebook.rank.record.feature",
    "findings": "ddp_notebook.rank.findings.feature",
    "guard": "ddp_notebook.rank.group.guard.feature",
    "rpc": "ddp_notebook.rank.rpc.feature",
    "files": "ddp_notebook.rank.files",
    "resize": "ddp_notebook.rank.resize.feature",
    "twice": "ddp_notebook.rank.twice.feature",
    "survive": "ddp_notebook.rank.survive.feature",
    "verify": "ddp_notebook.rank.verify.feature",
    "completion": "ddp_notebook.rank.completion.feature",
    "whos": "ddp_notebook.rank.whos.feature",
    "debug": "ddp_notebook.rank.debug.feature",
    "torch_errors": "ddp_notebook.rank.torch_errors.catalogue",
}


@dataclass
class Core:
    """Parts of the core that features use.

    Args:
        network: the groups, their operations, and the release from blocked waits.
        send: sends a message to the notebook, from any thread.
        answer: answers a request with bytes. Takes the number of the request, the bytes, notes about them as JSON, and
            the name of shared memory for large ones.
        place: returns the rank's place in the group; None before it has one.
        take_place: takes another place, in the main thread.
        running: returns the running cell's number and its start time; None if no cell runs.
        is_busy: returns whether too many messages wait for the notebook.
        hand_on: handles a message as if it had just arrived.
    """

    network: Network
    send: Callable[[Message], None]
    answer: Callable[[int, list[bytes], str, str], None]
    place: Callable[[], Form | None]
    take_place: Callable[[Form], None]
    running: Callable[[], tuple[int, float] | None]
    is_busy: Callable[[], bool]
    hand_on: Callable[[Message], None]
    between: BetweenSteps = field(default_factory=BetweenSteps, init=False)  # tasks of the core, run by recording
    update_cell_hooks: Callable[[], None] = field(default=lambda: None, init=False)  # see `Feature.watches_cells`
    unheld_limits: Callable[[], list[str]] = field(default=lambda: [], init=False)  # see `Feature.unheld_limits`
    shell: Any = field(default=None, init=False)  # the InteractiveShell, from `engine_ready` on
    stdin: Any = field(default=None, init=False)  # the `Stdin` of cells, from `engine_ready` on
    recording: RankRecording | None = field(default=None, init=False)  # None if that feature is off


class Feature:
    """One feature of a rank. The methods are hooks; a feature overrides those that it needs.

    A feature is made in the main thread when the rank starts, before there is an engine or a group.
    """

    watches_cells = True  # False: no `cell_begins` and `cell_ends`; call `core.update_cell_hooks` after a change

    def __init__(self, core: Core) -> None:
        self.core = core

    @classmethod
    def prepare(cls) -> Iterable[Callable[..., Any]]:
        """Do slow work before the fork. Return the library functions that the feature will replace."""
        return ()

    def engine_ready(self) -> None:
        """Prepare for cells. Called when the engine has its shell."""

    # ---- cells, in the main thread

    def cell_begins(self, cell: RunCell) -> None:
        """Prepare for a cell. Called before its code runs."""

    def debugged_cell_begins(self, cell: RunCell) -> None:
        """Prepare for a cell in which a debugger may stop ranks. Called on all its ranks, after `cell_begins`."""

    def cell_code(self, code: str) -> str:
        """Return the code to run in place of a cell's code."""
        return code

    def cell_ends(self) -> None:
        """Clean up after a cell. An `Exception` is reported under the cell, whose result does not change."""

    def cell_facts(self) -> Sequence[Sequence[Any]]:
        """Return facts about the ended cell for `CellDone`, as JSON values: name, step and details of each."""
        return ()

    def variables(self) -> Mapping[str, object]:
        """Return variables that each cell finds, unless the user has other variables with these names."""
        return {}

    def cell_failed(self, error: BaseException) -> None:
        """Note facts about the error of a cell, while the frames of its traceback exist."""

    def keeps_frames(self, error: BaseException) -> bool:
        """Return whether to keep the frames of a failed cell. The feature must clear them later. Called at its end."""
        return False

    def explain(self, error: BaseException) -> str:
        """Return a sentence about the cause of a cell's error; "" if there is none."""
        return ""

    # ---- groups

    def group_forms(self, place: Form) -> None:
        """Prepare for a group that is about to form, also for a re-formed one. Called in the thread that forms it."""

    def group_formed(self, place: Form) -> None:
        """Act on a newly formed group, before operations are allowed again. Called in the thread that forms it."""

    def ranks_lost(self) -> None:
        """Act on the death of other ranks. Called in the agent's thread."""

    # ---- messages and questions

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        """Return handlers that are called in the agent's thread, even while the main thread is stuck.

        If a handler returns True, no further handler gets the message.
        """
        return {}

    def in_main_thread(self) -> Mapping[type[Message], Callable[[Any], object]]:
        """Return handlers that are called in the main thread's event loop."""
        return {}

    def questions(self) -> Mapping[type[Message], Callable[[Any], Coroutine[Any, Any, None]]]:
        """Return handlers that the kernel calls between two cells."""
        return {}

    def vitals(self) -> Mapping[str, Any]:
        """Return fields of `Vitals`. Called from any thread."""
        return {}

    def facts(self, namespace: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return facts for `Check` besides those of variables, as JSON values; empty if there are none."""
        return {}

    def unheld_limits(self) -> Sequence[str]:
        """Return descriptions of waits whose time limit runs on while a debugger stops a rank. Called in other
        threads."""
        return ()

    def on_asked(self, flush: bool) -> None:
        """Act on a notebook's request for the time. With `flush`, send buffered data first. Called in the agent's
        thread."""


class Hooks:
    """Features of this rank, and the methods that override each hook. Made in the main thread."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._features = {name: kind(core) for name, kind in load().items()}
        core.update_cell_hooks = self._update_cell_hooks
        core.unheld_limits = self._unheld_limits
        self._update_cell_hooks()
        self.cell_code = self._of("cell_code")
        self.debugged_cell_begins = self._of("debugged_cell_begins")
        self.keeps_frames = self._of("keeps_frames")
        self.cell_facts = self._of("cell_facts")
        self.group_forms = self._of("group_forms")
        self.group_formed = self._of("group_formed")
        self.ranks_lost = self._of("ranks_lost")
        self.vitals = self._of("vitals")
        self.facts = self._of("facts")
        self.on_asked = self._of("on_asked")
        self._limits = self._of("unheld_limits")
        self._cell_failed = self._of("cell_failed")
        self._explain = self._of("explain")
        self._variables = self._of("variables")

    def _update_cell_hooks(self) -> None:
        watching = {name: one for name, one in self._features.items() if one.watches_cells}
        self.cell_begins = [
            one.cell_begins for one in watching.values() if type(one).cell_begins is not Feature.cell_begins
        ]
        self.cell_ends = [
            (name, one.cell_ends)
            for name, one in reversed(watching.items())
            if type(one).cell_ends is not Feature.cell_ends
        ]

    def _unheld_limits(self) -> list[str]:
        return [words for limits in self._limits for words in limits()]

    def _of(self, hook: str) -> list[Callable[..., Any]]:
        """Return the methods of the features that override a hook. A hook without overrides costs nothing."""
        features = self._features.values()
        return [getattr(one, hook) for one in features if getattr(type(one), hook) is not getattr(Feature, hook)]

    def engine_ready(self, shell: Any) -> None:
        """Store the shell and call the `engine_ready` hooks."""
        self.core.shell = shell
        for ready in self._of("engine_ready"):
            ready()

    def handlers(self, hook: str) -> list[tuple[type[Message], Callable[[Any], Any]]]:
        """Return the message handlers of features, for the hook `at_once`, `in_main_thread` or `questions`."""
        return [pair for messages in self._of(hook) for pair in messages().items()]

    def variables(self) -> dict[str, object]:
        """Return the variables that features add to each cell."""
        return {name: value for variables in self._variables for name, value in variables().items()}

    def cell_failed(self, error: BaseException) -> None:
        """Let the features note facts about the error of a cell."""
        for failed in self._cell_failed:
            failed(error)

    def explain(self, error: BaseException) -> str:
        """Return the first feature's sentence about the cause of an error; "" if no feature has one."""
        return next(filter(None, (explain(error) for explain in self._explain)), "")


def load() -> dict[str, type[Feature]]:
    """Import the enabled features. Return their classes in the order of `FEATURES`."""
    off = switches.without()
    return {name: importlib.import_module(module).FEATURE for name, module in FEATURES.items() if name not in off}


def prepare() -> list[Callable[..., Any]]:
    """Import the features before a fork. Return the functions that they will replace."""
    replaced: list[Callable[..., Any]] = []
    for feature in load().values():
        with contextlib.suppress(Exception):  # the rank reports the error
            replaced += feature.prepare()
    return replaced
