"""Compare the values of variables on ranks, based on the ranks' answers."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.messages.ranks import Check, Checked
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.cells import Cells
from ddp_notebook.run.consistency.compared_entries import (
    is_compared,
    list_names,
    may_differ,
    notes_on,
    summarize,
    variable_of,
)
from ddp_notebook.run.consistency.differences import Difference, absence_of, difference_of, measured
from ddp_notebook.run.consistency.disagreements import Facts, between, read_by_all, unread, variables_of
from ddp_notebook.run.groups.liveness import Liveness
from ddp_notebook.run.rank_requests import Questions
from ddp_notebook.run.values.exchange import check_name

_ANSWER_S = 1.0  # time for answers that a report can do without
_MOST_SHOWN = 12  # shown entries that differ
_LONGEST = 60  # characters of a mistake that was shown before
MISTAKES = ""  # entry for mistakes that may be the same on all ranks
SHARE = "share"  # kind of entries that are expected to differ: the part of the data that a rank reads
WITHIN = "within"  # kind of entries that only state that another variable contains this one
_OF_PROCESS = ("version", "setting", "random")
_EARLIER = "of models that only earlier cells trained:"
_OTHER_LAYERS = "ranks have trained models with other layers"
_OF_ONE_STAGE = "of one pipeline stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Result of a comparison of ranks. Its `repr` is the text that `%ddp_check` shows.

    Example:
        >>> session.check("model")
        2 ranks agree: 2 parameters (4 elements)
    """

    ranks: tuple[int, ...]
    differences: tuple[Difference, ...] = ()
    compared: int = 0  # number of entries
    same: str = ""  # description of equal entries
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()  # possible causes of differences
    mistakes: tuple[str, ...] = ()  # mistakes that may exist although ranks agree
    earlier: frozenset[str] = frozenset()  # variables that only earlier cells trained; shown last
    known: frozenset[str] = frozenset()  # findings that were shown before, folded to one line

    @property
    def agrees(self) -> bool:
        return not self.differences

    def without(self, busy: Sequence[int], gone: Sequence[int]) -> Agreement:
        """Return a copy with notes about ranks that were not compared: busy ranks and dead ranks."""
        reasons = (("in a cell", busy), ("without a process", gone))
        notes = [
            f"{list_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {why}: not asked"
            for why, ranks in reasons
            if ranks
        ]
        return replace(self, notes=(*self.notes, *notes))

    @property
    def differing_entries(self) -> tuple[str, ...]:
        """Return the shown tensors whose elements differ, for a request of samples."""
        shown = (difference for ones, _ in self._shown().values() for difference in ones)
        return tuple(one.entry for one in shown if one.is_inside and one.elements)

    def with_samples(self, by_rank: Mapping[int, Mapping[str, Sequence[float]]]) -> Agreement:
        """Return a copy with the size of the differences.

        Args:
            by_rank: results of `rank.variables.check.samples` for `differing_entries`, from one rank per set of equal
                ranks, or from all.
        """
        return replace(self, differences=tuple(measured(one, by_rank) for one in self.differences))

    @property
    def findings(self) -> dict[str, str]:
        """Return the text of each finding: the differences by variable, and the mistakes."""
        found = {name: "\n".join(map(repr, ones)) for name, ones in self._by_variable().items()}
        return {**found, **{mistake: mistake for mistake in self.mistakes}}

    def folded(self, known: Mapping[str, str]) -> Agreement:
        """Return a copy whose text names findings only that have the same text in `known`."""
        return replace(self, known=frozenset(key for key, text in self.findings.items() if known.get(key) == text))

    def __repr__(self) -> str:
        wrong = [f"wrong on {mistake}" for mistake in self.mistakes if mistake not in self.known]
        before = []
        if count := len(self.known):
            names = [key for key in self.findings if key in self.known and key not in self.mistakes]
            names += [textwrap.shorten(one, _LONGEST, placeholder=" ...") for one in self.mistakes if one in self.known]
            before = [f"{count} finding{'s' * (count > 1)} as before: {list_names(names)} (%ddp_check NAME shows all)"]
        return "\n".join([self._text, *wrong, *before])

    @property
    def _text(self) -> str:
        n = len(self.ranks)
        if n < 2:
            return "1 rank: nothing to compare" if n else "no ranks: nothing to compare"
        if self.agrees:
            said = f"{n} ranks agree: {self.same}" if self.same else f"{n} ranks have nothing that can be compared"
            return "; ".join([said, *self.notes])
        nowhere = [repr(one) for one in self.differences if one.is_nowhere]
        differing = len(self.differences) - len(nowhere)
        if not differing:
            agreed = [f"{n} ranks agree: {self.same}"] if self.same else []
            return "; ".join([*nowhere, *agreed, *self.notes])
        lines = [f"{n} ranks differ in {differing} of {self.compared - len(nowhere)} entries:", *self._lines()]
        lines += [f"  {hint}" for hint in self.hints]
        rest = [f"the rest agrees: {self.same}"] if self.same else []
        return "\n".join([*lines, "; ".join([*rest, *self.notes])]).rstrip()

    def _lines(self) -> list[str]:
        """Return the lines of the differences that are not known, with those of earlier cells last."""
        lines: list[str] = []
        left_out: list[str] = []
        for name, (shown, more) in self._shown().items():
            if name in self.earlier and f"  {_EARLIER}" not in lines:
                lines.append(f"  {_EARLIER}")
            lines += [f"  {difference}" for difference in shown]
            if shown and more:
                lines.append(f"  ... and {more} more of {name}")
            elif more:
                left_out.append(name)
        if left_out:
            lines.append(f"  ... and of {list_names(left_out)}")
        return lines

    def _by_variable(self) -> dict[str, list[Difference]]:
        of: dict[str, list[Difference]] = {}
        for difference in self.differences:
            of.setdefault(variable_of(difference.entry), []).append(difference)
        return of

    def _shown(self) -> dict[str, tuple[list[Difference], int]]:
        """Return, by variable, the differences to show, a few of each, and the number of others.

        Variables of earlier cells get the lines that the others leave.
        """
        of = {name: ones for name, ones in self._by_variable().items() if name not in self.known}
        limits, left = dict.fromkeys(of, 0), _MOST_SHOWN
        for is_earlier in (False, True):
            some = [name for name in of if (name in self.earlier) == is_earlier]
            while left and (names := [name for name in some if limits[name] < len(of[name])]):
                for name in names[:left]:
                    limits[name] += 1
                    left -= 1
        return {name: (ones[: limits[name]], len(ones) - limits[name]) for name, ones in of.items()}


