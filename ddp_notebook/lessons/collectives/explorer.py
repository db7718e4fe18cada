"""The collective explorer: what a collective does, predicted first, then run on the ranks, then compared."""

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
    """What happened when one rank called a collective wrongly.

    Args:
        kind: of `theory.WRONG`.
        rank: the one that was wrong.
        code: the call on that rank and on the others.
        error: the name of the error; "": none.
        message: of the error.
        by_rank: the last thing that each rank did, in words.
        values: what the ranks have, if there was no error.
        seconds: until the ranks were free again.
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
        outcome = f"{self.error}: {self.message}" if self.error else f"nobody noticed: {_words(self.values)}"
        return f"wrong {self.kind} on rank {self.rank}, after {self.seconds:.1f} s: {outcome}"


def _words(values: Values) -> str:
    by_words = group_by_value({rank: str(one.tolist()) for rank, one in values.items()})
    return "; ".join(f"{list_ranks(ranks)}: {words}" for words, ranks in by_words.items())


_WRONG_S = 2.0  # how long ranks wait for one that does not come
_MOST_ELEMENTS = 64  # of a rank: more are no picture


class Explorer(DisplayedLesson):
    """One collective with inputs of your own, on the running ranks.

    Args:
        op: of `theory.OPS`: "all_reduce", "send/recv", ...
        reduce_op: "SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR" or "BXOR".
        inputs: numbers of each rank; None: numbers that show who has contributed.
        root: the source, the destination, or the sender of a message.
        peer: the receiver of a message.
        group: ranks that take part, as a group of their own; None: all.
        dtype: of `theory.DTYPES`.
        sizes: elements of each rank's input or of each chunk; for all_to_all also one for each receiver.
        session: None: the running one.

    Raises:
        UsageError: torch has no such call.
        NoSessionError: no ranks are running.

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
        """Take another call; what was predicted and run before is forgotten. Arguments as those of the class."""
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
        if max(self.call.input_size(rank) for rank in known) > _MOST_ELEMENTS:
            raise UsageError(f"more than {_MOST_ELEMENTS} elements of a rank are no picture; choose smaller sizes")
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
        """The numbers of each rank, to be read and set: `explorer.inputs = {0: [1, 2], 1: [3, 4]}`."""
        return {rank: values.tolist() for rank, values in self._inputs.items()}

    @inputs.setter
    def inputs(self, given: Mapping[int, Sequence[float]]) -> None:
        taken = dict(self._inputs)
        for rank, values in given.items():
            if rank not in taken:
                raise UsageError(f"there is no rank {rank}; the ranks are 0 to {self.call.world_size - 1}")
            size = self.call.input_size(rank)
            if len(values) != size:
                raise UsageError(f"rank {rank} brings {size} elements to this {self.call.op}, not {len(values)}")
            taken[rank] = _numbers(values, self.call.dtype)
        self._inputs = taken
        self._forget()

    @property
    def line(self) -> str:
        """The line of code that runs on the ranks."""
        return self.call.line

    @property
    def formula(self) -> str:
        """What comes out, as one equation."""
        return self.call.formula

    def expected(self) -> Values:
        """What NumPy says, by rank; a rank whose result torch does not specify is not in it."""
        return theory.expected(self.call, self._inputs)

    def predict(self, values: Mapping[int, Sequence[float | None]]) -> None:
        """Say what will come out, for some ranks or for all; None leaves an element open."""
        for rank in values:
            if rank not in self.call.ranks:
                raise UsageError(f"rank {rank} does not take part; {list_ranks(list(self.call.ranks))} do")
        self.prediction |= {
            rank: [math.nan if value is None else float(value) for value in given] for rank, given in values.items()
        }

    def run(self) -> Values:
        """Run it on the ranks.

        Returns:
            What each rank of the group has then; after a reduce also what is left on the others.

        Raises:
            RankError: it failed there.
        """
        told = self._run(written.cell(self.call, self._inputs), RUN_S)
        self.result = self._left_ms(told) if self.call.op == "barrier" else told
        return self.result

    @property
    def right(self) -> dict[int, list[bool]]:
        """Whether each predicted element is what the ranks have. What torch does not specify cannot be wrong.

        Raises:
            UsageError: it was not run yet.
        """
        if self.result is None:
            raise UsageError("run it first: explorer.run()")
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
        """Whether the ranks have what NumPy says.

        Raises:
            UsageError: it was not run yet.
        """
        if self.result is None:
            raise UsageError("run it first: explorer.run()")
        specified = self.expected()
        return specified.keys() <= self.result.keys() and all(
            all(theory.agree(self.call, values, self.result[rank])) for rank, values in specified.items()
        )

    def wrong(self, kind: str, rank: int | None = None) -> Happened:
        """Let one rank call it wrongly, for real, and tell what happens. The ranks are free again afterwards.

        Args:
            kind: "operation", "size", "dtype", "missing rank" or "root".
            rank: the one that is wrong; None: the last one that takes part.

        Raises:
            UsageError: this cannot be wrong in this way.
        """
        if kind not in self.kinds_of_wrong:
            raise UsageError(f"{self.call.op} can be wrong in {', '.join(self.kinds_of_wrong)}, not in {kind!r}")
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
        """In which ways this call can be wrong."""
        if self.call.op == "barrier":
            return ("operation", "missing rank")
        return tuple(kind for kind in theory.WRONG if kind != "root" or self.call.op in theory.ROOTED)

    def picture(self) -> Figure:
        """Before and after, a column for each rank: a figure that stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """All that the browser draws."""
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
        """Do what a button asks for: "configure", "run" with a prediction, or "wrong".

        Raises:
            UsageError: it cannot be done.
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
        state = "not run" if self.result is None else "run" if self.agrees else "run, NOT what NumPy says"
        if self.result is not None and self.prediction:
            marks = [mark for ranks in self.right.values() for mark in ranks]
            state += f", {sum(marks)} of {len(marks)} cells right"
        return f"<Explorer: {self.line} on {list_ranks(list(self.call.ranks))}: {state}>"

    def _run(self, code: str, timeout_s: float) -> Values:
        told = self._runner.ask(code, timeout_s)
        return {rank: values for rank, values in told.items() if values is not None and rank in self.call.actors}

    def _left_ms(self, told: Values) -> Values:
        """When each rank left the barrier, in milliseconds since the one that comes last began to count. A rank's own
        beginning would not do: on a busy machine they begin apart, and the barrier seems to let go too early."""
        clock = self._runner.session.recording.clock
        times_ns = {rank: clock.to_notebook(rank, began_and_left_ns) for rank, began_and_left_ns in told.items()}
        last = max(told, key=lambda rank: (float(self._inputs[rank][0]), times_ns[rank][0]))
        return {rank: (left_ns - times_ns[last][:1]) / 1e6 for rank, (_, left_ns) in times_ns.items()}  # (1,) each


