"""Results of a cell by rank, and the errors that the notebook raises for them."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError
from ddp_notebook.records.operation import Operation
from ddp_notebook.records.units import bundle_chars
from ddp_notebook.records.words import group_by_value, line_of, list_ranks, name_ranks
from ddp_notebook.run.cells.interrupt import keyboard_interrupt
from ddp_notebook.run.groups.diagnosis import by_what_they_do
from ddp_notebook.run.groups.rank_view import RankView, Views
from ddp_notebook.run.notebook_kernel import ipython

_NOT_YET = "the cell continues there until it ends, or until %ddp_interrupt ends it"
_MISMATCH = "CollectiveMismatchError"  # raised on ranks by the guard
_UNDEFINED = re.compile(r"^NameError: name '(\w+)' is not defined")
_ADVICE = (  # pattern of the error message, advice
    (
        re.compile(r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs are available|_cuda_setDevice"),
        "These ranks have no GPU: replace cuda by `device` and `.cuda()` by `.to(device)`, and remove set_device. "
        "`device` is the rank's own GPU if it has one.",
    ),
)


class CellText:
    """Text of a rank. If it exceeds the limit, its last part is kept."""

    def __init__(self, limit_chars: int = 5_000_000) -> None:
        self._parts: deque[str] = deque()
        self._chars = self._dropped = 0
        self._limit_chars = limit_chars

    def append(self, part: str) -> None:
        self._parts.append(part)
        self._chars += len(part)
        while self._chars > self._limit_chars and len(self._parts) > 1:
            dropped = len(self._parts.popleft())
            self._chars -= dropped
            self._dropped += dropped

    def __str__(self) -> str:
        note = f"... {self._dropped} characters before this were not kept ...\n" if self._dropped else ""
        return note + "".join(self._parts)


class Displays(list[dict[str, Any]]):
    """MIME bundles in order, with updates applied and cleared ones removed.

    If they exceed the limit, the last part is kept.

    Attributes:
        left_out: number of dropped displays before the first kept one.
    """

    def __init__(self, limit_chars: int = 50_000_000) -> None:
        super().__init__()
        self.left_out = 0
        self._limit_chars = limit_chars
        self._chars = 0
        self._handles: dict[str, int] = {}  # number of the display, by display id

    def add_display(self, msg_type: str, data: dict[str, Any], handle: str | None) -> None:
        """Add a display of a rank."""
        if msg_type == "clear_output":
            self.clear()
            self._handles.clear()
            self._chars = self.left_out = 0
        elif data and msg_type == "update_display_data":
            if (number := self._handles.get(handle or "", -1)) >= self.left_out:
                place = number - self.left_out
                self._chars += bundle_chars(data) - bundle_chars(self[place])
                self[place] = data
        elif data:
            if handle is not None:
                self._handles[handle] = self.left_out + len(self)
            self.append(data)
            self._chars += bundle_chars(data)
        if self._chars > self._limit_chars:
            self._leave_out()

    def _leave_out(self) -> None:
        """Keep the last half. Dropping one at a time would move all others each time."""
        number = 0
        while self._chars > self._limit_chars // 2 and number < len(self) - 1:
            self._chars -= bundle_chars(self[number])
            number += 1
        del self[:number]
        self.left_out += number


_AUXILIARIES = {"": ("", ""), "be": ("was ", "were "), "have": ("has ", "have ")}  # for one rank, for several ranks


class Act(NamedTuple):
    """Last activity of a rank: words that follow its name.

    Example:
        >>> Act("not ended yet", "have").of([2]), Act("not ended yet", "have").of([0, 1])
        ('rank 2 has not ended yet', 'ranks 0,1 have not ended yet')
    """

    words: str
    auxiliary: str = ""

    def of(self, ranks: Sequence[int]) -> str:
        """Return the sentence about these ranks."""
        return f"{list_ranks(ranks)} {_AUXILIARIES[self.auxiliary][len(ranks) > 1]}{self.words}"


@dataclass(slots=True, repr=False)
class RankResult:
    """Result of a cell on one rank."""

    status: str = "running"  # later "ok", "error", "interrupted" or "died"
    duration_s: float = 0.0
    text: dict[str, CellText] = field(
        default_factory=lambda: defaultdict(CellText)
    )  # text by stream; most cells have none
    displays: Displays = field(default_factory=Displays)
    result: str | None = None  # plain text of the last expression's value
    error: str = ""  # "ValueError: message"
    ename: str = ""  # "ValueError"
    traceback: list[str] = field(default_factory=list)
    has_group: bool = True  # False: the cell has destroyed the default group and formed no other
    place: str = ""  # line of the failure or interrupt: "cell line 7, in all_reduce"
    operation: Operation | None = None  # operation in which it failed, or which was aborted
    was_freed: bool = False  # it did not fail by itself: its operation was aborted because other ranks were missing
    group: dict[str, Any] = field(default_factory=dict)  # state of its groups after a cell that did not succeed
    trains_apart: str = ""  # its optimizers made steps, but it sent nothing to other ranks, see `APART`
    groups_made: int = 0  # number of groups that torch has counted on the rank, if the cell has changed it
    findings: list[Any] = field(default_factory=list)  # facts about its training, see `run.findings`

    @property
    def failed_by_itself(self) -> bool:
        return self.status == "died" or (self.status == "error" and not self.was_freed)

    @property
    def last_act(self) -> Act:
        """Return the activity of the rank when the cell ended there, for a sentence."""
        if self.status == "running":
            return Act("not ended yet", "have")
        if self.status == "ok" and self.place:  # the code caught the interrupt
            return Act(f"interrupted at {self.place}, and then ended", "be")
        if self.status == "ok":
            return Act("had ended")
        if self.status == "died":
            return Act(f"died: {self.error}")
        if self.operation is not None:
            inside = ", ".join(filter(None, [self.operation.what, line_of(self.place)]))
            return Act(f"waited in {self.operation}" + (f" ({inside})" if inside else ""))
        if self.status == "interrupted":
            return Act(f"interrupted at {self.place or 'the start of the cell'}", "be")
        if self.was_freed:
            return Act(f"stopped at {self.place or 'the start of the cell'}", "be")
        return Act(f"{self.error}" + (f", at {self.place}" if self.place else ""))

    def __repr__(self) -> str:
        parts = [
            f"{self.status} after {self.duration_s:.3f} s",
            self.error,
            f"result {self.result}" * bool(self.result),
        ]
        parts += [f"{self.stdout.count(chr(10))} lines of stdout"] if self.stdout else []
        return f"<RankResult: {'; '.join(filter(None, parts))}>"

    @property
    def stdout(self) -> str:
        return str(self.text.get("stdout", ""))  # `get`, because an I/O thread may be adding the stream

    @property
    def stderr(self) -> str:
        return str(self.text.get("stderr", ""))


@dataclass(slots=True)
class CellResult:
    """Result of a cell on all of its ranks.

    Example:
        >>> result = session.run("print('hi')")
        [0-1] hi
        >>> result[0].stdout, result.ok
        ('hi\\n', True)
    """

    by_rank: dict[int, RankResult]

    @property
    def ranks(self) -> list[int]:
        return sorted(self.by_rank)

    @property
    def ok(self) -> bool:
        """Return whether the cell succeeded on every rank."""
        return all(one.status == "ok" for one in self.by_rank.values())

    def __getitem__(self, rank: int) -> RankResult:
        return self.by_rank[rank]

    def __repr__(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank in self.ranks:
            groups.setdefault(self.by_rank[rank].status, []).append(rank)
        slowest = max((one.duration_s for one in self.by_rank.values()), default=0.0)
        states = ", ".join(f"{status} on {name_ranks(ranks)}" for status, ranks in groups.items())
        return f"<CellResult: {states}; {slowest:.3f} s>"


def has_mismatch(result: CellResult) -> bool:
    """Return whether the operations of ranks differed, and the guard has ended the cell."""
    return any(one.ename == _MISMATCH for one in result.by_rank.values())


def of_mismatch(result: CellResult) -> Views:
    """Return the last activity of the ranks of an ended cell: the operation in which each failed, or the end."""
    views = {}
    for rank, one in result.by_rank.items():
        if one.status == "ok":
            views[rank] = RankView(rank=rank, state="ended")
        elif one.operation is not None:
            views[rank] = RankView(rank=rank, state="waiting", place=one.place, operation=one.operation)
        else:
            place = one.place if one.ename == _MISMATCH else one.error
            views[rank] = RankView(rank=rank, state="failed", place=place)
    return views


_KILLED = Act("killed by the second press of stop", "be")


def raise_if_bad(
    result: CellResult,
    pending: list[int],
    interrupted: bool,
    killed: list[int],
    timeout_s: float | None,
    views: Views,
    why: str = "",
    going_on: Sequence[str] = (),
    *,
    was_left: bool = False,
    cause: str = "",
) -> None:
    """Raise the error of a cell. Return if it succeeded on every rank.

    Args:
        result: result of the cell.
        pending: ranks on which the cell has not ended.
        interrupted: whether stop was pressed.
        killed: ranks that did not react to stop, and were killed.
        timeout_s: the exceeded limit; None: no limit was exceeded.
        views: activity of the ranks at the timeout.
        why: sentence with the cause of the hang, if it is known.
        going_on: sentences about calls that ranks still execute for the cell.
        cause: sentence about why the ranks called different operations, if it is known.
        was_left: the cell was ended, because ranks waited for ranks that have ended it; `why` describes that.

    Raises:
        RankDiedError, CellTimeoutError, KeyboardInterrupt, RankError
    """
    by_rank = result.by_rank
    bad = {rank for rank, one in by_rank.items() if one.status in ("error", "interrupted", "died")}
    culprits = {rank for rank in bad if by_rank[rank].failed_by_itself} - set(killed)
    stopped = f"was stopped: {why}" if why else "was stopped"
    if interrupted and not culprits:
        acts = _acts(result, set(by_rank), killed)
        raise keyboard_interrupt("\n  ".join([f"the cell {stopped}", *acts, *going_on]))
    if timeout_s is not None and (views or bad) and not culprits:
        then = "" if why else "; then"
        lines = [f"  {list_ranks(ranks)}: {doing}" for ranks, doing in by_what_they_do(views, lambda view: view.doing)]
        left = [f"{name_ranks(pending)} not stopped yet; {_NOT_YET}"] if pending else []
        first = f"the cell took longer than {timeout_s:g} s and {stopped}{then}"
        raise CellTimeoutError("\n".join([first, *lines, *left, *going_on]), result)
    if was_left and not culprits:
        raise _error_of_waits(result, bad | set(pending), stopped, pending, going_on)
    if shown := culprits or bad:
        raise _error_of(result, shown, pending, [*going_on, *([cause] if cause else [])])


def _error_of(result: CellResult, shown: Collection[int], pending: list[int], going_on: Sequence[str]) -> RankError:
    """Return the error with the tracebacks of the ranks `shown`. See `raise_if_bad` for `pending` and `going_on`."""
    by_rank = result.by_rank
    errors = {rank: by_rank[rank].error for rank in shown}
    kind = RankDiedError if any(by_rank[rank].status == "died" for rank in shown) else RankError
    tracebacks = {rank: by_rank[rank].traceback for rank in shown}
    others = {rank for rank in by_rank if rank not in shown and by_rank[rank].status != "ok"}
    known = advice(errors.values(), () if (shell := ipython()) is None else shell.user_ns)
    hint = "\n".join(filter(None, [f"{name_ranks(pending)}: {_NOT_YET}" if pending else "", *going_on, known]))
    return kind(tracebacks, errors, result, hint=hint, others=_acts(result, others))


def _error_of_waits(
    result: CellResult, waited: set[int], stopped: str, pending: list[int], going_on: Sequence[str]
) -> RankError:
    """Return the error of a cell in which ranks waited for ranks that have ended it.

    Args:
        waited: ranks that have not ended the cell by themselves.
        stopped: sentence about the stop and its reason.
    """
    left = [f"{name_ranks(pending)}: {_NOT_YET}"] if pending else []
    first = f"the cell {stopped}"
    return RankError(
        {},
        dict.fromkeys(sorted(waited), first),
        result,
        hint="\n".join([*left, *going_on]),
        others=_acts(result, waited),
    )


def _acts(result: CellResult, ranks: set[int], killed: Sequence[int] = ()) -> list[str]:
    """Return a line for each set of ranks with the same last activity: `"ranks 0,1,3 waited in all_reduce #12 ..."`."""
    acts = group_by_value({rank: _KILLED if rank in killed else result[rank].last_act for rank in sorted(ranks)})
    return [act.of(those) for act, those in acts.items()]


def advice(errors: Iterable[str], names_here: Collection[str]) -> str:
    """Return advice about the errors of a cell, or "" if none is known or necessary.

    Args:
        errors: `"NameError: name 'x' is not defined"`.
        names_here: the variables of the notebook.

    Example:
        >>> advice(["NameError: name 'x' is not defined"], {"x": 1})
        "The notebook has 'x': %ddp_push x sends it to the ranks."
    """
    errors = list(errors)
    known = [text for words, text in _ADVICE if any(words.search(error) for error in errors)]
    names = sorted({found[1] for error in errors if (found := _UNDEFINED.match(error))} & set(names_here))
    if names:
        known.append(
            f"The notebook has {' and '.join(map(repr, names))}: %ddp_push {' '.join(names)} sends it to the ranks."
        )
    return "\n".join(known)
