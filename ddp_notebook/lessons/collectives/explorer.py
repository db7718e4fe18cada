"""The collective explorer: predict the result of a collective, run it on the ranks, and compare."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import CellTimeoutError, RankError, UsageError
from ddp_notebook.lessons.collectives import theory, written
from ddp_notebook.lessons.collectives.theory import CollectiveCall, Values
from ddp_notebook.lessons.lesson import by_rank, options
from ddp_notebook.lessons.lesson_cells import RUN_S, LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.records.words import group_by_value, list_ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Outcome of a collective that one rank called wrongly.

    Args:
        kind: One of `theory.WRONG`.
        rank: Rank with the wrong call.
        code: Calls on that rank and on the others.
        error: Name of the error; "" if there was none.
        message: Message of the error.
        by_rank: Description of each rank's last action.
        values: Results of the ranks, if there was no error.
        seconds: Time until the ranks were idle again.
    """

    kind: str
    rank: int
    code: str
    error: str
    message: str
    by_rank: dict[int, str]
    values: Values
    seconds: float

    def __repr__(self) -> str:
        outcome = f"{self.error}: {self.message}" if self.error else f"no error was raised: {_words(self.values)}"
        return f"wrong {self.kind} on rank {self.rank}, after {self.seconds:.1f} s: {outcome}"


def _words(values: Values) -> str:
    by_words = group_by_value({rank: str(one.tolist()) for rank, one in values.items()})
    return "; ".join(f"{list_ranks(ranks)}: {words}" for words, ranks in by_words.items())


_WRONG_S = 2.0  # time limit for a call in which a rank is missing
_MOST_ELEMENTS = 64  # most elements of a rank that a picture can show


