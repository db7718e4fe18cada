"""Check after a failed cell whether the ranks are still in step, and if not, form their group again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddp_notebook.errors import StartError
from ddp_notebook.launch.cluster import Check, Cluster
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.process import STORE
from ddp_notebook.messages.ranks import Probe, Vitals
from ddp_notebook.records.words import group_by_value, list_ranks
from ddp_notebook.run.cells.result import CellResult
from ddp_notebook.run.rank_requests import Questions

_ASK_S = 2.0  # time for idle ranks to report their state
_FORM_S = 60.0
_CALL_S = 1.0  # a call of session.client has this time to end before the group is formed
_CALL_ANSWER_S = 0.3  # ranks have this time to report such a call
_LOOK_S = 0.05


class Recovery:
    """Restores the process group.

    Args:
        cluster: the ranks.
        questions: sends requests to the ranks.
        on_replaced: called with each rank that gets a new process.
        heals: whether dead ranks are replaced automatically.
    """

    def __init__(
        self, cluster: Cluster, questions: Questions, on_replaced: Callable[[int], None], *, heals: bool
    ) -> None:
        self.replaced: list[int] = []  # ranks that the last healing replaced
        self.on_healed: Callable[[], None] = lambda: None
        self.on_moved: Callable[[int], None] = lambda _: None  # called with each rank that was moved to another host
        self._cluster = cluster
        self._questions = questions
        self._on_replaced = on_replaced
        self._heals = heals
        self._is_due = False  # the group must be formed when all ranks are idle and alive
        self._told: set[int] = set()  # dead ranks that were reported to the user

    def after(
        self, result: CellResult, pending: list[int], killed: list[int], busy: Collection[int], check: Check
    ) -> list[str]:
        """Recover from the end of a cell. Return notes for the user.

        Args:
            result: result of the cell.
            pending: ranks on which the cell has not ended.
            killed: unresponsive ranks that were killed; they are replaced.
            busy: ranks that are in this cell or an earlier one, so that no group can be formed.
            check: called often while the group is formed; a KeyboardInterrupt that it raises postpones this.
        """
        bad = [rank for rank, one in result.by_rank.items() if one.status not in ("ok", "running")]
        # the cell may have caught the error
        is_broken = any(one.group.get("is_cut") for one in result.by_rank.values())
        if not bad and not pending and not is_broken:
            return []
        if gone := self._cluster.gone:
            self._is_due = True
            are_all_killed = bool(killed) and set(gone) <= set(killed)
            return self._replace_killed(gone, check) if are_all_killed and not busy else self._report_dead(gone)
        if busy or self._cluster.unheard:
            self._is_due = True
            return []
        states = self._states(result)
        diverged = _divergence({rank: state for rank, state in states.items() if rank in result.by_rank})
        if len(states) < len(self._cluster.ranks) or not are_in_step(states):
            try:
                return [*self._try_to_form(check), *diverged]
            except KeyboardInterrupt:
                return ["the group was not formed again, since that was interrupted: the next cell forms it", *diverged]
        return diverged

    def _replace_killed(self, gone: list[int], check: Check) -> list[str]:
        """Replace unresponsive ranks that were killed. Return notes for the user."""
        try:
            notes = self.heal(check)
        except StartError as error:
            return [f"{error}. %ddp_heal tries again"]
        except KeyboardInterrupt:
            return [f"{list_ranks(gone)} died, and replacing was interrupted. %ddp_heal replaces dead ranks"]
        return [replaced_in_words(gone, len(self._cluster.ranks)), *notes]

    def _report_dead(self, gone: list[int]) -> list[str]:
        """Return a sentence about dead ranks that are not replaced now; [] if an earlier cell has reported them."""
        it = "it" if len(gone) == 1 else "them"
        if self._heals:
            return [f"{list_ranks(gone)} died. The next cell or %ddp_heal replaces {it}"]
        if self._told.issuperset(gone):
            return []
        self._told = set(gone)
        until = "; until then cells run on the remaining ranks, which cannot communicate"
        is_any_left = len(gone) < len(self._cluster.ranks)
        return [f"{list_ranks(gone)} died. %ddp_heal replaces {it}{until if is_any_left else ''}"]

    def what_was_left(self, busy: Collection[int], check: Check) -> list[str]:
        """Form the group before the next cell, if it was postponed or the store is dead.

        The next `new_group` needs a store. Return the notes of `form`.

        Raises:
            KeyboardInterrupt: raised by `check`.
        """
        cannot = self._cluster.gone or busy or self._cluster.unheard
        is_due = self._is_due or not self._cluster.pids("store")
        return self._try_to_form(check) if is_due and not cannot else []

    def _try_to_form(self, check: Check) -> list[str]:
        try:
            return self.form(check=check)
        except StartError as error:
            return [f"the group could not be formed again, and collectives cannot run: {error}"]

    def form(self, timeout_s: float = _FORM_S, check: Check = lambda: None) -> list[str]:
        """Form the group again. Return sentences about resources that were not restored, and about a replaced store.

        Raises:
            StartError: the group could not be formed.
            KeyboardInterrupt: raised by `check`; the next cell forms the group.
        """
        self._is_due = True
        self.check_calls(check)
        stores = self.stopped_stores()
        notes = self._cluster.form(time.monotonic() + timeout_s, check)
        self._is_due = False
        return [*notes, *stores]

    def check_calls(self, check: Check = lambda: None) -> None:
        """Wait a moment for calls of `session.client` to end, because a rank cannot join a group during such a call.

        Raises:
            StartError: a call has not ended.
            KeyboardInterrupt: raised by `check`.
        """
        until = time.monotonic() + _CALL_S
        while in_call := self.in_call():
            if time.monotonic() > until:
                are = "is" if len(in_call) == 1 else "are"
                raise StartError(
                    f"{list_ranks(in_call)} {are} in a call of session.client, and cannot join a group until it ends. "
                    "Wait for it, or end it with %ddp_interrupt, which keeps all variables; then try again"
                )
            check()
            time.sleep(_LOOK_S)

    def in_call(self) -> list[int]:
        """Return the ranks whose main thread is in a call of `session.client`, without ranks that do not answer."""
        heard = [rank for rank in self._cluster.alive if rank not in self._cluster.unheard]
        answers: dict[int, Vitals] = self._questions.ask_for(heard, lambda n: Probe(request=n), _CALL_ANSWER_S)
        return [rank for rank, vitals in answers.items() if vitals.client_call_s]

    def stopped_stores(self) -> list[str]:
        """Return a sentence for each stopped store, which the next group replaces."""
        pids = [process.pid for process in self._cluster.stopped([]) if process.kind == STORE]
        return [f"the store (process {pid}) was stopped, and was replaced; no variable is lost" for pid in pids]

    def heal(self, check: Check) -> list[str]:
        """Replace the dead ranks, and form the group of all ranks. Return sentences about resources that were not
        restored.

        Raises:
            StartError: a process or the group could not be started.
            KeyboardInterrupt: raised by `check`; the dead ranks are unchanged.
        """
        gone = self._cluster.gone
        self.check_calls(check)
        for rank in gone:
            self._on_replaced(rank)
        self._is_due = True
        were_on = {rank: self._cluster.process(rank).host for rank in gone}
        notes = self._cluster.replace(gone, time.monotonic() + _FORM_S, check)
        self.replaced = gone
        self._is_due = False
        self._told -= set(gone)
        for rank, host in were_on.items():
            if self._cluster.process(rank).host is not host:
                self.on_moved(rank)
        self.on_healed()
        return notes

    def resize(
        self,
        stay: Sequence[int],
        placement: Placement,
        check: Check,
        renumbered: Callable[[Mapping[int, int]], object],
    ) -> list[str]:
        """Change the number of ranks, see `Cluster.resize`. Return sentences about resources that were not restored.

        Raises:
            StartError: a process could not be started, and nothing was changed; or the group could not be formed, and
                the next cell forms it.
            KeyboardInterrupt: raised by `check`, with the same consequences.
        """

        def now_due(stayed: Mapping[int, int]) -> None:
            self._is_due = True
            self.replaced = list(range(len(stay), placement.world_size))
            renumbered(stayed)

        self.check_calls(check)
        self._told.clear()  # the rank numbers have changed
        notes = self._cluster.resize(stay, placement, time.monotonic() + _FORM_S, check, now_due)
        self._is_due = False
        return notes

    def _states(self, result: CellResult) -> dict[int, dict[str, Any]]:
        """Return the state of the groups by rank: from the end of the cell, or from a new request."""
        states = {rank: one.group for rank, one in result.by_rank.items() if one.group}
        others = [rank for rank in self._cluster.ranks if rank not in states]
        answers: dict[int, Vitals] = self._questions.ask_for(others, lambda n: Probe(request=n), _ASK_S)
        return states | {rank: vitals.group for rank, vitals in answers.items() if not vitals.unread}


def replaced_in_words(ranks: list[int], world_size: int) -> str:
    """Return a sentence about ranks that got a new process, with advice."""
    one = len(ranks) == 1
    whose = f"{list_ranks(ranks)} {'was' if one else 'were'} replaced and begin{'s' * one} without variables"
    copy = ", or copy them with %ddp_heal --from RANK" if len(ranks) < world_size else ""
    return f"{whose}: run the cells that define them again{copy}"


def are_in_step(states: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether the groups can be used unchanged.

    No group was aborted, no operation is pending, and all ranks have created the same number of groups. All members
    have started every collective, and every sent message has its receive.

    Args:
        states: state of the groups by rank, see `rank.group.network`.
    """
    if any(state["is_cut"] or state["is_busy"] for state in states.values()):
        return False
    if len({state["made"] for state in states.values()}) > 1:
        return False
    if not any(state["has_communicated"] for state in states.values()):
        return True
    if any(state["has_models"] for state in states.values()):  # a backward pass may be incomplete
        return False
    groups: dict[str, dict[int, Any]] = {}
    for rank, state in states.items():
        for name, counts in state["counts"].items():
            groups.setdefault(name, {})[rank] = counts
    return all(_is_even(counts) for counts in groups.values())


