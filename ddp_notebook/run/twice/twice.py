"""Run a cell twice from the same state, and find the first tensor that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.messages.twice_messages import PutBack, TakeSnapshot
from ddp_notebook.records.names import listed, readable
from ddp_notebook.records.units import size
from ddp_notebook.records.words import list_ranks
from ddp_notebook.run.cells.interrupt import keyboard_interrupt, uninterrupted
from ddp_notebook.run.cells.run_queue import QueueSlot
from ddp_notebook.run.notebook_kernel import cell_number

if TYPE_CHECKING:
    from ddp_notebook.run.session_parts import SessionParts

_KINDS = ("batch", "local gradient", "gradient", "parameter")  # in the order of a step
_RESERVE = 0.9  # share of the free memory that copies may take
_PUT_BACK_S = 30.0
_OF_PROCESS = "RLIMIT"  # limits with this word are those of one process
_BOTH_ARE_OVER = "interrupted: both runs are over, and the ranks have the state that one run leaves"
_FILES = "Files are not restored between the two runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwiceResult:
    """Comparison of two runs of a cell from the same state. Its text is the output of `%%ddp_twice`."""

    is_deterministic: bool
    steps: int
    counts: Mapping[str, int]  # number of compared tensors of all ranks, by kind
    first: tuple[int, str, str, tuple[int, ...]] | None  # step, kind, name and ranks of the first difference
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return the result as one sentence, without its full stop."""
        counts = ", ".join(f"{count:,} {_plural(kind, count)}" for kind, count in self.counts.items() if count)
        if not counts:
            return "No tensor was compared: the cell ran no model and no optimizer step"
        if self.first is None:
            return f"Deterministic: {counts} are equal bit by bit in both runs"
        step, kind, name, ranks = self.first
        which = {
            "batch": f"the batch ({readable(name)})",
            "local gradient": f"the local gradient of {readable(name)}",
            "gradient": f"the gradient of {readable(name)} at the optimizer step",
            "parameter": f"the parameter {readable(name)} after the optimizer step",
        }[kind]
        text = f"Not deterministic: {which} differs first, in step {step} on {list_ranks(ranks)}"
        if kind == "gradient":
            text += (
                "; its local gradients are equal on all ranks, so the average, or code after it, differs"
                if self.counts.get("local gradient")
                else "; local gradients were not seen"
            )
        return text

    def __str__(self) -> str:
        return "\n".join(f"{text}." for text in (self.sentence, *self.notes, _FILES))


def _plural(kind: str, count: int) -> str:
    return kind if count == 1 else "batches" if kind == "batch" else f"{kind}s"


def run_twice(parts: SessionParts, run: Callable[..., object], code: str) -> TwiceResult:
    """Run a cell twice on all ranks from the same state. See `%%ddp_twice`.

    If a run fails or is stopped, the ranks get the state from before the cell. Jobs that start in the meantime wait.

    Args:
        parts: the core of the session.
        run: `Session._run_in_slot`.
        code: the cell.

    Raises:
        UsageError: the state cannot be copied, or does not fit in memory. Nothing has run then.
        Exception: the error of the cell.
    """
    parts.liveness.check()
    with QueueSlot(parts.cells.run_queue):
        return _run_twice(parts, run, code)