class Explorer(DisplayedLesson):
    """One collective on the running ranks, with your own inputs.

    Args:
        op: One of `theory.OPS`: "all_reduce", "send/recv", ...
        reduce_op: "SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR" or "BXOR".
        inputs: Numbers of each rank; None for numbers that show which ranks have contributed.
        root: Source, destination, or sender of a message.
        peer: Receiver of a message.
        group: Ranks that take part, as a new group; None for all ranks.
        dtype: One of `theory.DTYPES`.
        sizes: Elements of each rank's input or of each chunk; for all_to_all also one number for each receiver.
        session: Session to use; None for the running one.

    Raises:
        UsageError: torch has no such call.
        NoSessionError: No ranks are running.

    Example:
        >>> explorer = lessons.collective("all_reduce", inputs={0: [1, 2], 1: [10, 20]})
        >>> explorer.predict({0: [11, 22], 1: [11, 20]})
        >>> explorer.run()
        {0: array([11., 22.], dtype=float32), 1: array([11., 22.], dtype=float32)}
        >>> explorer.right
        {0: [True, True], 1: [True, False]}
    """

    def __init__(
        self,
        op: str = "all_reduce",
        reduce_op: str = "SUM",
        inputs: Mapping[int, Sequence[float]] | None = None,
        root: int | None = None,
        peer: int | None = None,
        group: Sequence[int] | None = None,
        dtype: str = "float32",
        sizes: int | Sequence[int] | None = None,
        session: Session | None = None,
    ) -> None:
        self._runner = LessonRunner(running(session))
        self.configure(
            op=op, reduce_op=reduce_op, inputs=inputs, root=root, peer=peer, group=group, dtype=dtype, sizes=sizes
        )

    def configure(
        self,
        *,
        op: str,
        reduce_op: str = "SUM",
        inputs: Mapping[int, Sequence[float]] | None = None,
        root: int | None = None,
        peer: int | None = None,
        group: Sequence[int] | None = None,
        dtype: str = "float32",
        sizes: int | Sequence[int] | None = None,
    ) -> None:
        """Choose another call, and drop the prediction and the result. Takes the arguments of the class."""
        world_size = self._runner.session.world_size
        members = tuple(sorted(group)) if group is not None else ()
        if len(members) == world_size:
            members = ()
        known = members or tuple(range(world_size))
        first = known[0] if root is None else root
        others = [rank for rank in known if rank != first]
        if sizes is None and inputs is not None:
            sizes = _size_of(op, inputs, known, first)
        if sizes is None:
            sizes = 1 if op in theory.CHUNKED or op == "barrier" else 4
        self.call = CollectiveCall(
            op=op,
            world_size=world_size,
            reduce_op=reduce_op,
            root=first,
            peer=(others[0] if others else first) if peer is None else peer,
            group=members,
            dtype=dtype,
            sizes=(sizes,) if isinstance(sizes, int) else tuple(sizes),
        )
        if (largest := max(self.call.input_size(rank) for rank in known)) > _MOST_ELEMENTS:
            raise UsageError(f"a rank must have at most {_MOST_ELEMENTS} elements, got {largest}: pass smaller sizes")
        self._forget()
        self._inputs = theory.default_inputs(self.call)
        if inputs is not None:
            self.inputs = inputs

    def _forget(self) -> None:
        self.prediction: dict[int, list[float]] = {}
        self.result: Values | None = None
        self.happened: Happened | None = None

    @property
    def inputs(self) -> dict[int, list[float]]:
        """Numbers of each rank, readable and writable: `explorer.inputs = {0: [1, 2], 1: [3, 4]}`."""
        return {rank: values.tolist() for rank, values in self._inputs.items()}

    @inputs.setter
    def inputs(self, given: Mapping[int, Sequence[float]]) -> None:
        taken = dict(self._inputs)
        for rank, values in given.items():
            if rank not in taken:
                raise UsageError(f"rank {rank} does not exist; the ranks are 0 to {self.call.world_size - 1}")
            size = self.call.input_size(rank)
            if len(values) != size:
                raise UsageError(f"rank {rank} must have {size} elements for {self.call.op}, got {len(values)}")
            taken[rank] = _numbers(values, self.call.dtype)
        self._inputs = taken
        self._forget()

    @property
    def line(self) -> str:
        """Return the line of code that runs on the ranks."""
        return self.call.line

    @property
    def formula(self) -> str:
        """Return the result as one equation."""
        return self.call.formula

    def expected(self) -> Values:
        """Return the results according to NumPy, by rank. Ranks whose result torch does not specify are left out."""
        return theory.expected(self.call, self._inputs)

    def predict(self, values: Mapping[int, Sequence[float | None]]) -> None:
        """Set a prediction for some or all ranks. None leaves an element open."""
        for rank in values:
            if rank not in self.call.ranks:
                raise UsageError(f"rank {rank} does not take part; {list_ranks(list(self.call.ranks))} do")
        self.prediction |= {
            rank: [math.nan if value is None else float(value) for value in given] for rank, given in values.items()
        }

    def run(self) -> Values:
        """Run the collective on the ranks.

        Returns:
            The result of each rank of the group. After a reduce, this includes the buffers of the other ranks.

        Raises:
            RankError: The call failed on a rank.
        """
        told = self._run(written.cell(self.call, self._inputs), RUN_S)
        self.result = self._left_ms(told) if self.call.op == "barrier" else told
        return self.result

    @property
    def right(self) -> dict[int, list[bool]]:
        """Return by rank whether each predicted element is correct. Elements that torch does not specify count as
        correct.

        Raises:
            UsageError: The collective was not run yet.
        """
        if self.result is None:
            raise UsageError("the collective was not run yet: call explorer.run()")
        specified = self.expected()
        found = {}
        for rank, real in self.result.items():
            guess = self.prediction.get(rank, [])
            if rank not in specified:
                found[rank] = [True] * len(guess)
            else:
                found[rank] = theory.is_right(self.call, np.array(guess), real, specified[rank])
        return found

    @property
    def agrees(self) -> bool:
        """Return whether the ranks have the result of NumPy.

        Raises:
            UsageError: The collective was not run yet.
        """
        if self.result is None:
            raise UsageError("the collective was not run yet: call explorer.run()")
        specified = self.expected()
        return specified.keys() <= self.result.keys() and all(
            all(theory.agree(self.call, values, self.result[rank])) for rank, values in specified.items()
        )

    def wrong(self, kind: str, rank: int | None = None) -> Happened:
        """Let one rank call the collective wrongly, and return the outcome. The ranks are idle again afterwards.

        Args:
            kind: "operation", "size", "dtype", "missing rank" or "root".
            rank: Rank with the wrong call; None for the last one that takes part.

        Raises:
            UsageError: This call cannot be wrong in this way.
        """
        if kind not in self.kinds_of_wrong:
            raise UsageError(f"kind must be one of {', '.join(self.kinds_of_wrong)} for {self.call.op}, got {kind!r}")
        who = list(self.call.actors)[-1] if rank is None else rank
        if who not in list(self.call.actors):
            raise UsageError(f"rank {who} does not take part; {list_ranks(list(self.call.actors))} do")
        code = written.cell(self.call, self._inputs, kind, who)
        began_s = time.monotonic()
        error = message = ""
        last_acts: dict[int, str] = {}
        values: Values = {}
        try:
            values = self._run(code, _WRONG_S)
        except (RankError, CellTimeoutError) as caught:
            error, message = type(caught).__name__, str(caught)
            if caught.result is not None:
                last_acts = {one: caught.result[one].last_act.words for one in caught.result.ranks}
        self.happened = Happened(
            kind=kind,
            rank=who,
            code="\n".join(written.lines(self.call, kind, who)),
            error=error,
            message=message,
            by_rank=last_acts,
            values=values,
            seconds=time.monotonic() - began_s,
        )
        return self.happened

    @property
    def kinds_of_wrong(self) -> tuple[str, ...]:
        """Return the ways in which this call can be wrong."""
        if self.call.op == "barrier":
            return ("operation", "missing rank")
        return tuple(kind for kind in theory.WRONG if kind != "root" or self.call.op in theory.ROOTED)

    def picture(self) -> Figure:
        """Return a figure of the values before and after, with a column for each rank. It stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        call = self.call
        who = theory.contributors(call)
        return {
            "kind": "collective",
            "world_size": call.world_size,
            "op": call.op,
            "reduce_op": call.reduce_op,
            "root": call.root,
            "peer": call.peer,
            "group": call.ranks,
            "dtype": call.dtype,
            "sizes": call.sizes,
            "ops": theory.OPS,
            "dtypes": theory.DTYPES,
            "reduce_ops": theory.legal_reduce_ops(call.dtype),
            "reduces": call.op in theory.REDUCING,
            "rooted": call.op in theory.ROOTED,
            "messages": call.op in theory.POINT_TO_POINT,
            "uneven": call.op in theory.MAY_BE_UNEVEN,
            "wrong": self.kinds_of_wrong,
            "actors": call.actors,
            "line": self.line,
            "formula": self.formula,
            "inputs": self.inputs,
            "in_chunks": {rank: _in_chunks(call, rank) for rank in call.ranks},
            "out_chunks": {rank: _out_chunks(call, rank, len(who[rank])) for rank in who},
            "who": who,
            "specified": sorted(self.expected()),
            "prediction": self.prediction,
            "result": self.result,
            "right": None if self.result is None else self.right,
            "agrees": None if self.result is None else self.agrees,
            "happened": None if self.happened is None else asdict(self.happened),
        }

    def act(self, wish: Wish) -> None:
        """Handle a request of the browser: "configure", "run" with a prediction, or "wrong".

        Raises:
            UsageError: The request is invalid.
        """
        match wish["do"]:
            case "configure":
                self.configure(**options(wish))
            case "run":
                if (inputs := wish.get("inputs")) is not None:
                    self.inputs = by_rank(inputs)
                self.prediction = {}
                predicted = by_rank(wish.get("prediction") or {})
                self.predict({rank: values for rank, values in predicted.items() if rank in self.call.ranks})
                self.run()
            case "wrong":
                self.wrong(wish["kind"], wish.get("rank"))

    def __repr__(self) -> str:
        state = "not run" if self.result is None else "run" if self.agrees else "run, NOT the result of NumPy"
        if self.result is not None and self.prediction:
            marks = [mark for ranks in self.right.values() for mark in ranks]
            state += f", {sum(marks)} of {len(marks)} cells right"
        return f"<Explorer: {self.line} on {list_ranks(list(self.call.ranks))}: {state}>"

    def _run(self, code: str, timeout_s: float) -> Values:
        told = self._runner.ask(code, timeout_s)
        return {rank: values for rank, values in told.items() if values is not None and rank in self.call.actors}

    def _left_ms(self, told: Values) -> Values:
        """Return the time at which each rank left the barrier, in milliseconds since the last rank started to count.

        The start of each rank cannot be the origin. On a busy machine ranks start at different times, so the barrier
        would seem to release them too early.
        """
        clock = self._runner.session.recording.clock
        times_ns = {rank: clock.to_notebook(rank, began_and_left_ns) for rank, began_and_left_ns in told.items()}
        last = max(told, key=lambda rank: (float(self._inputs[rank][0]), times_ns[rank][0]))
        return {rank: (left_ns - times_ns[last][:1]) / 1e6 for rank, (_, left_ns) in times_ns.items()}  # (1,) each


def _in_chunks(call: CollectiveCall, rank: int) -> list[tuple[str, int]]:
    """Return the rows of a rank's input: name and number of elements."""
    n = call.input_size(rank)
    if call.op in theory.CHUNKED and n:
        return [(f"for {to}", size) for to, size in zip(call.ranks, call.chunk_sizes, strict=True)]
    return [("", n)] if n else []