def compare(
    by_rank: Mapping[int, Mapping[str, Mapping[str, Any]]], names: Sequence[str] = (), *, is_whole: bool = True
) -> Agreement:
    """Compare the results of `rank.variables.summary.fingerprints` of all ranks.

    Args:
        by_rank: results of the ranks that answered.
        names: the variables to which the results belong; empty: all that must be equal on all ranks.
        is_whole: True if these are all ranks of the session.
    """
    ranks = sorted(by_rank)
    of_ranks = {rank: by_rank[rank].get(MISTAKES, {}) for rank in ranks}
    steps = _last_steps(of_ranks)
    earlier = frozenset() if names else _earlier_variables(steps)
    mistakes, old = _split_mistakes(between(of_ranks, names), of_ranks, earlier)
    shares = {rank: _of_kind(by_rank[rank], SHARE) for rank in ranks}
    if is_whole:
        mistakes += unread(shares)
    comparison = _Comparison(
        facts={rank: _without(by_rank[rank], SHARE, WITHIN) for rank in ranks},
        within={rank: _of_kind(by_rank[rank], WITHIN) for rank in ranks},
        is_strict=bool(names),
    )
    comparison.compare_all()
    same, real = comparison.same, comparison.real_differences
    if not names:
        for one in _with_other_layers(real, of_ranks):
            comparison.by_design.setdefault(_OTHER_LAYERS, []).append(one)
        others = comparison.by_design.get(_OTHER_LAYERS, [])
        real = tuple(one for one in real if variable_of(one.entry) not in others and not _is_input(one, steps))
        real = tuple(_by_importance(real, steps, earlier))
    notes = [*notes_on(same), *may_differ(comparison.by_design)]
    if comparison.has_only_process_state:
        notes.append("no modules, optimizers or data were found")
    notes += _random_notes(comparison.differences, same)
    if is_whole and len(ranks) > 1 and (loaders := read_by_all(shares)):
        notes.append(f"each rank reads all of {list_names(loaders)}, without a DistributedSampler")
    compared = len(real) + sum(map(len, comparison.by_design.values()))
    compared += sum(fact["kind"] != "random" and is_compared(fact) for fact in same.values())
    return Agreement(
        ranks=tuple(ranks),
        differences=real,
        compared=compared,
        same=summarize(same),
        notes=tuple(notes),
        hints=tuple(may_differ(comparison.expected)),
        mistakes=(*mistakes, *old),
        earlier=earlier,
    )


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Sorts the entries of all ranks into different and equal ones.

    Args:
        facts: by rank, in order: entries that can be compared.
        within: by rank: entries that only state that another variable contains this one.
        is_strict: entries that may differ by design are differences too.
    """

    facts: Mapping[int, Mapping[str, Mapping[str, Any]]]
    within: Mapping[int, Mapping[str, str]]
    is_strict: bool = False
    by_design: dict[str, list[str]] = field(default_factory=dict)  # entries that may differ, and do, by reason
    expected: dict[str, list[str]] = field(default_factory=dict)  # the same ones, if they are differences
    differences: list[Difference] = field(default_factory=list)
    same: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # facts of one rank, by entry

    def compare_all(self) -> None:
        """Compare each variable."""
        by_variable: dict[str, list[str]] = {}
        for entry in dict.fromkeys(entry for facts in self.facts.values() for entry in facts):
            by_variable.setdefault(variable_of(entry), []).append(entry)
        for variable, entries in by_variable.items():
            self._compare_variable(variable, entries)

    def _compare_variable(self, variable: str, entries: Sequence[str]) -> None:
        facts = self.facts
        holders = [rank for rank in facts if any(_is_there(facts[rank].get(entry)) for entry in entries)]
        having = [rank for rank in facts if rank in holders or variable in self.within[rank]]
        if self._compare_stages(entries, holders):
            return
        if absent := [rank for rank in facts if rank not in having]:
            self.differences.append(absence_of(variable, facts, having, absent))
        whole = difference_of(variable, {rank: facts[rank].get(variable) for rank in holders})
        # a variable that is a model on one rank and None on another differs once, not once per parameter
        if whole is not None:
            holders = [rank for rank in holders if any(e != variable and e in facts[rank] for e in entries)]
            self.differences.append(whole)
        if holders:
            self._compare_entries([entry for entry in entries if entry != variable or whole is None], holders)

    def _compare_stages(self, entries: Sequence[str], holders: Sequence[int]) -> bool:
        """Compare a variable that has pipeline stages. Ranks have different layers, and maybe different variables.

        Returns:
            Whether an entry belongs to a stage.
        """
        facts = self.facts
        stage_of = {entry: {rank: _part(facts[rank].get(entry)) for rank in holders} for entry in entries}
        stages = {stage for by_rank in stage_of.values() for stage in by_rank.values()} - {""}
        for stage in sorted(stages):
            own = [entry for entry in entries if stage in stage_of[entry].values()]
            ranks = [rank for rank in holders if any(stage_of[entry][rank] == stage for entry in own)]
            if len(ranks) > 1:
                self._compare_entries(own, ranks)
            else:
                self.same |= {entry: {**facts[ranks[0]][entry], "skipped": _OF_ONE_STAGE} for entry in own}
        if stages:
            others = [entry for entry in entries if not any(stage_of[entry].values())]
            self._compare_entries(others, [rank for rank in holders if any(entry in facts[rank] for entry in others)])
        return bool(stages)

    def _compare_entries(self, entries: Sequence[str], holders: Sequence[int]) -> None:
        """Compare entries of one variable between the ranks that have it."""
        for entry in entries:
            facts = {rank: self.facts[rank].get(entry) for rank in holders if entry not in self.within[rank]}
            reason = next((fact["may_differ"] for fact in facts.values() if fact and "may_differ" in fact), "")
            if (difference := difference_of(entry, facts)) is None:
                self.same[entry] = next(fact for fact in facts.values() if fact is not None)
            elif reason and difference.is_inside and not self.is_strict:
                self.by_design.setdefault(reason, []).append(entry)
            else:
                self.differences.append(difference)
                if reason:
                    self.expected.setdefault(reason, []).append(entry)

    @property
    def real_differences(self) -> tuple[Difference, ...]:
        """Return the differences except those of the random state, which is expected to differ."""
        return tuple(one for one in self.differences if one.kind != "random")

    @property
    def has_only_process_state(self) -> bool:
        """Return whether no rank has modules, optimizers or data."""
        kinds = {fact["kind"] for facts in self.facts.values() for fact in facts.values()}
        return kinds <= {*_OF_PROCESS}


def _without(facts: Mapping[str, Mapping[str, Any]], *kinds: str) -> dict[str, Mapping[str, Any]]:
    """Return the entries without those of the given kinds and without mistakes."""
    return {entry: fact for entry, fact in facts.items() if entry != MISTAKES and fact["kind"] not in kinds}


def _of_kind(facts: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, str]:
    return {entry: fact["value"] for entry, fact in facts.items() if entry != MISTAKES and fact["kind"] == kind}


def _part(fact: Mapping[str, Any] | None) -> str:
    """Return the pipeline stage or the group of replicas of an entry; "" for others."""
    return "" if fact is None else fact.get("part", "")


def _is_there(fact: Mapping[str, Any] | None) -> bool:
    return fact is not None and fact["kind"] != "missing"


def _random_notes(differences: Sequence[Difference], same: Mapping[str, Mapping[str, Any]]) -> list[str]:
    of = "random state of "
    differing = [one.entry.removeprefix(of) for one in differences if one.kind == "random"]
    equal = [entry.removeprefix(of) for entry, fact in same.items() if fact["kind"] == "random"]
    if not differing:
        return ["random state is the same"] if equal else []
    is_same = f", of {' and '.join(equal)} it is the same" if equal else ""
    whose = f" of {' and '.join(differing)}" if equal else ""
    return [f"random state{whose} differs (as it should where ranks draw their own){is_same}"]


class Checking:
    """Checks the consistency of ranks.

    Args:
        cells: cells of the session, with the run queue.
        questions: sends requests to the ranks.
        liveness: liveness checks of the ranks.
    """

    def __init__(self, cells: Cells, questions: Questions, liveness: Liveness) -> None:
        self._cells = cells
        self._questions = questions
        self._liveness = liveness
        self._shown: dict[str, str] = {}  # findings of the last report without names

    def report(self, names: Sequence[str]) -> Agreement:
        """Compare variables like `check`. Without names, findings that an earlier report has shown are folded."""
        found = self.check(names)
        if names:
            return found
        known, self._shown = self._shown, found.findings
        return found.folded(known)

    def check(self, names: Sequence[str]) -> Agreement:
        """Compare variables between ranks, see `Session.check`."""
        for name in names:
            check_name(name)
        with self._cells.run_queue:
            cluster = self._liveness.check_host()
            busy, gone = self._cells.busy, cluster.gone
            ranks = [rank for rank in cluster.ranks if rank not in {*busy, *gone}]
            if len(ranks) < 2:  # there is nothing to compare
                self._liveness.check()
                self._cells.check_idle()
            found = compare(self._ask(ranks, names, ()), names, is_whole=not busy and not gone)
            if found.differing_entries:
                found = found.with_samples(self._ask(ranks, names, found.differing_entries))
            return found.without(busy, gone)

    def whole_loaders(self) -> list[str]:
        """Return the loaders that each rank reads completely, in random order.

        Return [] if a rank is busy or does not answer in time.
        """
        with self._cells.run_queue.if_free() as is_ours:
            cluster = self._liveness.cluster
            if not is_ours or not cluster.is_running or self._cells.busy or cluster.gone or cluster.unheard:
                return []
            answers = self._questions.ask_for(cluster.ranks, lambda n: Check(request=n, whole=True), _ANSWER_S)
            names = [answer.facts for answer in answers.values()]
            if len(names) < max(2, len(cluster.ranks)):
                return []
            return [name for name in names[0] if all(name in others for others in names)]

    def _ask(self, ranks: list[int], names: Sequence[str], entries: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Return fingerprints of these variables, or samples of these entries, by rank."""

        def make(request: int) -> Check:
            return Check(request=request, names=list(names), entries=list(entries))

        answers: dict[int, Checked] = self._questions.ask_all(ranks, make)
        for rank, answer in answers.items():
            if answer.error:
                raise DDPNotebookError(f"rank {rank} could not inspect its variables: {answer.error}")
        return {rank: answer.facts for rank, answer in answers.items()}