def _run_twice(parts: SessionParts, run: Callable[..., object], code: str) -> TwiceResult:
    ranks = list(parts.cluster.ranks)

    def ask(make: Any) -> dict[int, dict[str, Any]]:
        answers = parts.questions.ask_all(ranks, make)
        if errors := {rank: one.error for rank, one in answers.items() if one.error}:
            rank, error = min(errors.items())
            raise DDPNotebookError(f"rank {rank} could not copy or restore its variables: {error}")
        return {rank: one.facts for rank, one in answers.items()}

    notes = _check(ask(lambda n: TakeSnapshot(request=n, code=code, copies=False)), parts.cluster.placement)

    def restore() -> str:
        """Restore the variables. Return a sentence about the ranks that have them again."""
        with uninterrupted():
            answers = parts.questions.ask_for(
                [rank for rank in ranks if rank in parts.cluster.alive],
                lambda n: PutBack(request=n, restores=True, ends=True),
                _PUT_BACK_S,
            )
        restored = [rank for rank, one in answers.items() if not one.error]
        others = sorted(set(ranks) - set(restored))
        kept = f"the variables of {list_ranks(restored)} are those from before the cell" if restored else ""
        return "; ".join(filter(None, [kept, f"those of {list_ranks(others)} may differ" if others else ""]))

    is_over = False
    try:
        ask(lambda n: TakeSnapshot(request=n, code=code, copies=True))
        prompt = f"In [{cell_number()}]"
        run(code, prompt=prompt)
        ask(lambda n: PutBack(request=n, restores=True, ends=False))
        run(code, quiet=True, prompt=f"{prompt}, second run")
        with uninterrupted():
            facts = ask(lambda n: PutBack(request=n, restores=False, ends=True))
            is_over = True
    except KeyboardInterrupt as error:
        error.__traceback__ = None  # IPython keeps the last error, with its frames and their data
        said = _BOTH_ARE_OVER if is_over else f"{str(error) or 'interrupted'}\n{restore()}"
        raise keyboard_interrupt(said) from None
    except BaseException:
        restore()
        raise
    return _result(facts, notes)


def _check(facts: Mapping[int, Mapping[str, Any]], placement: Any) -> tuple[str, ...]:
    """Return notes about objects that are not restored.

    Raises:
        UsageError: the cell reads such an object, or the copies do not fit in memory.
    """
    refused = {place: why for one in facts.values() for place, why in one["refused"].items()}
    if refused:
        places = ", ".join(f"{readable(place)} ({why})" for place, why in list(refused.items())[:4])
        raise UsageError(
            f"the cell cannot run twice from the same state: it reads {places}, whose position cannot be restored. "
            "Create it in the cell, or delete it"
        )
    sharing: dict[tuple[str, str], list[int]] = {}  # ranks by host, and by memory that they share
    for rank, one in facts.items():
        host = str(placement.names_of_machines[rank]) if placement.names_of_machines else ""
        for what in one["free"]:
            own = str(rank) if _OF_PROCESS in what else host
            sharing.setdefault((own, what), []).append(rank)
    for (_, what), ranks in sharing.items():
        needed, free = sum(facts[rank]["nbytes"] for rank in ranks), min(facts[rank]["free"][what] for rank in ranks)
        if free * _RESERVE < needed:
            raise UsageError(
                f"a copy of the variables of {list_ranks(ranks)} needs {size(needed)}, but only {size(free)} of memory "
                f"are free ({what}): delete variables that the cell does not need"
            )
    left = {place: why for one in facts.values() for place, why in one["left"].items()}
    if not left:
        return ()
    return (f"Not restored, and not read by the cell: {listed(f'{place} ({why})' for place, why in left.items())}",)


def _result(facts: Mapping[int, Mapping[str, Any]], notes: Sequence[str]) -> TwiceResult:
    counts: Counter[str] = Counter()
    for one in facts.values():
        counts.update(one.get("counts", {}))
    found = {rank: one["first"] for rank, one in facts.items() if one.get("first")}
    first = None
    if found:
        step, place = min((one[0], _KINDS.index(one[1])) for one in found.values())
        same = {rank: one for rank, one in found.items() if (one[0], _KINDS.index(one[1])) == (step, place)}
        rank = min(same)
        first = step, _KINDS[place], str(same[rank][2]), tuple(sorted(same))
    return TwiceResult(
        is_deterministic=first is None,
        steps=max((int(one.get("steps", 0)) for one in facts.values()), default=0),
        counts={kind: counts[kind] for kind in _KINDS},
        first=first,
        notes=tuple(notes),
    )