def _out_chunks(call: CollectiveCall, rank: int, n: int) -> list[tuple[str, int]]:
    """Return the rows of a rank's result, which has n elements: name and number of elements."""
    if n and call.op in ("gather", "all_gather"):
        return [(f"from {source}", call.sizes[0]) for source in call.ranks]
    if call.op == "all_to_all":
        size = call.chunk_sizes[call.ranks.index(rank)]
        return [(f"from {source}", size) for source in call.ranks]
    return [("", n)] if n else []


def _size_of(op: str, inputs: Mapping[int, Sequence[float]], ranks: Sequence[int], root: int) -> int:
    """Return the number of elements of the given inputs, or of their chunks."""
    longest = max((len(values) for values in inputs.values()), default=0)
    if op in theory.CHUNKED:
        if longest % len(ranks):
            raise UsageError(f"{longest} elements cannot be split into {len(ranks)} equal chunks; pass sizes=")
        return longest // len(ranks)
    return longest


def _numbers(values: Sequence[float], dtype: str) -> theory.Array:
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"inputs must be numbers, got {list(values)}") from None
    if not dtype.startswith("float"):
        limits = np.iinfo(dtype)
        if (found != np.round(found)).any() or (found < limits.min).any() or (found > limits.max).any():
            raise UsageError(
                f"inputs of {dtype} must be whole numbers from {limits.min} to {limits.max}, got {list(values)}"
            )
    return found.astype(dtype)


