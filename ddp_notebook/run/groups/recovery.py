"""After a cell that did not end well: are the ranks still in step, and if not, forming their group anew."""

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

_ASK_S = 2.0  # what idle ranks get to say how they are
_FORM_S = 60.0
_CALL_S = 1.0  # a call of session.client has this time to end before a group forms
_CALL_ANSWER_S = 0.3  # ranks have this time to report such a call
_LOOK_S = 0.05


class Recovery:
    """Brings the ranks together again.

    Args:
        cluster: the ranks.
        questions: to ask them.
        on_replaced: told of each rank that has a new process.
        heals: whether ranks that have died are replaced by themselves.
    """

    def __init__(
        self, cluster: Cluster, questions: Questions, on_replaced: Callable[[int], None], *, heals: bool
    ) -> None:
        self.replaced: list[int] = []  # by the last healing
        self.on_healed: Callable[[], None] = lambda: None
        self.on_moved: Callable[[int], None] = lambda _: None  # told of each rank that is on another host then
        self._cluster = cluster
        self._questions = questions
        self._on_replaced = on_replaced
        self._heals = heals
        self._is_due = False  # the group has to be formed, once the ranks are idle and alive
        self._told: set[int] = set()  # ranks that are gone, as the user knows

    def after(
        self, result: CellResult, pending: list[int], killed: list[int], busy: Collection[int], check: Check
    ) -> list[str]:
        """Do what the end of a cell calls for. Returns what the user has to know.

        Args:
            result: of the cell.
            pending: ranks on which it has not ended.
            killed: ranks that were ended since they did not answer; they are replaced.
            busy: ranks that are in this cell or an earlier one: no group forms with them.
            check: called often while the group forms; a KeyboardInterrupt that it raises leaves that for later.
        """
        bad = [rank for rank, one in result.by_rank.items() if one.status not in ("ok", "running")]
        is_broken = any(one.group.get("is_cut") for one in result.by_rank.values())  # the cell may have caught it
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
        """Replace ranks that were ended since they did not answer. Returns what the user has to know."""
        try:
            notes = self.heal(check)
        except StartError as error:
            return [f"{error}. %ddp_heal tries again"]
        except KeyboardInterrupt:
            return [f"{list_ranks(gone)} died, and replacing was interrupted. %ddp_heal replaces dead ranks"]
        return [replaced_in_words(gone, len(self._cluster.ranks)), *notes]

    def _report_dead(self, gone: list[int]) -> list[str]:
        """A sentence about dead ranks that are not replaced now; none if an earlier cell has reported them."""
        it = "it" if len(gone) == 1 else "them"
        if self._heals:
            return [f"{list_ranks(gone)} died. The next cell begins with replacing {it}, and so does %ddp_heal"]
        if self._told.issuperset(gone):
            return []
        self._told = set(gone)
        until = "; until then cells run on the remaining ranks, which cannot communicate"
        is_any_left = len(gone) < len(self._cluster.ranks)
        return [f"{list_ranks(gone)} died. %ddp_heal replaces {it}{until if is_any_left else ''}"]

    def what_was_left(self, busy: Collection[int], check: Check) -> list[str]:
        """Form the group before the next cell if an earlier cell was in the way of it, or if the store is gone: the
        next `new_group` needs one. Returns what `form` does.

        Raises:
            KeyboardInterrupt: `check` has raised it.
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
        """Form the group again. Returns sentences about resources that were not restored, and about a replaced store.

        Raises:
            StartError: it did not form.
            whatever `check` raises: the next cell forms it.
        """
        self._is_due = True
        self.check_calls(check)
        stores = self.stopped_stores()
        notes = self._cluster.form(time.monotonic() + timeout_s, check)
        self._is_due = False
        return [*notes, *stores]

    def check_calls(self, check: Check = lambda: None) -> None:
        """Wait a moment for calls of `session.client` to end: the main thread of a rank joins no group during one.

        Raises:
            StartError: a call goes on.
            whatever `check` raises.
        """
        until = time.monotonic() + _CALL_S
        while in_call := self.in_call():
            if time.monotonic() > until:
                are = "is" if len(in_call) == 1 else "are"
                raise StartError(
                    f"{list_ranks(in_call)} {are} in a call of session.client, and cannot join a group before it ends. "
                    "Wait for it, or end it with %ddp_interrupt, which keeps all variables; then try again"
                )
            check()
            time.sleep(_LOOK_S)

    def in_call(self) -> list[int]:
        """The ranks whose main thread is in a call of `session.client`, as far as they answer."""
        heard = [rank for rank in self._cluster.alive if rank not in self._cluster.unheard]
        answers: dict[int, Vitals] = self._questions.ask_for(heard, lambda n: Probe(request=n), _CALL_ANSWER_S)
        return [rank for rank, vitals in answers.items() if vitals.client_call_s]

    def stopped_stores(self) -> list[str]:
        """Return a sentence for a store that is stopped: the next group gets another one."""
        pids = [process.pid for process in self._cluster.stopped([]) if process.kind == STORE]
        return [f"the store (process {pid}) was stopped, and was replaced; no variable is lost" for pid in pids]

    def heal(self, check: Check) -> list[str]:
        """Replace the ranks that are gone, and form the group of all. Returns what could not be had again.

        Raises:
            StartError: a process or the group did not come up.
            whatever `check` raises: they are gone as before.
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
        """More or fewer ranks, see `Cluster.resize`. Returns what could not be had again.

        Raises:
            StartError: a process did not come up, and nothing was changed; or the group did not form, and the next cell
                forms it.
            whatever `check` raises: the same holds.
        """

        def now_due(stayed: Mapping[int, int]) -> None:
            self._is_due = True
            self.replaced = list(range(len(stay), placement.world_size))
            renumbered(stayed)

        self.check_calls(check)
        self._told.clear()  # they have other numbers
        notes = self._cluster.resize(stay, placement, time.monotonic() + _FORM_S, check, now_due)
        self._is_due = False
        return notes

    def _states(self, result: CellResult) -> dict[int, dict[str, Any]]:
        """The state of the groups by rank: what ranks said at the end of the cell, or say now."""
        states = {rank: one.group for rank, one in result.by_rank.items() if one.group}
        others = [rank for rank in self._cluster.ranks if rank not in states]
        answers: dict[int, Vitals] = self._questions.ask_for(others, lambda n: Probe(request=n), _ASK_S)
        return states | {rank: vitals.group for rank, vitals in answers.items() if not vitals.unread}