# ---- order: variables of the last training cell first, those of earlier cells last

# The most important kind comes first. Other kinds come last.
_KINDS = ("scaler", "parameter", "optimizer", "scheduler", "module", "missing", "data", "buffer", "setting", "version")


def _last_steps(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Return the cell of the last optimizer step by variable, on any rank."""
    found: dict[str, int] = {}
    for facts in by_rank.values():
        for name, cell in facts.get("stepped", {}).items():
            found[name] = max(cell, found.get(name, 0))
    return found


def _earlier_variables(steps: Mapping[str, int]) -> frozenset[str]:
    """Return the variables with optimizer steps in an earlier cell, and none in the last training cell.

    Example:
        >>> sorted(_earlier_variables({"toy": 3, "model": 8, "optimizer": 8}))
        ['toy']
    """
    last = max(steps.values(), default=0)
    return frozenset(name for name, cell in steps.items() if cell < last)


def _is_input(one: Difference, steps: Mapping[str, int]) -> bool:
    """Return whether a difference is of a tensor that requires gradients, while optimizers change other variables.

    Such a tensor is the input of a pipeline stage, for example.
    """
    return bool(steps) and one.kind == "parameter" and one.entry == variable_of(one.entry) and one.entry not in steps


def _with_other_layers(differences: Sequence[Difference], by_rank: Facts) -> set[str]:
    """Return the models and optimizers with other shapes on some rank, although all ranks trained them.

    Such ranks cannot have trained one model together, because averages of gradients need equal shapes.
    """
    found = set()
    for one in differences:
        variable = variable_of(one.entry)
        is_model = one.kind == "parameter" and one.entry != variable
        has_shapes = all("(" in (part.value or "(") for part in one.parts)  # numbers, such as `step`, have none
        is_optimizer = one.kind == "optimizer" and (one.entry == variable or has_shapes)
        was_trained = all(variable in facts.get("stepped", ()) for facts in by_rank.values())
        if (is_model or is_optimizer) and not one.is_inside and was_trained:
            found.add(variable)
    return found


def _by_importance(
    differences: Sequence[Difference], steps: Mapping[str, int], earlier: Collection[str]
) -> list[Difference]:
    """Return the differences of variables of the last training cell first, each variable by its most important kind."""
    most: dict[str, int] = {}
    for one in differences:
        is_absent = one.kind == "module" and any(part.value is None for part in one.parts)  # with its parameters
        name = "parameter" if is_absent else one.kind
        kind = _KINDS.index(name) if name in _KINDS else len(_KINDS)
        variable = variable_of(one.entry)
        most[variable] = min(kind, most.get(variable, kind))

    def place(one: Difference) -> tuple[Any, ...]:
        variable = variable_of(one.entry)
        is_earlier = variable in earlier
        return is_earlier, -steps.get(variable, 0) if is_earlier else 0, most[variable], variable not in steps

    return sorted(differences, key=place)


def _split_mistakes(mistakes: Sequence[str], by_rank: Facts, earlier: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the mistakes of the last training cell and those of earlier cells.

    A mistake is of an earlier cell if all of its variables are.
    """
    old = [one for one in mistakes if (names := variables_of(one, by_rank)) and names <= set(earlier)]
    return [one for one in mistakes if one not in old], old