def _draw(explorer: Explorer) -> Picture:
    """Draw the values before and after, with a column for each rank."""
    from ddp_notebook.display import INK, picture
    from ddp_notebook.lessons import rank_columns

    call = explorer.call
    inputs = {rank: explorer.inputs[rank] for rank in call.ranks}
    who = theory.contributors(call)
    values: Any = explorer.result if explorer.result is not None else explorer.expected()
    highest = max((len(one) for one in inputs.values()), default=1) or 1
    deepest = max((len(values.get(rank, ())) for rank in call.ranks), default=1) or 1
    figure, (axes,) = picture(explorer.line, 1.2 + rank_columns.CELL_IN * (highest + deepest + 2.2))
    rank_columns.bare(axes, call.world_size, highest + deepest + 2.2)
    marks = {} if explorer.result is None else {r: of for r, of in explorer.right.items() if r in explorer.prediction}
    for rank in range(call.world_size):
        rank_columns.head(axes, rank, f"rank {rank}" + ("" if rank in call.ranks else ": not in the group"))
        for at, value in enumerate(inputs.get(rank, ())):
            rank_columns.cell(axes, rank, 0.9 + at, value, (rank,))
        top = highest + 2.1
        for at, value in enumerate(values.get(rank, ())):
            if explorer.result is None:  # the picture of a lesson that was not run must not tell the answer
                rank_columns.cell(axes, rank, top + at, "?", ())
                continue
            is_guessed = rank in marks and at < len(marks[rank]) and not math.isnan(explorer.prediction[rank][at])
            guess = (explorer.prediction[rank][at], marks[rank][at]) if is_guessed else None
            rank_columns.cell(axes, rank, top + at, value, who[rank][at] if at < len(who.get(rank, ())) else (), guess)
    state = "after, on the ranks" if explorer.result is not None else "after: not run yet"
    rank_columns.legend(figure, call.world_size)
    axes.text(-0.08, 0.9 + highest / 2, "before", ha="right", va="center", color=INK, fontsize=9)
    axes.text(-0.08, highest + 2.1 + deepest / 2, "after", ha="right", va="center", color=INK, fontsize=9)
    axes.text(0.03, highest + 1.5, f"{explorer.formula}    [{state}]", va="center", color=INK, fontsize=9)
    return figure