def replaced_in_words(ranks: list[int], world_size: int) -> str:
    """What has happened to ranks that got a new process, and what to do."""
    one = len(ranks) == 1
    whose = f"{list_ranks(ranks)} {'was' if one else 'were'} replaced and begin{'s' * one} without variables"
    copy = ", or copy them with %ddp_heal --from RANK" if len(ranks) < world_size else ""
    return f"{whose}: run the cells that define them again{copy}"


def are_in_step(states: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the groups can be used as they are: none was cut, nothing is under way, all ranks have made as many,
    every collective was begun by all members, and every message has its receive.

    Args:
        states: of the groups, by rank, see `rank.group.network`.
    """
    if any(state["is_cut"] or state["is_busy"] for state in states.values()):
        return False
    if len({state["made"] for state in states.values()}) > 1:
        return False
    if not any(state["has_communicated"] for state in states.values()):
        return True
    if any(state["has_models"] for state in states.values()):  # a backward may have been left half done
        return False
    groups: dict[str, dict[int, Any]] = {}
    for rank, state in states.items():
        for name, counts in state["counts"].items():
            groups.setdefault(name, {})[rank] = counts
    return all(_is_even(counts) for counts in groups.values())


def _is_even(counts: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the members of one group have begun as many collectives, and every message has its receive."""
    if len({one["collective"] for one in counts.values()}) > 1:
        return False
    sent_to = {rank: sum(one["sent"].get(str(rank), 0) for one in counts.values()) for rank in counts}
    return all(sent_to[rank] == one["recv"] for rank, one in counts.items())


def _divergence(states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Ranks that have taken different numbers of optimizer steps."""
    steps = group_by_value({rank: str(state["steps"]) for rank, state in states.items()})
    if len(steps) < 2:
        return []
    parts = [f"{count} on {list_ranks(ranks)}" for count, ranks in steps.items()]
    kinds = {state["stepped"] for state in states.values() if state["steps"]}
    return [f"optimizer steps in this cell: {', '.join(parts)}. {_after_divergence(kinds)}"]


def _after_divergence(kinds: Collection[str]) -> str:
    """Return advice after different numbers of optimizer steps on the ranks.

    Args:
        kinds: how the ranks' parameters are spread, see `Models.kind_of`.
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