def _is_even(counts: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether the members of a group have started the same number of collectives, and every sent message has its
    receive.
    """
    if len({one["collective"] for one in counts.values()}) > 1:
        return False
    sent_to = {rank: sum(one["sent"].get(str(rank), 0) for one in counts.values()) for rank in counts}
    return all(sent_to[rank] == one["recv"] for rank, one in counts.items())


def _divergence(states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a sentence about ranks with different numbers of optimizer steps, or []."""
    steps = group_by_value({rank: str(state["steps"]) for rank, state in states.items()})
    if len(steps) < 2:
        return []
    parts = [f"{count} on {list_ranks(ranks)}" for count, ranks in steps.items()]
    kinds = {state["stepped"] for state in states.values() if state["steps"]}
    return [f"optimizer steps in this cell: {', '.join(parts)}. {_after_divergence(kinds)}"]


def _after_divergence(kinds: Collection[str]) -> str:
    """Return advice after different numbers of optimizer steps on the ranks.

    Args:
        kinds: how the parameters are distributed, see `Models.kind_of`.
    """
    if "sharded" in kinds:
        return (
            "The ranks hold parts of the parameters, and these parts are from different steps now. %ddp_check does not "
            "compare them. Load the last checkpoint, or make the model and the optimizer again"
        )
    if set(kinds) == {"ddp"}:
        return (
            "Parameters may differ now: %ddp_check lists them, and DDP(model.module) gives all ranks those of rank 0. "
            "Then make the optimizer again, because its own state differs too"
        )
    return (
        "Parameters may differ now: %ddp_check lists them. Load the last checkpoint, or make the model and the "
        "optimizer again"
    )