def _in_chunks(call: CollectiveCall, rank: int) -> list[tuple[str, int]]:
    """The rows of a rank's input: a name and how many elements."""
    n = call.input_size(rank)
    if call.op in theory.CHUNKED and n:
        return [(f"for {to}", size) for to, size in zip(call.ranks, call.chunk_sizes, strict=True)]
    return [("", n)] if n else []


def _out_chunks(call: CollectiveCall, rank: int, n: int) -> list[tuple[str, int]]:
    """The same of its result, which has n elements."""
    if n and call.op in ("gather", "all_gather"):
        return [(f"from {source}", call.sizes[0]) for source in call.ranks]
    if call.op == "all_to_all":
        size = call.chunk_sizes[call.ranks.index(rank)]
        return [(f"from {source}", size) for source in call.ranks]
    return [("", n)] if n else []


def _size_of(op: str, inputs: Mapping[int, Sequence[float]], ranks: Sequence[int], root: int) -> int:
    """Elements of an input, or of a chunk of it, as it was given."""
    longest = max((len(values) for values in inputs.values()), default=0)
    if op in theory.CHUNKED:
        if longest % len(ranks):
            raise UsageError(f"{longest} elements are no {len(ranks)} equal chunks; give sizes")
        return longest // len(ranks)
    return longest


def _numbers(values: Sequence[float], dtype: str) -> theory.Array:
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{list(values)}: numbers are needed") from None
    if not dtype.startswith("float"):
        limits = np.iinfo(dtype)
        if (found != np.round(found)).any() or (found < limits.min).any() or (found > limits.max).any():
            raise UsageError(f"{list(values)}: {dtype} takes whole numbers from {limits.min} to {limits.max}")
    return found.astype(dtype)


def _draw(explorer: Explorer) -> Picture:
    """Before and after, a column for each rank."""
    from ddp_notebook.display import INK, picture
    from ddp_notebook.lessons import rank_columns

    call = explorer.call
    inputs = {rank: explorer.inputs[rank] for rank in call.ranks}
    who = theory.contributors(call)
    values: Any = explorer.result if explorer.result is not None else explorer.expected()
    highest = max((len(one) for one in inputs.values()), default=1) or 1
    deepest = max((len(values.get(rank, ())) for rank in call.ranks), default=1) or 1
    figure, (axes,) = picture(explorer.line, 0.95 + rank_columns.CELL_IN * (highest + deepest + 2.2))
    rank_columns.bare(axes, call.world_size, highest + deepest + 2.2)
    marks = {} if explorer.result is None else {r: of for r, of in explorer.right.items() if r in explorer.prediction}
    for rank in range(call.world_size):
        rank_columns.head(axes, rank, f"rank {rank}" + ("" if rank in call.ranks else ": not in the group"))
        for at, value in enumerate(inputs.get(rank, ())):
            rank_columns.cell(axes, rank, 0.9 + at, value, (rank,))
        top = highest + 2.1
        for at, value in enumerate(values.get(rank, ())):
            mark = marks[rank][at] if rank in marks and at < len(marks[rank]) else None
            rank_columns.cell(axes, rank, top + at, value, who[rank][at] if at < len(who.get(rank, ())) else (), mark)
    state = "after, on the ranks" if explorer.result is not None else "after, says NumPy (not run yet)"
    axes.text(-0.08, 0.9 + highest / 2, "before", ha="right", va="center", color=INK, fontsize=9)
    axes.text(-0.08, highest + 2.1 + deepest / 2, state.split(",")[0], ha="right", va="center", color=INK, fontsize=9)
    axes.text(0.03, highest + 1.5, f"{explorer.formula}    [{state}]", va="center", color=INK, fontsize=9)
    return figure
